"""What scripts/profile_kernels reads out of Nsight Compute's output; taking it needs a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest

from support.scripts import loaded

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
ROWS = [
    ("ID", "Kernel Name", "gpu__time_duration.sum", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
     "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed",
     "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
     "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_elapsed",
     STALLED.format("barrier"),
     STALLED.format("long_scoreboard"), STALLED.format("selected"), "launch__func"),
    ("", "", "ns", "%", "%", "%", "%", "", "", "", ""),
    ("0", "spin_kernel(long)", "2000", "0", "0", "0", "0", "0", "0", "1", "x"),
    ("1", "_gemm_kernel", "12,500.5", "81.5", "40", "21", "3", "0.5", "3.25", "1", "x"),
    ("2", "_combine_kernel", "900", "70", "5", "0", "0", "0.1", "9", "1", "x"),
    ("3", "spin_kernel(long)", "2000", "0", "0", "0", "0", "0", "0", "1", "x"),
    ("4", "_gemm_kernel", "7000", "n/a", "40", "22", "3", "0.5", "0.25", "1", "x"),
]  # fmt: skip


@pytest.fixture
def script() -> ModuleType:
    return loaded("profile_kernels")


def test_reads_kernels_by_call(script: ModuleType) -> None:
    said = ["==PROF== Connected", *(",".join(f'"{word}"' for word in row) for row in ROWS)]
    first, second = script.read(said)
    assert [it.kernel for it in first] == ["_gemm_kernel", "_combine_kernel"]
    gemm = first[0]
    assert gemm.us == 12.5005
    assert gemm.percent == {"DRAM": 81.5, "ALU": 40, "tensor": 21}
    assert gemm.stalls == {"barrier": 0.5, "long_scoreboard": 3.25}
    assert "DRAM" not in second[0].percent


def test_prints_a_line_for_each_kernel(script: ModuleType) -> None:
    said = [",".join(f'"{word}"' for word in row) for row in ROWS]
    calls = dict(zip(("one", "other"), script.read(said), strict=True))
    lines = list(script.as_text(calls, everything=False))
    assert [line.split()[0] for line in lines[1:]] == [
        "one",
        "_gemm_kernel",
        "_combine_kernel",
        "other",
        "_gemm_kernel",
    ]
    assert lines[2].endswith("long_scoreboard 3.2, barrier 0.5") and " 12.5 " in lines[2]
    assert lines[2].split()[2:5] == ["82", "-", "-"]
