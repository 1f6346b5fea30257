"""The record of what one backend's kernels compute."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ..problem.moe_problem import Activation
from ..problem.schemes import FULL, WeightFormat, int_format

Compute = tuple[int, int]
"""A compute capability: major, minor."""


@dataclass(frozen=True, slots=True)
class WeightSupport:
    """Weight formats that kernels read in one layout.

    Attributes:
        formats: the formats; dtypes of their scales are compared by `KernelSupport.scales`.
        layout: the layout that is read; empty where the kernels' own library makes it.
        dtypes: of models.
        any_act: computed with 16-bit activations whatever the checkpoint declares.
        own_scales: the layout makes scales of whatever dtype the checkpoint's have.
    """

    formats: tuple[WeightFormat, ...]
    layout: str = ""
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    any_act: bool = False
    own_scales: bool = False


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """What one backend's kernels compute.

    Attributes:
        weights: the weight formats, by layout.
        lowest, highest: compute capabilities that the kernels run on; None is no upper bound.
        gated, ungated: activation functions of experts with and without a gate.
        scales: safetensors dtypes of the scales that are read; None for any.
        multiple: what divides the hidden and the intermediate size.
        weight_on_input: tokens may be multiplied by the router's weight before the first GEMM.
    """

    weights: tuple[WeightSupport, ...]
    lowest: Compute = (8, 0)
    highest: Compute | None = None
    gated: tuple[str, ...] = ()
    ungated: tuple[str, ...] = ()
    scales: frozenset[str] | None = None
    multiple: int = 1
    weight_on_input: bool = True

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Every weight format that is read."""
        return tuple(format for row in self.weights for format in row.formats)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weight formats, each once."""
        return tuple(dict.fromkeys(format.name for format in self.formats))

    @property
    def groups(self) -> str:
        """Columns of a scale, in words; those of whole rows left out."""
        *others, last = sorted({format.group for format in self.formats if format.group > 0})
        return f"{', '.join(map(str, others))} and {last}" if others else str(last)

    @property
    def capability(self) -> str:
        """The compute capabilities in words: ``9.0``, ``8.0 or newer``."""
        return ".".join(map(str, self.lowest)) + ("" if self.highest else " or newer")

    def reads(self, weight: WeightFormat) -> bool:
        """True when exactly this format is read; the dtype of its scales is not looked at."""
        return weight in self.formats

    def row(self, name: str) -> WeightSupport | None:
        """The first row with a format of this name; None when there is none."""
        return next((row for row in self.weights if any(it.name == name for it in row.formats)), None)

    def runs_on(self, there: Compute) -> bool:
        """True for a GPU of compute capability `there`."""
        return self.lowest <= there and (self.highest is None or there <= self.highest)

    def activation_refusal(self, activation: Activation) -> str:
        """Why `activation` is not computed, a clause; empty when it is."""
        known = self.gated if activation.gated else self.ungated
        if activation.name in known:
            return ""
        kind = "gated experts" if activation.gated else "experts without a gate"
        return f"for {kind} it has {', '.join(known)}, the layer has {activation.name}"


GROUPS = (FULL, 32, 64, 128)
"""Columns of a scale of integers; `FULL` for one scale of a whole row."""


def integers(bits: int, zero_points: tuple[bool, ...] = (False, True)) -> tuple[WeightFormat, ...]:
    """The integer formats of so many bits with the usual groups."""
    return tuple(int_format(bits, group, zero_point=zero) for group, zero in product(GROUPS, zero_points))
