"""Finds mbarriers in whose shared memory a kernel keeps something else, too.

Triton gives the memory of an mbarrier that nothing arrives at or waits for to other values, such as those
that partitions of a kernel capture. On an H200 its initialization (``SYNCS.EXCH``) has overtaken the store of
such a value (``STS``) that followed it, although the CTA's threads had met at a barrier in between: a
partition then read the initial state of a barrier as a number of tiles.
"""

from __future__ import annotations

import re

from .handovers import ARRIVAL
from .sass import Instruction, SassCode

INITIALIZATION, STORES = "SYNCS.EXCH", ("STS", "STSM")
USES = (ARRIVAL, "SYNCS.PHASECHK", "ARRIVES")
_OFFSET = re.compile(r"\[[^\]]*?\+(0x[0-9a-f]+)\]")


def overwritten_barriers(code: SassCode) -> tuple[str, ...]:
    """Stores to shared memory at the offset of an mbarrier that is initialized, and not used.

    The memory of one that was used may hold something else once it is not needed any more.
    """

    def offsets(*ops: str) -> set[int | None]:
        return {_offset(i) for i in code.instructions if i.op.startswith(ops)} - {None}

    unused = offsets(INITIALIZATION) - offsets(*USES)
    return tuple(str(i) for i in code.instructions if i.family in STORES and _offset(i) in unused)


def _offset(instruction: Instruction) -> int | None:
    """The constant part of the address that it accesses; None if it has none."""
    found = (_OFFSET.search(operand) for operand in instruction.operands)
    return next((int(match[1], 16) for match in found if match), None)
