"""CPU backends: AMX kernels on x86, ZenTorch on AMD, and the int8 kernels of other CPUs."""

from dataclasses import replace

from ...problem import Align
from ..backend import (
    ROCM,
    X86_AMX,
    Arch,
    Ask,
    Backend,
    Capability,
    Form,
    Need,
    Offer,
    Rule,
    Spread,
    Switch,
    Variant,
    but,
    only,
)

_ROUTERS = ("Default", "Renormalize", "RenormalizeNaive")

CPU_MXFP4 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(
        Variant(
            "CPUExpertsMxfp4",
            Capability(
                arch=(X86_AMX,),
                offers=(Offer(frozenset({"mxfp4 group 32"})),),
                activations=only("silu", "swigluoai", "gelu", "gelu_tanh"),
                ungated=False,
                routing=only(*_ROUTERS, "DeepseekV4"),
            ),
        ),
    ),
    # The engine rounds for ROCm before it looks at the backend.
    forms=(Form("cpu-amx-mxfp4", Align(256, 256), where=(ROCM,)), Form("cpu-amx-mxfp4", Align(32, 32))),
)
CPU_INT4 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(
        Variant(
            "CPUExpertsInt4",
            Capability(
                arch=(X86_AMX,),
                offers=(Offer(frozenset({"int4 group"})),),
                activations=only("silu", "gelu_tanh"),
                ungated=False,
                routing=only(*_ROUTERS),
            ),
        ),
    ),
    forms=(Form("cpu-amx-int4"),),
)

_INT8 = Capability(
    arch=(X86_AMX,),
    offers=(Offer(frozenset({"int8 per channel"}), only("int8 per token dynamic")),),
    activations=only("silu", "gelu_tanh"),
    ungated=False,
    routing=only(*_ROUTERS),
    rules=(
        Rule(
            question="hidden size",
            group="shape",
            vllm_code="shape",
            holds=lambda ask: ask.problem.dims.hidden % 32 == 0,
            wanted=lambda ask: str(ask.problem.dims.hidden),
            offered="a multiple of 32",
        ),
    ),
)
CPU_INT8 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(
        Variant("ZenCPUExpertsInt8", replace(_INT8, arch=(Arch("cpu", features=frozenset({"zen"})),))),
        Variant("PowerCPUExpertsInt8", replace(_INT8, arch=(Arch("cpu", names=frozenset({"ppc64le"})),))),
        Variant("ArmCPUExpertsInt8", replace(_INT8, arch=(Arch("cpu", names=frozenset({"aarch64"})),))),
        Variant("CPUExpertsInt8", _INT8),
    ),
    forms=(Form("cpu-int8"),),
)


def _whole_words(ask: Ask) -> bool:
    group = ask.problem.scheme.weight.group
    return group > 0 and group % 4 == 0


ZEN_INT4 = Backend(
    name="zen_cpu",
    engine_name="ZEN_CPU",
    variants=(
        Variant(
            "ZentorchExpertsInt4",
            Capability(
                arch=(Arch("cpu", features=frozenset({"zen"})),),
                needs=(Need("zentorch"),),
                switches=(Switch("VLLM_CPU_INT4_W4A8", vllm_code="other"),),
                offers=(Offer(frozenset({"int4 group", "int4 group 32"})),),
                activations=only("silu", "gelu", "swigluoai"),
                ungated=False,
                routing=only(*_ROUTERS, "Custom"),
                spread=Spread(ep=False),
                checkpoints=but("moe_wna16", "quark"),
                act_order=False,
                zero_points=False,
                dtypes=only("bf16"),
                rules=(
                    Rule(
                        question="scale groups",
                        group="shape",
                        vllm_code="other",
                        holds=_whole_words,
                        wanted=lambda ask: str(ask.problem.scheme.weight),
                        offered="groups of a multiple of 4",
                    ),
                    Rule(
                        question="experts per token",
                        group="shape",
                        vllm_code="other",
                        holds=lambda ask: ask.problem.top_k >= 2,
                        wanted=lambda ask: str(ask.problem.top_k),
                        offered="2 or more",
                    ),
                ),
            ),
        ),
    ),
    forms=(Form("zentorch-int4"),),
)
