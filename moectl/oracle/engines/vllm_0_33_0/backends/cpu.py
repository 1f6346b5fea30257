"""CPU backends: AMX kernels on x86, ZenTorch on AMD, and the int8 kernels of other CPUs."""

import math
from dataclasses import replace

from .....problem.moe_problem import Align
from ....backend import (
    Backend,
    BackendRule,
    Capability,
    EnvironmentSwitch,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    ParallelSupport,
    SupportQuery,
    WeightForm,
    but,
    only,
    weighted_input,
)
from ....gpu_archs import ROCM, X86_AMX, Arch
from ..variables import VARIABLES

_ZEN = Arch("cpu", features=frozenset({"zen"}))
_ARM = Arch("cpu", names=frozenset({"aarch64"}))
_POWER = Arch("cpu", names=frozenset({"ppc64le"}))
_STOPS = (weighted_input("NotImplementedError"),)
_ROUTERS = ("Default", "Renormalize", "RenormalizeNaive")

CPU_MXFP4 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(
        ExpertsClass(
            "CPUExpertsMxfp4",
            Capability(
                arch=(X86_AMX,),
                formats=(FormatSupport(frozenset({"mxfp4 group 32"})),),
                activations=only("silu", "swigluoai", "gelu", "gelu_tanh"),
                ungated=False,
                routing=only(*_ROUTERS, "DeepseekV4"),
                runtime_failures=_STOPS,
            ),
        ),
    ),
    # The engine rounds for ROCm before it looks at the backend.
    forms=(
        WeightForm("cpu-amx-mxfp4", Align(256, 256), where=(ROCM,)),
        WeightForm("cpu-amx-mxfp4", Align(32, 32)),
    ),
)
CPU_INT4 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(
        ExpertsClass(
            "CPUExpertsInt4",
            Capability(
                arch=(X86_AMX,),
                formats=(FormatSupport(frozenset({"int4 group"})),),
                activations=only("silu", "gelu_tanh"),
                ungated=False,
                routing=only(*_ROUTERS),
                runtime_failures=_STOPS,
            ),
        ),
    ),
    forms=(WeightForm("cpu-amx-int4"),),
)


def multiples(hidden: int, intermediate: int = 1) -> BackendRule:
    """Required multiples; an intermediate size that the kernels pad themselves is not checked."""
    also = f", intermediate of {intermediate}" if intermediate > 1 else ""

    def holds(ask: SupportQuery) -> bool:
        dims = ask.problem.dims
        return dims.hidden % hidden == 0 and dims.intermediate % intermediate == 0

    return BackendRule("sizes", "shape", "shape", holds, _sizes, f"hidden a multiple of {hidden}{also}")


def _sizes(ask: SupportQuery) -> str:
    return f"hidden {ask.problem.dims.hidden}, intermediate {ask.problem.dims.intermediate} per rank"


_INT8 = Capability(
    arch=(X86_AMX,),
    formats=(FormatSupport(frozenset({"int8 per channel"}), only("int8 per token dynamic")),),
    activations=only("silu", "gelu_tanh"),
    ungated=False,
    routing=only(*_ROUTERS),
    rules=(multiples(32),),
    runtime_failures=_STOPS,
)
_INT8_SPLIT = replace(
    _INT8,
    runtime_failures=(),
    activations=only("silu", "swigluoai", "gelu", "gelu_tanh"),
    parallel=ParallelSupport(ep=False),
)
CPU_INT8 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(
        ExpertsClass(
            "ZenCPUExpertsInt8",
            replace(_INT8_SPLIT, arch=(_ZEN,), needs=(PackageNeed("zentorch"),), rules=()),
        ),
        ExpertsClass(
            "PowerCPUExpertsInt8",
            replace(_INT8_SPLIT, arch=(_POWER,), dtypes=only("bf16", "fp32"), rules=(multiples(16, 16),)),
        ),
        ExpertsClass("ArmCPUExpertsInt8", replace(_INT8_SPLIT, arch=(_ARM,), rules=(multiples(32, 32),))),
        ExpertsClass("CPUExpertsInt8", _INT8),
    ),
    forms=(WeightForm("cpu-int8"),),
)

CPU_W4A8 = Backend(
    name="cpu",
    engine_name="CPU_INT4",
    variants=(
        ExpertsClass(
            "CPUExpertsInt4",
            Capability(
                arch=(_ARM,),
                formats=(FormatSupport(frozenset({"int4 group", "int4 group 32"})),),
                activations=only("silu", "swigluoai", "swiglustep"),
                ungated=False,
                routing=only(*_ROUTERS),
                parallel=ParallelSupport(ep=False),
                codes={"device": "other"},
            ),
            monolithic=True,
        ),
    ),
    forms=(WeightForm("kleidiai-int4"),),
)


def _grouped_gemm(output: int, reduction: int, zen: bool = False) -> BackendRule:
    """Tiles of the grouped GEMM; the intermediate size is padded to them, except for gpt-oss rows."""

    def holds(ask: SupportQuery) -> bool:
        if zen and _ZEN.fits(ask.device) and ask.packages.has("zentorch"):
            return True
        dims, tile = ask.problem.dims, math.lcm(output, reduction)
        return dims.hidden % tile == 0 and (ask.activation != "swigluoai" or dims.intermediate % tile == 0)

    tile = math.lcm(output, reduction)
    return BackendRule("sizes", "shape", "shape", holds, _sizes, f"hidden and gpt-oss intermediate of {tile}")


_BF16 = Capability(
    arch=(Arch("cpu"),),
    formats=(FormatSupport(frozenset({"bf16"})),),
    activations=only("silu", "swigluoai", "gelu", "gelu_tanh"),
    ungated=False,
)
CPU_BF16 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(
        ExpertsClass(
            "X86CPUUnquantizedExperts",
            replace(_BF16, arch=(X86_AMX,), dtypes=only("bf16"), rules=(_grouped_gemm(32, 32),)),
        ),
        ExpertsClass(
            "ArmCPUUnquantizedExperts",
            replace(_BF16, arch=(_ARM,), dtypes=only("bf16"), rules=(_grouped_gemm(32, 4),)),
        ),
        ExpertsClass(
            "PowerCPUUnquantizedExperts",
            replace(_BF16, arch=(_POWER,), dtypes=only("bf16"), rules=(_grouped_gemm(16, 2),)),
        ),
        ExpertsClass("CPUUnquantizedExperts", replace(_BF16, rules=(_grouped_gemm(32, 1, zen=True),))),
    ),
    forms=(
        WeightForm("cpu-bf16", where=(X86_AMX,), dtypes=only("bf16")),
        WeightForm("cpu-bf16-neon", where=(_ARM,), dtypes=only("bf16")),
        WeightForm("cpu-bf16-vsx", where=(_POWER,), dtypes=only("bf16")),
        WeightForm("cpu-bf16-vec"),
    ),
    note="Kernels of one architecture come before the portable ones.",
)

_FP8 = Capability(
    arch=(X86_AMX,),
    formats=(FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),),
    activations=only("silu", "gelu", "gelu_tanh"),
    ungated=False,
    routing=only(*_ROUTERS, "DeepSeekV3", "DeepseekV4"),
    runtime_failures=_STOPS,
)
CPU_FP8 = Backend(
    name="cpu",
    engine_name="CPU",
    variants=(ExpertsClass("CPUExpertsFp8", _FP8),),
    forms=(WeightForm("cpu-amx-fp8"),),
)
CPU_W8A8 = Backend(
    name="cpu_w8a8",
    engine_name="CPU_W8A8",
    variants=(
        ExpertsClass(
            "CPUExpertsFp8W8A8",
            replace(
                _FP8,
                arch=(Arch("cpu", features=frozenset({"amx-fp8"})),),
                activations=only("silu", "gelu_tanh"),
            ),
        ),
    ),
    forms=(WeightForm("cpu-amx-fp8-w8a8"),),
    note="First, as it alone keeps FP8 activations; without AMX-FP8 the next one takes 16-bit ones.",
)


def _whole_words(ask: SupportQuery) -> bool:
    group = ask.problem.scheme.weight.group
    return group > 0 and group % 4 == 0


ZEN_INT4 = Backend(
    name="zen_cpu",
    engine_name="ZEN_CPU",
    variants=(
        ExpertsClass(
            "ZentorchExpertsInt4",
            Capability(
                arch=(_ZEN,),
                needs=(PackageNeed("zentorch"),),
                switches=(EnvironmentSwitch(VARIABLES["VLLM_CPU_INT4_W4A8"], code="other"),),
                formats=(FormatSupport(frozenset({"int4 group", "int4 group 32"})),),
                activations=only("silu", "gelu", "gelu_tanh", "swigluoai"),
                ungated=False,
                routing=only(*_ROUTERS, "Custom"),
                parallel=ParallelSupport(ep=False),
                checkpoints=but("moe_wna16", "quark_int4"),
                act_order=False,
                zero_points=False,
                dtypes=only("bf16"),
                rules=(
                    BackendRule(
                        question="scale groups",
                        group="shape",
                        code="other",
                        holds=_whole_words,
                        wanted=lambda ask: str(ask.problem.scheme.weight),
                        offered="groups of a multiple of 4",
                    ),
                    BackendRule(
                        question="experts per token",
                        group="shape",
                        code="other",
                        holds=lambda ask: ask.problem.top_k >= 2,
                        wanted=lambda ask: str(ask.problem.top_k),
                        offered="2 or more",
                    ),
                ),
            ),
            monolithic=True,
        ),
    ),
    forms=(WeightForm("zentorch-int4"),),
)
