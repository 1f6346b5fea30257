"""Programs of one pass over a tensor: for every output word, the source bytes and bits it is made of."""

from __future__ import annotations

from dataclasses import dataclass

Vector = tuple[int, ...]


@dataclass(frozen=True)
class CopyLoop:
    """`size` iterations, each `source` bytes further in the input and `target` bytes further in the output.

    `source_at` and `target_at` are the steps of an iteration in each coordinate that has a limit.
    """

    size: int
    source: int
    target: int
    source_at: Vector = ()
    target_at: Vector = ()


@dataclass(frozen=True)
class SourceByte:
    """One input byte of a word.

    Attributes:
        source: its offset in bytes from the loops' current position.
        at: its coordinates; it exists in the input where each is below its limit.
        moves: pairs of a bit of the byte and the bit of the word that it becomes.
        fill: the byte used where it does not exist.
        add: added to the byte, modulo 256, before its bits move; 0 if only some bits are used.
    """

    source: int
    at: Vector
    moves: tuple[tuple[int, int], ...]
    fill: int
    add: int = 0


@dataclass(frozen=True)
class OutputWord:
    """One output word at offset `target` from the loops' current position: the bits of its `slots`, then
    XOR with `invert`.

    It is written only where its coordinates `at` are below their limits.
    """

    target: int
    at: Vector
    slots: tuple[SourceByte, ...]
    invert: int


@dataclass(frozen=True, eq=False)
class WordProgram:
    """One expert of an output tensor: the words of `words` at every iteration of the loops.

    A program equals only itself, so that caches find it without a look at all words.

    Attributes:
        width: bytes of a word: 1, 2, 4 or 8.
        loops: nested loops, those with the widest output steps outermost.
        words: the words written in each iteration.
        source_limits, target_limits: bounds of the coordinates.
        source_bytes, target_bytes: sizes of one expert in the input and in the output.
    """

    width: int
    loops: tuple[CopyLoop, ...]
    words: tuple[OutputWord, ...]
    source_limits: Vector
    target_limits: Vector
    source_bytes: int
    target_bytes: int

    @property
    def lookups(self) -> float:
        """Input bytes read per output byte: the cost of the pass."""
        return sum(max(len(word.slots), 1) for word in self.words) / (len(self.words) * self.width)

    def for_experts(self, experts: int) -> tuple[CopyLoop, ...]:
        """The loops inside an outermost loop over `experts`."""
        zeros = (0,) * len(self.source_limits), (0,) * len(self.target_limits)
        return (CopyLoop(experts, self.source_bytes, self.target_bytes, *zeros), *self.loops)
