"""What runs a prepared layer: the contract that every backend here meets, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..errors import NoBackend, UsageError
from ..problem.moe_problem import MoEProblem
from ..problem.schemes import A16, ActFormat
from .prepared_layer import PreparedMoE

Run = Callable[..., Tensor]


class ActivationFormat(str, Enum):
    """How tokens are passed to the experts, by the name of the `Runner` field that takes them so."""

    STANDARD = "compute"
    MONOLITHIC = "monolithic"
    BATCHED = "batched"

    @property
    def says(self) -> str:
        """What such experts take, in a user's words."""
        return _FORMS[self]


_FORMS = {
    ActivationFormat.STANDARD: "expert ids and weights",
    ActivationFormat.MONOLITHIC: "router logits",
    ActivationFormat.BATCHED: "tokens batched by expert",
}


LIBRARY = "the library"


def chosen_by(who: str) -> Callable[[PreparedMoE, int], str]:
    """The `Runner.tactic` of a library that chooses by itself, and does not tell what."""
    return lambda prepared, tokens: f"chosen by {who}"


@dataclass(frozen=True, slots=True)
class Runner:
    """What runs a prepared layer. A stateless constant: everything it needs is in the `PreparedMoE`.

    It computes in one or several of three forms; those that it lacks are None. Each is called with
    arguments already checked, and with `Quantized` tokens where `wants` is another format than `A16`.

    Attributes:
        name: the backend's name.
        layout: name of the weight layout it reads, or what tells it from a problem; None reads every
            layout through its way back.
        compute: modular, ``compute(prepared, x, ids, weights) -> y``: tokens in their own order.
        refusal: why it cannot run a problem on a device, in a sentence; empty when it can.
        accumulation: the row of the tolerance table that its results are held to.
        capturable: True when a call can be captured in a CUDA graph: it never waits for the GPU.
        ready: makes what it derives from a layer's weights once, before the first call; may wait for
            the GPU.
        monolithic: ``monolithic(prepared, x, logits, correction_bias) -> y``: it routes by itself.
        batched: ``batched(prepared, x, counts) -> y``: x and y ``[local_experts, most, hidden]``, of which
            the first ``counts[e]`` rows of expert e are tokens and all others hold anything; the router's
            weights are left to whoever puts the tokens back in their order, on either side.
        wants: the activation format in which it takes tokens, or what tells it from a problem; of another
            than A16 its y is in the model's dtype, and tokens come already multiplied where the router's
            weight is on the input.
        weighs: True when `compute` multiplies by the router's weights and sums over a token's experts;
            else its y is ``[tokens, top_k, hidden]`` and both are left to the finalize step.
        tactic: ``tactic(prepared, tokens)``: what it launches for so many tokens, in few words, or who
            chooses that where a library does not tell (`chosen_by`); empty where there is no choice.
        masks_padding: True when it reads no lane of the weights past the logical sizes as a number, so that
            they may hold anything; else they are zeros, as layouts leave them.
        tiled: it reads scales of tokens in tiles of 128 x 4 (`quantize.in_tiles`); else row by row.
        input_scale: the one number of a layer by which tokens are quantized, in a tensor where the layer
            is: of NVFP4 tokens, and of static formats. None: the format's own scales are all.
        workspace: ``workspace(prepared, tokens, form)``, most bytes of a call beside its arguments and its
            result; of the batched form `tokens` are the rows of one expert. None: it does not say.
    """

    name: str
    layout: str | Callable[[MoEProblem], str] | None
    compute: Run | None
    refusal: Callable[[MoEProblem, torch.device], str]
    accumulation: str = "fp32"
    capturable: bool = True
    ready: Callable[[PreparedMoE], object] = lambda prepared: None
    monolithic: Run | None = None
    batched: Run | None = None
    wants: ActFormat | Callable[[MoEProblem], ActFormat] = A16
    weighs: bool = True
    tactic: Callable[[PreparedMoE, int], str] = lambda prepared, tokens: ""
    masks_padding: bool = False
    tiled: bool = False
    input_scale: Callable[[PreparedMoE], Tensor | None] = lambda prepared: None
    workspace: Callable[[PreparedMoE, int, ActivationFormat], int] | None = None

    def in_form(self, form: ActivationFormat) -> Run | None:
        """What computes in `form`, or None."""
        found: Run | None = getattr(self, form.value)
        return found

    @property
    def forms(self) -> tuple[ActivationFormat, ...]:
        """The forms that it has, its own first."""
        return tuple(form for form in ActivationFormat if self.in_form(form) is not None)

    def layout_of(self, problem: MoEProblem) -> str | None:
        """The layout in which it reads `problem`'s weights; None when any will do."""
        return self.layout(problem) if callable(self.layout) else self.layout

    def wants_of(self, problem: MoEProblem) -> ActFormat:
        """The activation format in which it takes `problem`'s tokens."""
        return self.wants(problem) if callable(self.wants) else self.wants

    def accept(self, prepared: PreparedMoE) -> None:
        """Raises NoBackend when the layer is where no kernel runs, in another layout, or refused."""
        if prepared.device.type not in DEVICES:
            raise NoBackend(
                f"there is no kernel for {prepared.device.type} devices; kernels here run on "
                f"{' and '.join(DEVICES.values())}"
            )
        wanted = self.layout_of(prepared.problem)
        if wanted is not None and prepared.layout != wanted:
            raise NoBackend(
                f"the {self.name} backend reads layout {wanted}, got weights in {prepared.layout}",
                hint="prepare the layer for this backend",
            )
        reason = self.refusal(prepared.problem, prepared.device)
        if reason:
            raise NoBackend(f"the {self.name} backend cannot run this layer: {reason}")


DEVICES = {"cuda": "GPUs that torch calls cuda", "cpu": "the CPU"}
"""Kinds of torch devices with kernels; TPUs and other platforms of plug-ins have none."""


def check_tokens(prepared: PreparedMoE, x: Tensor, **others: Tensor | None) -> None:
    """Raises UsageError when `x` does not fit the layer, or it and `others` are not where the layer is."""
    problem = prepared.problem
    if x.ndim != 2 or x.shape[1] != problem.dims.hidden:
        raise UsageError(f"x must be [tokens, {problem.dims.hidden}], got {list(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(f"x must be torch.bfloat16 or torch.float16, got {x.dtype}; cast it before the call")
    given = {"x": x, **{name: t for name, t in others.items() if t is not None}}
    devices = {t.device for t in given.values()} | {prepared.device}
    if len(devices) > 1:
        places = ", ".join(sorted(str(d) for d in devices))
        raise UsageError(f"{', '.join(given)} and the layer must be on one device, got {places}")


def check_arguments(
    prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, experts: int | None = None
) -> None:
    """Raises UsageError when tensors do not fit the layer or each other.

    `experts` are those that ids may name; None: the ones of the layer that are here.
    """
    problem, wanted = prepared.problem, (len(x), prepared.problem.top_k)
    check_tokens(prepared, x, ids=ids, weights=weights)
    for name, tensor, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        if tuple(tensor.shape) != wanted:
            raise UsageError(f"{name} must be {list(wanted)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype:
            raise UsageError(f"{name} must be {dtype}, got {tensor.dtype}; cast it before the call")
    known = experts or problem.local_experts
    # Reading ids back from a GPU would stall it, and is not possible inside a CUDA graph.
    if ids.device.type == "cpu" and len(ids) and int(ids.max()) >= known:
        whose = "the layer's experts" if experts else "the experts here"
        raise UsageError(f"ids must be below {known}, {whose}; got {int(ids.max())}")
