"""The second stage: the quantization method of a layer of experts, and its runner."""

from .bf16 import PLAIN
from .compressed_tensors import (
    CT_FP8,
    CT_GROUPS,
    CT_GROUPS_TRITON,
    CT_INTEGERS,
    CT_NVFP4,
    CT_NVFP4_A16,
    CT_ROCM,
    CT_ROCM_GROUPS,
    CT_TRITON,
)
from .fp4 import MXFP4, NVFP4
from .fp8 import FP4_EXPERTS, FP8, MODELOPT_FP8, MXFP8
from .integers import AWQ, AWQ_ELSEWHERE, AWQ_TRITON, GPTQ
from .quark import QUARK_FP8, QUARK_MXFP4

ROUTES = (
    PLAIN,
    FP8,
    MXFP8,
    FP4_EXPERTS,
    MXFP4,
    NVFP4,
    MODELOPT_FP8,
    CT_FP8,
    CT_ROCM_GROUPS,
    CT_ROCM,
    CT_GROUPS_TRITON,
    CT_GROUPS,
    CT_TRITON,
    CT_INTEGERS,
    CT_NVFP4,
    CT_NVFP4_A16,
    GPTQ,
    AWQ_ELSEWHERE,
    AWQ_TRITON,
    AWQ,
    QUARK_MXFP4,
    QUARK_FP8,
)
"""The first that applies to a layer; see `Route`."""
