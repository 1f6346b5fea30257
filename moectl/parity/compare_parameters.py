"""Two sets of parameters, matched by name or by layer and role, and compared byte by byte."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..dtypes import ONE_BYTE
from .parameter_dump import ParameterRecord

_LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")
_LEAF = re.compile(r"(?:^|[._])(w13|w2)(?:_(\w+))?$")

KINDS: Mapping[str, str] = {
    **dict.fromkeys(("", "weight", "weight_packed", "qweight"), ""),
    **dict.fromkeys(("scale", "weight_scale", "weight_scale_inv", "scales"), "_scale"),
    **dict.fromkeys(("zero", "weight_zero_point", "qzeros", "zeros"), "_zero"),
    **dict.fromkeys(("global", "weight_scale_2", "weight_global_scale"), "_global"),
    **dict.fromkeys(("input", "input_scale", "input_global_scale"), "_input"),
    "input_global": "_input_global",
    "bias": "_bias",
}
"""Canonical suffixes of roles by what engines append to the name of a matrix."""


@dataclass(frozen=True)
class ParameterPair:
    """Two parameters that stand for the same numbers, or one that has no other.

    Attributes:
        a, b: their names; empty for a missing one.
        status: ``equal``, ``differs``, ``only a`` or ``only b``.
        differences: what differs, each as a clause; empty if nothing does.
        first: index of the first element that differs, in row-major order; None if none does, or the
            shapes differ.
        count: number of elements that differ.
        sha256: hashes of both.
        expert: whether it is an expert's, by its name.
    """

    a: str
    b: str
    status: str
    differences: tuple[str, ...] = ()
    first: tuple[int, ...] | None = None
    count: int = 0
    sha256: tuple[str, str] = ("", "")
    expert: bool = True


def role_of(name: str) -> tuple[int | None, str] | None:
    """Layer number and role of an engine's parameter; None for a name that is no expert's.

    Example:
        >>> role_of("model.layers.3.mlp.experts.w13_weight_packed")
        (3, 'w13')
        >>> role_of("model.layers.3.mlp.gate.weight")
    """
    leaf = _LEAF.search(name)
    if not leaf or (leaf[2] or "") not in KINDS:
        return None
    number = _LAYER.search(name)
    return (int(number[1]) if number else None), leaf[1] + KINDS[leaf[2] or ""]


def compared(a: Mapping[str, ParameterRecord], b: Mapping[str, ParameterRecord]) -> list[ParameterPair]:
    """Every parameter of `a` and `b`: those with the same name or the same layer and role are compared.

    A name without a layer's number matches any layer.
    """
    pairs = []
    left = dict(b)
    for name, record in a.items():
        other = _match(name, left)
        if other is None:
            pairs.append(ParameterPair(name, "", "only a", expert=role_of(name) is not None))
        else:
            pairs.append(compared_pair(record, left.pop(other)))
    pairs += [ParameterPair("", name, "only b", expert=role_of(name) is not None) for name in left]
    return pairs


def _match(name: str, others: Mapping[str, ParameterRecord]) -> str | None:
    if name in others:
        return name
    role = role_of(name)
    if role is None:
        return None
    for other in others:
        found = role_of(other)
        if found and found[1] == role[1] and (None in (found[0], role[0]) or found[0] == role[0]):
            return other
    return None


def compared_pair(a: ParameterRecord, b: ParameterRecord) -> ParameterPair:
    """Compares two parameters; dtypes of one byte are alike, since engines name them differently."""
    differences = []
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= _BYTES:
        differences.append(f"dtype {a.dtype}, {b.dtype}")
    if a.shape != b.shape:
        differences.append(f"shape {list(a.shape)}, {list(b.shape)}")
    if a.shape == b.shape and None not in (a.stride, b.stride) and not _same_strides(a, b):
        differences.append(f"strides {list(a.stride or ())}, {list(b.stride or ())}")
    first, count = None, 0
    left, right = a.read(), b.read()
    hashes = a.sha256, b.sha256
    if left.numel() != right.numel():
        differences.append(f"{left.numel()} and {right.numel()} bytes")
    elif hashes[0] != hashes[1]:
        elements = max(1, torch.Size(a.shape).numel())
        unequal = (left != right).reshape(elements, -1).any(1)
        count = int(unequal.sum())
        first = tuple(int(i) for i in torch.unravel_index(unequal.int().argmax(), a.shape)) if a.shape else ()
        differences.append(f"{count} of {elements} elements, the first at {list(first)}")
    status = "differs" if differences else "equal"
    return ParameterPair(a.name, b.name, status, tuple(differences), first, count, hashes)


_BYTES = frozenset({*ONE_BYTE, "U8", "F4"})


def _same_strides(a: ParameterRecord, b: ParameterRecord) -> bool:
    """Whether elements lie alike; strides of axes of one element mean nothing."""
    assert a.stride is not None and b.stride is not None
    pairs = zip(a.shape, a.stride, b.stride, strict=True)
    return all(size == 1 or one == other for size, one, other in pairs)
