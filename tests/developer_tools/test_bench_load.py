"""The script that times loading, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from support import python_forks

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_load"


def test_both_roads_of_a_converted_folder_are_timed(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_gpt_oss)
    layout = layout_for("moectl", source.groups[0].problem.scheme.weight)
    folder = convert(plan_conversion(source, layout), tmp_path / "out").folder
    arguments = ["--device", "cpu", "--backend", "torch", "--threads", "2", "--repeats", "2", "--json"]
    done = python_forks.run([SCRIPT, folder, *arguments], check=True)
    report = json.loads(done.stdout)
    kinds = ["all layers prepared", "each prepared", "files to tensors"]
    assert [row["what"] for row in report["rows"]] == kinds
    for row in report["rows"]:
        assert row["layers"] == len(row["by_layer"]) == 2 and row["threads"] == 2
        assert row["weights"] > 0 < row["seconds"]
    assert all(rate > 0 for rate in report["machine"].values()) and report["machine"]
