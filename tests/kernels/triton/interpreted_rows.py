"""Layers in rows under Triton's interpreter, and tokens quantized there; run by `test_interpreter`."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moectl.kernels.quantize_tokens import quantize
from moectl.kernels.triton.token_codes import quantize_rows
from moectl.problem.schemes import FP8_ACT_GROUP_128, FP8_ACT_TOKEN, INT8_ACT_TOKEN, ActFormat
from support import row_cases as cases
from support.kernel_cases import poison_new_memory
from support.sampling import every_nth


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize("case", every_nth(cases.CASES, 4), ids=str)
def test_agrees_with_the_same_rounding(case: cases.RowCase) -> None:
    cases.agrees(case, "cpu")


@pytest.mark.parametrize(
    ("scheme", "value"),
    every_nth(
        product(
            [
                *("plain", "block", "block, UE8M0 tokens", "channel and token", "tensor, 16-bit tokens"),
                *("channel and token, INT8", "group and token, INT4"),
            ],
            [float("nan"), float("inf")],
        ),
        3,
    ),
)
def test_what_is_not_finite_stays_in_its_row(scheme: str, value: float) -> None:
    cases.stays_in_its_row(scheme, "grouped 16x64x128", value, "cpu")


FORMS = {
    "block": FP8_ACT_GROUP_128,
    "token": FP8_ACT_TOKEN,
    "block, UE8M0": cases.UE8M0_TOKENS,
    "INT8": INT8_ACT_TOKEN,
}


@pytest.mark.parametrize(
    ("form", "columns", "dtype"),
    every_nth(product(FORMS.values(), (128, 384, 1536, 4096, 5120), (torch.float16, torch.bfloat16)), 3),
    ids=str,
)
def test_tokens_are_quantized_bit_for_bit(form: ActFormat, columns: int, dtype: torch.dtype) -> None:
    cases.quantizes_bit_for_bit(form, columns, dtype, "cpu")


@cases.each_kind_of_live_rows
def test_rows_that_live_are_quantized_bit_for_bit(form: ActFormat, kind: str, columns: int) -> None:
    cases.quantizes_rows_that_live(form, kind, columns, "cpu")


@pytest.mark.parametrize("scale", cases.GIVEN_SCALES)
def test_static_scales_bit_for_bit(scale: float) -> None:
    cases.quantizes_by_a_static_scale(scale, "cpu")


@pytest.mark.parametrize("kind", ["all", "sorted", "slots"])
def test_one_scale_of_all_tokens_is_of_those_that_live(kind: str) -> None:
    cases.one_scale_of_those_that_live(kind, "cpu")


@pytest.mark.parametrize("form", [FP8_ACT_GROUP_128, cases.UE8M0_TOKENS], ids=["fp32", "UE8M0"])
def test_blocks_may_be_cut_at_the_end_of_a_row(form: ActFormat) -> None:
    x = cases.rows_of_every_size(200).half()
    made = quantize_rows(x, form)
    right = quantize(torch.nn.functional.pad(x, (0, 56)), form)
    assert torch.equal(made.codes.view(torch.uint8), right.values.view(torch.uint8)[:, :200])
    assert torch.equal(made.scales, right.scales)
