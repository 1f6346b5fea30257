"""A layer's fused-MoE kernel: prepare, experts, finalize."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...errors import NoBackend, UsageError
from ...problem.schemes import A16
from ..layer_inputs import LayerInputs
from ..prepared_layer import KERNEL, PreparedMoE
from ..quantize_tokens import refusal as quantizing_refusal
from ..registry import runner_for
from ..runner import ActivationFormat, Runner, check_arguments, check_tokens
from .exchange import Exchange, SingleRankExchange
from .prepare_finalize import NO_EXPERT, PrepareFinalize
from .torch_ops import fused_moe, fused_moe_logits, handle_of

Shared = Callable[[Tensor], Tensor]
"""Shared experts: their output ``[tokens, hidden]`` for tokens ``[tokens, hidden]``."""


@dataclass(frozen=True, eq=False)
class FusedMoEKernel:
    """One layer's experts on one backend, with the steps before and after them. Never shared between layers.

    Its parts are checked against each other when it is created, so that a call only checks its arguments. A
    call keeps no state in the kernel: threads and streams may call it concurrently. Under torch.compile
    it is one operator.

    Attributes:
        prepared: the layer's weights and its problem.
        runner: computes with them.
        form: the runner's activation format in use.
        exchange: communication between ranks.
        shared: shared experts of this rank's tokens, added to the routed ones' sum over ranks.
        expert_map: ``[experts]`` int32 from the layer's ids to local ids, -1 for experts of other ranks;
            None where calls pass local ids.
        dtype: of the result and of sums after the experts; None for the tokens' dtype.
        prepare_finalize: the steps before and after the experts.
        handle: the number by which torch operators look the kernel up.

    Raises:
        NoBackend: the runner lacks the form, refuses the layer, or does not support the other arguments.
        UsageError: the expert map does not fit the layer.
    """

    prepared: PreparedMoE
    runner: Runner
    form: ActivationFormat = ActivationFormat.STANDARD
    exchange: Exchange = field(default_factory=SingleRankExchange)
    shared: Shared | None = None
    expert_map: Tensor | None = None
    dtype: torch.dtype | None = None
    prepare_finalize: PrepareFinalize = field(init=False, repr=False)
    handle: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.runner.accept(self.prepared)
        if self.expert_map is not None:
            check_expert_map(self.expert_map, self.prepared)
        for refuses in REFUSALS:
            if reason := refuses(self):
                raise NoBackend(f"the {self.runner.name} backend {reason[0]}", hint=reason[1])
        prepare_finalize = PrepareFinalize(
            self.prepared,
            self.runner,
            self.form,
            self.exchange,
            self.runner.wants_of(self.prepared.problem),
            self.expert_map,
            self.runner.input_scale(self.prepared),
        )
        object.__setattr__(self, "prepare_finalize", prepare_finalize)
        object.__setattr__(self, "handle", handle_of(self))

    @property
    def monolithic(self) -> bool:
        """True when it takes router logits; else expert ids and weights."""
        return self.form is ActivationFormat.MONOLITHIC

    @property
    def capturable(self) -> bool:
        """True when a call can be captured in a CUDA graph: nothing in it waits for the GPU."""
        return self.runner.capturable and self.exchange.capturable

    def workspace(self, tokens: int) -> int | None:
        """Upper bound in bytes on what a call of `tokens` per rank allocates besides arguments and result.

        None if the runner's is unknown. Without shared experts and the allocator's rounding.
        """
        if self.runner.workspace is None:
            return None
        rows = tokens * self.exchange.ranks
        cast = 0 if self.dtype is None else 2 * rows * self.prepared.problem.dims.hidden
        experts = self.runner.workspace(self.prepared, rows, self.form)
        return self.prepare_finalize.workspace(tokens) + experts + cast

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``[tokens, hidden]`` output in `dtype`.

        Args:
            x: ``[tokens, hidden]`` of this rank, in the model's 16-bit dtype.
            ids: ``[tokens, top_k]`` int32, no expert twice in a row: the layer's ids with an expert map,
                else local ids. Ids that are negative, or of no expert, are skipped; on a CPU ids beyond
                the last are refused.
            weights: ``[tokens, top_k]`` fp32.

        Raises:
            UsageError: arguments that do not fit the layer or each other. The other ranks of an exchange
                then wait for this one until their group's timeout.
            NoBackend: the kernel is monolithic.
        """
        if torch.compiler.is_compiling():
            y: Tensor = fused_moe(x, ids, weights, self.handle, self.dtype or x.dtype)
            return y
        return self.call(x, ids, weights)

    def call(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """`apply` without the operator for torch.compile."""
        if self.monolithic:
            raise NoBackend(
                f"the kernel of the {self.runner.name} backend takes {self.form.says}, got expert ids and "
                "weights",
                hint="call apply_monolithic with logits, or choose a modular backend",
            )
        experts = None if self.expert_map is None else len(self.expert_map)
        check_arguments(self.prepared, x, ids, weights, experts)
        sent = self.prepare_finalize.prepare(x, ids, weights)
        if sent is None:
            return self._nothing(x)
        if sent.batches is not None:
            y = self._experts(self.prepared, sent.tokens, sent.batches.counts, sent.batches.expected)
        else:
            y = self._experts(self.prepared, sent.tokens, sent.ids, sent.weights)
        y = self.prepare_finalize.finalize(y, sent, self.dtype or x.dtype)
        return y if self.shared is None or not len(x) else y + self.shared(x).to(y.dtype)

    def call_into(self, y: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """`call` with its result written to the contiguous `y`, of the shape and dtype of `x`.

        Nothing is copied where the backend can write to a given tensor, except under torch.compile.
        """
        if torch.compiler.is_compiling():
            y.copy_(self.apply(x, ids, weights))
            return
        into, alone = self.runner.into, isinstance(self.exchange, SingleRankExchange)
        plain = self.form is ActivationFormat.STANDARD and alone and self.shared is None
        if into is None or not plain or y.dtype != x.dtype or not y.is_contiguous() or not len(x):
            y.copy_(self.call(x, ids, weights))
            return
        experts = None if self.expert_map is None else len(self.expert_map)
        check_arguments(self.prepared, x, ids, weights, experts)
        sent = self.prepare_finalize.prepare(x, ids, weights)
        assert sent is not None
        into(y, self.prepared, sent.tokens, sent.ids, sent.weights)

    def apply_monolithic(self, x: Tensor, logits: Tensor, correction_bias: Tensor | None = None) -> Tensor:
        """``[tokens, hidden]`` output of tokens that the kernel routes by ``[tokens, experts]`` logits.

        `correction_bias` ``[experts]``, for the choice alone, is every rank's own copy. Errors as of `apply`.
        """
        if torch.compiler.is_compiling():
            y: Tensor = fused_moe_logits(x, logits, correction_bias, self.handle, self.dtype or x.dtype)
            return y
        return self.call_monolithic(x, logits, correction_bias)

    def call_monolithic(self, x: Tensor, logits: Tensor, correction_bias: Tensor | None) -> Tensor:
        """`apply_monolithic`, made at once whatever compiles."""
        if not self.monolithic:
            raise NoBackend(
                f"the kernel of the {self.runner.name} backend takes {self.form.says}, got router logits",
                hint="route first, or choose a monolithic backend",
            )
        check_tokens(self.prepared, x, logits=logits, correction_bias=correction_bias)
        wanted = (len(x), self.prepared.problem.experts)
        if tuple(logits.shape) != wanted or not logits.is_floating_point():
            got = f"{logits.dtype} {list(logits.shape)}"
            raise UsageError(f"router logits must be floats {list(wanted)}, got {got}")
        sent = self.prepare_finalize.prepare_logits(x, logits)
        if sent is None:
            return self._nothing(x)
        y = self._experts(self.prepared, sent.tokens, sent.logits, correction_bias)
        return self.prepare_finalize.finalize(y, sent, self.dtype or x.dtype)

    def run(self, inputs: LayerInputs, correction_bias: Tensor | None = None) -> Tensor:
        """The output for `inputs`: from the logits if the kernel is monolithic, else from ids and weights."""
        if self.monolithic:
            return self.apply_monolithic(inputs.x, inputs.logits, correction_bias)
        return self.apply(inputs.x, inputs.ids, inputs.weights)

    def _experts(self, *arguments: object) -> Tensor:
        compute = self.runner.in_form(self.form)
        assert compute is not None
        return compute(*arguments)

    def _nothing(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=self.dtype or x.dtype)


def layer_kernel(prepared: PreparedMoE) -> FusedMoEKernel:
    """The kernel behind a call of `prepared`: ids and weights of the whole layer, without an exchange.

    It has a copy of `prepared` with derived values of its own, so that a layer that keeps its kernel is freed
    with its last reference. Raises NoBackend when the backend does not run it, or takes no ids.
    """
    share = map_of(prepared) if prepared.problem.local_experts < prepared.problem.experts else None
    return share_kernel(prepared, share)


def called_kernel(prepared: PreparedMoE) -> FusedMoEKernel | None:
    """The kernel behind calls of `prepared`, with derived values of its own; None before the first call."""
    kernel = prepared.derived.get(KERNEL)
    return kernel if isinstance(kernel, FusedMoEKernel) else None


def share_kernel(prepared: PreparedMoE, expert_map: Tensor | None = None) -> FusedMoEKernel:
    """`layer_kernel` for calls with ids that `expert_map` maps; with local ids if there is none."""
    runner = runner_for(prepared.backend)
    form = next(
        (form for form in (ActivationFormat.STANDARD, ActivationFormat.BATCHED) if form in runner.forms),
        ActivationFormat.STANDARD,
    )
    return FusedMoEKernel(replace(prepared, derived={}), runner, form, expert_map=expert_map)


Reason = tuple[str, str]
"""A clause that follows the backend's name in an error, and its hint."""


def _form_refusal(kernel: FusedMoEKernel) -> Reason | None:
    runner = kernel.runner
    if kernel.form in runner.forms:
        return None
    offered = " or ".join(form.says for form in runner.forms) or "nothing"
    return f"takes {offered}, not {kernel.form.says}", "choose another backend, or one of its forms"


def _shared_refusal(kernel: FusedMoEKernel) -> Reason | None:
    problem = kernel.prepared.problem
    if kernel.shared is None:
        return None
    apart = "choose a modular backend, or add the shared experts' output yourself"
    if kernel.monolithic:
        return "is monolithic here, and takes no shared experts between its routing and its result", apart
    if problem.model_hidden != problem.dims.hidden:
        sizes = f"{problem.dims.hidden} columns, shared experts have the model's {problem.model_hidden}"
        return f"computes experts of {sizes}", "add the shared experts' output behind the projection"
    return None


def _wants_refusal(kernel: FusedMoEKernel) -> Reason | None:
    problem = kernel.prepared.problem
    wants = kernel.runner.wants_of(problem)
    if wants == A16:
        return None
    wanted = f"wants tokens in {wants}"
    if reason := quantizing_refusal(wants, problem.dims.hidden):
        return f"{wanted}: {reason}", "choose another backend"
    if not wants.dynamic and kernel.runner.input_scale(kernel.prepared) is None:
        return f"{wanted}, and the layer has no scale of its inputs", "use a checkpoint that has them"
    if problem.routing.weight_on_input and problem.top_k > 1:
        says = f"{wanted}, which cannot be multiplied by the weights of {problem.top_k} experts"
        return says, "choose a backend that takes 16-bit tokens"
    return None


def _map_refusal(kernel: FusedMoEKernel) -> Reason | None:
    if kernel.expert_map is None or not kernel.monolithic:
        return None
    if torch.equal(kernel.expert_map, map_of(kernel.prepared)):
        return None
    first = kernel.prepared.first_expert
    last = first + kernel.prepared.problem.local_experts - 1
    says = f"is monolithic here, and routes to the layer's experts {first} to {last} alone, in their order"
    return says, "leave the expert map out, or choose a modular backend"


REFUSALS: tuple[Callable[[FusedMoEKernel], Reason | None], ...] = (
    _form_refusal,
    _map_refusal,
    _shared_refusal,
    _wants_refusal,
)
"""Checks of a kernel's parts against each other, each giving its reason to refuse; None when they fit."""


def check_expert_map(expert_map: Tensor, prepared: PreparedMoE) -> None:
    """UsageError unless `expert_map` maps the layer's ids to local ids one to one; waits for the GPU."""
    problem, shape = prepared.problem, expert_map.shape
    on_device = expert_map.device == prepared.device
    if shape != (problem.experts,) or expert_map.dtype != torch.int32 or not on_device:
        raise UsageError(
            f"the expert map must be int32 [{problem.experts}] on {prepared.device}, "
            f"got {expert_map.dtype} {list(shape)} on {expert_map.device}"
        )
    local = sorted(number for number in expert_map.tolist() if number != NO_EXPERT)
    if local != list(range(problem.local_experts)):
        raise UsageError(
            f"the expert map must name each of {problem.local_experts} experts here once and others "
            f"{NO_EXPERT}, got {len(local)} from {min(local, default='none')} to {max(local, default='none')}"
        )


def map_of(prepared: PreparedMoE) -> Tensor:
    """``[experts]`` int32 map to the local ids of a layer with consecutive local experts, on its device."""
    return prepared.local_ids(torch.arange(prepared.problem.experts, device=prepared.device)).to(torch.int32)


def kernel_of(prepared: PreparedMoE) -> FusedMoEKernel:
    """The kernel of a layer for the backend that it was prepared for, on one rank; it takes local ids."""
    runner = runner_for(prepared.backend)
    return FusedMoEKernel(prepared, runner, runner.forms[0])
