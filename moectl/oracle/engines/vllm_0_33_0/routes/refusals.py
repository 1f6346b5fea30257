"""What vLLM refuses with every method, before it creates any layer."""

from .....problem.model_shape import stated_stages
from ....backend import SupportQuery, is_on
from ....decision import DEPLOYMENT
from ....route import Condition
from ..backends.aiter import CDNA3
from ..variables import PARTITION, VARIABLES


def _moonep(ask: SupportQuery) -> bool:
    return ask.problem.parallel.all2all == "moonep"


def _quantized(ask: SupportQuery) -> bool:
    return ask.problem.scheme.weight.name != "bf16"


_A4W4 = "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"
_A4W4_MODELS = ("deepseek_v41", "deepseek_v41_text")
_SHARED = "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"


def _mori(ask: SupportQuery) -> bool:
    return ask.exchange.startswith("mori")


def _fused_aiter(ask: SupportQuery) -> bool:
    """True when vLLM runs the experts with AITER, which it does only for gated ones."""
    if not ask.problem.activation.gated:
        return False
    switched = is_on(ask.packages, VARIABLES["VLLM_ROCM_USE_AITER"]) and is_on(
        ask.packages, VARIABLES["VLLM_ROCM_USE_AITER_MOE"]
    )
    served = any(arch.fits(ask.device) for arch in CDNA3)
    return served and ask.packages.has("aiter") and switched


NO_PIPELINE = frozenset(
    {
        "AliceAIForCausalLM",
        "AriaForConditionalGeneration",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    }
)
"""Architectures with experts whose classes do not implement `SupportsPP`."""
VOCABULARY_STEP = 64
"""vLLM pads the embedding to a multiple of this before it shards it."""


def _padded_vocabulary(ask: SupportQuery) -> int:
    return -(-ask.model.vocabulary // VOCABULARY_STEP) * VOCABULARY_STEP


def _attention(ask: SupportQuery) -> str:
    """Why attention cannot be sharded over the TP ranks: query heads first, then KV heads; or empty."""
    heads, kv_heads, tp = ask.model.attention_heads, ask.model.kv_heads, ask.problem.parallel.tp
    if heads % tp:
        return f"the number of attention heads ({heads}) must be divisible by the tensor parallel size ({tp})"
    if kv_heads and (tp % kv_heads if tp >= kv_heads else kv_heads % tp):
        return f"{kv_heads} KV heads can be neither sharded nor replicated evenly over {tp} TP ranks"
    return ""


def _partition(ask: SupportQuery) -> str:
    """Why the stated layers of the pipeline stages are refused, in vLLM's words; or empty."""
    text = ask.packages.env.get(PARTITION)
    if text is None:
        return ""
    stages, pp, layers = stated_stages(text), ask.problem.parallel.pp, ask.model.layers
    if stages is None:
        return f"{PARTITION}: invalid partition string: {text!r}"
    if len(stages) != pp:
        return f"{PARTITION}: len(partitions)={len(stages)} does not match pp_size={pp}"
    if layers and sum(stages) != layers:
        return f"{PARTITION}: sum(partitions)={sum(stages)} does not match num_hidden_layers={layers}"
    return ""


def _cut_blocks(ask: SupportQuery) -> str:
    """Why vLLM refuses to shard an FP8 matrix outside the experts (`validate_fp8_block_shape`); or empty.

    It makes an exception of merged projections, and shards nothing of the shared experts that run in
    sequence parallel or that AITER fuses with the routed ones.
    """
    parallel = ask.problem.parallel
    shares = ask.device.platform == "cuda" and not (parallel.ep and parallel.dp > 1)
    if parallel.tp == 1 or ask.device.platform not in ("cuda", "rocm"):
        return ""
    for matrix in ask.model.blocked:
        size = matrix.size // parallel.tp
        if size % matrix.block and (shares or not matrix.shared):
            what, edge = ("output_partition_size", "n") if matrix.rows else ("input_size_per_partition", "k")
            return (
                f"{matrix.module}: weight {what} = {size} is not divisible by weight quantization "
                f"block_{edge} = {matrix.block}"
            )
    return ""


DEPLOYMENTS = (
    Condition(DEPLOYMENT, lambda ask: bool(_attention(ask)), _attention),
    Condition(
        DEPLOYMENT,
        lambda ask: not _attention(ask) and _padded_vocabulary(ask) % ask.problem.parallel.tp > 0,
        lambda ask: (
            f"the vocabulary, padded to {_padded_vocabulary(ask)}, must be divisible by the tensor parallel "
            f"size ({ask.problem.parallel.tp})"
        ),
        kind="AssertionError",
    ),
    Condition(
        DEPLOYMENT,
        lambda ask: ask.problem.parallel.pp > 1 and ask.model.architecture in NO_PIPELINE,
        lambda ask: f"pipeline parallelism is not supported for {ask.model.architecture}",
        kind="NotImplementedError",
    ),
    Condition(
        DEPLOYMENT,
        lambda ask: ask.problem.parallel.eplb and not ask.problem.parallel.ep,
        lambda ask: "expert load balancing (EPLB) requires expert parallelism",
    ),
    Condition(
        DEPLOYMENT,
        lambda ask: ask.problem.parallel.eplb and ask.problem.parallel.ep and ask.problem.parallel.ranks == 1,
        lambda ask: "expert load balancing (EPLB) requires tensor or data parallelism",
    ),
    Condition(DEPLOYMENT, lambda ask: bool(_partition(ask)), _partition),
    Condition(DEPLOYMENT, lambda ask: not _partition(ask) and bool(_cut_blocks(ask)), _cut_blocks),
)
"""What vLLM checks of a deployment before the experts: `ParallelConfig`, then
`ModelConfig.verify_with_parallel_config`, then the shards of attention and embedding, then the stages
(`get_pp_indices`, which reads the variable without pipeline parallelism, too), then dense FP8 layers."""

REFUSALS = (
    *DEPLOYMENTS,
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and _quantized(ask),
        lambda ask: "MoonEP supports unquantized models only",
    ),
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and ask.dtype != "bf16",
        lambda ask: f"MoonEP supports only BF16; model runs in {ask.dtype}",
    ),
    Condition(
        "token exchange",
        lambda ask: _moonep(ask) and ask.problem.parallel.eplb,
        lambda ask: "MoonEP does not support expert load balancing (EPLB)",
    ),
    Condition(
        "token exchange",
        lambda ask: _mori(ask) and not _fused_aiter(ask),
        lambda ask: "MoRI needs AITER's fused experts, which are not installed or not enabled",
        kind="AssertionError",
    ),
    Condition(
        "token exchange",
        lambda ask: _mori(ask) and _fused_aiter(ask) and is_on(ask.packages, VARIABLES[_SHARED]),
        lambda ask: f"MoRI does not support shared experts fused by AITER; set {_SHARED}=0",
        kind="AssertionError",
    ),
    Condition(
        "switch",
        lambda ask: (
            _fused_aiter(ask)
            and is_on(ask.packages, VARIABLES[_A4W4])
            and ask.problem.model_type not in _A4W4_MODELS
        ),
        lambda ask: (
            f"{_A4W4} supports only models of type {' or '.join(_A4W4_MODELS)}; "
            f"this one is {ask.problem.model_type or 'of an unknown type'}: unset it"
        ),
    ),
    Condition(
        "expert balancing",
        lambda ask: ask.problem.parallel.eplb and ask.problem.experts % ask.problem.parallel.ep_size > 0,
        lambda ask: (
            f"{ask.problem.experts} experts are not divisible by {ask.problem.parallel.ep_size} ranks, "
            "which expert load balancing (EPLB) requires"
        ),
    ),
    Condition(
        "batch invariance",
        lambda ask: ask.invariant and ask.device.platform == "xpu" and _quantized(ask),
        lambda ask: "batch invariance on XPU supports unquantized models only",
    ),
    Condition(
        "gating",
        lambda ask: not ask.problem.activation.gated and ask.device.platform not in ("cuda", "rocm", "xpu"),
        lambda ask: f"non-gated experts are not supported on {ask.device.platform}",
        kind="NotImplementedError",
    ),
)
