"""The plain grouped GEMM compiled for SM90 without a GPU: matrix units, asynchronous loads, no spills."""

from __future__ import annotations

import pytest
import torch
from devtools.inspection.kernel_report import report_of
from devtools.inspection.offline_gpu import compiling_for
from devtools.inspection.published_kernels import gpu_of

from moectl.tuning.grouped_gemm import SPAN, GemmConfig, PaddedAssignments, plain_gemm

N, K, TOKENS, EXPERTS, ASSIGNMENTS = 1536, 2048, 16, 128, 128


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("scaled", "swapped", "blocks", "product"),
    [
        (False, False, GemmConfig(16, 64, 128, 1, 4, 4), "HMMA"),
        (False, False, GemmConfig(128, 256, 64, 16, 8, 4), "HGMMA"),
        (True, True, GemmConfig(16, 64, 128, 1, 4, 4), "QGMMA"),
        (True, False, GemmConfig(64, 128, 128, 16, 4, 4), "QGMMA"),
    ],
    ids=["few rows", "many rows", "fp8 few rows", "fp8 many rows"],
)
def test_on_sm90(scaled: bool, swapped: bool, blocks: GemmConfig, product: str) -> None:
    dtype = torch.float8_e4m3fn if scaled else torch.bfloat16
    most = ASSIGNMENTS * blocks.block_m
    rows = PaddedAssignments(_meta(most), _meta(most // blocks.block_m), _meta(1), ASSIGNMENTS, most)
    x, weight = _meta(TOKENS, K, dtype=dtype), _meta(EXPERTS, N, K, dtype=dtype)
    y = _meta(ASSIGNMENTS, N, dtype=torch.bfloat16)
    spans = _meta(TOKENS, K // SPAN), _meta(EXPERTS, N // SPAN, K // SPAN)
    scales = (spans[0].float(), spans[1].float()) if scaled else None
    with compiling_for(gpu_of(90)) as launched:
        plain_gemm(y, x, weight, rows, blocks, scales, swapped)
        report = report_of(launched[-1])
    assert report.opcodes[product] and report.opcodes["LDGSTS"], report
    assert not report.opcodes["LDL"] and not report.opcodes["STL"], "registers are spilled"
    assert not report.hazards and not report.warnings
