"""What both FlashInfer runners share: its functions, numbers for each expert, tokens as wide as weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...capabilities.flashinfer import FlashInferKernel, function_of
from ...errors import BackendFailed, NoBackend
from ...problem.moe_problem import Dims, MoEProblem
from ...problem.padding import pad
from ..prepared_layer import PreparedMoE

Arguments = dict[str, Any]

FUSED_MOE = "flashinfer.fused_moe"
ENUMS = "flashinfer.tllm_enums"
TUNER = "flashinfer.autotuner"


@cache
def function(name: str) -> Callable[..., Any]:
    """FlashInfer's fused MoE function called `name`; NoBackend when there is no such FlashInfer."""
    found: Callable[..., Any] = _attribute(FUSED_MOE, name)
    return found


@cache
def member(enum: str, name: str) -> Any:
    """The member `name` of FlashInfer's `enum`; NoBackend when there is no such FlashInfer."""
    kind = _attribute(ENUMS, enum)
    try:
        return kind[name]
    except KeyError as error:
        raise NoBackend(
            f"the installed FlashInfer has no {enum}.{name}", hint="pip install -U flashinfer-python"
        ) from error


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NoBackend(
            f"there is no {module}.{name} here: {error}", hint="pip install flashinfer-python"
        ) from error


def call(backend: str, name: str, arguments: Mapping[str, Any], hidden: int) -> Tensor:
    """``[tokens, hidden]`` output of FlashInfer's function `name`, without padded columns.

    Raises BackendFailed when FlashInfer refuses the arguments or breaks.
    """
    run = function(name)
    try:
        made = run(**arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, OSError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise BackendFailed(backend, f"{name}: {said[-1]}") from error
    y: Tensor = made[0] if isinstance(made, list | tuple) else made
    return y[:, :hidden].contiguous()


def tuned_for(tokens: int) -> int:
    """The number of tokens at which tactics for a call of `tokens` are timed: a power of two, not above."""
    return 1 << max(tokens, 1).bit_length() - 1


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """Who chooses what runs inside `choosing_tactics`; FlashInfer does not tell what it is."""
    return f"chosen by its tuner at {tuned_for(tokens)} tokens"


@contextmanager
def choosing_tactics(prepared: PreparedMoE, backend: str, tokens: int) -> Iterator[None]:
    """In here FlashInfer runs what its tuner has found fastest for the layer's shape and about `tokens`.

    It times its tactics at a layer's first call of each power of two; a call that is being captured in a
    CUDA graph times nothing, and runs what an earlier one of such a shape has found, else the first tactic.

    FlashInfer's tuner has one mode for the whole process: while a call searches, other threads' calls of the
    library do, too. It counts who asked for that, so that its mode is what it was when the call has ended,
    whether it failed or not, also inside a caller's own ``autotune``; numbers of tokens are a thread's own.
    """
    power = tuned_for(tokens)
    known: set[int] = prepared.derived.setdefault(f"{backend} tactics", set())
    capturing = prepared.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    search = not capturing and power not in known
    with _attribute(TUNER, "autotune")(search, tuning_buckets=(power,)):
        yield
    if search:
        known.add(power)


def sizes_of(prepared: PreparedMoE) -> Dims:
    """The layer's sizes, with padded ones as its stored weights have them."""
    return pad(prepared.layout, prepared.problem).dims


def widened(t: Tensor, columns: int) -> Tensor:
    """`t` ``[tokens, n]`` in contiguous rows of `columns`, zeros at the end."""
    return torch.nn.functional.pad(t, (0, columns - t.shape[1])) if t.shape[1] < columns else t.contiguous()


def weighted(problem: MoEProblem, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and router weights for kernels that multiply outputs only: top-1 weights go to the tokens."""
    if not problem.routing.weight_on_input:
        return x, weights
    return (x.float() * weights).to(x.dtype), torch.ones_like(weights)


def per_expert(problem: MoEProblem, value: float | None, device: torch.device) -> Tensor | None:
    """``[local_experts]`` fp32 of `value`; None for None."""
    return None if value is None else torch.full((problem.local_experts,), float(value), device=device)


def activation_numbers(problem: MoEProblem, device: torch.device) -> dict[str, Tensor | None]:
    """alpha, beta and limit of the layer's activation function as ``[local_experts]`` fp32 or None."""
    found = function_of(problem.activation)
    assert found is not None, "refused before"
    numbers = found.numbers(problem.activation)
    return {name: per_expert(problem, value, device) for name, value in numbers.items()}


def activation_member(problem: MoEProblem) -> Any:
    """FlashInfer's ``ActivationType`` of the layer."""
    found = function_of(problem.activation)
    assert found is not None, "refused before"
    return member("ActivationType", found.member)


def kept(prepared: PreparedMoE, backend: str, make: Callable[[PreparedMoE], Arguments]) -> Arguments:
    """Arguments that follow from the layer alone; made once and kept with it."""
    made: Arguments | None = prepared.derived.get(backend)
    if made is None:
        made = prepared.derived[backend] = make(prepared)
    return made


def no_kernel(kernels: tuple[FlashInferKernel, ...], problem: MoEProblem) -> str:
    """The clause for a pair of number formats that no row of `kernels` has."""
    pairs = "; ".join(dict.fromkeys(kernel.names for kernel in kernels))
    return f"it has kernels for {pairs}, the layer is {problem.scheme}"
