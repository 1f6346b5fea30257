"""The fit of the model of launch times."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import pytest

from moectl.kernels.choice.launch_model import BY_FORMAT, GEMM, LAUNCH, coefficients
from moectl.kernels.choice.launch_plan import PORTABLE
from moectl.kernels.choice.launch_table import entries
from support import python_forks

ROOT = Path(__file__).parents[2]
BENCHES = ("docs/bench_sm90_h100.jsonl", "docs/bench_sm90_h200.jsonl")
FOUR_BITS = (
    "docs/bench_4_bits_h200_28_november.jsonl",
    "docs/bench_4_bits_h100.jsonl",
    "docs/bench_rows_h200_28_november.jsonl",
    "docs/bench_rows_h200_29_november.jsonl",
    "docs/bench_between_rows_h200.jsonl",
    "docs/launches_h200.jsonl",
    "docs/launches_mid_h200.jsonl",
    "docs/launches_chosen_h200.jsonl",
    "docs/launches_few_tokens_h200.jsonl",
    "docs/launches_other_h200.jsonl",
    "docs/launches_split_h200.jsonl",
    "docs/launches_h100.jsonl",
    "docs/launches_settled_h200.jsonl",
)

LAYER = ("name", "format", "hidden", "intermediate", "experts", "local_experts", "top_k")
"""What tells the layers of a survey apart."""


def _fit(*arguments: str) -> str:
    script = ROOT / "scripts" / "fit_launch_model"
    return python_forks.run([script, *arguments], cwd=ROOT, check=True, timeout=3600).stdout


def test_the_page_counts_the_rows_as_they_are() -> None:
    page = " ".join((ROOT / "docs/launches.md").read_text().split())
    cells: dict[tuple[object, ...], Counter[int]] = defaultdict(Counter)
    for line in (ROOT / "docs/launches_h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        cells[tuple(row[key] for key in LAYER)][row["tokens"]] += 1
    tokens = [len(of) for of in cells.values()]
    launches = [number for of in cells.values() for number in of.values()]
    said = (
        f"The H200's rows are of {len(cells)} layers at {min(tokens)} to {max(tokens)} numbers of tokens "
        f"(median {median(tokens):g}), of {min(launches)} to {max(launches)} launches at each "
        f"(median {median(launches):g})."
    )
    assert said in page
    assert f"({sum(launches)} on an H200" in page
    surveyed = {
        name: len((ROOT / f"docs/launches_{name}.jsonl").read_text().splitlines())
        for name in (
            "h100",
            "mid_h200",
            "chosen_h200",
            "few_tokens_h200",
            "other_h200",
            "split_h200",
            "settled_h200",
        )
    }
    assert f"{surveyed['chosen_h200']} such launches were timed" in page
    assert f", {surveyed['h100']} on an H100); {surveyed['mid_h200']} of [`mid`]" in page
    assert f"[{surveyed['chosen_h200']} that models chose]" in page
    of = [surveyed[f"{name}_h200"] for name in ("few_tokens", "other", "split", "settled")]
    said = "{} of few tokens, {} of ranks with few experts and {} that split the second GEMM; and {} on"
    assert said.format(*of) in page
    of_4_bits = sum(row.family != "tma" for entry in entries() for row in entry.rows)
    assert f"to all {of_4_bits} rows of the shipped table (`--table`) that are in these formats" in page
    counts = {
        name: len((ROOT / f"docs/launches_tma_{name}_h200.jsonl").read_text().splitlines())
        for name in ("rows", "few_tokens", "unseen", "dispatched", "16_bit_tokens")
    }
    assert f"{counts['rows'] + counts['few_tokens']} of [few tokens and of layers that have rows]" in page
    assert f" of {counts['dispatched']} of [dispatched tokens]" in page
    assert f" of {counts['16_bit_tokens']} of FP8 weights with 16-bit tokens" in page
    assert f"{counts['few_tokens']} ([rows](launches_tma_few_tokens_h200.jsonl))" in page
    assert f"{counts['unseen']} launches ([rows](launches_tma_unseen_h200.jsonl)" in page


@pytest.mark.slow
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
    fitted = {name: values for name, values in document["families"].items() if not name.startswith("tma ")}
    assert document["families"].keys() == coefficients().families.keys()  # those of `tma` as shipped
    for values in (values for name, values in fitted.items() if name not in PORTABLE):
        assert set(values) == {*LAUNCH, *GEMM} - {"listing"}  # which their `fixed` includes
    for formats in document["formats"].values():
        assert all(set(values) <= set(BY_FORMAT) for values in formats.values())
    brief = _fit(str(survey), "--steps", "1")
    for line in ("without DeepSeek-V2-Lite: ", "without dbrx-instruct ep8: ", "each model left out: "):
        assert line in brief
    mean = [float(_line(text, "fitted to all").rpartition("mean ")[2]) for text in (brief, printed)]
    assert mean[1] < mean[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "row", "h200", "h100"),
    [
        (
            (*FOUR_BITS, "--table"),
            "all",
            5,
            4.5,
        ),
        (
            (
                *("docs/launches_tma_h100.jsonl", "docs/launches_tma_h200.jsonl"),
                *("docs/launches_tma_few_tokens_h200.jsonl", "docs/launches_tma_rows_h200.jsonl"),
                *("docs/launches_tma_dispatched_h200.jsonl", "docs/launches_tma_16_bit_tokens_h200.jsonl"),
                *("docs/bench_sm90_h200_29_november.jsonl", "--families", "tma"),
            ),
            "all of tma",
            5.5,
            3.5,
        ),
        (("docs/launches_portable_h200.jsonl", "--families", "decode,grouped"), "all portable", 5.5, None),
    ],
    ids=["4 bits", "tma", "portable"],
)
def test_layers_that_were_left_out_get_launches_near_their_fastest(
    arguments: tuple[str, ...], row: str, h200: float, h100: float | None
) -> None:
    """What docs/launches.md says of the model's choices, from the recorded rows, with a small margin."""
    said = re.search(
        rf"\| {row} \| (\d+) \| (\d+)% \| (\d+)% \| ([\d.]+) \|", (ROOT / "docs/launches.md").read_text()
    )
    printed = _fit(*arguments)
    found = re.search(
        r"each model left out: (\d+) cells, (\d+)% within 3%, (\d+)% within 10%, mean ([\d.]+);", printed
    )
    assert said and found
    (cells, *shares, mean), (wanted, *least, most) = map(float, found.groups()), map(float, said.groups())
    assert cells == wanted
    assert shares[0] >= least[0] - 3 and shares[1] >= least[1] - 2 and mean <= most + 0.005, printed
    errors = {
        gpu: float(error) for gpu, error in re.findall(r"  (NVIDIA .*): median error ([\d.]*)%", printed)
    }
    assert errors["NVIDIA H200"] < h200, errors
    assert h100 is None or errors["NVIDIA H100 80GB HBM3"] < h100, errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such file"),
        ("not json\n", "line 1 of"),
        ('{"name": "a"}\n', "is no row of a survey or a bench: KeyError, 'family'"),
        ('{"kind": "run", "device": "NVIDIA H200"}\n', "nothing to fit to"),
    ],
)
def test_files_without_rows_end_in_a_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    script = ROOT / "scripts" / "fit_launch_model"
    done = python_forks.run([script, str(path), "--out", str(tmp_path / "out.json")], cwd=ROOT, timeout=60)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_other_families_keep_their_coefficients(tmp_path: Path) -> None:
    out = tmp_path / "coefficients.json"
    printed = _fit(*BENCHES, "--families", "tma", "--no-aside", "--steps", "1", "--out", str(out))
    assert printed.startswith("128 launches, 128 of them of 6 surveyed layers")
    made, known = json.loads(out.read_text()), coefficients()
    for part in ("families", "shapes", "formats", "errors"):
        kept = {name: value for name, value in getattr(known, part).items() if not name.startswith("tma ")}
        assert kept and kept == {n: value for n, value in made[part].items() if not n.startswith("tma ")}
    assert made["families"]["tma bf16"] != known.families["tma bf16"]


def _line(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line
