# mypy: ignore-errors
"""E4M3 codes made in the kernels of `tma`: those of `quantize_tokens`, but for the sign of zeros."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def codes_of(x, scale, BOUNDED: gl.constexpr):
    """`x` / `scale` in E4M3, as bytes; saturates, and NaN stays NaN. Both are fp32, `scale` one or a column.

    The quotient is rounded once before, as by division, but without a division's branches: two steps of
    Newton's method from the product with the rounded inverse. `BOUNDED` promises that no finite quotient is
    more than 448; with an infinite scale all codes are NaN then.
    """
    up = gl.where(scale < 2.0**-64, 2.0**64, 1.0)  # so that nothing underflows
    scale = scale * up
    inverse = gl.div_rn(1.0, scale)
    x = x * up
    first = x * inverse
    quotient = tl.fma(tl.fma(-first, scale, x), inverse, first)
    quotient = tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)
    if not BOUNDED:
        quotient = gl.where(gl.abs(first) < float("inf"), quotient, first)
    return quotient.to(gl.float8e4nv).to(gl.uint8, bitcast=True)  # the conversion saturates
