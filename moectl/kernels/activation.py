"""Activation functions between the two GEMMs, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import NoBackend, UsageError
from ..lazy_torch import Tensor, torch
from ..problem.moe_problem import Activation


def silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def _swigluoai(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    alpha = 1.0 if activation.alpha is None else activation.alpha
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _swiglustep(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Step-3.5: the gate is limited after silu."""
    gate, limit = silu(gate), activation.limit
    return gate * up if limit is None else gate.clamp(max=limit) * up.clamp(-limit, limit)


def _soft_limit(t: Tensor, beta: float | None) -> Tensor:
    """``beta * tanh(t / beta)``: close to `t` near zero, bounded by `beta`; `t` itself for None."""
    return t if beta is None else beta * torch.tanh(t / beta)


def _situ(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Kimi-K3: sigmoid(gate) times softly limited gate times softly limited up (vLLM's situ_and_mul)."""
    return torch.sigmoid(gate) * _soft_limit(gate, activation.beta) * _soft_limit(up, activation.linear_beta)


GATED: Mapping[str, Callable[[Tensor, Tensor, Activation], Tensor]] = {
    "silu": lambda gate, up, activation: silu(gate) * up,
    "swigluoai": _swigluoai,
    "swiglustep": _swiglustep,
    "gelu": lambda gate, up, activation: gelu(gate) * up,
    "gelu_tanh": lambda gate, up, activation: gelu(gate, approximate="tanh") * up,
    "situ": _situ,
}
"""Functions of gated experts by the name in `Activation.name`."""

UNGATED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: torch.relu(x).square(),
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}
"""Functions of experts without a gate."""

LIMITED_BEFORE = frozenset(("silu", "swigluoai"))
"""Functions whose limit clamps their arguments: gate from above, up on both sides."""


def unknown(activation: Activation) -> str:
    """Why `activation` cannot be computed here, a clause; empty when it can."""
    known = GATED if activation.gated else UNGATED
    if activation.name in known:
        return ""
    kind = "gated experts" if activation.gated else "experts without a gate"
    return f"activation {activation.name} of {kind} is not one of {', '.join(known)}"


def split_rows(h13: Tensor, rows: str) -> tuple[Tensor, Tensor]:
    """(gate, up) halves ``[..., intermediate]`` of `h13` ``[..., 2 * intermediate]`` in `rows` order."""
    if rows == "interleaved":
        return h13[..., 0::2], h13[..., 1::2]
    if rows == "concatenated":
        half = h13.shape[-1] // 2
        return h13[..., :half], h13[..., half:]
    raise UsageError(f"row order must be 'interleaved' or 'concatenated', got {rows!r}")


def activate(h13: Tensor, activation: Activation, rows: str) -> Tensor:
    """``[..., intermediate]`` activations of the first GEMM's output.

    `h13` is ``[..., 2 * intermediate]`` in `rows` order, or ``[..., intermediate]`` for experts without a
    gate. Raises NoBackend for an activation that is in neither table.

    Example:
        >>> activate(torch.tensor([[0.0, 2.0, 3.0, 4.0]]), Activation("silu"), "concatenated")
        tensor([[0.0000, 7.0464]])
    """
    reason = unknown(activation)
    if reason:
        raise NoBackend(reason)
    if not activation.gated:
        return UNGATED[activation.name](h13)
    gate, up = split_rows(h13, rows)
    if activation.limit is not None and activation.name in LIMITED_BEFORE:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return GATED[activation.name](gate, up, activation)
