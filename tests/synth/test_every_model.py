"""Every built-in model, made small: read as published, converted, verified, and restored byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moectl.checkpoint import Checkpoint, open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import LAYOUTS
from moectl.convert.plan.conversion_plan import ConversionPlan
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.errors import NoBackend, UsageError
from moectl.layer.prepare import checkpoint_layer
from moectl.run import RunMachine, run_layer, this_machine
from moectl.synth import synthesize
from support.sampling import every_nth

SMALL = {"layers": 1, "experts": 4, "top_k": 2, "hidden": 256, "intermediate": 256}


@pytest.fixture(scope="module")
def machine() -> RunMachine:
    return this_machine("cpu")


def first_plan(found: Checkpoint) -> ConversionPlan:
    """The conversion to the first layout of the table that takes the model."""
    reasons = []
    for layout in LAYOUTS:
        if found.groups[0].problem.scheme.weight not in layout.weights:
            continue
        try:
            return plan_conversion(found, layout)
        except (NoBackend, UsageError) as error:
            reasons.append(f"{layout.name}: {error}")
    raise AssertionError(f"no layout takes it: {reasons}")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("name", every_nth(model_names(), 3))
def test_made_read_run_and_converted_there_and_back(name: str, machine: RunMachine, tmp_path: Path) -> None:
    made = synthesize(name, tmp_path / "made", **SMALL)
    found, published = open_checkpoint(made), open_checkpoint(name, offline=True).groups[0]
    (group,) = found.groups
    problem, expected = group.problem, published.problem
    assert (problem.scheme, problem.storage) == (expected.scheme, expected.storage)
    assert (problem.activation, problem.dtype) == (expected.activation, expected.dtype)
    assert (problem.rows, problem.bias) == (expected.rows, expected.bias)
    assert group.names == published.names and group.details == published.details
    assert set(group.notes) <= set(published.notes)

    ran = run_layer(checkpoint_layer(found), "torch", machine, tokens=4, repeats=1)
    assert ran.check.ok, ran.check
    assert 0.01 < float(ran.y.float().pow(2).mean().sqrt()) < 100
    assert torch.isfinite(ran.y).all()

    out, back = tmp_path / "out", tmp_path / "back"
    convert(first_plan(found), out, threads=1)
    report = verify(out, made)
    assert report.ok, report
    unconvert(out, back)
    assert contents(back) == contents(made)
