"""Quantization of rows compiled for SM90 without a GPU: no spills, and loads and stores of many bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devtools.inspection.kernel_report import report_of
from devtools.inspection.offline_gpu import compiling_for
from devtools.inspection.published_kernels import gpu_of

from moectl.kernels.external.fp8_rows import expert_rows, quantize_rows
from moectl.problem.moe_problem import Dims
from moectl.problem.schemes import FP8_ACT_GROUP_128, FP8_ACT_TENSOR, FP8_ACT_TOKEN, ActFormat
from support import peer_cases as cases
from support.sampling import every_nth

FORMS = {"blocks": FP8_ACT_GROUP_128, "tokens": FP8_ACT_TOKEN, "everything": FP8_ACT_TENSOR}


@pytest.mark.parametrize("form", every_nth(FORMS.values(), 3), ids=FORMS)
def test_on_sm90(form: ActFormat) -> None:
    """Tokens in their order, tokens by expert, and the activations of both."""
    problem = replace(cases.BLOCKS, dims=Dims(7168, 2048))
    x = torch.empty(16, 7168, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(48, dtype=torch.int32, device="meta")
    gate_up = torch.empty(48, 4096, dtype=torch.bfloat16, device="meta")
    with compiling_for(gpu_of(90)) as launched:
        quantize_rows(x, problem, form)
        order = expert_rows(ids, problem.local_experts)
        codes, scales = quantize_rows(x, problem, form, order=order)
        quantize_rows(gate_up, problem, form, activated=True, ids=ids)
        quantize_rows(gate_up, problem, form, activated=True, order=order)
        reports = [report_of(kernel) for kernel in launched]
    assert codes.shape == (48, 7168) and scales.shape[0] in (1, 48)
    quantizing = [report for report in reports if report.name == "_quantize_kernel"]
    assert len(quantizing) == (8 if form == FP8_ACT_TENSOR else 4)
    for report in quantizing:
        assert not report.opcodes["LDL"] and not report.opcodes["STL"], "registers are spilled"
        assert report.registers <= 64 and not report.hazards and not report.warnings
