"""Shared by both FlashInfer runners: calling its functions, autotuning, per-expert parameters, padding."""

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
    """FlashInfer's fused MoE function `name`; NoBackend if FlashInfer is missing or does not have it."""
    fused_moe: Callable[..., Any] = _attribute(FUSED_MOE, name)
    return fused_moe


@cache
def member(enum: str, name: str) -> Any:
    """The member `name` of FlashInfer's `enum`; NoBackend if FlashInfer is missing or does not have it."""
    try:
        return _attribute(ENUMS, enum)[name]
    except KeyError as error:
        raise NoBackend(
            f"the installed FlashInfer has no {enum}.{name}", hint="pip install -U flashinfer-python"
        ) from error


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NoBackend(
            f"{module}.{name} cannot be imported: {error}", hint="pip install flashinfer-python"
        ) from error


def call(backend: str, name: str, arguments: Mapping[str, Any], hidden: int) -> Tensor:
    """``[tokens, hidden]`` output of FlashInfer's function `name`, without padded columns.

    Raises BackendFailed if FlashInfer rejects the arguments or fails.
    """
    fused_moe = function(name)
    try:
        outputs = fused_moe(**arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BackendFailed(backend, f"{name}: {lines[-1]}") from error
    y: Tensor = outputs[0] if isinstance(outputs, list | tuple) else outputs
    return y[:, :hidden].contiguous()


def tuning_bucket(tokens: int) -> int:
    """The number of tokens at which tactics for `tokens` tokens are timed: a power of two, rounded down."""
    return 1 << max(tokens, 1).bit_length() - 1


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """Who chooses the kernel inside `autotuned`; FlashInfer does not report which one it is."""
    return f"chosen by its tuner at {tuning_bucket(tokens)} tokens"


@contextmanager
def autotuned(prepared: PreparedMoE, backend: str, tokens: int) -> Iterator[None]:
    """Context in which FlashInfer runs the tactic that its tuner found fastest at about `tokens` tokens.

    Tactics are timed in a layer's first call of each power of two. A call that is being captured in a CUDA
    graph times nothing: it runs the tactic found by an earlier call of that shape, else the first tactic.

    FlashInfer's tuning mode is global to the process: while a call tunes, calls in other threads tune, too.
    The mode is reference-counted, so it is restored when the call ends, by an error as well, and inside a
    caller's own ``autotune``. The tuning buckets are thread-local.
    """
    bucket = tuning_bucket(tokens)
    timed: set[int] = prepared.derived.setdefault(f"{backend} tactics", set())
    capturing = prepared.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    tune = not capturing and bucket not in timed
    with _attribute(TUNER, "autotune")(tune, tuning_buckets=(bucket,)):
        yield
    if tune:
        timed.add(bucket)


def padded_dims(prepared: PreparedMoE) -> Dims:
    """The layer's sizes, including the padded sizes of its stored weights."""
    return pad(prepared.layout, prepared.problem).dims


def pad_columns(t: Tensor, columns: int) -> Tensor:
    """`t` ``[tokens, n]`` zero-padded to contiguous ``[tokens, columns]``."""
    return torch.nn.functional.pad(t, (0, columns - t.shape[1])) if t.shape[1] < columns else t.contiguous()


def apply_input_weights(problem: MoEProblem, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and router weights for kernels that weight outputs only.

    If the layer applies its (top-1) weights to the input, the tokens are multiplied here and the weights
    become ones.
    """
    if not problem.routing.weight_on_input:
        return x, weights
    return (x.float() * weights).to(x.dtype), torch.ones_like(weights)


def per_expert(problem: MoEProblem, value: float | None, device: torch.device) -> Tensor | None:
    """``[local_experts]`` fp32 filled with `value`; None for None."""
    return None if value is None else torch.full((problem.local_experts,), float(value), device=device)


def activation_parameters(problem: MoEProblem, device: torch.device) -> dict[str, Tensor | None]:
    """alpha, beta and limit of the layer's activation function, each ``[local_experts]`` fp32 or None."""
    activation = function_of(problem.activation)
    assert activation is not None, "rejected before"
    parameters = activation.numbers(problem.activation)
    return {name: per_expert(problem, value, device) for name, value in parameters.items()}


def activation_member(problem: MoEProblem) -> Any:
    """The member of FlashInfer's ``ActivationType`` for the layer."""
    activation = function_of(problem.activation)
    assert activation is not None, "rejected before"
    return member("ActivationType", activation.member)


def formats_refusal(kernels: tuple[FlashInferKernel, ...], problem: MoEProblem) -> str:
    """The reason for rejecting a pair of number formats that none of `kernels` has, as a clause."""
    pairs = "; ".join(dict.fromkeys(kernel.names for kernel in kernels))
    return f"it has kernels for {pairs}; the layer is {problem.scheme}"
