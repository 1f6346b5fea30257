"""Kernels around the experts compiled for GPUs that are not here, without spilled registers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from devtools.inspection.kernel_report import report_of
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for

from moectl.kernels.triton import router
from moectl.kernels.triton.sort_and_combine import order_of_counts
from support.router_cases import METHODS, case_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_DEFAULT = [*((90, dtype) for dtype in DTYPES), *zip((80, 100, 120), DTYPES, strict=True)]


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        pytest.param(arch, dtype, marks=() if (arch, dtype) in BY_DEFAULT else pytest.mark.slow)
        for arch, dtype in product((80, 90, 100, 120), DTYPES)
    ],
    ids=str,
)
def test_compiles(arch: int, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Each method for one dtype of logits on sm_90 and on one other GPU, dtypes and GPUs taking turns.

    By default every third method of those.
    """
    names = [name for i, name in enumerate(METHODS) if DTYPES[(i + arch // 10) % 3] == dtype]
    if arch != 90:
        turn = [80, 100, 120].index(arch)
        names = [name for name in names if (list(METHODS).index(name) // 3) % 3 == turn]
    if not request.config.getoption("--slow"):
        names = names[::3]
    assert names
    with compiling_for(OFFLINE_GPUS[arch]) as launched:
        for name in names:
            problem = METHODS[name]
            c = case_of(problem, "random", 3, dtype).to("meta")
            ids, weights = router.route(c.logits, problem, c.bias, c.factors, c.table, c.token_ids)
            assert ids.shape == weights.shape == (3, problem.top_k)
        reports = [report_of(it) for it in launched]
    assert len(reports) == len(names)
    assert not any(it.faults for it in reports), reports


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_the_rows_of_a_batch_compile(arch: int) -> None:
    with compiling_for(OFFLINE_GPUS[arch]) as launched:
        for experts, dtype in ((1, torch.int64), (384, torch.int32)):
            ids, weights, _ = order_of_counts(torch.empty(experts, dtype=dtype, device="meta"), 70)
            assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        reports = [report_of(it) for it in launched]
    assert len(reports) == 2 and not any(it.faults for it in reports), reports
