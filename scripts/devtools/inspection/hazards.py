"""Finds instructions that touch registers which a wgmma in flight still needs.

A wgmma is in flight from its issue until a ``WARPGROUP.DEPBAR`` has waited for its group (a group ends at the
wgmma marked ``gsb0``). Until then an A operand in registers must not be written, and the result must be
neither read nor written, except by another wgmma. ptxas sometimes violates the first rule: the code that
Triton 3.6.0 generates for a pipelined loop overwrites A operands in flight.

All paths through the code are followed, including loop back edges. Where paths join, a wgmma is in flight if
it is in flight on one of them. Predicates count as true and every jump as possible, so hazards on infeasible
paths are reported, too. Jumps to computed addresses are followed where nvdisasm lists their targets;
`SassCode.unreached` has the code behind other ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .sass import Instruction, SassCode, flow

WGMMA = ("HGMMA", "QGMMA", "IGMMA")
A_REGISTERS = 4
"""Registers per lane of an A operand of 64 rows by 32 bytes, of which a warp has 16 rows."""

MOST_GROUPS = 8
"""Groups that are distinguished; `WARPGROUP.DEPBAR` counts to seven."""

InFlight = tuple[frozenset[int], ...]
"""Wgmmas in flight by index: the open group, then the committed groups, youngest first."""

NOTHING: InFlight = (frozenset(),)


@dataclass(frozen=True)
class Hazard:
    """An instruction that touches what a wgmma in flight needs: its A operand, or its result."""

    instruction: str
    wgmma: str
    what: str

    def __str__(self) -> str:
        return f"{self.instruction} touches {self.what} of {self.wgmma}"


def a_registers(wgmma: Instruction) -> frozenset[int]:
    """Registers of the A operand; empty if it is in shared memory."""
    first = re.match(r"R(\d+)", wgmma.operands[1])
    return frozenset(range(int(first[1]), int(first[1]) + A_REGISTERS)) if first else frozenset()


def result_registers(wgmma: Instruction) -> frozenset[int]:
    """Registers of the 64 x n accumulator: ``n / 2`` a lane in 32 bits, ``n / 4`` in fp16."""
    shape, result = wgmma.op.split(".")[1:3]
    columns, first = int(shape.split("x")[1]), int(wgmma.operands[0][1:])
    return frozenset(range(first, first + columns // (4 if result == "F16" else 2)))


def hazards(code: SassCode) -> tuple[Hazard, ...]:
    """Every pair of an instruction and a wgmma in flight whose registers it must not touch yet."""
    instructions = code.instructions
    wgmmas = {
        index: (a_registers(instruction), result_registers(instruction))
        for index, instruction in enumerate(instructions)
        if instruction.family in WGMMA
    }
    if not wgmmas:
        return ()
    touched: dict[tuple[int, int], str] = {}
    for index, in_flight in _reached(code, set(wgmmas)).items():
        instruction = instructions[index]
        if index in wgmmas or not instruction.named:
            continue
        for wgmma in frozenset().union(*in_flight):
            a, result = wgmmas[wgmma]
            if instruction.written & a:
                touched[index, wgmma] = "the A operand"
            elif instruction.named & result:
                touched[index, wgmma] = "the result"
    return tuple(
        Hazard(str(instructions[index]), str(instructions[wgmma]), what)
        for (index, wgmma), what in sorted(touched.items())
    )


def _reached(code: SassCode, wgmmas: set[int]) -> dict[int, InFlight]:
    """The wgmmas that may be in flight before each reachable instruction, by index."""
    return flow(
        code,
        NOTHING,
        lambda index, in_flight: _after(code.instructions[index], index in wgmmas, index, in_flight),
        _joined,
    )


def _after(instruction: Instruction, is_wgmma: bool, index: int, in_flight: InFlight) -> InFlight:
    """What is in flight after `instruction` was issued."""
    if is_wgmma:
        open_group = in_flight[0] | {index}
        if "gsb0" not in instruction.operands:
            return (open_group, *in_flight[1:])
        committed = (open_group, *in_flight[1:])
        if len(committed) > MOST_GROUPS:
            committed = (*committed[: MOST_GROUPS - 1], frozenset().union(*committed[MOST_GROUPS - 1 :]))
        return (frozenset(), *committed)
    if instruction.op.startswith("WARPGROUP.DEPBAR"):
        return in_flight[: 1 + int(instruction.operands[-1], 16)]
    return in_flight


def _joined(a: InFlight, b: InFlight) -> InFlight:
    """What may be in flight where two paths join, group by group from the youngest."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return (*(x | y for x, y in zip(longer, shorter, strict=False)), *longer[len(shorter) :])
