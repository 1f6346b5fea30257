"""FlashInfer's TRT-LLM kernels for FP8 and MXFP8 weights on SM10x."""

from dataclasses import replace

from ....backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    ParallelSupport,
    SupportQuery,
    WeightForm,
    only,
)
from ....gpu_archs import SM10X
from .flashinfer import TRTLLM_SYMBOLS, flashinfer_needs

_ALONE_OR_GATHERED = ("none", "allgather_reducescatter")
_SWIGLU = ("silu", "swigluoai_uninterleave")
_BLOCKS = frozenset({"fp8 block 128x128", "mxfp8 group 32"})
MOST_EXPERTS = 2048

ROUTED_EXPERTS = BackendRule(
    question="number of experts",
    group="shape",
    code="other",
    holds=lambda ask: ask.problem.experts <= MOST_EXPERTS,
    wanted=lambda ask: str(ask.problem.experts),
    offered=f"at most {MOST_EXPERTS}",
)


def _clamp_fits(ask: SupportQuery) -> bool:
    """True when the kernel receives the activation's parameters: only with block scales and a gated SiLU."""
    return not ask.parametrized or (ask.weight in _BLOCKS and ask.activation in _SWIGLU)


CLAMP = BackendRule(
    question="activation parameters",
    group="scheme",
    code="other",
    holds=_clamp_fits,
    wanted=lambda ask: str(ask.problem.activation),
    offered="alpha, beta and limit with block scales and a gated SiLU only",
)


def _llama4_fits(ask: SupportQuery) -> bool:
    return ask.routing != "Llama4" or ask.weight not in _BLOCKS


_LLAMA4 = BackendRule(
    question="routing of Llama 4",
    group="scheme",
    code="routing_method",
    holds=_llama4_fits,
    wanted=lambda ask: f"{ask.routing} with {ask.weight}",
    offered="Llama4 with one scale per tensor only",
)

_MODULAR = Capability(
    arch=(SM10X,),
    needs=flashinfer_needs(TRTLLM_SYMBOLS),
    formats=(
        FormatSupport(frozenset({"fp8 block 128x128"}), only("fp8 group 128 dynamic")),
        FormatSupport(frozenset({"mxfp8 group 32"}), only("mxfp8")),
    ),
    activations=only(*_SWIGLU, "relu2_no_mul"),
    parallel=ParallelSupport(
        exchange=only(
            *_ALONE_OR_GATHERED,
            "deepep_v2",
            "flashinfer_nvlink_one_sided",
            "flashinfer_nvlink_two_sided",
            "flashinfer_all2allv",
        ),
        eplb=False,
    ),
    rules=(ROUTED_EXPERTS, CLAMP),
)
_MONOLITHIC = replace(
    _MODULAR,
    formats=(
        *(_MODULAR.formats or ()),
        FormatSupport(frozenset({"fp8 per tensor"}), only("fp8 per tensor static")),
    ),
    routing=only(
        "DeepSeekV3",
        "Renormalize",
        "RenormalizeNaive",
        "SigmoidRenorm",
        "Sigmoid",
        "MiniMax2",
        "Llama4",
    ),
    logits=only("bf16", "fp32"),
    parallel=ParallelSupport(exchange=only(*_ALONE_OR_GATHERED), eplb=False, sequence=False),
    rules=(ROUTED_EXPERTS, CLAMP, _LLAMA4),
)

TRTLLM_FP8 = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM",
    variants=(
        ExpertsClass("TrtLlmFp8ExpertsMonolithic", _MONOLITHIC, monolithic=True),
        ExpertsClass("TrtLlmFp8ExpertsModular", _MODULAR),
    ),
    # Weights are padded to the layout's tiles only when they are repacked.
    forms=(
        WeightForm("trtllm-mxfp8", weights=frozenset({"mxfp8"})),
        WeightForm("trtllm-fp8-block", scaled=only("fp8 block 128x128")),
        WeightForm("trtllm-fp8-tensor"),
    ),
)
