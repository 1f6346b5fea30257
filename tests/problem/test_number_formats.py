"""Records of number formats: what they say is so, and a new one is known wherever formats are."""

from __future__ import annotations

import math

import pytest
import torch

from moectl.checkpoint.config.quantization import parse_quantization
from moectl.convert.canonical import canonical_shapes
from moectl.convert.codecs import codec_for
from moectl.convert.codecs.grids import GRIDS, IntegerGrid, Minifloat
from moectl.convert.portable.quantization_config import DOCUMENTS, Described, Description
from moectl.environment.named_devices import find_device
from moectl.errors import NoBackend
from moectl.kernels.layer_inputs import make_inputs
from moectl.kernels.quantize_tokens import dequantize, quantize, refusal
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import check, tolerance_for
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from moectl.problem.number_formats import (
    E2M1,
    NUMBER_FORMATS,
    CodeGrid,
    NumberFormat,
    TokenTolerance,
    number_format,
)
from moectl.problem.roofline import published_rates
from moectl.problem.schemes import (
    A16,
    BF16,
    ActFormat,
    Scheme,
    WeightFormat,
    act_format,
    weight_format,
)
from moectl.torch_dtypes import TORCH_DTYPES
from support.runners import apply

CPU = torch.device("cpu")
SCALED = [number for number in NUMBER_FORMATS.values() if number.scale]
E5M2 = CodeGrid("E5M2", 8, "F8_E5M2", 57344.0, matrix_unit="fp8")
NEW = {
    # Codes that nothing else has.
    "mxe5m2": NumberFormat("mxe5m2", E5M2, "E8M0", (1, 64), compressed_tensors="mxe5m2-quantized"),
    # Known codes and scales in blocks of another size.
    "mxfp4x64": NumberFormat(
        "mxfp4x64",
        E2M1,
        "E8M0",
        (1, 64),
        token_tolerance=TokenTolerance(2.4, 0.5, "blocks are twice as long as MXFP4's"),
        compressed_tensors="mxfp4x64-pack-quantized",
    ),
}


@pytest.mark.parametrize("number", SCALED, ids=lambda number: number.name)
def test_a_record_agrees_with_its_codec(number: NumberFormat) -> None:
    grid = GRIDS[number.grid.name]
    values = torch.tensor([grid.value(code) for code in range(1 << grid.bits)])
    assert (grid.bits, isinstance(grid, IntegerGrid)) == (number.bits, number.grid.integer)
    # Activations leave the lowest integer out: both sides have as many steps.
    assert values.nan_to_num(0).max() == number.grid.largest
    if values.isnan().any():
        assert number.grid.rms == 0
    else:
        assert number.grid.rms == pytest.approx(values.square().mean().sqrt().item(), rel=0.01)
    if number.grid.dtype != "U8":
        codes = torch.arange(256, dtype=torch.uint8).view(TORCH_DTYPES[number.grid.dtype]).float()
        torch.testing.assert_close(codes, values, rtol=0, atol=0, equal_nan=True)


def test_unknown_names_are_refused() -> None:
    assert number_format("a16") is number_format("bf16")
    for form in (WeightFormat("fp6", 6, (1, 32)), ActFormat("fp6", 6, (1, 32))):
        with pytest.raises(NoBackend, match="'fp6' is unknown; known are bf16, fp8, mxfp8, mxfp4, nvfp4"):
            form.number  # noqa: B018


@pytest.fixture(params=NEW)
def new(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NumberFormat:
    """A number format that moectl has not, registered as CONTRIBUTING says."""
    number = NEW[request.param]
    monkeypatch.setitem(NUMBER_FORMATS, number.name, number)
    monkeypatch.setitem(GRIDS, "E5M2", Minifloat(8, 2, -14, 57344.0))  # type: ignore[arg-type]
    return number


def problem_of(weight: WeightFormat, act: ActFormat = A16) -> MoEProblem:
    return MoEProblem(Dims(256, 128), 8, 2, Scheme(weight, act), SILU)


def test_a_new_format_is_encoded_and_counted(new: NumberFormat) -> None:
    weight = weight_format(new.name)
    assert str(weight) == f"{new.name} group 64"
    w = torch.randn(3, 128, 256, generator=torch.Generator().manual_seed(1))
    encoded = codec_for(weight).encode(w)
    decoded = codec_for(weight).decode(*encoded)
    error = (decoded - w).square().mean().sqrt()
    assert 0.02 < error < 0.2
    again = codec_for(weight).encode(decoded)
    torch.testing.assert_close(codec_for(weight).decode(*again), decoded, rtol=0, atol=0)
    problem = problem_of(weight)
    shapes = canonical_shapes(problem, 3)
    assert shapes["w2"] == ("U8", (3, 256, 128 * new.bits // 8)) and shapes["w2_scale"] == ("U8", (3, 256, 2))
    stored = sum(math.prod(shape[1:]) for _, shape in shapes.values())
    assert problem.expert_bytes() == stored


def test_a_new_format_is_computed_within_its_tolerance(new: NumberFormat) -> None:
    problem = problem_of(weight_format(new.name))
    inputs = make_inputs(problem, 24, seed=1)
    for backend in ("torch", "emulation"):
        prepared = RandomLayer(problem, CPU).experts.prepared(backend, "cpu")
        runner = runner_for(backend)
        y = apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
        expected = moe_reference(inputs.x, inputs.ids, inputs.weights, prepared.expert, problem)
        # Codes times scales of a half, one and two times the power of two nearest to their inverse.
        size = (new.grid.rms or 1.0) * math.sqrt(problem.dims.hidden)
        spread = math.sqrt(7 / 4) * size / 2.0 ** round(math.log2(size)) / math.sqrt(problem.dims.hidden)
        assert prepared.expert(0).w13.float().square().mean().sqrt().item() == pytest.approx(spread, rel=0.1)
        assert check(y, expected, tolerance_for(problem, runner.accumulation_of(problem))).ok


def test_a_new_format_is_written_and_read(new: NumberFormat) -> None:
    scheme = Scheme(weight_format(new.name))
    config = DOCUMENTS["compressed-tensors"](Description((Described(scheme, ("Linear",)),), (), ()))
    assert config is not None and config["format"] == new.compressed_tensors
    assert parse_quantization(config).scheme == scheme


def test_tokens_in_a_new_format_need_a_quantizer(new: NumberFormat) -> None:
    form = act_format(new.name)
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    if new.token_tolerance is None:
        assert refusal(form, 256).startswith("there are quantizers to fp8,")
        return
    lost = (dequantize(quantize(x, form)) - x).square().mean().sqrt()
    assert 0.05 < lost < 0.2
    problem = problem_of(BF16, form)
    inputs = make_inputs(problem, 24, seed=1)
    prepared = RandomLayer(problem, CPU).experts.prepared("emulation", "cpu")
    y = apply(runner_for("emulation"), prepared, inputs.x, inputs.ids, inputs.weights)
    expected = moe_reference(inputs.x, inputs.ids, inputs.weights, prepared.expert, problem)
    found = check(y, expected, tolerance_for(problem, "declared"))
    assert found.ok and found.rms > new.token_tolerance.rms / 8


def test_a_new_format_has_a_roofline(new: NumberFormat) -> None:
    known = {"fp8": "fp8", "fp4": "mxfp4"}[new.grid.matrix_unit]
    gpu = find_device("b200")
    assert published_rates(gpu, new.name) == published_rates(gpu, known)
