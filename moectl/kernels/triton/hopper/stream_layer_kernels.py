# mypy: ignore-errors
"""Device code of both GEMMs of a layer in one launch, for few tokens per expert on SM90.

The programs of the first GEMM come first in the grid, then those of the second: an expert's second product
starts as soon as its first is complete, while those of other experts are still running, so no multiprocessor
idles between the two. A program of the second GEMM waits only for programs before it in the grid, which the
GPU starts earlier.

A record's third word counts the programs of the first GEMM that have finished it; the plan sets it to 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import thread_barrier
from .stream_kernels import _let_next_start, _stream, _wait
from .stream_operands import _record


@gluon.jit
def _done(counter):
    """Increments `counter` with release semantics, after the stores of all threads of this program."""
    thread_barrier()
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "RECORDS"])
def _stream_layer_kernel(
    X, W, SC, ZP, B, F, H, H_2, W_2, SC_2, ZP_2, B_2, F_2, Y, IDS, PLAN, WEIGHTS, T, RECORDS,
    N, K, KX2, NX, RUNS, N_2, K_2, KX2_2, NX_2, RUNS_2, alpha, limit,
    E: gl.constexpr, TOP_K: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    HALVES: gl.constexpr, HALVES_2: gl.constexpr, ON_INPUT: gl.constexpr, KIND: gl.constexpr,
    KIND_2: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    STEPS: gl.constexpr, TILES: gl.constexpr, S_2: gl.constexpr, RW_2: gl.constexpr, R_2: gl.constexpr,
    D_2: gl.constexpr, STEPS_2: gl.constexpr, TILES_2: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """H by slot (H_2: the same as words) and Y ``[T, NX_2]`` fp32 by slot; grid RECORDS * (RUNS + RUNS_2)."""
    if PDL:
        _wait()
        _let_next_start()
    program = gl.program_id(0)
    first = RECORDS * RUNS
    if program < first:
        p = program // RUNS
        expert, count = _record(IDS, PLAN, p, T, TOKENS, True)
        if (expert >= 0) & (expert < E):
            _stream(
                X, W, SC, ZP, B, F, H, IDS, PLAN, WEIGHTS, T, N, K, KX2, NX, alpha, limit, p, expert, count,
                program % RUNS, 0, 0, True, TOP_K, ACT, GATED, BIAS, HALVES, ON_INPUT, KIND, GROUP,
                TOKENS, S, RW, R, D, STEPS, TILES, 1, True, "",
            )  # fmt: skip
            _done((PLAN + p.to(gl.int64) * (TOKENS + 8) + 2).to(gl.int64))
    else:
        p = (program - first) // RUNS_2
        expert, count = _record(IDS, PLAN, p, T, TOKENS, True)
        if (expert >= 0) & (expert < E):
            _stream(
                H_2, W_2, SC_2, ZP_2, B_2, F_2, Y, IDS, PLAN, WEIGHTS, T, N_2, K_2, KX2_2, NX_2, 0.0, 0.0, p,
                expert, count, (program - first) % RUNS_2, 0, RUNS, False, 1, "", False, BIAS, HALVES_2,
                not ON_INPUT, KIND_2, GROUP, TOKENS, S_2, RW_2, R_2, D_2, STEPS_2, TILES_2, 1, True, "record",
            )  # fmt: skip
