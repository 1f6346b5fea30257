"""vLLM 0.20.0 for unquantized experts, as its difference from 0.22.0."""

from ...backend import Backend, NameSet, only
from ...gpu_archs import SM10X, SM12X, SM90, sm
from ...release import ClassChange, Difference, RouteChange
from ...route import LateFailure
from .v0_22_0 import VLLM_0_22_0
from .v0_24_0 import UNQUANTIZED


def _tanh_apart(name: str) -> NameSet:
    """The activation functions of a backend's first class without those of GELU's tanh approximation."""
    backend: Backend = next(b for b in VLLM_0_22_0.policy.backends() if b.engine_name == name)
    known = backend.variants[0].capability.activations.only or frozenset()
    return only(*known - {"gelu_tanh", "gelu_tanh_no_mul"})


_UNGATED = LateFailure(
    "gate",
    lambda ask, chosen: not ask.problem.activation.gated and ask.device.platform == "xpu",
    lambda ask, chosen: "experts without a gate are supported on NVIDIA's and AMD's GPUs only",
    kind="NotImplementedError",
)

DIFFERENCE = Difference(
    version="0.20.0",
    classes=(
        ClassChange(("FlashInferExperts",), {"arch": (SM90, SM10X, sm(110, 119), SM12X)}),
        ClassChange(("TritonExperts",), {"activations": _tanh_apart("TRITON")}),
        ClassChange(("BatchedTritonExperts",), {"activations": _tanh_apart("BATCHED_TRITON")}),
        ClassChange(("XPUExperts",), {"activations": only("silu", "gelu", "swigluoai"), "ungated": False}),
    ),
    routes=(RouteChange((UNQUANTIZED,), {"late_failures": (_UNGATED,)}),),
)

VLLM_0_20_0 = DIFFERENCE.before(VLLM_0_22_0)
