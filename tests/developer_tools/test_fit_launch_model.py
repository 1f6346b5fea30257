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
    survey = tmp_path / "survey.jsonl"
    lines = (ROOT / "docs" / "launches_h200.jsonl").read_text().splitlines()
    wrong = {**json.loads(lines[0]), "why": "it differs"}
    del wrong["us"]
    survey.write_text("\n".join([*lines[:80], json.dumps(wrong)]) + "\n")
    out = tmp_path / "coefficients.json"
    printed = _fit(str(survey), "--no-aside", "--steps", "60", "--out", str(out))
    assert printed.startswith("80 launches, 80 of them of 2 surveyed layers")
    document = json.loads(out.read_text())
    for values in document["families"].values():
        assert set(values) == {*LAUNCH, *GEMM}
    for formats in document["formats"].values():
        assert all(set(values) <= set(BY_FORMAT) for values in formats.values())
    brief = _fit(str(survey), "--no-aside", "--steps", "1")
    mean = [float(text.rpartition("mean ")[2]) for text in (brief, printed)]
    assert mean[1] < mean[0]


def test_a_layer_is_left_out_on_every_gpu(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (ROOT / "docs" / "launches_h100.jsonl").read_text().splitlines()]
    some = [row for row in rows if row["name"] in ("DeepSeek-V2-Lite", "dbrx-instruct ep8")]
    survey = tmp_path / "survey.jsonl"
    survey.write_text("\n".join(map(json.dumps, some)) + "\n")
    printed = _fit(str(survey), "--steps", "2")
    assert "without DeepSeek-V2-Lite: " in printed and "without dbrx-instruct ep8: " in printed
    assert (
        "each layer left out: " in printed and "launches that were chosen when it was measured: " in printed
    )
