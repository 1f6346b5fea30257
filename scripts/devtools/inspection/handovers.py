"""Shared memory that a thread releases before the other threads of its partition have finished with it.

Partitions of a kernel hand shared memory on by an mbarrier: all threads read or write, a barrier
(``BAR.SYNC``) waits for all of them, and one arrives (``SYNCS.ARRIVE``). An arrival that a shared access
reaches on some path without a barrier between tells the other side too early, for no thread but the one
that arrives is known to have made its access. compute-sanitizer's racecheck sees such a race only in the
accesses of a run, and takes some ordered ones for one; this follows all paths of the machine code.

A wgmma reads shared memory for the four warps that issue it together, and a warp that has waited for it
(``WARPGROUP.DEPBAR``) knows of its own part alone that it is done. That wait counts as an access.

Predicates count as true and every jump as possible, as in `hazards`. Accesses that the asynchronous copies
of a thread make (``LDGSTS``) are not looked at: each thread's own arrival follows those.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sass import Instruction, SassCode

ACCESSES = ("LDS", "LDSM", "STS", "STSM", "ATOMS")
WAITED = "WARPGROUP.DEPBAR"
BARRIER, ARRIVAL = "BAR.SYNC", "SYNCS.ARRIVE"
NEVER = "!PT"
"""Guard of instructions that are there for their place in the pipeline alone."""


@dataclass(frozen=True)
class Handover:
    """An arrival, and a shared access that reaches it without a barrier between."""

    arrival: str
    access: str

    def __str__(self) -> str:
        return f"{self.arrival} may come before other threads' {self.access}"


def is_access(instruction: Instruction) -> bool:
    """Whether it reads or writes shared memory, or ends what a wgmma reads of it."""
    accesses = instruction.family in ACCESSES or instruction.op.startswith(WAITED)
    return accesses and instruction.guard != NEVER


def early_handovers(code: SassCode) -> tuple[Handover, ...]:
    """Every pair of an arrival and a shared access that no barrier of threads stands between."""
    places = code.instructions
    if not any(i.op.startswith(ARRIVAL) for i in places):
        return ()
    # The accesses that can come before each instruction, as bits of an integer by their place.
    before = {0: 0}
    todo = [0]
    while todo:
        place = todo.pop()
        instruction, after = places[place], before[place]
        if instruction.op.startswith(BARRIER) and not instruction.guard:
            after = 0
        elif is_access(instruction):
            after |= 1 << place
        for following in code.following[place]:
            known = before.get(following)
            if known is None or after & ~known:
                before[following] = after | (known or 0)
                todo.append(following)
    return tuple(
        Handover(str(places[place]), str(places[access]))
        for place, reached in sorted(before.items())
        if places[place].op.startswith(ARRIVAL)
        for access in range(reached.bit_length())
        if reached >> access & 1
    )
