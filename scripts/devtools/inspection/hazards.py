"""Registers that are touched while a wgmma that may still be running needs them.

A wgmma runs on after it was issued, until a ``WARPGROUP.DEPBAR`` has waited for its group (a group ends
at the wgmma marked ``gsb0``). Until then its A operand, where that is in registers, must not be written,
and its result neither read nor written, except by another wgmma. ptxas does not always keep to the first:
code that Triton 3.6.0 makes of a pipelined loop overwrites A operands in flight.

All paths through the code are followed, over loop edges too. Where paths meet, a wgmma is in flight when it
is on one of them. Predicates count as true and every jump as possible, so that a hazard on a path that
cannot be taken is still named. Jumps to computed addresses are followed where nvdisasm lists them; code that
is behind others is found by `SassCode.unreached`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .sass import Instruction, SassCode

WGMMA = ("HGMMA", "QGMMA", "IGMMA")
A_REGISTERS = 4
"""A warp's share of an A operand, 64 rows deep 32 bytes: 16 rows, four 32-bit registers a lane."""

MOST_GROUPS = 8
"""Groups that are told apart; `WARPGROUP.DEPBAR` counts to seven."""

Flying = tuple[frozenset[int], ...]
"""Wgmmas in flight by their place: the group that is not ended yet, then ended ones, youngest first."""

NOTHING: Flying = (frozenset(),)


@dataclass(frozen=True)
class Hazard:
    """An instruction that touches what a wgmma in flight needs: its A operand, or its result."""

    instruction: str
    wgmma: str
    what: str

    def __str__(self) -> str:
        return f"{self.instruction} touches {self.what} of {self.wgmma}"


def a_registers(wgmma: Instruction) -> frozenset[int]:
    """Registers of the A operand; none when it comes from shared memory."""
    found = re.match(r"R(\d+)", wgmma.operands[1])
    return frozenset(range(int(found[1]), int(found[1]) + A_REGISTERS)) if found else frozenset()


def result_registers(wgmma: Instruction) -> frozenset[int]:
    """Registers of the 64 x n accumulator: ``n / 2`` a lane in 32 bits, ``n / 4`` in fp16."""
    shape, result = wgmma.op.split(".")[1:3]
    columns, first = int(shape.split("x")[1]), int(wgmma.operands[0][1:])
    return frozenset(range(first, first + columns // (4 if result == "F16" else 2)))


def hazards(code: SassCode) -> tuple[Hazard, ...]:
    """Every pair of an instruction and a wgmma in flight whose registers it must not touch yet."""
    places = code.instructions
    wgmmas = {n: (a_registers(i), result_registers(i)) for n, i in enumerate(places) if i.family in WGMMA}
    if not wgmmas:
        return ()
    found: dict[tuple[int, int], str] = {}
    for place, flying in _reached(code, set(wgmmas)).items():
        instruction = places[place]
        if place in wgmmas or not instruction.named:
            continue
        for number in frozenset().union(*flying):
            a, result = wgmmas[number]
            if instruction.written & a:
                found[place, number] = "the A operand"
            elif instruction.named & result:
                found[place, number] = "the result"
    return tuple(Hazard(str(places[at]), str(places[n]), what) for (at, n), what in sorted(found.items()))


def _reached(code: SassCode, wgmmas: set[int]) -> dict[int, Flying]:
    """For each place that is reached from the first: the wgmmas that may be in flight before it."""
    before: dict[int, Flying] = {0: NOTHING}
    todo = [0]
    while todo:
        place = todo.pop()
        after = _after(code.instructions[place], place in wgmmas, place, before[place])
        for following in code.following[place]:
            known = before.get(following)
            joined = after if known is None else _joined(known, after)
            if joined != known:
                before[following] = joined
                todo.append(following)
    return before


def _after(instruction: Instruction, is_wgmma: bool, place: int, flying: Flying) -> Flying:
    """What is in flight once `instruction` was issued."""
    if is_wgmma:
        open_group = flying[0] | {place}
        if "gsb0" not in instruction.operands:
            return (open_group, *flying[1:])
        ended = (open_group, *flying[1:])
        if len(ended) > MOST_GROUPS:
            ended = (*ended[: MOST_GROUPS - 1], frozenset().union(*ended[MOST_GROUPS - 1 :]))
        return (frozenset(), *ended)
    if instruction.op.startswith("WARPGROUP.DEPBAR"):
        return flying[: 1 + int(instruction.operands[-1], 16)]
    return flying


def _joined(one: Flying, other: Flying) -> Flying:
    """What may be in flight where two paths meet, group by group from the youngest."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return (*(a | b for a, b in zip(longer, shorter, strict=False)), *longer[len(shorter) :])
