"""Layers in rows under Triton's interpreter, and tokens quantized there; run by `test_interpreter`."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.quantize_tokens import quantize
from moectl.kernels.triton.token_codes import LiveRows, quantize_rows
from moectl.problem.schemes import (
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    ActFormat,
)
from support import row_cases as cases
from support.kernel_cases import poison_new_memory


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_agrees_with_the_same_rounding(case: cases.RowCase) -> None:
    cases.agrees(case, "cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", ["plain", "block", "channel and token", "tensor, 16-bit tokens"])
def test_what_is_not_finite_stays_in_its_row(scheme: str, value: float) -> None:
    cases.stays_in_its_row(scheme, "grouped 16x64x128", value, "cpu")


def rows_of_every_size(columns: int) -> torch.Tensor:
    """Numbers of all magnitudes, zeros, middles of two codes, rows and blocks of zeros."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(40, columns, generator=generator)
    x *= torch.exp2(torch.randint(-14, 14, (40, 1), generator=generator).float())
    x[1], x[2, :128], x[3] = 0, 0, (torch.arange(columns) % 97).float() / 8
    x[4, ::2] *= 2.0**-9
    x[5] = torch.arange(columns).float() * 2.0**-10
    x[5, 0] = 448
    return x


FORMS = {"block": FP8_ACT_GROUP_128, "token": FP8_ACT_TOKEN}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [128, 384, 5120])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tokens_are_quantized_bit_for_bit(form: ActFormat, columns: int, dtype: torch.dtype) -> None:
    x = rows_of_every_size(columns).to(dtype)
    made, right = quantize_rows(x, form), quantize(x, form)
    assert torch.equal(made.codes.view(torch.uint8), right.values.view(torch.uint8))
    assert torch.equal(made.scales.view_as(right.scales), right.scales)


@pytest.mark.parametrize("scale", [0.037, 3.0, 2.0**-20])
def test_static_scales_bit_for_bit(scale: float) -> None:
    x, given = rows_of_every_size(384).half(), torch.tensor([scale])
    made, right = (
        quantize_rows(x, FP8_ACT_TENSOR_STATIC, given),
        quantize(x, FP8_ACT_TENSOR_STATIC, given),
    )
    assert torch.equal(made.codes.view(torch.uint8), right.values.view(torch.uint8))


@pytest.mark.parametrize("kind", ["all", "sorted", "slots"])
def test_one_scale_of_all_tokens_is_of_those_that_live(kind: str) -> None:
    x = rows_of_every_size(200).half()
    live, by = torch.ones(40, dtype=torch.bool), None
    if kind == "sorted":
        live, by = torch.arange(40) < 31, torch.tensor([0, 7, 31], dtype=torch.int32)
    elif kind == "slots":
        by = torch.arange(40, dtype=torch.int32) % 4 - 1
        live = (by >= 0) & (by < 2)
    x[~live] = float("nan")
    made = quantize_rows(x, FP8_ACT_TENSOR, None, LiveRows(kind, by, 2))
    scale = x[live].float().abs().amax() / torch.tensor(448.0)
    assert torch.equal(made.scales, scale.view(1))
    right = quantize(x[live], FP8_ACT_TENSOR_STATIC, made.scales)
    assert torch.equal(made.codes.view(torch.uint8)[live], right.values.view(torch.uint8))


def test_blocks_may_be_cut_at_the_end_of_a_row() -> None:
    x = rows_of_every_size(200).half()
    made = quantize_rows(x, FP8_ACT_GROUP_128)
    right = quantize(torch.nn.functional.pad(x, (0, 56)), FP8_ACT_GROUP_128)
    assert torch.equal(made.codes.view(torch.uint8), right.values.view(torch.uint8)[:, :200])
    assert torch.equal(made.scales, right.scales)
