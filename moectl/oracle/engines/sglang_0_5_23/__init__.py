"""SGLang 0.5.23: server arguments, runners of experts, environment variables and packages."""

from ....capabilities.kernel_packages import KERNEL_PACKAGES
from ....environment.package_probes import Probe
from ...engine import CacheFolder, Engine, Profile
from .data import variables
from .policy import POLICY

SGLANG_0_5_23 = Engine(
    policy=POLICY,
    title="SGLang",
    family="sglang",
    package="sglang",
    env_prefix="SGLANG_",
    env_example="SGLANG_USE_AITER=1",
    other_variables=variables,
    packages={
        "flashinfer": KERNEL_PACKAGES["flashinfer"],
        "triton_kernels": KERNEL_PACKAGES["triton_kernels"],
        "deep_gemm": KERNEL_PACKAGES["deep_gemm"],
        "aiter": Probe(("aiter",), "amd-aiter", get="build github.com/ROCm/aiter"),
    },
    profiles=lambda: {
        "sglang": Profile(("flashinfer", "triton_kernels", "deep_gemm")),
        "sglang_rocm": Profile(("aiter", "triton_kernels")),
        "sglang_rocm_aiter": Profile(("aiter", "triton_kernels"), {"SGLANG_USE_AITER": "1"}),
        "sglang_cpu": Profile(("triton_kernels",)),
    },
    default_profiles={"cuda": "sglang", "rocm": "sglang_rocm_aiter", "cpu": "sglang_cpu"},
    caches=(CacheFolder("SGLang", "SGLANG_CACHE_DIR", "~/.cache/sglang"),),
    beside=False,
)


def engine(version: str) -> Engine:
    """SGLang 0.5.23, the only `version`."""
    return SGLANG_0_5_23
