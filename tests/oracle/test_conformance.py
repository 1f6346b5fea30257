"""Agreement with recorded decisions, and proof that a disagreement is seen."""

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moectl.conformance import compare, decide, read_decisions, read_grid
from moectl.errors import UsageError
from moectl.oracle import policy_named
from moectl.padding import padding

SAMPLE = Path(__file__).parents[1] / "data" / "oracle" / "decisions-sample.jsonl.gz"
SCRIPT = Path(__file__).parents[2] / "scripts" / "conformance"
POLICY = policy_named("vllm-0.33.0")


@pytest.fixture(scope="module")
def records() -> list[tuple[int, dict[str, Any]]]:
    return [(line, dict(record)) for line, record in read_decisions(SAMPLE)]


def test_every_recorded_decision_in_scope_agrees(records: list[tuple[int, dict[str, Any]]]) -> None:
    report = compare(records, read_grid(), POLICY, reasons=True)
    assert not report.disagreements, "\n".join(map(str, report.disagreements))
    asked, outside = sum(report.asked.values()), sum(report.out_of_scope.values())
    assert asked + outside + report.without_meaning == len(records)
    assert asked > 900
    assert set(report.asked) >= {
        record["scheme"]
        for _, record in records
        if record["scheme"].startswith(("mxfp4", "int4", "int8")) and record["device"].startswith("sm")
    }
    assert report.without_meaning >= 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("selected", "TRITON_UNFUSED"),
        ("experts_cls", "NoSuchExperts"),
        ("monolithic", None),
        ("padded", {"hidden": 1, "intermediate_per_partition": 1}),
        ("gates", ["refused"]),
    ],
)
def test_a_changed_record_is_a_disagreement(
    records: list[tuple[int, dict[str, Any]]], field: str, value: object
) -> None:
    line, record = next(
        (line, r)
        for line, r in records
        if r["scheme"] == "mxfp4_gptoss" and r["selected"] == "TRITON" and not r["gates"]
    )
    report = compare([(line, {**record, field: value})], read_grid(), POLICY)
    assert report.disagreed == 1
    assert len(report.disagreements) == 1


def test_a_missing_reason_and_another_order_are_seen(records: list[tuple[int, dict[str, Any]]]) -> None:
    line, record = next(
        (line, r)
        for line, r in records
        if r["scheme"] == "mxfp4_gptoss" and r["device"] == "sm90" and r["rejected"]
    )
    wrong = [{**record["rejected"][0], "code": "lora"}, *record["rejected"][1:]]
    assert compare([(line, {**record, "rejected": wrong})], read_grid(), POLICY, reasons=True).disagreements
    other = [{**record["rejected"][0], "backend": "HUMMING", "experts_cls": None}]
    assert compare([(line, {**record, "rejected": other})], read_grid(), POLICY, reasons=True).disagreements


def test_marlin_weight_preparation_sizes_are_the_layouts(
    records: list[tuple[int, dict[str, Any]]],
) -> None:
    grid, seen = read_grid(), 0
    for _, record in records:
        prepared = record.get("marlin_weight_prep_intermediate")
        if prepared is None or not record["device"].startswith("sm"):
            continue
        decision = decide(grid, record, POLICY)
        weight = decision.problem.scheme.weight
        align = padding(f"marlin-{weight.name}", weight)
        assert align.apply(decision.problem.dims).padded_intermediate == prepared
        seen += 1
    assert seen > 50


def test_unknown_names_and_incomplete_records_are_refused(
    records: list[tuple[int, dict[str, Any]]],
) -> None:
    record = records[0][1]
    with pytest.raises(UsageError, match="the grid has no devices 'sm999'"):
        compare([(1, {**record, "device": "sm999"})], read_grid(), POLICY)
    with pytest.raises(UsageError, match="line 7 has no selected"):
        compare([(7, {k: v for k, v in record.items() if k != "selected"})], read_grid(), POLICY)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(SAMPLE.read_bytes()[:3000])
    with pytest.raises(UsageError, match="cannot be read after line"):
        list(read_decisions(cut))
    text = tmp_path / "bad.jsonl"
    text.write_text('{"a": 1}\n{"a":\n')
    with pytest.raises(UsageError, match="line 2 is not JSON"):
        list(read_decisions(text))
    text.write_text("[1]\n")
    with pytest.raises(UsageError, match="line 1 must be an object"):
        list(read_decisions(text))
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_decisions(tmp_path / "absent.jsonl"))


def test_a_grid_file_replaces_the_names(tmp_path: Path) -> None:
    tables = {name: {} for name in ("MODELS", "SCHEMES", "DEVICES", "PARALLEL")}
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(tables))
    with pytest.raises(UsageError, match="has no table PROFILES"):
        read_grid(path)
    path.write_text(json.dumps({**tables, "PROFILES": {}}))
    assert read_grid(path).models == {}
    script = tmp_path / "grid.py"
    script.write_text("MODELS = SCHEMES = DEVICES = PARALLEL = {}\nPROFILES = {'mine': {}}\n")
    assert "mine" in read_grid(script).profiles


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def altered(tmp_path: Path) -> Iterator[Path]:
    """The sample with one decision changed, as plain lines."""
    lines = gzip.decompress(SAMPLE.read_bytes()).decode().splitlines()
    for at, line in enumerate(lines):
        record = json.loads(line)
        if record["selected"] == "MARLIN" and record["scheme"].startswith("int4"):
            lines[at] = json.dumps({**record, "selected": "HUMMING"})
            break
    path = tmp_path / "altered.jsonl"
    path.write_text("\n".join(lines) + "\n")
    yield path


def test_script_reports_the_total_last_and_fails_on_a_disagreement(altered: Path) -> None:
    assert shutil.which(str(SCRIPT)), "scripts/conformance must be executable"
    good = run(SAMPLE)
    assert good.returncode == 0, good.stderr
    assert good.stdout.splitlines()[-1].startswith("total: ")
    assert "mxfp4_gptoss: " in good.stdout
    bad = run(altered)
    assert bad.returncode == 1
    assert "selected: recorded HUMMING, ours MARLIN" in bad.stdout
    assert bad.stdout.splitlines()[-1].startswith("total: ")
    assert run(altered.parent / "absent").returncode == 2
