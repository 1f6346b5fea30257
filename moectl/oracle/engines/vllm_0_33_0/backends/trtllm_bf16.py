"""FlashInfer's TRT-LLM kernels for unquantized weights on SM10x, without and with adapters."""

from dataclasses import replace

from .....problem.moe_problem import Align
from ....backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    ParallelSupport,
    SupportQuery,
    WeightForm,
    but,
    only,
)
from ....gpu_archs import SM10X
from .flashinfer import TRTLLM_SYMBOLS, flashinfer_needs
from .trtllm_fp8 import ROUTED_EXPERTS

_TRTLLM = Capability(
    arch=(SM10X,),
    needs=flashinfer_needs(TRTLLM_SYMBOLS),
    formats=(FormatSupport(frozenset({"bf16"})),),
    activations=only("silu", "relu2_no_mul"),
    rules=(ROUTED_EXPERTS,),
)
_GATHERED = ParallelSupport(exchange=only("none", "allgather_reducescatter"), eplb=False)
_FORMS = (WeightForm("trtllm-bf16", Align(1, 128)),)

TRTLLM_PLAIN = Backend(
    name="flashinfer_trtllm",
    engine_name="FlashInfer TRTLLM",
    variants=(
        ExpertsClass(
            "TrtLlmBf16ExpertsMonolithic",
            replace(
                _TRTLLM,
                routing=only(
                    "DeepSeekV3",
                    "Llama4",
                    "Renormalize",
                    "RenormalizeNaive",
                    "SigmoidRenorm",
                    "MiniMax2",
                    "Sigmoid",
                ),
                parallel=_GATHERED,
            ),
            monolithic=True,
        ),
        ExpertsClass(
            # Without an all2all exchange that routes tokens itself, only the monolithic class is used.
            "TrtLlmBf16ExpertsModular",
            replace(
                _TRTLLM,
                parallel=ParallelSupport(
                    exchange=but("none", "allgather_reducescatter", "deepep_high_throughput"), eplb=False
                ),
            ),
        ),
    ),
    forms=_FORMS,
)


def _whole_tiles(ask: SupportQuery) -> bool:
    return ask.problem.dims.intermediate % 128 == 0


TRTLLM_LORA = Backend(
    name="flashinfer_trtllm",
    engine_name="FlashInfer TRTLLM",
    variants=(
        ExpertsClass(
            "TrtLlmBf16LoRAExperts",
            replace(
                _TRTLLM,
                activations=only("silu"),
                ungated=False,
                routing=only("DeepSeekV3", "Llama4", "Renormalize", "RenormalizeNaive"),
                parallel=_GATHERED,
                lora=True,
                rules=(
                    BackendRule(
                        question="intermediate size",
                        group="shape",
                        code="shape",
                        holds=_whole_tiles,
                        wanted=lambda ask: f"{ask.problem.dims.intermediate} per rank",
                        offered="a multiple of 128, which is not padded here",
                    ),
                ),
            ),
        ),
    ),
    forms=_FORMS,
    note="Besides Triton's, the only kernels that apply LoRA adapters between the two GEMMs.",
)
