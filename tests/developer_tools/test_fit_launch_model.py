"""The fit of the model of launch times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from moectl.kernels.choice.launch_model import BY_FORMAT, GEMM, LAUNCH

ROOT = Path(__file__).parents[2]


def _fit(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "fit_launch_model"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_a_fit_writes_every_coefficient_and_chooses_better_the_longer_it_runs(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (ROOT / "docs" / "launches_h100.jsonl").read_text().splitlines()]
    some = [row for row in rows if row["name"] in ("DeepSeek-V2-Lite", "dbrx-instruct ep8")]
    wrong = {**some[0], "why": "it differs"}
    del wrong["us"]
    survey, out = tmp_path / "survey.jsonl", tmp_path / "coefficients.json"
    survey.write_text("\n".join(map(json.dumps, [*some, wrong])) + "\n")
    printed = _fit(str(survey), "--no-aside", "--steps", "60", "--out", str(out))
    assert printed.startswith(f"{len(some)} launches, {len(some)} of them of 2 surveyed layers")
    assert "left out" not in printed
    document = json.loads(out.read_text())
    for values in document["families"].values():
        assert set(values) == {*LAUNCH, *GEMM}
    for formats in document["formats"].values():
        assert all(set(values) <= set(BY_FORMAT) for values in formats.values())
    brief = _fit(str(survey), "--steps", "1")
    for line in ("without DeepSeek-V2-Lite: ", "without dbrx-instruct ep8: ", "each layer left out: "):
        assert line in brief
    mean = [float(_line(text, "fitted to all").rpartition("mean ")[2]) for text in (brief, printed)]
    assert mean[1] < mean[0]


def _line(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line
