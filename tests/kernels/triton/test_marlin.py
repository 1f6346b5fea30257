"""A folder converted for Marlin, on the backend that reads it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.manifest.manifest import load_manifest
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.environment import Packages, find_device
from moectl.errors import NoBackend, UsageError
from moectl.kernels.layer_inputs import make_inputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.registry import runner_for
from moectl.kernels.triton.marlin import matrix_of
from moectl.layer.prepare import _reader_of, converted_layer, load_prepared
from moectl.run import RunMachine, choose_backends
from support.runners import apply


@pytest.fixture(scope="module")
def folder(tiny_kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-K2-Thinking checkpoint, converted for Marlin."""
    checkpoint, out = open_checkpoint(tiny_kimi), tmp_path_factory.mktemp("marlin") / "out"
    layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight, None)
    convert(plan_conversion(checkpoint, layout), out)
    return out


def test_its_own_backend_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    layer = converted_layer(load_manifest(folder))
    assert _reader_of(layer, torch.device("cuda")) == "moectl_marlin"
    assert _reader_of(layer, torch.device("cpu")) == "torch"
    machine = RunMachine(torch.device("cuda"), find_device("h200"), Packages())
    assert choose_backends(layer.problem, machine).names[0] == "moectl"
    choice = choose_backends(layer.problem, machine, stored=layer.layout)
    assert choice.names[:2] == ("moectl_marlin", "moectl")


def test_it_is_loaded_as_it_is(folder: Path) -> None:
    prepared = load_prepared(folder, backend="moectl_marlin")
    assert (prepared.layout, prepared.relaid) == ("marlin-int4", "")
    w13, w2 = matrix_of(prepared, "w13"), matrix_of(prepared, "w2")
    dims = prepared.problem.dims
    assert (w13.n, w13.k, w13.group) == (2 * dims.intermediate, dims.hidden, 32)
    assert (w2.n, w2.k, w2.group) == (dims.hidden, dims.intermediate, 32)
    assert w13.codes.data_ptr() == prepared.weights["w13"].data_ptr()


def test_without_a_gpu_it_says_so(folder: Path) -> None:
    prepared = load_prepared(folder, backend="moectl_marlin")
    inputs = make_inputs(prepared.problem, 2, seed=0)
    with pytest.raises(NoBackend, match="needs a CUDA GPU"):
        apply(runner_for("moectl_marlin"), prepared, inputs.x, inputs.ids, inputs.weights)


def test_tensors_that_do_not_fit_are_refused(folder: Path) -> None:
    prepared = load_prepared(folder, backend="moectl_marlin")

    def changed(role: str, tensor: torch.Tensor) -> PreparedMoE:
        weights = {**prepared.weights, role: tensor}
        return PreparedMoE(prepared.problem, prepared.backend, prepared.layout, weights, prepared.dense)

    with pytest.raises(UsageError, match="w13 must be int32"):
        matrix_of(changed("w13", prepared.weights["w13"][..., :-8]), "w13")
    with pytest.raises(UsageError, match="w2_scale must be"):
        matrix_of(changed("w2_scale", prepared.weights["w2_scale"][..., :-8]), "w2")
