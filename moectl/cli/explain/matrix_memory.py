"""Memory of one GPU below a matrix: weights for each deployment, and the smallest TP at which they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...explain.decision_matrix import DecisionMatrix
from ...explain.rank_memory import TENSOR_PARALLEL, RankMemory
from ...oracle.registry import engine_named
from ...problem.moe_problem import Parallel
from ..output import gib
from ..text_blocks import Block, Heading, LabelledValues
from .matrix_text import parallel_name

_SOURCES = {"headers": "", "config": "other weights are estimated from config.json"}
"""What to say of other weights, by how they are known."""


def memory_blocks(matrix: DecisionMatrix) -> Iterator[Block]:
    """Weights on one GPU by deployment, then from which TP on each GPU has room; nothing if unknown."""
    count = len(matrix.parallels)
    rows = []
    for number, parallel in enumerate(matrix.parallels):
        memories = [memory for memory in matrix.memories[number::count] if memory]
        if memories:
            rows.append((parallel_name(parallel), _weights(memories)))
    fits = tuple(_fits(matrix))
    if not rows:
        return
    engine = engine_named(matrix.question.policy.name)
    share = (
        f"; {engine.title} fills {engine.memory_share:.2g} of its memory ({engine.memory_option})"
        if engine.memory_option
        else ""
    )
    note = "other weights are not listed here, and not counted"
    if matrix.other_weights is not None:
        note = _SOURCES[matrix.other_weights.source]
    yield Heading(f"weights per GPU{share}", 3)
    yield LabelledValues(
        (*rows, *(("fits", line) for line in fits), ("note", note)), strong=frozenset({"fits"})
    )


def _weights(memories: Iterable[RankMemory]) -> str:
    """``71.3 GiB experts + 2.1 GiB others``; from the least to the most padded GPU if they differ."""
    experts = _span(memory.experts for memory in memories)
    others = [memory.others for memory in memories if memory.others is not None]
    return f"{experts} experts + {_span(others)} other weights" if others else f"{experts} experts"


def _span(sizes: Iterable[int]) -> str:
    """The least and the greatest of `sizes`, once if they print alike."""
    ordered = sorted(sizes)
    return " to ".join(dict.fromkeys(gib(nbytes) for nbytes in (ordered[0], ordered[-1])))


def _fits(matrix: DecisionMatrix) -> Iterator[str]:
    """``from TP 2 on h200 (141 GiB); from TP 4 on h100 (80 GiB)``, a line for each PP, DP and EP."""
    count = len(matrix.parallels)
    kinds: dict[Parallel, int] = {}
    for number, parallel in enumerate(matrix.parallels):
        kinds.setdefault(replace(parallel, tp=1), number)
    for kind, number in kinds.items():
        by_size: dict[int | None, list[str]] = {}
        for machine, memory in zip(matrix.machines, matrix.memories[number::count], strict=True):
            if memory is not None and memory.device is not None:
                name = f"{machine.key or machine.device.name} ({gib(memory.device)})"
                by_size.setdefault(memory.smallest_tp, []).append(name)
        ordered = sorted(by_size.items(), key=lambda item: item[0] or TENSOR_PARALLEL[-1] + 1)
        with_kind = parallel_name(kind).removeprefix("TP 1").strip()
        parts = [
            f"{f'from TP {size}' if size else f'at no TP up to {TENSOR_PARALLEL[-1]}'} on {', '.join(names)}"
            for size, names in ordered
        ]
        if parts:
            yield f"{f'with {with_kind}: ' if with_kind else ''}{'; '.join(parts)}"
