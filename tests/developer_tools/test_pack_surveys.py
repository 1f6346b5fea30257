"""scripts/pack_surveys: the surveyed times that ship are those of docs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.scripts import SCRIPTS, loaded

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "moectl" / "kernels" / "choice" / "surveyed.json"
ROW = json.loads((ROOT / "docs/launches_h200.jsonl").read_text().splitlines()[0])


def _run(monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "pack_surveys"), *map(str, options)])
    loaded("pack_surveys").main()


def _rows(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_shipped_file_is_made_of_the_surveys_of_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "surveyed.json"
    _run(monkeypatch, "--out", out)
    assert out.read_text() == SHIPPED.read_text()
    page = " ".join((ROOT / "docs/launches.md").read_text().split())
    said = capsys.readouterr().out.strip()
    launches, cells, layers = (word for word in said.split() if word.isdigit())
    assert f"{int(launches):,} launches of {layers} layers, in {cells} cells" in page


def test_every_file_of_rows_is_used_or_left_out_for_a_reason() -> None:
    script = loaded("pack_surveys")
    known = [*script.SURVEYS, *script.LEFT_OUT]
    assert sorted(known) == sorted(path.stem for path in (ROOT / "docs").glob("*.jsonl"))
    begun = [
        json.loads((ROOT / f"docs/{name}.jsonl").read_text().splitlines()[0])["begun"]
        for name in script.BENCHES
    ]
    assert begun == sorted(begun), "later files win"


def test_later_files_win_and_launches_that_are_no_more_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, other = ROW | {"family": "gone"}, ROW | {"tile": ROW["tile"] | {"depth": 4}, "us": 15.0}
    failed = {name: value for name, value in other.items() if name != "us"} | {"tokens": 9, "why": "wrong"}
    first = _rows(tmp_path / "first", ROW | {"us": 11.0}, other, gone, failed, ROW | {"tokens": 9})
    later = _rows(tmp_path / "later", ROW | {"us": 12.34567}, ROW | {"us": 13.0, "tokens": 7})
    out = tmp_path / "out.json"
    _run(monkeypatch, first, later, "--out", out)
    made = json.loads(out.read_text())
    assert [tile["depth"] for _, tile in made["launches"]] == [4, 8]
    (layer,) = made["layers"]
    assert layer["times"] == {"1": [[0, 15.0], [1, 12.35]]} and layer["gpu"] == ROW["gpu"]


def test_rows_of_benches_count_for_the_layer_of_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tmp_path / "bench.jsonl"
    lines = (ROOT / "docs/bench_4_bits_changed_h200.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    mine = next(row for row in rows if row.get("backend") == "moectl" and row["model"] == "kimi-k2")
    slower = mine | {"tactic": mine["tactic"].replace("depth=", "depth=1"), "median_us": 99.0}
    peers = [row for row in rows if row.get("backend") == "humming"]
    ungated = mine | {"model": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "scheme": "bf16, a16 activations"}
    wrong, skewed = mine | {"ok": False}, mine | {"routing": "zipf:1.2"}
    _rows(
        bench, rows[0], mine, slower, *peers, wrong, skewed, ungated, ungated | {"tactic": slower["tactic"]}
    )
    out = tmp_path / "out.json"
    _run(monkeypatch, bench, "--out", out)
    made = json.loads(out.read_text())
    layer, other = sorted(made["layers"], key=lambda layer: not layer["gated"])
    assert layer["gated"] and not other["gated"] and other["experts"] == 128
    assert layer["gpu"] == "NVIDIA H200" and (layer["experts"], layer["intermediate"]) == (384, 256)
    ((tokens, cell),) = layer["times"].items()
    assert int(tokens) == mine["tokens"] and sorted(us for _, us in cell)[-1] == 99.0 and len(cell) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"format": "int5"}, "line 1 of {path} is no row of a survey or a bench: KeyError, 'int5'"),
        ({"us": "fast"}, "line 1 of {path} is no row of a survey or a bench: ValueError"),
        ({"us": -1.0}, "line 1 of {path} is no row of a survey or a bench: ValueError, -1.0 us at 1 tokens"),
        ({"tile": 3}, "line 1 of {path} is no row of a survey or a bench: TypeError"),
        (
            {"settled": "yes"},
            "line 1 of {path} is no row of a survey or a bench: TypeError, settled is 'yes'",
        ),
        ({"gpu": "none"}, "no device is called 'none'"),
        ({"family": "gone"}, "the files have no cell with two launches that are known"),
    ],
)
def test_other_rows_are_refused_and_nothing_is_written(
    row: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = _rows(tmp_path / "rows", ROW | row), tmp_path / "out.json"
    with pytest.raises(SystemExit) as end:
        _run(monkeypatch, path, "--out", out)
    assert end.value.code == 2 and not out.exists()
    assert said.format(path=path) in capsys.readouterr().err


def test_a_missing_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        _run(monkeypatch, tmp_path / "nowhere", "--out", tmp_path / "out.json")
    assert end.value.code == 2 and "nowhere" in capsys.readouterr().err


def test_plans_are_judged_by_launches_of_which_half_are_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch, ROOT / "docs/launches_tma_unseen_h200.jsonl", "--judge")
    lines = capsys.readouterr().out.splitlines()
    means = {
        line.split("with ")[1].split(":")[0]: float(line.split("mean ")[1].split(",")[0])
        for line in lines
        if "mean" in line
    }
    assert len(lines) == 4 and "all change the launch in" in lines[3]
    assert list(means) == ["nothing", "all", "the other half"]
    assert 1 < means["all"] < means["the other half"] <= means["nothing"] < 1.025


def test_what_cannot_be_judged_or_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ROW | {"tile": ROW["tile"] | {"depth": 4}}
    rows = _rows(tmp_path / "rows", ROW, other)
    _run(monkeypatch, rows, "--judge")
    assert "with all: 0 of 0 cells" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        _run(monkeypatch, rows, "--out", tmp_path)
    assert end.value.code == 2
    assert f"cannot write {tmp_path}: Is a directory. Give --out another path." in capsys.readouterr().err


def test_beside_times_on_settled_clocks_no_others_count_that_may_be_as_short(tmp_path: Path) -> None:
    def row(depth: int, us: float, **other: object) -> dict[str, object]:
        return ROW | {"tile": ROW["tile"] | {"depth": depth}, "us": us, "tokens": 64} | other

    unsettled = [row(4, 80.0), row(8, 90.0), row(2, 124.0), row(1, 126.0)]
    settled = [row(4, 104.0, settled=True), row(8, 100.0, settled=True)]
    alone = [row(4, 80.0, tokens=9), row(8, 90.0, tokens=9), row(4, 91.0, tokens=9, settled=True)]
    many = [row(4, 80.0, tokens=1024), row(8, 90.0, tokens=1024)]
    launch_rows = loaded("launch_rows.py")
    path = _rows(tmp_path / "rows", *unsettled, *settled, *alone, *many)
    kept = launch_rows.comparable(launch_rows.timed_launches(path))
    times = {(made.tokens, made.launch.tile.depth): made.us for made in kept}
    assert times == {
        (64, 4): 104.0,
        (64, 8): 100.0,
        (64, 1): 126.0,
        (9, 4): 91.0,
        (9, 8): 90.0,
        (1024, 4): 80.0,
        (1024, 8): 90.0,
    }
