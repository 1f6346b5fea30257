"""Static scales of activations: what they hold is checked, what they cannot hold is no wrong result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moectl.checkpoint import open_checkpoint
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.torch_backends.emulation import RUNNER
from moectl.layer.experts import ExpertLayer
from moectl.layer.prepare import checkpoint_layer
from moectl.run import plan_stress, run_layer, this_machine
from moectl.run.one_layer import prepare_layer
from moectl.run.static_scales import beyond_static_scales, quantizes_activations
from moectl.run.stress import CaseResult, stress
from moectl.run.stress_cases import CASES
from moectl.synth import synthesize
from support import peer_cases
from support.invoking import moectl

CPU = torch.device("cpu")
MODELS = {
    "nvfp4": "nvidia/Qwen3-30B-A3B-NVFP4",
    "relu2 nvfp4": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
    "relu2 fp8": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
}
NAMED = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ExpertLayer]:
    made = {}
    for name, model in MODELS.items():
        folder: Path = tmp_path_factory.mktemp("static") / "model"
        synthesize(model, folder, layers=1, experts=8, hidden=256, intermediate=256, top_k=4)
        made[name] = checkpoint_layer(open_checkpoint(str(folder)))
    return made


def with_input_scale(layer: ExpertLayer, factor: float) -> ExpertLayer:
    """`layer` with other static scales of activations."""

    def canonical(ids: object, device: torch.device | None = None) -> Mapping[str, Tensor]:
        roles = layer.canonical(ids, device)  # type: ignore[arg-type]
        return {name: t * factor if name.endswith("_input") else t for name, t in roles.items()}

    return replace(layer, canonical=canonical)


def stressed(layer: ExpertLayer, backend: str, *names: str) -> list[CaseResult]:
    planned = plan_stress(layer, CPU, cases=[NAMED[name] for name in names])
    return list(stress(prepare_layer(layer, backend, this_machine("cpu")), planned, CPU, lambda text: None))


@pytest.mark.parametrize("name", MODELS)
def test_synthesized_scales_hold_what_layers_of_synthesized_weights_see(layers, name: str) -> None:
    layer = layers[name]
    assert run_layer(layer, "emulation", this_machine("cpu"), tokens=65).check.ok
    for case in plan_stress(layer, CPU, cases=[NAMED["257 tokens"]]):
        assert beyond_static_scales(layer, case.workload.inputs, CPU) == ""


@pytest.mark.parametrize("name", MODELS)
def test_what_static_scales_cannot_hold_does_not_apply(layers, name: str) -> None:
    large, tiny, zeros, ordinary = stressed(layers[name], "emulation", "large", "tiny", "zeros", "65 tokens")
    assert (large.ok, tiny.ok, zeros.ok, ordinary.ok) == (None, None, True, True)
    assert "activations that enter w13 of expert" in large.note and "static scale holds up to" in large.note
    assert "have an RMS of" in tiny.note and "resolves those from" in tiny.note


def test_backends_that_take_16_bit_activations_pass_all_magnitudes(layers) -> None:
    assert [result.ok for result in stressed(layers["nvfp4"], "torch", "large", "tiny")] == [True, True]
    assert not quantizes_activations("fp32") and not quantizes_activations("steps")
    assert quantizes_activations("declared") and quantizes_activations("nvfp4")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_within_the_limits_is_within_the_tolerance(layers, name: str) -> None:
    """Scales of all magnitudes: wherever the check says that they hold the tokens, emulation passes."""
    held = []
    for power in range(-12, 14, 2):
        layer = with_input_scale(layers[name], 2.0**power)
        (case,) = plan_stress(layer, CPU, cases=[NAMED["65 tokens"]])
        beyond = beyond_static_scales(layer, case.workload.inputs, CPU)
        held.append(not beyond)
        if not beyond:
            ready = prepare_layer(layer, "emulation", this_machine("cpu"))
            y = ready.kernel.run(*case.workload.at(ready.prepared))
            assert check(y, case.expected, tolerance_for(layer.problem, RUNNER.accumulation)).ok, power
    assert held[0] is False and held[-1] is False and held[6] is True


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_fails_for_clipped_inputs_says_so(layers, name: str, tmp_path: Path) -> None:
    layer, source = layers[name], tmp_path / "x.safetensors"
    x = torch.randn(8, layer.problem.dims.hidden, generator=torch.Generator().manual_seed(1))
    save_file({"x": (x * 4096).to(torch.bfloat16)}, source)
    result = run_layer(layer, "emulation", this_machine("cpu"), source=source)
    assert not result.check.ok and "values clip" in result.beyond
    assert "static scale holds up to" in result.beyond
    assert run_layer(layer, "emulation", this_machine("cpu"), tokens=8).beyond == ""
    assert run_layer(layer, "torch", this_machine("cpu"), source=source).beyond == ""


def test_the_command_names_the_cause_and_what_to_do(tmp_path: Path) -> None:
    folder, source = tmp_path / "model", tmp_path / "x.safetensors"
    synthesize(MODELS["nvfp4"], folder, layers=1, experts=8, hidden=256, intermediate=256, top_k=4)
    save_file({"x": torch.full((4, 256), 4096.0, dtype=torch.bfloat16)}, source)
    done = moectl(
        "run", folder, "--input", source, "--backend", "emulation", "--device", "cpu", "--offline", code=1
    )
    assert "static activation scales do not fit these inputs" in done.words
    assert "values clip" in done.words and "--input FILE" in done.words


def test_large_activations_of_a_limited_activation_do_not_depend_on_how_tokens_are_rounded() -> None:
    """Nearly all gates are at the limit, and a token's rounding moves the others by more than the limit."""
    layer = peer_cases.layer_for(peer_cases.PLAIN["fp8 blocks, fp8 tokens, bias"])
    assert layer.problem.activation.limit
    assert [result.ok for result in stressed(layer, "emulation", "large")] == [True]
