# mypy: ignore-errors
"""Device code shared by the Gluon kernels: the activation that the first GEMM applies to its accumulators.

NaN inputs give NaN.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _logistic(x):
    """1 / (1 + exp(-x)) by the approximate ex2 and rcp instructions, each accurate to about 2^-22."""
    return gl.inline_asm_elementwise(
        "{ ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0; }",
        "=f,f",
        [x * -1.4426950408889634],
        gl.float32,
        True,
        1,
    )


@gluon.jit
def _tanh(x):
    """Accurate to about 2^-20 relative to the result: a series near zero, where the sigmoid would cancel."""
    square = x * x
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
    near = x + x * square * (-0.3333333333333333 + square * series)
    return gl.where(square < 0.0625, near, 2.0 * _logistic(2.0 * x) - 1.0)


@gluon.jit
def _softly_limited(x, limit):
    """limit * tanh(x / limit); `x` itself for infinity."""
    return gl.where(limit == float("inf"), x, limit * _tanh(x * (1.0 / limit)))


@gluon.jit
def activate(gate, up, alpha, limit, ACT: gl.constexpr):
    """activation(gate) * up in fp32, for two tensors of the same layout.

    The gate is clamped to at most `limit`, up to [-limit, limit]; infinity means no clamp. `swiglustep`
    clamps the gate after its sigmoid, and `gelu_tanh` never clamps. `alpha` multiplies the argument of the
    sigmoid, 1 for `silu`. `situ` softly limits the gate by `alpha` and up by `limit`.
    """
    if ACT == "gelu_tanh":
        slope = 2.0 * gate * (0.7978845608028654 + 0.035677408136300125 * gate * gate)
        result = up * gate * _logistic(slope)
    elif ACT == "situ":
        result = _softly_limited(up, limit) * _softly_limited(gate, alpha) * _logistic(gate)
    elif ACT == "swiglustep":
        gate = gl.minimum(gate * _logistic(gate), limit, propagate_nan=tl.PropagateNan.ALL)
        up = gl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        result = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL) * gate
    else:
        gl.static_assert(ACT == "silu" or ACT == "swigluoai", "unknown activation of gated experts")
        gate = gl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = gl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        if ACT == "swigluoai":
            up = up + 1.0
        result = up * gate * _logistic(alpha * gate)
    return result


@gluon.jit
def activate_rows(acc, alpha, limit, TOKENS: gl.constexpr, ACT: gl.constexpr):
    """`activate` of 64 rows, as [32, TOKENS]; each block of 16 rows has 8 gate rows, then 8 up rows."""
    gate, up = gl.split(acc.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    return activate(gate, up, alpha, limit, ACT).reshape([32, TOKENS])


@gluon.jit
def activate_columns(acc, alpha, limit, ACT: gl.constexpr):
    """`activate` of 64 columns, as [64, 32]; each block of 16 columns has 8 gates, then 8 ups."""
    gate, up = gl.split(acc.reshape([64, 4, 2, 8]).permute((0, 1, 3, 2)))
    return activate(gate, up, alpha, limit, ACT).reshape([64, 32])


@gluon.jit
def activate_one(x, ACT: gl.constexpr):
    """activation(x) in fp32, for experts without a gate."""
    gl.static_assert(ACT == "relu2", "unknown activation of experts without a gate")
    return gl.where(x < 0.0, 0.0, x * x)
