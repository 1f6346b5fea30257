"""Finds shared memory that a thread releases before the other threads of its partition have finished with it.

Partitions of a kernel hand shared memory over by an mbarrier: all threads read or write, a barrier
(``BAR.SYNC``) waits for all of them, and one arrives (``SYNCS.ARRIVE``). If some path leads from a shared
access to an arrival without a barrier in between, the other side may be signalled too early, as only the
arriving thread is known to have made its access. compute-sanitizer's racecheck sees such races only if they
occur in a run, and reports some ordered accesses as races; this analysis follows all paths of the machine
code.

A wgmma reads shared memory on behalf of four warps, and a warp that has waited for it (``WARPGROUP.DEPBAR``)
only knows that its own part is done. The wait therefore counts as an access.

Predicates count as true and every jump as possible, as in `hazards`. Accesses by a thread's asynchronous
copies (``LDGSTS``) are ignored, as each thread signals their completion itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sass import Instruction, SassCode

ACCESSES = ("LDS", "LDSM", "STS", "STSM", "ATOMS")
WGMMA_WAIT = "WARPGROUP.DEPBAR"
BARRIER, ARRIVAL = "BAR.SYNC", "SYNCS.ARRIVE"
NEVER = "!PT"
"""Guard of instructions that never execute and only occupy a slot in the pipeline."""


@dataclass(frozen=True)
class Handover:
    """An arrival, and a shared access from which a path without a barrier leads to it."""

    arrival: str
    access: str

    def __str__(self) -> str:
        return f"{self.arrival} may precede other threads' {self.access}"


def is_access(instruction: Instruction) -> bool:
    """Whether it reads or writes shared memory, or waits for a wgmma that reads it."""
    accesses = instruction.family in ACCESSES or instruction.op.startswith(WGMMA_WAIT)
    return accesses and instruction.guard != NEVER


def early_handovers(code: SassCode) -> tuple[Handover, ...]:
    """Every pair of an arrival and a shared access that no barrier separates on some path."""
    instructions = code.instructions
    if not any(i.op.startswith(ARRIVAL) for i in instructions):
        return ()
    # For each instruction the accesses that may precede it without a barrier, as a bit mask of indices.
    before = {0: 0}
    pending = [0]
    while pending:
        index = pending.pop()
        instruction, after = instructions[index], before[index]
        if instruction.op.startswith(BARRIER) and not instruction.guard:
            after = 0
        elif is_access(instruction):
            after |= 1 << index
        for successor in code.following[index]:
            previous = before.get(successor)
            if previous is None or after & ~previous:
                before[successor] = after | (previous or 0)
                pending.append(successor)
    return tuple(
        Handover(str(instructions[index]), str(instructions[access]))
        for index, accesses in sorted(before.items())
        if instructions[index].op.startswith(ARRIVAL)
        for access in range(accesses.bit_length())
        if accesses >> access & 1
    )
