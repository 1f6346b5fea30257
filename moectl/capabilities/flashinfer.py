"""What FlashInfer's fused MoE functions support, in FlashInfer's terms. Imports neither it nor torch.

From FlashInfer 0.7.2: its Python signatures and documentation, and the checks of its launchers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..problem.moe_problem import Activation, MoEProblem, Routing
from ..problem.padding import size_rule
from ..problem.schemes import (
    A16,
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR_STATIC,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    ActFormat,
    WeightFormat,
    int_format,
)

Number = Callable[[Activation], float | None]


def _nothing(activation: Activation) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class FlashInferActivation:
    """An activation function: its member of ``ActivationType``, and its parameters.

    ``Swiglu`` is ``g * sigmoid(alpha * g) * (u + beta)``, with the gate clamped from above and up clamped on
    both sides at `limit`; alpha defaults to 1 and beta to 0. `needed` lists parameters that have to be given
    because FlashInfer's defaults differ.
    """

    member: str
    alpha: Number = _nothing
    beta: Number = _nothing
    limit: Number = _nothing
    needed: tuple[str, ...] = ()

    def numbers(self, activation: Activation) -> dict[str, float | None]:
        """``alpha``, ``beta`` and ``limit`` for `activation`; None if it has no such parameter."""
        return {name: getattr(self, name)(activation) for name in ("alpha", "beta", "limit")}


GATED: Mapping[str, FlashInferActivation] = {
    "silu": FlashInferActivation("Swiglu", limit=lambda act: act.limit),
    "swigluoai": FlashInferActivation(
        "Swiglu",
        alpha=lambda act: 1.0 if act.alpha is None else act.alpha,
        beta=lambda act: 1.0,
        limit=lambda act: act.limit,
    ),
    "swiglustep": FlashInferActivation("SwigluStep", limit=lambda act: act.limit, needed=("limit",)),
    "situ": FlashInferActivation(
        "Situ", alpha=lambda act: act.beta, beta=lambda act: act.linear_beta, needed=("alpha", "beta")
    ),
    "gelu": FlashInferActivation("Geglu"),
    "gelu_tanh": FlashInferActivation("GegluTanh"),
}
"""Functions for gated experts by `Activation.name`."""

UNGATED: Mapping[str, FlashInferActivation] = {
    "relu2": FlashInferActivation("Relu2"),
    "silu": FlashInferActivation("Silu"),
    "gelu": FlashInferActivation("Gelu"),
}
"""Functions for experts without a gate by `Activation.name`."""


def function_of(activation: Activation) -> FlashInferActivation | None:
    """FlashInfer's function for `activation`, or None."""
    return (GATED if activation.gated else UNGATED).get(activation.name)


@dataclass(frozen=True, slots=True)
class FlashInferRouting:
    """A routing method fused in the kernels.

    Attributes:
        member: the member of ``RoutingMethodType``.
        normalizes: value of ``norm_topk_prob``.
        groups: supports groups of experts.
        scales: supports a factor on the weights.
        most: maximum top-k; 0 for no specific bound.
    """

    member: str
    normalizes: bool = True
    groups: bool = False
    scales: bool = False
    most: int = 0


_DEEPSEEK = FlashInferRouting("DeepSeekV3", groups=True, scales=True, most=22)

METHODS: Mapping[tuple[str, bool, bool, bool], FlashInferRouting] = {
    ("softmax", False, False, False): FlashInferRouting("Default"),
    ("softmax", False, True, False): FlashInferRouting("RenormalizeNaive"),
    ("softmax", True, True, False): FlashInferRouting("Renormalize"),
    ("softmax", True, False, False): FlashInferRouting("Renormalize"),
    ("sigmoid", False, True, True): _DEEPSEEK,
    ("sigmoid", False, False, True): FlashInferRouting(
        "DeepSeekV3", False, groups=True, scales=True, most=22
    ),
    ("sigmoid", False, True, False): FlashInferRouting("SigmoidRenorm"),
    ("sigmoid", False, False, False): FlashInferRouting("Sigmoid", normalizes=False),
    ("sigmoid", True, False, False): FlashInferRouting("TopKSigmoid", normalizes=False),
}
"""Methods by (scoring, after top-k, renormalized, with a correction bias)."""

LLAMA4 = FlashInferRouting("Llama4", normalizes=False, most=1)
"""Top-1, then a sigmoid whose value multiplies the expert's input."""

MOST_EXPERTS = 2048
"""Maximum number of experts in a layer."""

MOST_GROUPS_CHOSEN, MOST_IN_A_GROUP = 4, 32
"""Limits of group-limited routing."""


def method_of(routing: Routing) -> FlashInferRouting | None:
    """The fused routing method for `routing`; None if it is not supported."""
    if routing.hashed or routing.expert_scale:
        return None
    if routing.weight_on_input:
        return LLAMA4 if (routing.scoring, routing.correction_bias) == ("sigmoid", False) else None
    key = (routing.scoring, routing.after_topk, routing.renormalize, routing.correction_bias)
    return METHODS.get(key)


def unrouted(problem: MoEProblem) -> str:
    """Why no kernel can fuse the routing of `problem`, as a clause; empty if one can."""
    routing = problem.routing
    method = method_of(routing)
    if method is None:
        return f"it has no routing method for {routing}"
    grouped = bool(routing.groups and routing.groups > 1)
    if grouped and not method.groups:
        return f"its {method.member} routing knows no groups of experts"
    if routing.scale != 1.0 and not method.scales:
        return f"its {method.member} routing has no factor on the weights, the layer's is {routing.scale:g}"
    if method.most and problem.top_k > method.most:
        return f"its {method.member} routing chooses at most {method.most} experts, the layer {problem.top_k}"
    if grouped:
        assert routing.groups is not None
        if (routing.topk_groups or 0) > MOST_GROUPS_CHOSEN or problem.experts % 4:
            return f"it chooses at most {MOST_GROUPS_CHOSEN} groups, among a multiple of 4 experts"
        if problem.experts // routing.groups > MOST_IN_A_GROUP:
            return f"it takes at most {MOST_IN_A_GROUP} experts in a group"
    return ""


@dataclass(frozen=True, slots=True)
class FlashInferKernel:
    """A supported pair of number formats.

    Attributes:
        weight, act: the formats.
        layout: layout of the weights.
        gated, ungated: supported activation functions.
        numbers: alpha, beta and limit of SwiGLU are passed to the kernel.
        bias: supports expert biases.
        routed: function of ``flashinfer.fused_moe`` for given expert ids and weights.
        logits: function that takes router logits; empty if there is none.
        weight_on_input: the kernel can multiply tokens by the router's weight.
        dtypes: supported model dtypes.
    """

    weight: WeightFormat
    act: ActFormat
    layout: str
    gated: frozenset[str]
    routed: str
    logits: str = ""
    ungated: frozenset[str] = frozenset()
    numbers: bool = True
    bias: bool = False
    weight_on_input: bool = False
    dtypes: frozenset[str] = frozenset(("bf16",))

    def supports(self, weight: WeightFormat, act: ActFormat) -> bool:
        """True for its weight format and activation format."""
        same = (act.block, act.dynamic) == (self.act.block, self.act.dynamic)
        return self.weight == weight and self.act.name == act.name and (same or act.name not in _IN_BLOCKS)

    @property
    def names(self) -> str:
        """Both formats as a phrase."""
        return f"{self.weight} x {self.act}"


_IN_BLOCKS = frozenset(("fp8", "int8"))
"""Activation formats for which blocks and static scales are also compared."""


_SILU = frozenset(("silu",))
_SWIGLU = frozenset(("silu", "swigluoai"))
_STEP = _SWIGLU | {"swiglustep"}
_RELU2 = frozenset(("relu2",))

_FP4, _FP8 = "trtllm_fp4_block_scale_", "trtllm_fp8_block_scale_"
_TENSOR, _BF16, _INT4 = "trtllm_fp8_per_tensor_scale_", "trtllm_bf16_", "trtllm_mxint4_block_scale_"


def _trtllm(
    weight: WeightFormat, act: ActFormat, layout: str, function: str, gated: frozenset[str], **more: object
) -> FlashInferKernel:
    return FlashInferKernel(weight, act, layout, gated, f"{function}routed_moe", f"{function}moe", **more)  # type: ignore[arg-type]


TRTLLM: tuple[FlashInferKernel, ...] = (
    _trtllm(MXFP4, A16, "trtllm-mxfp4", _FP4, _SWIGLU | {"situ"}, bias=True),
    _trtllm(MXFP4, MXFP8_ACT, "trtllm-mxfp4", _FP4, _SWIGLU | {"situ"}, bias=True),
    _trtllm(NVFP4, NVFP4_ACT, "trtllm-nvfp4", _FP4, _STEP | {"situ"}, ungated=_RELU2),
    _trtllm(int_format(4, 32), A16, "trtllm-mxint4", _INT4, _SWIGLU),
    _trtllm(FP8_BLOCK, FP8_ACT_GROUP_128, "trtllm-fp8-block", _FP8, _SWIGLU, ungated=_RELU2),
    _trtllm(MXFP8, MXFP8_ACT, "trtllm-mxfp8", _FP8, _STEP, ungated=_RELU2),
    _trtllm(
        FP8_TENSOR,
        FP8_ACT_TENSOR_STATIC,
        "trtllm-fp8-tensor",
        _TENSOR,
        _SILU | {"swiglustep"},
        ungated=_RELU2,
        numbers=False,
        weight_on_input=True,
    ),
    _trtllm(BF16, A16, "trtllm-bf16", _BF16, _STEP, ungated=_RELU2),
)
"""TRT-LLM's generated kernels for SM100 and SM103."""

_CUTLASS_GATED = frozenset(GATED)
_CUTLASS_UNGATED = frozenset(UNGATED)

CUTLASS: tuple[FlashInferKernel, ...] = (
    FlashInferKernel(
        MXFP4,
        A16,
        "cutlass-sm90",
        _CUTLASS_GATED,
        "cutlass_fused_moe",
        ungated=_CUTLASS_UNGATED,
        bias=True,
    ),
    FlashInferKernel(
        BF16,
        A16,
        "cutlass-bf16",
        _CUTLASS_GATED,
        "cutlass_fused_moe",
        ungated=_CUTLASS_UNGATED,
        bias=True,
        dtypes=frozenset(("bf16", "fp16")),
    ),
    FlashInferKernel(
        FP8_BLOCK,
        FP8_ACT_GROUP_128,
        "cutlass-fp8-block",
        _SILU,
        "cutlass_fused_moe",
        numbers=False,
    ),
)
"""CUTLASS kernels for SM90. With FP8 blocks the kernel quantizes the tokens itself."""


def kernel_of(
    kernels: Iterable[FlashInferKernel], weight: WeightFormat, act: ActFormat
) -> FlashInferKernel | None:
    """The entry of `kernels` for a pair of formats, or None."""
    return next((kernel for kernel in kernels if kernel.supports(weight, act)), None)


def refusal(kernel: FlashInferKernel, problem: MoEProblem, *, logits: bool = False) -> str:
    """Why `kernel` does not support `problem`, whose formats it has, as a clause; empty if it does.

    With `logits`, the kernel has to do the routing, too.
    """
    reason = next((reason for check in CHECKS if (reason := check(kernel, problem))), "")
    return reason or (unrouted(problem) or unweighted_input(kernel, problem) if logits else "")


def unfit_activation(kernel: FlashInferKernel, problem: MoEProblem) -> str:
    """Why the layer's activation function is not supported, as a clause."""
    activation = problem.activation
    known = kernel.gated if activation.gated else kernel.ungated
    function = function_of(activation)
    if function is None or activation.name not in known:
        kind = "gated experts" if activation.gated else "experts without a gate"
        has = ", ".join(sorted(known)) or "nothing"
        return f"for {kind} of {kernel.names} it has {has}, the layer has {activation}"
    numbers = function.numbers(activation)
    missing = [name for name in function.needed if not numbers[name]]
    if missing:
        return f"its {function.member} needs {' and '.join(missing)}, the layer has {activation}"
    if not kernel.numbers and function.member == "Swiglu" and any(n is not None for n in numbers.values()):
        return f"alpha, beta and limit do not reach its {kernel.names} kernels, the layer has {activation}"
    return ""


def unfit_bias(kernel: FlashInferKernel, problem: MoEProblem) -> str:
    """Why the layer's expert biases are not supported, as a clause."""
    return f"its {kernel.names} kernels add no biases" if problem.bias and not kernel.bias else ""


def unfit_sizes(kernel: FlashInferKernel, problem: MoEProblem) -> str:
    """Why the layout does not support the layer's sizes, as a clause."""
    dims = problem.dims
    needs = size_rule(kernel.layout, problem.scheme.weight, problem.activation.gated, dims.hidden).needs
    if dims.hidden % needs.hidden or dims.intermediate % needs.intermediate:
        return (
            f"{kernel.layout} takes multiples of {needs.hidden} and {needs.intermediate}, the layer has "
            f"hidden {dims.hidden} and intermediate {dims.intermediate}"
        )
    return ""


def unfit_dtype(kernel: FlashInferKernel, problem: MoEProblem) -> str:
    """Why the model's dtype is not supported, as a clause."""
    if problem.dtype in kernel.dtypes:
        return ""
    known = ", ".join(sorted(kernel.dtypes))
    return f"it computes {kernel.names} for {known} models, the layer's is {problem.dtype}"


def unfit_weighting(kernel: FlashInferKernel, problem: MoEProblem) -> str:
    """Why tokens cannot be multiplied by the router's weight before the call, as a clause."""
    if problem.routing.weight_on_input and problem.top_k > 1:
        return f"weights on the input are multiplied beforehand with top-1, the layer has top-{problem.top_k}"
    return ""


def unweighted_input(kernel: FlashInferKernel, problem: MoEProblem) -> str:
    """Why a kernel with fused routing cannot multiply tokens by the weights first, as a clause."""
    if not problem.routing.weight_on_input or kernel.weight_on_input:
        return ""
    return f"the router's weight on the input does not reach its {kernel.names} kernels"


def unfit_count(kernel: FlashInferKernel, problem: MoEProblem) -> str:
    """Why the number of experts is not supported, as a clause."""
    if problem.experts <= MOST_EXPERTS:
        return ""
    return f"it takes at most {MOST_EXPERTS} experts, the layer has {problem.experts}"


CHECKS = (unfit_activation, unfit_bias, unfit_sizes, unfit_dtype, unfit_weighting, unfit_count)
"""Checks of a layer whose number formats a kernel supports."""
