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


def test_later_files_win_and_launches_that_are_no_more_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ROW | {"family": "gone"}
    failed = {name: value for name, value in ROW.items() if name != "us"} | {"tokens": 9, "why": "wrong"}
    first = _rows(tmp_path / "first", ROW | {"us": 11.0}, gone, failed)
    later = _rows(tmp_path / "later", ROW | {"us": 12.34567}, ROW | {"us": 13.0, "tokens": 7})
    out = tmp_path / "out.json"
    _run(monkeypatch, first, later, "--out", out)
    made = json.loads(out.read_text())
    assert made["launches"] == [[ROW["family"], ROW["tile"]]]
    (layer,) = made["layers"]
    assert layer["times"] == {"1": [[0, 12.35]], "7": [[0, 13.0]]} and layer["gpu"] == ROW["gpu"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"format": "int5"}, "line 1 of {path} is no row of a survey: KeyError, 'int5'"),
        ({"us": "fast"}, "line 1 of {path} is no row of a survey: ValueError"),
        ({"us": -1.0}, "line 1 of {path} is no row of a survey: ValueError, -1.0 us at 1 tokens"),
        ({"tile": 3}, "line 1 of {path} is no row of a survey: TypeError"),
        ({"gpu": "none"}, "no device is called 'none'"),
        ({"family": "gone"}, "the files have no times of launches that are known"),
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
        line.split("with ")[1].split(":")[0]: float(line.split("mean ")[1].split(",")[0]) for line in lines
    }
    assert list(means) == ["nothing", "all", "the other half"]
    assert 1 < means["all"] < means["the other half"] <= means["nothing"] < 1.025
