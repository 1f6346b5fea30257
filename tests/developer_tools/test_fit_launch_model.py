"""The fit of the model of launch times."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        assert set(values) == {*LAUNCH, *GEMM} - {"listing"}  # which their `fixed` includes
    for formats in document["formats"].values():
        assert all(set(values) <= set(BY_FORMAT) for values in formats.values())
    brief = _fit(str(survey), "--steps", "1")
    for line in ("without DeepSeek-V2-Lite: ", "without dbrx-instruct ep8: ", "each layer left out: "):
        assert line in brief
    mean = [float(_line(text, "fitted to all").rpartition("mean ")[2]) for text in (brief, printed)]
    assert mean[1] < mean[0]


@pytest.mark.slow
def test_layers_that_were_left_out_get_launches_near_their_fastest() -> None:
    """What docs/launches.md says of the model's choices, from the recorded rows, with a small margin."""
    said = re.search(
        r"\| all \| (\d+) \| (\d+)% \| (\d+)% \| ([\d.]+) \|", (ROOT / "docs/launches.md").read_text()
    )
    surveys = [f"docs/launches_{gpu}.jsonl" for gpu in ("h200", "h100")]
    printed = _fit(*surveys, "--table")
    found = re.search(
        r"each layer left out: (\d+) cells, (\d+)% within 3%, (\d+)% within 10%, mean ([\d.]+);", printed
    )
    assert said and found
    (cells, *shares, mean), (wanted, *least, most) = map(float, found.groups()), map(float, said.groups())
    assert cells == wanted
    assert shares[0] >= least[0] - 3 and shares[1] >= least[1] - 2 and mean <= most + 0.005, printed
    errors = {gpu: float(error) for gpu, error in re.findall(r"  (NVIDIA .*): median error (.*)%", printed)}
    assert errors["NVIDIA H200"] < 5 and errors["NVIDIA H100 80GB HBM3"] < 4.5, errors


def _line(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line
