"""FlashInfer's FP8 kernels: TRT-LLM generated ones on SM10x, and CUTLASS."""

from dataclasses import replace

from ..backend import SM10X, Ask, Backend, Capability, Form, Offer, Rule, Spread, Variant, only
from .flashinfer import CUTLASS_CAPABILITY, TRTLLM_SYMBOLS, flashinfer_needs
from .flashinfer_bf16 import ROUTED_EXPERTS

_BLOCK, _TENSOR = "fp8 block 128x128", "fp8 per tensor"
_BLOCK_OFFER = Offer(frozenset({_BLOCK}), only("fp8 group 128 dynamic"))
_BLOCKS = frozenset({_BLOCK, "mxfp8 group 32"})

_SEQUENCE_EXCHANGES = frozenset(
    {
        "allgather_reducescatter",
        "deepep_high_throughput",
        "deepep_low_latency",
        "deepep_v2",
        "flashinfer_nvlink_one_sided",
        "mori_high_throughput",
        "mori_low_latency",
        "nixl_ep",
    }
)


def _sequence_parallel(ask: Ask) -> bool:
    """True when the engine splits tokens over tensor-parallel ranks before the experts."""
    parallel = ask.problem.parallel
    return parallel.exchanges and parallel.tp > 1 and parallel.all2all in _SEQUENCE_EXCHANGES


def _clamps(ask: Ask) -> bool:
    """True when the kernels apply the activation's parameters, or there are none."""
    activation = ask.problem.activation
    bare = activation.alpha is None and activation.limit is None
    applied = ask.weight in _BLOCKS and ask.activation in ("silu", "swigluoai_uninterleave")
    return bare or applied


PARAMETERS = Rule(
    question="activation parameters",
    group="scheme",
    vllm_code="other",
    holds=_clamps,
    wanted=lambda ask: f"alpha {ask.problem.activation.alpha}, limit {ask.problem.activation.limit}",
    offered="only for weights scaled by block, with silu or swigluoai_uninterleave",
)
_SEQUENCE = Rule(
    question="sequence parallel",
    group="parallel",
    vllm_code="parallel",
    holds=lambda ask: not _sequence_parallel(ask),
    wanted=lambda ask: str(_sequence_parallel(ask)).lower(),
    offered="false",
)
_LLAMA4 = Rule(
    question="routing method for blocks",
    group="scheme",
    vllm_code="routing_method",
    holds=lambda ask: ask.routing != "Llama4" or ask.weight == _TENSOR,
    wanted=lambda ask: ask.routing,
    offered="Llama4 with scales per tensor only",
)

_TRTLLM = Capability(
    arch=(SM10X,),
    needs=flashinfer_needs(TRTLLM_SYMBOLS),
    offers=(_BLOCK_OFFER,),
    activations=only("silu", "swigluoai_uninterleave", "relu2_no_mul"),
    rules=(PARAMETERS, ROUTED_EXPERTS),
)

TRTLLM_FP8 = Backend(
    name="flashinfer_trtllm",
    engine_name="FLASHINFER_TRTLLM",
    variants=(
        Variant(
            "TrtLlmFp8ExpertsMonolithic",
            replace(
                _TRTLLM,
                offers=(_BLOCK_OFFER, Offer(frozenset({_TENSOR}), only("fp8 per tensor static"))),
                routing=only(
                    "DeepSeekV3",
                    "Llama4",
                    "Renormalize",
                    "RenormalizeNaive",
                    "SigmoidRenorm",
                    "Sigmoid",
                    "MiniMax2",
                ),
                logits=only("bf16", "fp32"),
                spread=Spread(exchange=only("none", "allgather_reducescatter"), eplb=False),
                rules=(*_TRTLLM.rules, _SEQUENCE, _LLAMA4),
            ),
            monolithic=True,
        ),
        Variant(
            "TrtLlmFp8ExpertsModular",
            replace(
                _TRTLLM,
                spread=Spread(
                    exchange=only(
                        "none",
                        "allgather_reducescatter",
                        "deepep_v2",
                        "flashinfer_nvlink_one_sided",
                        "flashinfer_nvlink_two_sided",
                        "flashinfer_all2allv",
                    ),
                    eplb=False,
                ),
            ),
        ),
    ),
    # Sizes are padded when the weights are repacked.
    forms=(Form("trtllm-fp8-block", scaled=only(_BLOCK)), Form("trtllm-fp8-tensor")),
)
CUTLASS_FP8 = Backend(
    name="flashinfer_cutlass",
    engine_name="FLASHINFER_CUTLASS",
    variants=(Variant("FlashInferExperts", CUTLASS_CAPABILITY),),
    forms=(Form("cutlass-fp8-block", scaled=only(_BLOCK)), Form("cutlass-fp8-tensor")),
)
