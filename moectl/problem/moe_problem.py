"""One MoE layer as a value: everything a backend is chosen, prepared and run by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ..errors import UsageError
from .schemes import FULL, Scheme


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of one expert on one rank; logical and padded sizes travel together.

    `hidden` is the reduction size of the first GEMM (the experts' own, where it differs from the
    model's), `intermediate` the reduction size of the second. Padded sizes default to the logical
    ones, and only `Align.apply` makes them larger.
    """

    hidden: int
    intermediate: int
    padded_hidden: int = 0
    padded_intermediate: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded_hidden", self.padded_hidden or self.hidden)
        object.__setattr__(self, "padded_intermediate", self.padded_intermediate or self.intermediate)


@dataclass(frozen=True, slots=True)
class Align:
    """Multiples to which a backend rounds `hidden` and the per-rank `intermediate` up."""

    hidden: int = 1
    intermediate: int = 1

    def apply(self, dims: Dims) -> Dims:
        """`dims` with padded sizes rounded up; logical sizes stay."""
        return replace(
            dims,
            padded_hidden=math.ceil(dims.hidden / self.hidden) * self.hidden,
            padded_intermediate=math.ceil(dims.intermediate / self.intermediate) * self.intermediate,
        )


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the two GEMMs.

    `silu`: silu(gate) * up. `swigluoai`: gate = min(gate, limit), up = clamp(up, -limit, limit),
    gate * sigmoid(alpha * gate) * (up + 1), as gpt-oss publishes it. `gelu_tanh`: gelu's tanh form of
    gate, times up. `relu2`: relu(x)^2 of the one matrix of an ungated expert. `situ`: Kimi-K3's, with
    `beta` on the gate's side and `linear_beta` on the other. `limit` None is no clamp.
    """

    name: str
    gated: bool = True
    alpha: float | None = None
    limit: float | None = None
    beta: float | None = None
    linear_beta: float | None = None

    def __str__(self) -> str:
        names = ("alpha", "limit", "beta", "linear_beta")
        known = [f"{name} {value:g}" for name in names if (value := getattr(self, name)) is not None]
        return ", ".join([self.name, *([] if self.gated else ["not gated"]), *known])


MAX_TOKENS = 1 << 20
"""Most tokens of one call that inputs are made for."""

SILU = Activation("silu")
SWIGLU_OAI = Activation("swigluoai", alpha=1.702, limit=7.0)


@dataclass(frozen=True, slots=True)
class Routing:
    """How router logits become top-k expert ids and weights.

    Attributes:
        scoring: ``softmax``, ``sigmoid``, ``sqrtsoftplus`` or ``sparsemixer`` of the logits.
        renormalize: the chosen weights are divided by their sum. With softmax this equals a softmax
            over the chosen logits (`after_topk`), which is how gpt-oss states it.
        after_topk: the model computes the scores of the chosen logits only.
        correction_bias: a per-expert bias is added to the scores for the choice, not to the weights.
        router_bias: the router is a linear layer with a bias of its own.
        groups, topk_groups: group-limited choice (DeepSeek); None when the model has no groups.
        scale: factor on the final weights.
        weight_on_input: weights multiply the experts' input instead of their output (Llama 4).
        hashed: ids come from a table by token id, the scores only weigh (first layers of DeepSeek-V4).
        expert_scale: a per-expert factor on the final weights (Gemma 4).
    """

    scoring: str = "softmax"
    renormalize: bool = True
    after_topk: bool = False
    correction_bias: bool = False
    router_bias: bool = False
    groups: int | None = None
    topk_groups: int | None = None
    scale: float = 1.0
    weight_on_input: bool = False
    hashed: bool = False
    expert_scale: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """A deployment as on an engine's command line.

    `ep` is a flag: experts are spread over all tp * dp ranks instead of being sliced. `all2all` is
    the engine's name of the exchange kernels, used only with `ep` and `dp` > 1. `eplb` is dynamic
    expert load balancing.
    """

    tp: int = 1
    dp: int = 1
    ep: bool = False
    all2all: str = "allgather_reducescatter"
    eplb: bool = False

    @property
    def ranks(self) -> int:
        """Ranks that share one MoE layer."""
        return self.tp * self.dp

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are spread; 1 without expert parallelism."""
        return self.ranks if self.ep else 1

    @property
    def tp_size(self) -> int:
        """Ranks over which each expert is sliced; without `ep`, data-parallel ranks slice too."""
        return 1 if self.ep else self.ranks

    @property
    def exchanges(self) -> bool:
        """True when tokens travel between ranks through all2all kernels."""
        return self.ep and self.dp > 1


def expert_range(experts: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and last (exclusive) of `experts` that `rank` of `ranks` holds.

    Runs of consecutive experts; where they do not divide, the first ranks hold one more each (vLLM's
    linear placement).
    """
    each, more = divmod(experts, ranks)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


@dataclass(frozen=True, slots=True)
class MoEProblem:
    """One MoE layer on one rank. `repr` is a constructor call.

    Attributes:
        storage: how the checkpoint stores the experts: ``gpt_oss`` (fused MXFP4 blocks),
            ``mxfp4``, ``quark``, ``compressed-tensors``, ``gptq``, ``awq``, ``modelopt``, ``fp8``,
            ``plain``.
        rows: order of the first GEMM's rows: ``interleaved`` (gate0, up0, gate1, ...) or
            ``concatenated`` (all gates, then all ups).
        act_order: the reduction axis is permuted group-wise (GPTQ desc_act): ``""``, ``weight``
            (an ordinary group layout) or ``group``.
        dtype: the model's 16-bit dtype, ``bf16`` or ``fp16``.
        local_experts: experts on this rank; 0 means all.
        shared_experts: shared experts computed beside the routed ones.
        model_hidden: the model's hidden size; 0 means the experts' own, from which it differs only
            where experts work in a latent space.
        router_dtype: dtype of the router's weights, ``bf16``, ``fp16`` or ``fp32``.
        lora: adapters are served on the experts.
        model_type: the family, as ``config.json`` names the text model; empty when it is not known.
    """

    dims: Dims
    experts: int
    top_k: int
    scheme: Scheme
    activation: Activation = SILU
    routing: Routing = Routing()
    storage: str = "plain"
    rows: str = "concatenated"
    act_order: str = ""
    bias: bool = False
    shared_experts: int = 0
    dtype: str = "bf16"
    parallel: Parallel = Parallel()
    local_experts: int = field(default=0)
    model_hidden: int = 0
    router_dtype: str = "bf16"
    lora: bool = False
    model_type: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_experts", self.local_experts or self.experts)
        object.__setattr__(self, "model_hidden", self.model_hidden or self.dims.hidden)

    def on(self, parallel: Parallel) -> MoEProblem:
        """This problem, whole, as one rank of `parallel` sees it: its slice of each expert, or its experts.

        Raises UsageError when the intermediate size does not divide by the ranks that slice it, or
        there are more ranks than experts to spread over them.
        """
        if parallel.ep_size > self.experts:
            raise UsageError(
                f"{self.experts} experts cannot be spread over {parallel.ep_size} ranks",
                hint="choose --tp and --dp so that tp x dp is at most the number of experts",
            )
        whole = self.dims.intermediate * self.parallel.tp_size
        if whole % parallel.tp_size:
            raise UsageError(
                f"intermediate size {whole} cannot be sliced over {parallel.tp_size} tensor-parallel ranks",
                hint="choose --tp so that tp x dp divides it, or spread whole experts with --ep",
            )
        return replace(
            self,
            dims=Dims(self.dims.hidden, whole // parallel.tp_size),
            parallel=parallel,
            local_experts=expert_range(self.experts, parallel.ep_size, 0)[1],
        )

    def expert_bytes(self, padded: bool = False) -> int:
        """Bytes of one expert's two matrices with their scales, zero points and biases on this rank.

        Scales count as many bytes as the number format's usual ones, whatever dtype a checkpoint has.
        """
        return sum(self.matrix_bytes(padded))

    def matrix_bytes(self, padded: bool = False) -> tuple[int, int]:
        """Bytes of one expert's first matrix (gate and up) and of its second, as `expert_bytes` counts."""
        dims = self.dims
        hidden = dims.padded_hidden if padded else dims.hidden
        inter = dims.padded_intermediate if padded else dims.intermediate
        rows = inter * (2 if self.activation.gated else 1)
        return self._matrix_bytes(rows, hidden), self._matrix_bytes(hidden, inter)

    def _matrix_bytes(self, n: int, k: int) -> int:
        weight = self.scheme.weight
        total = n * k * weight.bits // 8 + (2 * n if self.bias else 0)
        if weight.block != (0, 0):
            rows, columns = (full if b == FULL else b for b, full in zip(weight.block, (n, k), strict=True))
            scales = math.ceil(n / rows) * math.ceil(k / columns)
            total += scales * weight.number.scale_bytes
            if weight.zero_point:
                total += scales * weight.bits // 8
        return total
