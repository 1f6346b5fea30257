"""Parses the machine code that nvdisasm prints: instructions, control flow, loops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+\{?\s*(?:@(?P<guard>!?U?P\w+)\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<rest>[^;]*);"
)
_TARGET = re.compile(r"\.L_\w+")
_REGISTER = re.compile(r"\bR(\d+)\b")
_PREDICATE = re.compile(r"!?U?P(?:\d+|T)$")

ENDS = ("EXIT", "RET", "KILL", "BPT")
"""Instructions that end a path, unless a predicate guards them."""

JUMPS = ("BRA", "BRX", "JMP", "JMX")
"""Instructions that name their target."""

PREDICATES_ONLY = ("SETP", "PLOP3", "R2P", "FCHK", "VOTE.ALL")
STORES = (
    "ST",
    "RED",
    "LDGSTS",
    "BAR",
    "UTMA",
    "UBLK",
    "SYNCS",
    "MEMBAR",
    "CCTL",
    "WARPSYNC",
    "BSYNC",
    "DEPBAR",
)

_WIDTHS = {".128": 4, ".64": 2}
_WIDE = {
    "IMAD.WIDE": 2,
    "CS2R": 2,
    "LDSM.16.M88.4": 4,
    "LDSM.16.MT88.4": 4,
    "LDSM.16.M88.2": 2,
    "HMMA": 4,
    "IMMA": 4,
}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: its byte offset in the code.
        guard: its predicate; empty if it always executes.
        op: opcode with its modifiers, ``HGMMA.64x16x16.F32.BF16``.
        operands: as printed.
    """

    address: int
    guard: str
    op: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:04x}: {guard}{self.op} {', '.join(self.operands)}".rstrip()

    @property
    def family(self) -> str:
        """The opcode without modifiers."""
        return self.op.split(".")[0]

    @cached_property
    def written(self) -> frozenset[int]:
        """Registers that it writes; none for stores and for instructions that only write predicates."""
        if self.op.startswith(STORES) or any(part in self.op for part in PREDICATES_ONLY):
            return frozenset()
        for operand in self.operands:
            if _PREDICATE.match(operand):
                continue
            first = re.match(r"R(\d+)\b", operand)
            return frozenset(range(int(first[1]), int(first[1]) + self._width)) if first else frozenset()
        return frozenset()

    @cached_property
    def named(self) -> frozenset[int]:
        """Registers that it names or writes; of a wider source operand only the first register."""
        return self.written | {int(r) for operand in self.operands for r in _REGISTER.findall(operand)}

    @property
    def _width(self) -> int:
        for prefix, width in _WIDE.items():
            if self.op.startswith(prefix):
                return width
        return next((width for part, width in _WIDTHS.items() if part in self.op), 1)


@dataclass(frozen=True)
class SassLoop:
    """An innermost loop: the instructions from the target of its backward jump up to the jump."""

    instructions: tuple[Instruction, ...]

    def count(self, *families: str) -> int:
        """Number of its instructions in `families`."""
        return sum(i.family in families for i in self.instructions)


@dataclass(frozen=True)
class SassCode:
    """A kernel's instructions in order, and for each the indices of its possible successors."""

    instructions: tuple[Instruction, ...]
    following: tuple[tuple[int, ...], ...]

    @cached_property
    def opcodes(self) -> Counter[str]:
        """Occurrences of each opcode, with modifiers."""
        return Counter(i.op for i in self.instructions)

    @cached_property
    def families(self) -> Counter[str]:
        """Occurrences of each opcode, without modifiers."""
        return Counter(i.family for i in self.instructions)

    @cached_property
    def loops(self) -> tuple[SassLoop, ...]:
        """Innermost loops by backward jumps; a jump to itself (spinning, or padding) is not a loop."""
        spans = {
            (target, at)
            for at, targets in enumerate(self.following)
            for target in targets
            if target < at and self.instructions[at].op.startswith(JUMPS) and self._is_cycle(target, at)
        }
        inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
        return tuple(SassLoop(self.instructions[first : last + 1]) for first, last in sorted(inner))

    @cached_property
    def unreached(self) -> tuple[Instruction, ...]:
        """Instructions that no path reaches, except the padding at the end: NOPs and jumps to themselves.

        They exist if the targets of a jump are unknown, and analyses that follow paths do not see them.
        """
        seen, todo = {0}, [0]
        while todo:
            successors = set(self.following[todo.pop()]) - seen if self.instructions else set()
            seen |= successors
            todo += successors
        unseen = (n for n in range(len(self.instructions)) if n not in seen)
        return tuple(
            self.instructions[n]
            for n in unseen
            if self.instructions[n].family != "NOP" and n not in self.following[n]
        )

    def _is_cycle(self, first: int, last: int) -> bool:
        """Whether a path leads from `first` to `last` within the instructions between them.

        There is none if `last` ends an out-of-line block, placed after the kernel's end, that jumps back.
        """
        seen, todo = {first}, [first]
        while todo:
            successors = {n for n in self.following[todo.pop()] if first <= n <= last} - seen
            seen |= successors
            todo += successors
        return last in seen


State = TypeVar("State")


def flow(
    code: SassCode,
    first: State,
    after: Callable[[int, State], State],
    joined: Callable[[State, State], State],
) -> dict[int, State]:
    """What is known before each reachable instruction, by index: `first` at the start, `after` an instruction
    that of its index and what was known before it, and `joined` where two paths meet."""
    before = {0: first}
    pending = [0]
    while pending:
        index = pending.pop()
        known = after(index, before[index])
        for successor in code.following[index]:
            now = joined(before[successor], known) if successor in before else known
            if successor not in before or now != before[successor]:
                before[successor] = now
                pending.append(successor)
    return before


def parse(text: str) -> SassCode:
    """Parses the output of ``nvdisasm -c``. Lines other than instructions and labels are ignored."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            operands = tuple(part.strip() for part in match["rest"].split(",") if part.strip())
            address = int(match["at"], 16)
            instructions.append(Instruction(address, match["guard"] or "", match["op"], operands))
    following = [_following(i, n, labels) for n, i in enumerate(instructions)]
    _rejoin(instructions, following, labels)
    end = len(instructions)
    return SassCode(tuple(instructions), tuple(tuple(t for t in ts if t < end) for ts in following))


def _following(instruction: Instruction, index: int, labels: dict[str, int]) -> list[int]:
    """Indices of possible successors: the targets, and the next instruction if it may fall through."""
    targets = [labels[name] for o in instruction.operands for name in _TARGET.findall(o) if name in labels]
    if instruction.op.startswith(JUMPS):
        # A predicate may also be an operand, and BRA.DIV is conditional by itself.
        operands = [o for o in instruction.operands if not _TARGET.search(o)]
        unconditional = not instruction.guard and not operands and "DIV" not in instruction.op
        return targets if unconditional else [index + 1, *targets]
    if instruction.op.startswith("BSSY"):
        return [index + 1]  # its operand is the target of BSYNC
    if instruction.op.startswith(ENDS) and not instruction.guard:
        return []
    return [index + 1, *targets]


def _rejoin(instructions: list[Instruction], following: list[list[int]], labels: dict[str, int]) -> None:
    """Adds to every BSYNC the targets that BSSYs of the same barrier name."""
    joins: dict[str, list[int]] = {}
    for i in instructions:
        if i.op.startswith("BSSY") and len(i.operands) > 1:
            joins.setdefault(i.operands[0], []).extend(
                labels[name] for name in _TARGET.findall(i.operands[-1]) if name in labels
            )
    for index, i in enumerate(instructions):
        if i.op.startswith("BSYNC"):
            following[index] += joins.get(i.operands[0], []) if i.operands else []
