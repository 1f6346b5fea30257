"""`MoEProblem`: the description of a MoE layer that backends are selected, prepared and run by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ..errors import UsageError
from ..files.records import Count, Size
from .schemes import Scheme


@dataclass(frozen=True, slots=True)
class Dims:
    """Logical and padded sizes of one expert on one rank.

    `hidden` is the reduction size of the first GEMM (that of the experts, which may differ from the
    model's), `intermediate` that of the second. Padded sizes default to the logical ones; only
    `Align.apply` increases them.
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
    """Multiples to which a backend rounds up `hidden` and the per-rank `intermediate`.

    Example:
        >>> Align(256, 128).apply(Dims(2880, 2880))
        Dims(hidden=2880, intermediate=2880, padded_hidden=3072, padded_intermediate=2944)
    """

    hidden: int = 1
    intermediate: int = 1

    def apply(self, dims: Dims) -> Dims:
        """`dims` with the padded sizes rounded up; logical sizes are unchanged."""
        return replace(
            dims,
            padded_hidden=math.ceil(dims.hidden / self.hidden) * self.hidden,
            padded_intermediate=math.ceil(dims.intermediate / self.intermediate) * self.intermediate,
        )


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the two GEMMs.

    `silu`: silu(gate) * up. `swigluoai`: gate = min(gate, limit), up = clamp(up, -limit, limit),
    gate * sigmoid(alpha * gate) * (up + 1), as published for gpt-oss. `gelu_tanh`: gelu(gate), tanh
    approximation, times up. `relu2`: relu(x)^2 of the single matrix of an ungated expert. `situ`: the
    function of Kimi-K3, with `beta` for the gate and `linear_beta` for up. `limit` None means no clamp.
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
"""Maximum number of tokens for which inputs are generated."""

SILU = Activation("silu")
SWIGLU_OAI = Activation("swigluoai", alpha=1.702, limit=7.0)


@dataclass(frozen=True, slots=True)
class Routing:
    """How router logits become top-k expert ids and weights.

    Attributes:
        scoring: ``softmax``, ``sigmoid``, ``sqrtsoftplus`` or ``sparsemixer`` of the logits.
        renormalize: the selected weights are divided by their sum. With softmax this equals a softmax
            over the selected logits (`after_topk`), as gpt-oss defines it.
        after_topk: scores are computed from the selected logits only.
        correction_bias: a per-expert bias is added to the scores for selection, but not to the weights.
        router_bias: the router's linear layer has a bias.
        groups, topk_groups: group-limited selection (DeepSeek); None for models without groups.
        scale: factor on the final weights.
        weight_on_input: weights multiply the experts' input instead of their output (Llama 4).
        hashed: ids come from a table by token id, and scores only give the weights (first layers of
            DeepSeek-V4).
        expert_scale: a per-expert factor on the final weights (Gemma 4).
    """

    scoring: str = "softmax"
    renormalize: bool = True
    after_topk: bool = False
    correction_bias: bool = False
    router_bias: bool = False
    groups: Count | None = None
    topk_groups: Count | None = None
    scale: float = 1.0
    weight_on_input: bool = False
    hashed: bool = False
    expert_scale: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """A parallel deployment, in terms of an engine's command line.

    With `ep`, experts are distributed over all tp * dp ranks instead of being sliced. `all2all` is the
    engine's name for the communication kernels, used only with `ep` and `dp` > 1. `eplb` is dynamic expert
    load balancing. `pp` counts pipeline stages, which hold different layers.
    """

    tp: Count = 1
    dp: Count = 1
    ep: bool = False
    all2all: str = "allgather_reducescatter"
    eplb: bool = False
    pp: Count = 1

    @property
    def ranks(self) -> int:
        """Ranks that share one MoE layer."""
        return self.tp * self.dp

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are distributed; 1 without expert parallelism."""
        return self.ranks if self.ep else 1

    @property
    def tp_size(self) -> int:
        """Ranks over which each expert is sliced; without `ep`, data-parallel ranks slice too."""
        return 1 if self.ep else self.ranks

    @property
    def exchanges(self) -> bool:
        """True when tokens are exchanged between ranks by all2all kernels."""
        return self.ep and self.dp > 1

    def states_exchange(self, usual: str) -> bool:
        """True when `all2all` has an effect and is not the `usual` one; if usually none, any has."""
        return self.all2all != usual and (self.exchanges or usual == "none")


def expert_range(experts: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and last (exclusive) expert of `rank`, as in vLLM's linear placement.

    Each rank has consecutive experts; if they do not divide evenly, the first ranks have one more.

    Example:
        >>> [expert_range(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    per_rank, remainder = divmod(experts, ranks)
    first = rank * per_rank + min(rank, remainder)
    return first, first + per_rank + (rank < remainder)


@dataclass(frozen=True, slots=True)
class MoEProblem:
    """One MoE layer on one rank. `repr` is a constructor call.

    Example:
        >>> from moectl.problem.schemes import MXFP4, Scheme
        >>> problem = MoEProblem(Dims(2880, 2880), 32, 4, Scheme(MXFP4), SWIGLU_OAI, bias=True)
        >>> problem.on(Parallel(tp=2)).dims.intermediate
        1440

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
        shared_experts: number of shared experts, computed in addition to the routed ones.
        model_hidden: the model's hidden size; 0 means that of the experts, which differs only for experts
            in a latent space.
        router_dtype: dtype of the router's weights, ``bf16``, ``fp16`` or ``fp32``.
        lora: LoRA adapters are used on the experts.
        model_type: `model_type` of the text model in ``config.json``; empty if unknown.
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
    shared_experts: Size = 0
    dtype: str = "bf16"
    parallel: Parallel = Parallel()
    local_experts: Size = field(default=0)
    model_hidden: Size = 0
    router_dtype: str = "bf16"
    lora: bool = False
    model_type: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_experts", self.local_experts or self.experts)
        object.__setattr__(self, "model_hidden", self.model_hidden or self.dims.hidden)

    def on(self, parallel: Parallel) -> MoEProblem:
        """The share of one rank of `parallel`: a slice of each expert, or some of the experts.

        Raises UsageError when the tensor-parallel ranks do not divide the intermediate size, or there are
        more expert-parallel ranks than experts.
        """
        if parallel.ep_size > self.experts:
            raise UsageError(
                f"{self.experts} experts cannot be spread over {parallel.ep_size} ranks",
                hint="choose --tp and --dp so that tp x dp is at most the number of experts",
            )
        full_intermediate = self.dims.intermediate * self.parallel.tp_size
        if full_intermediate % parallel.tp_size:
            raise UsageError(
                f"intermediate size {full_intermediate} cannot be sliced over {parallel.tp_size} "
                "tensor-parallel ranks",
                hint="choose --tp so that tp x dp divides it, or spread whole experts with --ep",
            )
        return replace(
            self,
            dims=Dims(self.dims.hidden, full_intermediate // parallel.tp_size),
            parallel=parallel,
            local_experts=expert_range(self.experts, parallel.ep_size, 0)[1],
        )

    def expert_bytes(self, padded: bool = False) -> int:
        """Bytes of one expert's matrices with scales, zero points and biases on this rank.

        Scales are counted with the number format's default dtype, whatever the checkpoint's is.
        """
        return sum(self.matrix_bytes(padded))

    def matrix_bytes(self, padded: bool = False) -> tuple[int, int]:
        """Bytes of one expert's first matrix (gate and up) and of its second, as in `expert_bytes`."""
        dims = self.dims
        hidden = dims.padded_hidden if padded else dims.hidden
        inter = dims.padded_intermediate if padded else dims.intermediate
        rows = inter * (2 if self.activation.gated else 1)
        return self._matrix_bytes(rows, hidden), self._matrix_bytes(hidden, inter)

    def _matrix_bytes(self, n: int, k: int) -> int:
        return self.scheme.weight.nbytes(n, k) + (2 * n if self.bias else 0)
