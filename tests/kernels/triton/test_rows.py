"""What surrounds kernels of layers in rows: matrices, launches, refusals, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for
from triton.runtime.jit import JITFunction

from moectl.capabilities.own_kernels import token_format
from moectl.errors import UsageError
from moectl.kernels.choice.launch_plan import launch_for
from moectl.kernels.choice.portable_launches import Tile
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat
from moectl.kernels.tolerance import DECLARED
from moectl.kernels.triton.kernel_family import KernelLayer, layer_of
from moectl.kernels.triton.row_matrix import RowLayer
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.kernels.triton.workspace import SMALLEST
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from support import row_cases as cases
from support.asked_memory import asked_for
from support.random_layers import KIMI, random_layer


def problem_of(scheme: str) -> MoEProblem:
    return MoEProblem(Dims(2048, 768), 128, 8, cases.SCHEMES[scheme], SILU)


@pytest.mark.parametrize("scheme", cases.SCHEMES)
def test_a_layer_in_rows_has_matrices_in_rows(scheme: str) -> None:
    groups = cases.SCHEMES[scheme].weight.bits == 4
    hidden, columns = (256, 384) if groups else (160, 200)
    dims = Dims(hidden, columns)
    problem = replace(problem_of(scheme), dims=dims, experts=3, local_experts=3, top_k=1, bias=True)
    layer = layer_of(cases.layer_of(problem, "cpu").prepared("moectl", "cpu"))
    assert isinstance(layer, RowLayer)
    assert (layer.w13.n, layer.w13.k, layer.w2.n, layer.w2.k) == (2 * columns, hidden, hidden, columns)
    coded = problem.scheme.weight.bits < 16
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.int8}
    assert layer.w13.weights.dtype == dtypes[problem.scheme.weight.name]
    shapes = {"block": ((4, 2), (2, 2)), "channel": ((400, 1), (160, 1)), "tensor": ((2, 1), (1, 1))}
    shapes["group"] = ((2, 768), (3, 256))
    kind = next((shape for name, shape in shapes.items() if scheme.startswith(name)), None)
    of_scales = torch.bfloat16 if scheme == "group and token, INT4" else torch.float32
    for m, shape in zip((layer.w13, layer.w2), kind or (None, None), strict=True):
        assert (m.scales is None) == (shape is None) == (not coded)
        assert m.scales is None or (m.scales.dtype, tuple(m.scales.shape[1:])) == (of_scales, shape)
        assert (m.token_scale is not None) == ("static" in scheme) and m.bias is not None
    quantized = "16-bit" not in scheme and scheme != "plain"
    assert (token_format(problem) is not None) == quantized
    assert runner_for("moectl").accumulation_of(problem) == (DECLARED if quantized else "fp32")


def test_layers_in_tiles_stay_what_they_were() -> None:
    prepared = random_layer(KIMI).prepared("moectl", "cpu")
    assert isinstance(layer_of(prepared), KernelLayer) and prepared.layout == "moectl-mtile64"
    assert runner_for("moectl").accumulation_of(KIMI) == "fp32"


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        ("w2", lambda t: t[:, :, :8], r"w2 must be torch.uint8 \[128, 2048, 768\], contiguous, got"),
        ("w13_scale", lambda t: t.half(), r"w13_scale must be torch.float32 \[128, 12, 16\], contiguous"),
        ("w2", lambda t: t.transpose(1, 2), "w2 must be"),
    ],
)
def test_tensors_of_other_shapes_are_refused(role: str, change: object, message: str) -> None:
    prepared = empty_layer(problem_of("block"), "moectl")
    weights = {**prepared.weights, role: change(prepared.weights[role])}  # type: ignore[operator]
    with pytest.raises(UsageError, match=message):
        layer_of(replace(prepared, weights=weights, derived={}))


@pytest.mark.parametrize("scheme", cases.SCHEMES)
def test_only_families_that_read_rows_take_them(scheme: str) -> None:
    problem = problem_of(scheme)
    tiles = {name: family.candidates(KIMI) for name, family in FAMILIES.items()}
    fitting = {name for name, made in tiles.items() if any(not FAMILIES[name].fits(problem, t) for t in made)}
    assert fitting == {"decode", "grouped"}
    for tokens in (1, 7, 40, 300, 5000):
        launch = launch_for(problem, tokens)
        assert not FAMILIES[launch.family].fits(problem, launch.tile)


@pytest.mark.parametrize(("scheme", "name"), [("block", "FP8"), ("group and token, INT4", "INT4")])
def test_steps_whose_products_are_summed_by_themselves_are_never_longer_than_a_block(
    scheme: str, name: str
) -> None:
    for family in ("decode", "grouped"):
        why = FAMILIES[family].fits(problem_of(scheme), Tile(16, 64, 256, stages=2, warps=4))
        assert f"adds up more than 128 columns of {name} products at once" in why


@pytest.fixture
def launching_nothing() -> Iterator[None]:
    with compiling_for(OFFLINE_GPUS[90]), patch.object(JITFunction, "run", lambda *args, **options: None):
        yield


@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("form", [ActivationFormat.STANDARD, ActivationFormat.BATCHED], ids=lambda f: f.name)
@pytest.mark.parametrize("scheme", ["plain", "block", "tensor, dynamic", "channel, 16-bit tokens"])
def test_calls_take_the_memory_that_is_said(
    scheme: str, form: ActivationFormat, tokens: int, launching_nothing: None
) -> None:
    problem = replace(problem_of(scheme), dims=Dims(512, 384), experts=16, local_experts=16)
    prepared, runner = empty_layer(problem, "moectl"), runner_for("moectl")
    compute = runner.in_form(form)
    assert compute is not None and runner.workspace is not None
    if form is ActivationFormat.BATCHED:
        tokens = min(tokens, 40)
        given = (
            torch.empty(16, tokens, 512, dtype=torch.bfloat16, device="meta"),
            torch.empty(16, dtype=torch.int32, device="meta"),
        )
    else:
        given = (
            torch.empty(tokens, 512, dtype=torch.bfloat16, device="meta"),
            torch.empty(tokens, 8, dtype=torch.int32, device="meta"),
            torch.empty(tokens, 8, dtype=torch.float32, device="meta"),
        )
    compute(prepared, *given)
    took = asked_for(lambda: compute(prepared, *given), *given, *prepared.weights.values())
    said = runner.workspace(prepared, tokens, form)
    assert took <= said <= 1.25 * took + SMALLEST + 1024 * problem.local_experts, (took, said)
