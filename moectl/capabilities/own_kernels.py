"""What moectl's own kernels support."""

from __future__ import annotations

from ..problem.schemes import MXFP4
from .kernel_support import KernelSupport, WeightSupport, integers

GATED, UNGATED = ("silu", "swigluoai", "gelu_tanh"), ("relu2",)
"""Activation functions of moectl's device code, which is also used with the GEMMs of other projects."""

TRITON = KernelSupport(
    (WeightSupport((MXFP4, *integers(4), *integers(8)), "moectl-mtile64"),),
    gated=GATED,
    ungated=UNGATED,
    scales=frozenset(("E8M0", "BF16", "F16")),
)
TRITON_MARLIN = KernelSupport(
    (WeightSupport(integers(4), "marlin-int4"),),
    gated=GATED,
    ungated=UNGATED,
    scales=frozenset(("BF16", "F16")),
)
TORCH_PLATFORMS = {"cuda": "cuda", "rocm": "cuda", "cpu": "cpu"}
"""Platforms of the plain torch backends, by torch's device type. They support every weight format."""
