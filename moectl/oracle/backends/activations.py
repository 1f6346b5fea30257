"""Sets of activation functions that several backends share, in the engine's spelling.

``swigluoai`` is the gpt-oss function over interleaved gate and up rows, ``swigluoai_uninterleave`` the
same over concatenated ones; ``_no_mul`` marks functions without a gate.
"""

from ..backend import only

SHARED = only(
    "silu",
    "gelu",
    "gelu_tanh",
    "situ",
    "swigluoai",
    "swigluoai_uninterleave",
    "swiglustep",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
)
"""What a step of its own between the two GEMMs computes."""
