"""Agreement with recorded decisions, and proof that a disagreement is seen."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from devtools.conformance import (
    compare,
    compare_rounding,
    decide,
    gate_kind,
    read_decisions,
    read_grid,
    read_rounding,
)

from moectl.errors import UsageError
from moectl.oracle import engine_named, policy_named
from moectl.oracle.decision import CAPABILITY, DTYPE, NAME, PLATFORM
from moectl.oracle.recorded_fields import FIELDS
from moectl.problem.padding import padding

SAMPLE = Path(__file__).parents[1] / "data" / "oracle" / "decisions-sample.jsonl.gz"
ROUNDING = SAMPLE.with_name("padding-sample.json.gz")
SCRIPT = Path(__file__).parents[2] / "scripts" / "conformance"
POLICY = policy_named("vllm-0.33.0")


@pytest.fixture(scope="module")
def records() -> list[tuple[int, dict[str, Any]]]:
    return [(line, dict(record)) for line, record in read_decisions(SAMPLE)]


def test_every_recorded_decision_agrees(records: list[tuple[int, dict[str, Any]]]) -> None:
    grid = read_grid()
    report = compare(records, grid, POLICY)
    assert not report.disagreements, "\n".join(map(str, report.disagreements))
    total = report.total
    assert (total.outside, total.asked + total.without_meaning) == (0, len(records))
    assert total.without_meaning >= 2
    assert set(report.axes["scheme"]) == set(grid.schemes)
    assert set(report.axes["device"]) == set(grid.devices)
    assert set(report.axes["parallel"]) == set(grid.parallel)
    assert set(report.fields) == {field.name for field in FIELDS}
    assert all(tally.asked for tally in report.fields.values())


def test_the_sample_holds_every_kind_of_outcome(records: list[tuple[int, dict[str, Any]]]) -> None:
    recorded = [record for _, record in records]
    gates = {gate_kind(text, engine_named()) for record in recorded for text in record["gates"]}
    assert gates == {CAPABILITY, DTYPE, PLATFORM, NAME}
    errors = {record["error"] for record in recorded if record["error"]}
    assert errors == {"ValueError", "NotImplementedError", "AssertionError"}
    later = {record["create_weights_error"] for record in recorded if record.get("create_weights_error")}
    assert later == {"ValueError", "AssertionError"}
    assert {record["forced"] for record in recorded} >= {
        "aiter",
        "b12x",
        "batched_triton",
        "cutlass",
        "deep_gemm",
        "emulation",
        "flashinfer_b12x",
        "flashinfer_cutedsl",
        "flashinfer_moe_ep_cutedsl",
        "flydsl",
        "hpc",
        "humming",
        "marlin",
        "rdna3",
        "triton_unfused",
    }


def test_a_cell_with_more_ranks_than_experts_has_an_answer(
    records: list[tuple[int, dict[str, Any]]],
) -> None:
    record = next(r for _, r in records if r["model"] == "mixtral-8x7b" and r["device"] == "sm90")
    problem = decide(read_grid(), {**record, "parallel": "tp8_dp2_ep16_agrs"}, POLICY).problem
    assert (problem.parallel.ep_size, problem.local_experts) == (16, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("selected", "TRITON_UNFUSED"),
        ("experts_cls", "NoSuchExperts"),
        ("monolithic", None),
        ("padded", {"hidden": 1, "intermediate_per_partition": 1}),
        ("gates", ["refused"]),
        ("gates", ["min capability of gpt_oss_mxfp4 is 80, device has 75"]),
        ("error", "ValueError: no"),
        ("create_weights_error", "ValueError: no"),
        ("priority", ["TRITON"]),
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
    assert not compare([(line, record)], read_grid(), POLICY).disagreements
    report = compare([(line, {**record, field: value})], read_grid(), POLICY)
    assert (report.total.asked, report.total.agreed) == (1, 0)
    assert report.disagreements
    assert "recorded" in str(report.disagreements[0])


def test_a_missing_reason_and_another_order_are_seen(records: list[tuple[int, dict[str, Any]]]) -> None:
    line, record = next(
        (line, r)
        for line, r in records
        if r["scheme"] == "mxfp4_gptoss" and r["device"] == "sm90" and r["rejected"]
    )
    wrong = [{**record["rejected"][0], "code": "lora"}, *record["rejected"][1:]]
    assert compare([(line, {**record, "rejected": wrong})], read_grid(), POLICY).disagreements
    other = [{**record["rejected"][0], "backend": "HUMMING", "experts_cls": None}]
    assert compare([(line, {**record, "rejected": other})], read_grid(), POLICY).disagreements


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


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(SAMPLE.read_bytes()[:3000])
    with pytest.raises(UsageError, match="cannot be read after line"):
        list(read_decisions(cut))
    text = tmp_path / "bad.jsonl"
    first = gzip.decompress(SAMPLE.read_bytes()).decode().splitlines()[0]
    text.write_text(first + '\n{"a":\n')
    with pytest.raises(UsageError, match="line 2 is not JSON"):
        list(read_decisions(text))
    text.write_text('{"scheme": "bf16"}\n')
    with pytest.raises(UsageError, match="line 1 has no model"):
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
def few(tmp_path: Path) -> Path:
    """Every tenth line of the sample: the whole of it is compared above."""
    path = tmp_path / "few.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(gzip.decompress(SAMPLE.read_bytes()).splitlines(True)[::10])))
    return path


@pytest.fixture
def altered(few: Path, tmp_path: Path) -> Path:
    """These lines with one decision changed, as plain lines."""
    lines = gzip.decompress(few.read_bytes()).decode().splitlines()
    for at, line in enumerate(lines):
        record = json.loads(line)
        if record["selected"] == "MARLIN" and record["scheme"].startswith("int4"):
            lines[at] = json.dumps({**record, "selected": "HUMMING"})
            break
    path = tmp_path / "altered.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_script_reports_the_total_last_and_fails_on_a_disagreement(few: Path, altered: Path) -> None:
    assert shutil.which(str(SCRIPT)), "scripts/conformance must be executable"
    good = run(few, ROUNDING)
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stdout.splitlines()[-1].startswith("total: ")
    for heading in ("by scheme", "by device", "by parallel", "by field", "by family", "by backend"):
        assert heading in good.stdout
    bad = run(altered)
    assert bad.returncode == 1
    assert "selected: recorded HUMMING" in bad.stdout
    assert bad.stdout.splitlines()[-1].startswith("total: ")
    assert "ours" not in run(altered, "--show", 0).stdout
    assert run(altered, "--fields", "monolithic").returncode == 0
    assert run(altered, "--fields", "colour").returncode == 2
    assert run(altered.parent / "absent.jsonl").returncode == 2
    assert run(altered.parent / "absent").returncode == 2


def test_cores_share_the_lines(altered: Path) -> None:
    one, three = (json.loads(run(altered, "--json", "--cores", n).stdout)[str(altered)] for n in (1, 3))
    assert one == three
    assert {found["field"] for found in one["disagreements"]} == {"selected"}
    assert one["total"]["asked"] - one["total"]["agreed"] == 1
    assert sum(tally["asked"] for tally in one["axes"]["device"].values()) == one["total"]["asked"]


def test_recorded_roundings_agree_and_another_size_is_seen() -> None:
    rows = [dict(row) for row in read_rounding(ROUNDING)]
    report = compare_rounding(rows, read_grid(), POLICY)
    assert not report.disagreements, "\n".join(map(str, report.disagreements))
    assert report.total.asked == len(rows) > 1000
    wrong = {**rows[0], "padded": [1, 1]}
    assert compare_rounding([wrong], read_grid(), POLICY).disagreements


def test_damaged_roundings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounding.json"
    row = read_rounding(ROUNDING)[0]
    for rows, why in (
        ({}, "must be a list"),
        ([1], "must be a list"),
        ([{**row, "family": "int3"}], "family 'int3'"),
        ([{"family": "mxfp4"}], "answer 1 has no device"),
    ):
        path.write_text(json.dumps(rows))
        with pytest.raises(UsageError, match=why):
            read_rounding(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_rounding(tmp_path / "absent.json")
