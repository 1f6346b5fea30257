"""What one pass over a tensor does: for every word that is written, the bytes and bits it is made of."""

from __future__ import annotations

from dataclasses import dataclass

Vector = tuple[int, ...]


@dataclass(frozen=True)
class CopyLoop:
    """`size` repetitions, each `source` bytes further on in the input and `target` in the output.

    `source_at` and `target_at` say how far a repetition moves in each coordinate that has a limit.
    """

    size: int
    source: int
    target: int
    source_at: Vector = ()
    target_at: Vector = ()


@dataclass(frozen=True)
class SourceByte:
    """One input byte of a word, `source` bytes from where the loops stand.

    Attributes:
        source: offset in bytes.
        at: its coordinates; it exists in the input where each is below its limit.
        moves: pairs of a bit of the byte and the bit of the word that it becomes.
        fill: the byte to take where it does not exist.
        add: what is added to the byte, modulo 256, before its bits move; 0 where only some bits are used.
    """

    source: int
    at: Vector
    moves: tuple[tuple[int, int], ...]
    fill: int
    add: int = 0


@dataclass(frozen=True)
class OutputWord:
    """One output word, `target` bytes from where the loops stand: its slots' bits, then `invert` applied.

    It is written only where its coordinates `at` are below their limits.
    """

    target: int
    at: Vector
    slots: tuple[SourceByte, ...]
    invert: int


@dataclass(frozen=True)
class WordProgram:
    """All of an output tensor, expert for expert: the words of `words` at every place of the loops.

    Attributes:
        width: bytes of a word: 1, 2, 4 or 8.
        loops: in order of their place in the output, the widest steps first.
        words: what is written at each place.
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
        """Input bytes looked at per output byte, the cost of the pass."""
        return sum(max(len(word.slots), 1) for word in self.words) / (len(self.words) * self.width)

    def for_experts(self, experts: int) -> tuple[CopyLoop, ...]:
        """The loops with one over `experts` around them."""
        zeros = (0,) * len(self.source_limits), (0,) * len(self.target_limits)
        return (CopyLoop(experts, self.source_bytes, self.target_bytes, *zeros), *self.loops)
