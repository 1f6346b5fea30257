"""Kernels that quantize FP8 tokens, compiled for SM90 without a GPU."""

from __future__ import annotations

import pytest
import torch
from devtools.inspection.kernel_report import report_of
from devtools.inspection.offline_gpu import compiling_for
from devtools.inspection.published_kernels import gpu_of

from moectl.kernels.triton.token_codes import LiveRows, quantize_rows
from moectl.problem.schemes import FP8_ACT_GROUP_128, FP8_ACT_TENSOR, FP8_ACT_TOKEN, ActFormat

FORMS = {"blocks": FP8_ACT_GROUP_128, "tokens": FP8_ACT_TOKEN, "everything": FP8_ACT_TENSOR}


@pytest.mark.parametrize("columns", [7168, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_on_sm90(form: ActFormat, columns: int) -> None:
    """Nothing spills; numbers are divided by multiplying, which conversions saturate."""
    x = torch.empty(48, columns, dtype=torch.bfloat16, device="meta")
    with compiling_for(gpu_of(90)) as launched:
        quantize_rows(x, form)
    assert len(launched) == (2 if form == FP8_ACT_TENSOR else 1)
    aligned = columns % 16 == 0
    for kernel in launched:
        report = report_of(kernel)
        assert not report.opcodes["LDL"] and not report.opcodes["STL"], "registers are spilled"
        assert report.registers <= (128 if aligned else 168) and not report.hazards and not report.warnings
        quotients = kernel.kernel.asm["ptx"].count("div.rn.f32")
        # For each width of rows and each scale of a thread, the scale and its reciprocal; none for a number.
        assert quotients <= (12 if form == FP8_ACT_TOKEN else 4) * (1 if aligned else 8)
        conversions = kernel.kernel.asm["ptx"].count("cvt.rn.satfinite.e4m3x2.f32")
        assert (conversions > 0) == ("codes" in kernel.name)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rows_and_columns_are_not_compiled(form: ActFormat) -> None:
    live = LiveRows("sorted", torch.empty(9, dtype=torch.int32, device="meta"), 8)
    with compiling_for(gpu_of(90)) as launched:
        for rows, columns in ((1, 7168), (48, 256), (16, 2048), (4096, 14336)):
            quantize_rows(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), form, None, live)
    assert len({kernel.kernel.hash for kernel in launched}) == (2 if form == FP8_ACT_TENSOR else 1)
