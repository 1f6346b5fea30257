"""What a launch does in terms that its time depends on (`LaunchShape`), the same for all kernel families."""

from __future__ import annotations

import math
from typing import NamedTuple


class GemmShape(NamedTuple):
    """How programs share one of the two GEMMs.

    Attributes:
        name: of its coefficients in the model of time; equal for GEMMs that run the same instructions.
        rows: weight rows of a program.
        step: 64-column tiles that a program reads at once, along the reduction.
        split: programs that share the reduction.
        resident: programs that fit into one multiprocessor; of no meaning in a launch whose programs stay.
        shared: bytes of shared memory of a program, by which a GPU's is divided; 0 if `resident` counts them.
        copied: tokens whose rows a program copies before it starts; 0 if they are copied step by step.
        compiled_split: what stands for `split` in the binary: 1 or 2 where that is an argument of the launch.
    """

    name: str
    rows: int
    step: int
    split: int = 1
    resident: float = math.inf
    copied: int = 0
    shared: int = 0
    compiled_split: int = 1

    @property
    def binary(self) -> GemmShape:
        """What is compiled of it: equal for shapes that share a binary."""
        return self._replace(split=self.compiled_split)


class LaunchShape(NamedTuple):
    """How a launch splits a layer's work.

    Attributes:
        name: of the coefficients that do not depend on one GEMM.
        gemms: the first and the second GEMM.
        widths: widths of a token tile, in ascending order: an expert's tokens are split into tiles of the
            last one, and the rest takes the smallest that fits. Empty if each assignment is a tile.
        even: whether an expert's tokens are split evenly, in units of 16, instead.
        persistent: programs per multiprocessor that take one tile after another; 0 if each tile is one.
        lists: whether the model of time counts the kernels that list assignments, of which a single token has
            none; otherwise they are part of what all launches of the family take.
        codes: GEMMs whose input kernels of their own quantize: none, the first, or both.
    """

    name: str
    gemms: tuple[GemmShape, GemmShape]
    widths: tuple[int, ...]
    even: bool = False
    persistent: int = 0
    lists: bool = False
    codes: int = 0
