"""vLLM 0.19.0 for unquantized experts: before its oracle, as its difference from 0.20.0.

The method chose by platform, packages and two variables; what the kernels support was not asked.
"""

from dataclasses import replace
from typing import Any

from ...backend import NONE, Backend, Capability, ExpertsClass, ParallelSupport, SupportQuery, only
from ...gpu_archs import sm
from ...release import Difference, RouteChange
from ...route import Exclusion, Order
from ..vllm_0_33_0.routes.order import CPU, ROCM, XPU
from .v0_20_0 import VLLM_0_20_0
from .v0_23_0 import FLASHINFER, KIND, wanted
from .v0_24_0 import ADAPTERS, ON_CPU, UNQUANTIZED

_KNOWN = {backend.engine_name: backend for backend in VLLM_0_20_0.policy.backends()}
_UNASKED = Capability()


def _backend(name: str, *variants: ExpertsClass) -> Backend:
    return replace(_KNOWN[name], variants=variants)


def _narrowed(name: str, **fields: Any) -> Capability:
    """What selects a backend: the devices and packages of its class, and `fields`."""
    known: Capability = _KNOWN[name].variants[0].capability
    return replace(Capability(arch=known.arch, needs=known.needs, switches=known.switches), **fields)


_TRITON = _backend(
    "TRITON",
    ExpertsClass("TritonExperts", _UNASKED),
    ExpertsClass("BatchedTritonExperts", _UNASKED, batched=True),
)
_AITER = _backend(
    "ROCm AITER",
    ExpertsClass("AiterExperts", _narrowed("ROCm AITER")),
    ExpertsClass("AiterExperts", _narrowed("ROCm AITER"), batched=True),
)
_TRTLLM = _backend(
    "FlashInfer TRTLLM",
    ExpertsClass(
        "flashinfer_fused_moe_bf16",
        _narrowed(
            "FlashInfer TRTLLM",
            activations=only("silu"),
            ungated=False,
            routing=only("Default", "Renormalize", "RenormalizeNaive", "DeepSeekV3", "Llama4"),
            parallel=ParallelSupport(eplb=False),
        ),
        monolithic=True,
    ),
)
_CUTLASS = _backend(
    "FlashInfer CUTLASS",
    ExpertsClass(
        "FlashInferExperts",
        _narrowed("FlashInfer CUTLASS", arch=(sm(90),), parallel=ParallelSupport(dp=False, alone=False)),
    ),
)
_XPU = _backend("XPU", ExpertsClass("XPUExperts", _UNASKED))
_CPU = _backend(
    "CPU",
    *(
        replace(variant, capability=Capability(arch=variant.capability.arch))
        for variant in _KNOWN["CPU"].variants
    ),
)


def _latency(ask: SupportQuery) -> bool:
    return wanted(ask) and ask.packages.env.get(KIND.name, KIND.default) == "latency"


DIFFERENCE = Difference(
    version="0.19.0",
    unknown_routes=frozenset({ON_CPU}),
    routes=(
        RouteChange(
            (UNQUANTIZED,),
            {
                "orders": (
                    Order((_AITER, _TRITON), ROCM),
                    Order((_XPU,), XPU),
                    Order((_CPU,), CPU),
                    Order((_TRTLLM, _CUTLASS, _TRITON)),
                ),
                "moves": (),
                "exclusions": (
                    Exclusion(
                        (_TRTLLM,),
                        f"only while {FLASHINFER.name} is on and {KIND.name} is latency",
                        lambda ask: not _latency(ask),
                        frozenset({FLASHINFER.name, KIND.name}),
                    ),
                    Exclusion(
                        (_CUTLASS,),
                        f"only while {FLASHINFER.name} is on",
                        lambda ask: not wanted(ask),
                        frozenset({FLASHINFER.name}),
                    ),
                ),
                "switch_requests": (),
                "batched_twins": (),
                "names": {
                    "triton": (_TRITON,),
                    "flashinfer_trtllm": (_TRTLLM,),
                    "flashinfer_cutlass": (_CUTLASS,),
                    "aiter": (_AITER,),
                },
            },
        ),
        RouteChange((ADAPTERS,), {"ignored": NONE}),
    ),
)

VLLM_0_19_0 = DIFFERENCE.before(VLLM_0_20_0)
