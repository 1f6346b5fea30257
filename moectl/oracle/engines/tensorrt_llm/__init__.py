"""TensorRT-LLM's PyTorch backend at commit d1fce83: read from its source, never run."""

from ....capabilities.kernel_packages import KERNEL_PACKAGES
from ....environment.package_probes import Probe
from ...engine import Engine, Profile
from .policy import POLICY

TENSORRT_LLM = Engine(
    policy=POLICY,
    title="TensorRT-LLM",
    family="tensorrt-llm",
    package="tensorrt_llm",
    env_prefix="TRTLLM_GEN_FUSED_MOE_",
    env_example="TRTLLM_GEN_FUSED_MOE_USE_FLASHINFER=1",
    packages={
        "flashinfer": KERNEL_PACKAGES["flashinfer"],
        "cutlass_dsl": Probe(
            ("cutlass",),
            "nvidia-cutlass-dsl",
            oldest="4.5.0",
            get="pip install 'nvidia-cutlass-dsl[cu13]'",
        ),
    },
    profiles=lambda: {"tensorrt_llm": Profile(("flashinfer", "cutlass_dsl"))},
    default_profiles={"cuda": "tensorrt_llm"},
    beside=False,
)


def engine(version: str) -> Engine:
    """TensorRT-LLM as read at that commit, the only `version`."""
    return TENSORRT_LLM
