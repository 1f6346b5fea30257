"""Unquantized experts, in BF16 or FP16."""

from dataclasses import replace

from ....backend import ANY, Backend, SupportQuery, only
from ....gpu_archs import sm
from ....route import Assignment, Condition, EngineSubstitute, Order, OrderMove, Route
from ..backends import aiter, cpu, flashinfer, moonep, triton, trtllm_bf16, xpu
from .order import AITER_DEMANDED, CPU, OUT_OF_TREE, ROCM, TPU, XPU, without_aiter

_LAST_ON_HOPPER = "FlashInfer has the lowest priority on SM9x, where it is slower than Triton"
_LAST_WITH_DP = "FlashInfer's CUTLASS has the lowest priority with data parallelism, because Qwen3.5 crashed"
_PLUG_IN = "the platform's plug-in runs the layer; vLLM itself chooses no kernel"
_LAST_FOR_GPT_OSS = (
    "FlashInfer has the lowest priority for gpt-oss, whose activation it treats as plain SwiGLU"
)


def _data_parallel(ask: SupportQuery) -> bool:
    return ask.problem.parallel.dp > 1


def _gpt_oss(ask: SupportQuery) -> bool:
    return ask.activation == "swigluoai"


_NAMES: dict[str, tuple[Backend, ...]] = {
    "triton": (triton.TRITON_PLAIN,),
    "batched_triton": (triton.BATCHED_TRITON,),
    "flashinfer_trtllm": (trtllm_bf16.TRTLLM_PLAIN,),
    "flashinfer_cutlass": (flashinfer.CUTLASS_PLAIN,),
    "aiter": (aiter.AITER_PLAIN,),
}

_BF16 = Route(
    name="unquantized experts",
    method="UnquantizedFusedMoEMethod",
    storages=ANY,
    weights=frozenset({"bf16"}),
    orders=(
        Order((aiter.AITER_PLAIN, triton.TRITON_PLAIN, triton.BATCHED_TRITON), ROCM),
        Order((xpu.XPU_PLAIN, triton.TRITON_PLAIN), XPU),
        Order((cpu.CPU_BF16,), CPU),
        Order(
            (
                trtllm_bf16.TRTLLM_PLAIN,
                flashinfer.CUTLASS_PLAIN,
                triton.TRITON_PLAIN,
                triton.BATCHED_TRITON,
            )
        ),
    ),
    moves=(
        OrderMove(trtllm_bf16.TRTLLM_PLAIN, (sm(90, 99),), last=True, why=_LAST_ON_HOPPER),
        OrderMove(flashinfer.CUTLASS_PLAIN, (sm(90, 99),), last=True, why=_LAST_ON_HOPPER),
        OrderMove(flashinfer.CUTLASS_PLAIN, last=True, when=_data_parallel, why=_LAST_WITH_DP),
        OrderMove(trtllm_bf16.TRTLLM_PLAIN, last=True, when=_gpt_oss, why=_LAST_FOR_GPT_OSS),
        OrderMove(flashinfer.CUTLASS_PLAIN, last=True, when=_gpt_oss, why=_LAST_FOR_GPT_OSS),
    ),
    exclusions=(without_aiter(aiter.AITER_PLAIN),),
    switch_requests=(replace(AITER_DEMANDED, falls_back=True),),
    names=_NAMES,
    batched_twins=((triton.TRITON_PLAIN, triton.BATCHED_TRITON),),
    # These support only quantized weights; layers excluded from quantization must not fail for them.
    ignored=only("marlin", "humming"),
    batched_requests=frozenset({"batched_triton"}),
    rounds=True,
    covers=ANY,
    substitutes=(
        EngineSubstitute("TPU", TPU, _PLUG_IN, at_once=True),
        EngineSubstitute("OOT", OUT_OF_TREE, _PLUG_IN, at_once=True),
    ),
)
_ADAPTERS = replace(
    _BF16,
    name="unquantized experts with adapters",
    when=Condition(
        "adapters on experts",
        lambda ask: ask.problem.lora and ask.device.platform not in ("tpu", "out-of-tree"),
        lambda ask: "LoRA adapters are applied to the experts",
    ),
    orders=(),
    moves=(),
    exclusions=(),
    switch_requests=(),
    names={},
    assigned=(
        Assignment(
            trtllm_bf16.TRTLLM_LORA,
            trtllm_bf16.TRTLLM_LORA.variants[0],
            trtllm_bf16.TRTLLM_LORA.engine_name,
            asks=True,
        ),
        Assignment(triton.TRITON_PLAIN, triton.TRITON_PLAIN.variants[0], triton.TRITON_PLAIN.engine_name),
    ),
)
_MOONEP = replace(
    _BF16,
    name="unquantized experts over MoonEP",
    when=Condition(
        "MoonEP exchange",
        lambda ask: ask.exchange == "moonep",
        lambda ask: "tokens are exchanged by MoonEP, which needs its own experts class",
    ),
    orders=(Order((moonep.MOONEP,)),),
    moves=(),
    exclusions=(),
    switch_requests=(),
    names={},
    ignored=ANY,
    fails="ValueError",
)

ROUTES = (_ADAPTERS, _MOONEP, _BF16)
