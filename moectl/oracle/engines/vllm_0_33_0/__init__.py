"""vLLM 0.33.0: its rules, backends, environment variables, packages, tuned files and memory."""

from ....problem.schemes import BF16, MXFP4
from ...decision import CAPABILITY, DTYPE, NAME, PLATFORM
from ...engine import CacheFolder, Engine, Recordings
from .data import GRID
from .deployment import REPACKING
from .kernel_names import KERNEL_NAMES
from .own_code import OWN_CODE
from .packages import COMPILED_KERNELS, DEFAULT_PROFILES, PACKAGES, profiles
from .policy import POLICY
from .tuned_files import TUNED_FILES
from .variables import HISTORY, PARTITION


def _no_deep_ep(platform: str, exchange: str) -> bool:
    """True for DeepEP exchanges on platforms without DeepEP."""
    return exchange.startswith("deepep") and platform in ("cpu", "xpu")


VLLM_0_33_0 = Engine(
    policy=POLICY,
    title="vLLM",
    family="vllm",
    package="vllm",
    env_prefix="VLLM_",
    env_example="VLLM_USE_DEEP_GEMM=0",
    history=HISTORY,
    packages=PACKAGES,
    compiled_kernels=COMPILED_KERNELS,
    profiles=profiles,
    default_profiles=DEFAULT_PROFILES,
    caches=(CacheFolder("vLLM", "VLLM_CACHE_ROOT", "@cache/vllm"),),
    repacking=REPACKING,
    tuned_files=TUNED_FILES,
    kernel_names=KERNEL_NAMES,
    memory_share=0.92,
    memory_option="--gpu-memory-utilization",
    stages_variable=PARTITION,
    own_code=OWN_CODE,
    recordings=Recordings(
        GRID,
        gates={
            "min capability": CAPABILITY,
            "not in supported act dtypes": DTYPE,
            "currently not supported in": PLATFORM,
            "not accepted by KernelConfig": NAME,
        },
        rounded={"mxfp4": MXFP4, "unquantized": BF16},
        without_meaning=_no_deep_ep,
    ),
)
