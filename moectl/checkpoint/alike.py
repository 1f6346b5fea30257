"""Experts that are all alike, told from columns of names without looking at their tensors one by one."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress

from ..files.tensor_table import TensorTable

EXPERTS_MARK = ".experts."
"""What stands between a layer's name and an expert's number."""


_NUMBER = re.compile(r"\.experts\.(\d{1,6})\.", re.ASCII)


@dataclass
class Alike:
    """Experts 0 to `count` - 1 of one place: each has the same `leaves`, each leaf one dtype and shape."""

    count: int
    leaves: list[str] = field(default_factory=list)


def alike_experts(tensors: TensorTable) -> tuple[Mapping[str, Alike], list[str]]:
    """The places whose experts are all there and alike, by what their names begin with, and all other names.

    A place begins as in ``model.layers.3.mlp.experts.``. One where anything is odd (an expert or tensor
    missing, another dtype or shape, a number with a leading zero, a tensor of no expert) is left out.
    """
    of_experts = [EXPERTS_MARK in name for name in tensors]
    columns = _columns(list(compress(tensors, of_experts)))
    if columns is None:
        # Some layers have experts in one tensor, whose names hold no number.
        of_experts = [_NUMBER.search(name) is not None for name in tensors]
        columns = _columns(list(compress(tensors, of_experts)))
    if columns is None:
        return {}, list(tensors)
    heads, numbers, leaves = columns
    kinds = compress(tensors.kinds, of_experts)
    experts: dict[str, dict[str, int]] = defaultdict(dict)
    for (head, number), held in Counter(zip(heads, numbers, strict=True)).items():
        experts[head][number] = held
    places = {
        head: Alike(len(found))
        for head, found in experts.items()
        if all(str(expert) in found for expert in range(len(found)))
    }
    for (head, leaf, _), held in Counter(zip(heads, leaves, kinds, strict=True)).items():
        if head in places and held == places[head].count:
            places[head].leaves.append(leaf)
        else:
            places.pop(head, None)
    for head, found in experts.items():
        if head in places and set(found.values()) != {len(places[head].leaves)}:
            del places[head]
    taken = set(places)
    others = [name for name, known in zip(tensors, of_experts, strict=True) if not known]
    if len(taken) < len(experts):
        named = compress(tensors, of_experts)
        others += [name for name, head in zip(named, heads, strict=True) if head not in taken]
    return {head + EXPERTS_MARK: place for head, place in places.items()}, others


def _columns(names: list[str]) -> tuple[list[str], list[str], list[str]] | None:
    """For each name what stands before the mark, the expert's number and the rest; None where one has none.

    The names are cut all at once: a piece between two numbers ends one name and begins the next, and there
    are few different ones.
    """
    pieces = _NUMBER.split("\n".join(names))
    if not names or len(pieces) != 2 * len(names) + 1:
        return None
    cut = {piece: piece.split("\n") for piece in pieces[2:-1:2]}
    if any(len(halves) != 2 for halves in cut.values()):
        return None
    between = list(map(cut.__getitem__, pieces[2:-1:2]))
    heads = [pieces[0], *(head for _, head in between)]
    leaves = [*(leaf for leaf, _ in between), pieces[-1]]
    return heads, pieces[1::2], leaves
