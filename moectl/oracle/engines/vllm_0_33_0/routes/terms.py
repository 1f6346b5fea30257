"""vLLM's names for a model's properties, and what its methods refuse."""

from __future__ import annotations

from dataclasses import replace

from .....environment import Device
from .....problem.moe_problem import Dims, MoEProblem
from .....problem.schemes import FULL
from ....backend import SupportQuery
from ....decision import Candidate
from ....route import Condition, LateFailure
from ..backends.marlin import BATCHED_MARLIN, MARLIN, shape_fits

_MARLIN = (MARLIN.engine_name, BATCHED_MARLIN.engine_name)


def dtype(problem: MoEProblem, device: Device) -> str:
    """The dtype that a model runs in: BF16 models run in FP16 on GPUs without BF16 arithmetic."""
    old = device.platform == "cuda" and device.capability < 80
    return "fp16" if old and problem.dtype == "bf16" else problem.dtype


def activation(problem: MoEProblem) -> str:
    """vLLM's name; gpt-oss' function over concatenated rows has a separate one."""
    name = problem.activation.name
    if name == "swigluoai" and problem.rows == "concatenated":
        name = "swigluoai_uninterleave"
    return name if problem.activation.gated else f"{name}_no_mul"


_ROUTING = {
    # (scoring, correction bias, renormalize)
    ("softmax", False, True): "RenormalizeNaive",
    ("softmax", False, False): "Default",
    ("sigmoid", False, True): "SigmoidRenorm",
    ("sigmoid", False, False): "Sigmoid",
    ("sigmoid", True, True): "MiniMax2",
    ("sqrtsoftplus", False, True): "DeepseekV4",
    ("sqrtsoftplus", True, True): "DeepseekV4",
}


def routing(problem: MoEProblem) -> str:
    """vLLM's name of the routing method; models with expert groups use DeepSeekV3."""
    routing = problem.routing
    if routing.weight_on_input and problem.top_k == 1:
        return "Llama4"
    if routing.scoring == "sparsemixer" or routing.expert_scale:
        return "Custom"
    name = _ROUTING.get((routing.scoring, routing.correction_bias, routing.renormalize), "Unspecified")
    return "DeepSeekV3" if name == "MiniMax2" and routing.groups else name


def refuses(name: str, says: str, kind: str) -> Condition:
    """A refusal of every problem of a route: checkpoints that vLLM does not load."""
    return Condition(name, lambda ask: True, lambda ask: says, kind)


def _group_order(ask: SupportQuery) -> bool:
    return ask.problem.act_order == "group"


REFUSES_ACT_ORDER = Condition(
    "activation order",
    _group_order,
    lambda ask: (
        f"{ask.problem.storage} checkpoints with activation order by group (g_idx) are no longer supported; "
        "use one quantized without it, or with static groups"
    ),
)


GPTQ_ZERO_POINTS = Condition(
    "zero points",
    lambda ask: ask.problem.storage == "gptq" and ask.problem.scheme.weight.zero_point,
    lambda ask: "GPTQ checkpoints with zero points (sym false) are not supported; use a symmetric one",
)
AWQ_HAS_4_BITS = Condition(
    "bits",
    lambda ask: ask.problem.storage == "awq" and ask.problem.scheme.weight.bits != 4,
    lambda ask: f"AWQ checkpoints must have 4-bit weights, these are {ask.problem.scheme.weight}",
)


def _no_awq_kernels(ask: SupportQuery) -> bool:
    old = ask.device.platform == "cuda" and ask.device.capability < 75
    return ask.problem.storage == "awq" and (old or ask.device.platform in ("cpu", "xpu"))


def _per_channel(ask: SupportQuery, chosen: Candidate | None) -> bool:
    marlin = chosen is not None and chosen.backend.engine_name in _MARLIN
    return ask.problem.scheme.weight.group == FULL and not marlin


def _final(ask: SupportQuery, chosen: Candidate | None) -> Dims:
    return chosen.dims if chosen else ask.problem.dims


def _straddles(ask: SupportQuery, chosen: Candidate | None) -> bool:
    weight, dims = ask.problem.scheme.weight, _final(ask, chosen)
    sizes = (dims.padded_hidden, dims.padded_intermediate)
    if weight.group != FULL and any(size % weight.group for size in sizes):
        return True
    # Zero points are packed: each rank needs whole 32-bit words.
    words = 32 // weight.bits
    return weight.zero_point and any(size % words for size in (sizes[0], 2 * sizes[1]))


def _halved_below_32(ask: SupportQuery, chosen: Candidate | None) -> bool:
    group, dims = ask.problem.scheme.weight.group, _final(ask, chosen)
    if group == FULL:
        return False
    while dims.padded_intermediate % group or dims.padded_hidden % group:
        group //= 2
        if group < 32:
            return True
    return False


def _sizes(ask: SupportQuery, chosen: Candidate | None) -> str:
    dims, weight = _final(ask, chosen), ask.problem.scheme.weight
    return f"hidden {dims.padded_hidden}, intermediate {dims.padded_intermediate} per rank, {weight}"


ROUTES_AS_DEEPSEEK_V4 = Condition(
    "routes as DeepSeek-V4",
    lambda ask: ask.routing == "DeepseekV4",
    lambda ask: f"experts are routed as {ask.routing}",
)
AWQ_NEEDS_TURING = Condition(
    "AWQ needs a GPU",
    _no_awq_kernels,
    lambda ask: f"AWQ on the MoeWNA16 path needs sm75 or newer; this device is {ask.device.arch}",
)
MARLIN_REFUSES = Condition(
    "Marlin does not support the sizes",
    lambda ask: not shape_fits(replace(ask, pads_tiles=True)),
    lambda ask: f"Marlin does not support the sizes of {ask.problem.dims}",
)
CHANNELS_WITH_MARLIN_ONLY = LateFailure(
    "scales per channel",
    _per_channel,
    lambda ask, chosen: (
        "the method supports per-channel scales with Marlin only and fails on "
        f"{chosen.variant.experts if chosen else 'no backend'}"
    ),
    kind="AssertionError",
)
WHOLE_GROUPS = LateFailure(
    "scale groups",
    _straddles,
    lambda ask, chosen: f"the TP shard is not a multiple of the quantization group ({_sizes(ask, chosen)})",
    kind="ValueError",
    sized=True,
)
COUNTS_CHANNELS_AS_GROUPS = LateFailure(
    "scales per channel",
    lambda ask, chosen: ask.problem.scheme.weight.group == FULL,
    lambda ask, chosen: "the method creates scales for groups only, and these are per channel",
    kind="RuntimeError",
    sized=True,
)
HALVES_GROUPS = LateFailure(
    "scale groups",
    _halved_below_32,
    lambda ask, chosen: f"no quantization group of 32 or more divides the sizes ({_sizes(ask, chosen)})",
    kind="AssertionError",
    sized=True,
)
