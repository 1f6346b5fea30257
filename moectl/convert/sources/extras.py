"""What tensors that carry no weights must say: sizes, the order of columns, zeros of symmetric codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...problem import MoEProblem
from ..canonical import groups


def _columns(stored: str, problem: MoEProblem) -> int:
    """Reduction columns of the matrix that a stored role belongs to."""
    return problem.dims.intermediate if stored.startswith("w2") else problem.dims.hidden


def _rows(stored: str, problem: MoEProblem) -> int:
    """Output rows of the matrix that a stored role belongs to."""
    if stored.startswith("w2"):
        return problem.dims.hidden
    return problem.dims.intermediate * (2 if stored.startswith("w13") and problem.activation.gated else 1)


def sizes_of(stored: str, problem: MoEProblem, shape: tuple[int, ...], less: bool) -> Tensor:
    """``[rows, columns]`` of the weights."""
    return torch.tensor((_rows(stored, problem), _columns(stored, problem)))


def order_of(stored: str, problem: MoEProblem, shape: tuple[int, ...], less: bool) -> Tensor:
    """The group of every column, in the columns' own order."""
    columns = _columns(stored, problem)
    return torch.arange(columns) // (columns // groups(problem.scheme.weight, columns))


def zeros_of(stored: str, problem: MoEProblem, shape: tuple[int, ...], less: bool) -> Tensor:
    """32-bit words of the middle code, or of the one below it where zero points are stored less one."""
    bits = problem.scheme.weight.bits
    code = (1 << (bits - 1)) - less
    word = sum(code << at for at in range(0, 32, bits))
    return torch.full(shape, word - (1 << 32) if word >> 31 else word)


def no_bias(stored: str, problem: MoEProblem, shape: tuple[int, ...], less: bool) -> Tensor:
    """Zeros."""
    return torch.zeros(shape)


EXTRAS: Mapping[str, Callable[[str, MoEProblem, tuple[int, ...], bool], Tensor]] = {
    "shape": sizes_of,
    "order": order_of,
    "zero": zeros_of,
    "bias": no_bias,
}
"""What one expert's tensor of a kind must hold, from its stored role, the problem, its shape and whether
zero points are stored less one."""

_WRONG: Mapping[str, str] = {
    "shape": "says {got}, but its weight is {expected}",
    "order": "puts columns into groups out of their order (act order), which cannot be converted or run",
    "zero": "holds zero points other than the middle code, but the config says that codes are symmetric",
    "bias": "is not all zeros, but the experts have no biases as the config describes them",
}


def extra_values(stored: str, problem: MoEProblem, shape: tuple[int, ...], less: bool) -> Tensor:
    """What one expert's tensor of role `stored` and `shape` must hold."""
    return EXTRAS[stored.partition("_")[2]](stored, problem, shape, less)


def check_extra(stored: str, problem: MoEProblem, values: Tensor, less: bool) -> str:
    """What is wrong with one expert's `values`, a clause about the tensor; empty when they are right.

    The order of columns is left alone where the config says that it changes nothing.
    """
    kind = stored.partition("_")[2]
    if kind == "order" and problem.act_order == "weight":
        return ""
    expected = extra_values(stored, problem, tuple(values.shape), less)
    if torch.equal(values.to(expected.dtype), expected):
        return ""
    return _WRONG[kind].format(
        got=values.tolist() if kind == "shape" else "", expected=expected.tolist() if kind == "shape" else ""
    )
