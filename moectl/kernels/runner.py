"""The contract of everything that runs a prepared layer (`Runner`), and checks of a call's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..errors import NoBackend, UsageError
from ..problem.moe_problem import MoEProblem
from ..problem.schemes import A16, ActFormat
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .prepared_layer import PreparedMoE

Run = Callable[..., Tensor]


class ActivationFormat(str, Enum):
    """How tokens are passed to the experts; the value is the `Runner` field for this format."""

    STANDARD = "compute"
    MONOLITHIC = "monolithic"
    BATCHED = "batched"

    @property
    def says(self) -> str:
        """What experts of this format take as arguments, for sentences."""
        return _FORMS[self]


_FORMS = {
    ActivationFormat.STANDARD: "expert ids and weights",
    ActivationFormat.MONOLITHIC: "router logits",
    ActivationFormat.BATCHED: "tokens batched by expert",
}


LIBRARY = "the library"


def chosen_by(library: str) -> Callable[[PreparedMoE, int], str]:
    """The `Runner.tactic` of a library that chooses its tactic internally and does not report it."""
    return lambda prepared, tokens: f"chosen by {library}"


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs a prepared layer. A stateless constant: everything it needs is in the `PreparedMoE`.

    It supports one or more of the three activation formats (`compute`, `monolithic`, `batched`); the others
    are None. Each is called with checked arguments, and with `QuantizedTokens` if `wants` is not `A16`.

    Attributes:
        name: the backend's name.
        layout: name of the weight layout it reads, or a function of the problem; None supports every layout
            by decoding the weights with the layout's inverse.
        compute: modular, ``compute(prepared, x, ids, weights) -> y``: tokens in their own order.
        refusal: why it cannot run a problem on a device, in a sentence; empty when it can.
        accumulation: the row of the tolerance table that its results are checked against, or a function of
            the problem.
        capturable: True when a call can be captured in a CUDA graph: it never waits for the GPU.
        ready: derives what it needs from a layer's weights, once before the first call; may wait for
            the GPU.
        monolithic: ``monolithic(prepared, x, logits, correction_bias) -> y``: routing is part of the kernel.
        batched: ``batched(prepared, x, counts, expected=None) -> y``: x and y are
            ``[local_experts, most, hidden]``; the first ``counts[e]`` rows of expert e are tokens, all others
            are undefined. `expected` is about how many rows of an expert are tokens, on average, for the
            choice of a kernel, whose result is right for all counts; None if nothing is known. The caller
            applies the router's weights when it gathers the tokens in their original order.
        wants: the activation format in which it takes tokens, or a function of the problem. For a format
            other than A16, y has the model's dtype, and tokens are already multiplied by the router's weight
            if that is applied to the input.
        applies_router_weights: True when `compute` multiplies by the router's weights and sums over a token's
            experts; otherwise y is ``[tokens, top_k, hidden]`` and the finalize step does both.
        tactic: ``tactic(prepared, tokens)``: a short description of the kernel that it launches for this many
            tokens, or `chosen_by` for a library that does not report it; empty if there is no choice.
        predicted_us: ``predicted_us(prepared, tokens)``: microseconds of that kernel by a model of the
            backend's own; None if there is none.
        masks_padding: True when padding beyond the logical sizes never enters a computation and may hold
            anything; otherwise it must be zeros, as layouts write it.
        tiled: it reads token scales in tiles of 128 x 4 (`quantize_tokens.in_tiles`); else row by row.
        input_scale: the layer's scale for quantizing tokens, on the layer's device: for NVFP4 tokens and
            static formats. None: there are no scales but those of tokens or blocks.
        workspace: ``workspace(prepared, tokens, form)``: upper bound in bytes on what a call allocates
            besides arguments and result; with batched activations `tokens` are the rows of one expert.
            None: unknown.
        refit: ``refit(layers, scales)``: why kernels that were launched for any of these copies of a layer,
            and captured in graphs, would be wrong with new canonical scales of some experts, each with its
            role; empty if they are right. It is asked before they are written, and remembers what it lets
            pass.
        refit_exponents: ``refit_exponents(layers, role)``: the biased exponents of new scales `role` that
            `refit` lets pass, where scales are E8M0 bytes or bf16.
        refit_found: ``refit_found(layers, found)``: remembers the least and the largest exponent of new
            scales by role, as `refit` does of what it lets pass.
        refit_codes: names of the weight formats of which `refit` is asked about new codes, too.
        keeps: how `ready` copies the weights: ``""`` not at all, ``numbers`` some tensors of a few numbers
            for each expert, ``weights`` whole matrices of canonical layers, which cannot change in place.
        into: ``into(y, prepared, x, ids, weights)``: `compute` with its result written to the contiguous `y`;
            None if the result is always a new tensor.

    Example:
        >>> from moectl.kernels.registry import runner_for
        >>> runner = runner_for("torch")
        >>> runner.name, [form.value for form in runner.forms]
        ('torch', ['compute', 'batched'])
    """

    name: str
    layout: str | Callable[[MoEProblem], str] | None
    compute: Run | None
    refusal: Callable[[MoEProblem, torch.device], str]
    accumulation: str | Callable[[MoEProblem], str] = "fp32"
    capturable: bool = True
    ready: Callable[[PreparedMoE], object] = lambda prepared: None
    monolithic: Run | None = None
    batched: Run | None = None
    wants: ActFormat | Callable[[MoEProblem], ActFormat] = A16
    applies_router_weights: bool = True
    tactic: Callable[[PreparedMoE, int], str] = lambda prepared, tokens: ""
    predicted_us: Callable[[PreparedMoE, int], float | None] = lambda prepared, tokens: None
    masks_padding: bool = False
    tiled: bool = False
    input_scale: Callable[[PreparedMoE], Tensor | None] = lambda prepared: None
    workspace: Callable[[PreparedMoE, int, ActivationFormat], int] | None = None
    refit: Callable[[Sequence[PreparedMoE], Sequence[tuple[str, Tensor]]], str] = lambda layers, scales: ""
    refit_exponents: Callable[[Sequence[PreparedMoE], str], range] = lambda layers, role: range(256)
    refit_found: Callable[[Sequence[PreparedMoE], Mapping[str, tuple[int, int]]], None] = (
        lambda layers, found: None
    )
    refit_codes: tuple[str, ...] = ()
    keeps: str = ""
    into: Run | None = None

    def in_form(self, form: ActivationFormat) -> Run | None:
        """The function that computes in `form`, or None."""
        function: Run | None = getattr(self, form.value)
        return function

    @property
    def forms(self) -> tuple[ActivationFormat, ...]:
        """The activation formats that it supports, the preferred one first."""
        return tuple(form for form in ActivationFormat if self.in_form(form) is not None)

    def layout_of(self, problem: MoEProblem) -> str | None:
        """The layout in which it reads `problem`'s weights; None when it supports any."""
        return self.layout(problem) if callable(self.layout) else self.layout

    def judges(self, problem: MoEProblem, role: str) -> bool:
        """Whether `refit` is asked about new numbers of `role`: scales, and codes of `refit_codes`."""
        codes = role in ("w13", "w2") and problem.scheme.weight.name in self.refit_codes
        return codes or role.endswith("_scale")

    def accumulation_of(self, problem: MoEProblem) -> str:
        """The row of the tolerance table that results for `problem` are checked against."""
        return self.accumulation(problem) if callable(self.accumulation) else self.accumulation

    def wants_of(self, problem: MoEProblem) -> ActFormat:
        """The activation format in which it takes `problem`'s tokens."""
        return self.wants(problem) if callable(self.wants) else self.wants

    def accept(self, prepared: PreparedMoE) -> None:
        """Raises NoBackend for a device without kernels, another layout, or a layer that is refused."""
        if prepared.device.type not in DEVICES:
            raise NoBackend(
                f"there is no kernel for {prepared.device.type} devices; kernels here run on "
                f"{' and '.join(DEVICES.values())}"
            )
        layout = self.layout_of(prepared.problem)
        if layout is not None and prepared.layout != layout:
            raise NoBackend(
                f"the {self.name} backend reads layout {layout}, got weights in {prepared.layout}",
                hint="prepare the layer for this backend",
            )
        reason = self.refusal(prepared.problem, prepared.device)
        if reason:
            raise NoBackend(f"the {self.name} backend cannot run this layer: {reason}")


DEVICES = {"cuda": "GPUs that torch calls cuda", "cpu": "the CPU"}
"""Kinds of torch devices with kernels; TPUs and other platforms of plug-ins have none."""


def check_tokens(prepared: PreparedMoE, x: Tensor, **others: Tensor | None) -> None:
    """Raises UsageError when `x` does not fit the layer, or a tensor is not on the layer's device."""
    problem = prepared.problem
    if x.ndim != 2 or x.shape[1] != problem.dims.hidden:
        raise UsageError(f"x must be [tokens, {problem.dims.hidden}], got {list(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(f"x must be torch.bfloat16 or torch.float16, got {x.dtype}; cast it before the call")
    tensors = {"x": x, **{name: t for name, t in others.items() if t is not None}}
    devices = {t.device for t in tensors.values()} | {prepared.device}
    if len(devices) > 1:
        names = ", ".join(sorted(str(d) for d in devices))
        raise UsageError(f"{', '.join(tensors)} and the layer must be on one device, got {names}")


def check_dtype(problem: MoEProblem, x: Tensor) -> None:
    """Raises UsageError if tokens do not have the model's dtype, which scales and biases have."""
    expected = MODEL_TORCH_DTYPES[problem.dtype]
    if x.dtype != expected:
        raise UsageError(f"x must be {expected}, the model's dtype, got {x.dtype}; cast it before the call")


def check_arguments(
    prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, experts: int | None = None
) -> None:
    """Raises UsageError when tensors do not fit the layer or each other.

    `experts` is the number of experts that ids may name; None: the layer's local experts.
    """
    problem, shape = prepared.problem, (len(x), prepared.problem.top_k)
    check_tokens(prepared, x, ids=ids, weights=weights)
    for name, tensor, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype:
            raise UsageError(f"{name} must be {dtype}, got {tensor.dtype}; cast it before the call")
    count = experts or problem.local_experts
    # Copying ids from a GPU would stall it, and is not possible inside a CUDA graph.
    if ids.device.type == "cpu" and len(ids) and int(ids.max()) >= count:
        whose = "the layer's experts" if experts else "the experts here"
        raise UsageError(f"ids must be below {count}, {whose}; got {int(ids.max())}")
