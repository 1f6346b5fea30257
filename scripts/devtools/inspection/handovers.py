"""Finds shared memory that a thread releases before the other threads of its partition have finished with it.

Partitions of a kernel hand shared memory over by an mbarrier: all threads read or write, a barrier
(``BAR.SYNC``) waits for all of them, and one arrives (``SYNCS.ARRIVE``). If some path leads from a shared
access to an arrival without a barrier in between, the other side may be signalled too early, as only the
arriving thread is known to have made its access. compute-sanitizer's racecheck sees such races only if they
occur in a run, and reports some ordered accesses as races; this analysis follows all paths of the machine
code.

A wgmma reads shared memory on behalf of four warps, and a warp that has waited for it (``WARPGROUP.DEPBAR``)
only knows that its own part is done. The wait therefore counts as an access.

Nor may a thread go to that barrier with a load in flight (`late_reads`): it has been issued, but where other
warps copy into shared memory by cp.async, it can wait behind those copies until the other side has written
anew. A load is known to be done once its result is used, or that of a later one, as they are done in order.
The arriving thread knows of other threads' loads if they were done before the barrier.

Predicates count as true and every jump as possible, as in `hazards`. Accesses by a thread's asynchronous
copies (``LDGSTS``) are ignored, as each thread signals their completion itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import or_

from .sass import Instruction, SassCode, flow

ACCESSES = ("LDS", "LDSM", "STS", "STSM", "ATOMS")
WGMMA_WAIT = "WARPGROUP.DEPBAR"
LOADS = ("LDS", "LDSM")
BARRIER, ARRIVAL, AWAIT = "BAR.SYNC", "SYNCS.ARRIVE", "SYNCS.PHASECHK"
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

    def accesses_after(index: int, before: int) -> int:
        """The accesses that may precede the next instruction without a barrier, as a bit mask of indices."""
        instruction = instructions[index]
        if instruction.op.startswith(BARRIER) and not instruction.guard:
            return 0
        return before | 1 << index if is_access(instruction) else before

    before = flow(code, 0, accesses_after, or_)
    return tuple(
        Handover(str(instructions[index]), str(instructions[access]))
        for index, accesses in sorted(before.items())
        if instructions[index].op.startswith(ARRIVAL)
        for access in range(accesses.bit_length())
        if accesses >> access & 1
    )


@dataclass(frozen=True)
class LateRead:
    """An arrival, and a shared load that may be in flight then.

    Attributes:
        ahead: whether nothing is awaited on any path from the load to the arrival. Of a ring whose next stage
            is awaited and read before the last one is given back, such a load reads the next stage, unless
            it has sunk past the wait.
    """

    arrival: Instruction
    load: Instruction
    ahead: bool

    def __str__(self) -> str:
        return f"{self.arrival} may precede the end of {self.load}"


InFlight = Mapping[int, frozenset[int]]
"""Loads in flight by index, each with later ones that are also in flight: it is done when one of them is."""


@dataclass(frozen=True)
class Reads:
    """Loads of a partition's threads: those in flight, those that are done since the last barrier, and those
    that were in flight at a barrier."""

    in_flight: InFlight
    done: frozenset[int]
    late: frozenset[int]


def late_reads(code: SassCode) -> tuple[LateRead, ...]:
    """Every pair of an arrival and a shared load that on some path is not known to be done in all threads."""
    instructions = code.instructions
    if not any(i.op.startswith(ARRIVAL) for i in instructions):
        return ()
    results = {
        index: instruction.written
        for index, instruction in enumerate(instructions)
        if instruction.family in LOADS and instruction.guard != NEVER and instruction.written
    }
    nothing = Reads({}, frozenset(), frozenset())
    before = flow(
        code, nothing, lambda index, reads: _issued(index, instructions[index], reads, results), _of_either
    )
    awaited = flow(
        code,
        (frozenset[int](), frozenset[int]()),
        lambda index, loads: _since_wait(index, instructions[index], *loads, results),
        lambda a, b: (a[0] | b[0], a[1] | b[1]),
    )
    return tuple(
        LateRead(instructions[index], instructions[load], load not in awaited[index][1])
        for index, reads in sorted(before.items())
        if instructions[index].op.startswith(ARRIVAL)
        for load in sorted(reads.late | reads.done | reads.in_flight.keys())
    )


def _issued(
    index: int, instruction: Instruction, reads: Reads, results: Mapping[int, frozenset[int]]
) -> Reads:
    """What is in flight or done after `instruction` was issued."""
    if instruction.op.startswith(BARRIER) and not instruction.guard:
        # What had been late is done by now, unless it is still in flight.
        return Reads(reads.in_flight, frozenset(), frozenset(reads.in_flight))
    used = {load for load in reads.in_flight if results[load] & instruction.named}
    left = {load: later for load, later in reads.in_flight.items() if load not in used and not later & used}
    done = reads.done | (reads.in_flight.keys() - left.keys())
    late = reads.late
    if index in results:
        left = {load: later | {index} for load, later in left.items() if load != index}
        left[index] = frozenset()
        done, late = done - {index}, late - {index}
    return Reads(left, done, late)


def _since_wait(
    index: int,
    instruction: Instruction,
    since: frozenset[int],
    earlier: frozenset[int],
    results: Mapping[int, frozenset[int]],
) -> tuple[frozenset[int], frozenset[int]]:
    """Loads since the last wait for an mbarrier, and those before it, after `instruction` was issued."""
    if instruction.op.startswith(AWAIT):
        return frozenset(), since | earlier
    if index in results:
        return since | {index}, earlier - {index}
    return since, earlier


def _of_either(a: Reads, b: Reads) -> Reads:
    """What may be in flight or done where two paths join."""
    both = {load: a.in_flight[load] & b.in_flight[load] for load in a.in_flight.keys() & b.in_flight.keys()}
    return Reads({**a.in_flight, **b.in_flight, **both}, a.done | b.done, a.late | b.late)
