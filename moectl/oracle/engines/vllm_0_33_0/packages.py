"""Optional packages that vLLM's rules ask for, and installations of it by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from ....capabilities.kernel_packages import KERNEL_PACKAGES
from ....environment.package_probes import Probe
from ...engine import CompiledKernels, Profile
from .backends.flashinfer import KERNELS
from .data import GRID

PACKAGES: Mapping[str, Probe] = {
    "flashinfer": KERNEL_PACKAGES["flashinfer"],
    "flashinfer_cubin": KERNEL_PACKAGES["flashinfer_cubin"],
    "triton_kernels": KERNEL_PACKAGES["triton_kernels"],
    "deep_gemm": KERNEL_PACKAGES["deep_gemm"],
    "humming": KERNEL_PACKAGES["humming"],
    "deep_ep": Probe(
        ("deep_ep",),
        "deep-ep",
        symbols=("Buffer",),
        get="build github.com/deepseek-ai/DeepEP",
    ),
    "aiter": Probe(
        ("aiter",),
        "amd-aiter",
        symbols=("fused_moe.fused_moe", "ops.shuffle.shuffle_weight"),
        get="build github.com/ROCm/aiter",
    ),
    "quark": Probe(("quark",), "amd-quark", ("torch",), get="pip install amd-quark"),
    "b12x": Probe(("b12x",), "b12x", get="pip install b12x"),
    "hpc": Probe(
        ("hpc",),
        symbols=("fuse_moe", "fuse_moe_blockwise"),
        get="build github.com/Tencent/hpc-ops",
    ),
    "zentorch": Probe(("zentorch",), "zentorch", get="pip install zentorch"),
}
"""By the name under which `Packages` lists them."""

COMPILED_KERNELS = (
    CompiledKernels(
        "flashinfer",
        "FlashInfer",
        KERNELS,
        "compiled kernels (flashinfer-cubin)",
        "pip install flashinfer-cubin=={version}, or install nvcc and ninja",
    ),
)

DEFAULT_PROFILES = {"cuda": "full", "rocm": "rocm_default", "cpu": "cpu", "xpu": "xpu"}
"""By platform: the default installation there."""


@cache
def profiles() -> Mapping[str, Profile]:
    """Installations by name, those that decisions were recorded with."""
    recorded = json.loads(GRID.read_text(encoding="utf-8"))["PROFILES"]
    return {name: Profile(tuple(row["packages"]), row["env"]) for name, row in recorded.items()}
