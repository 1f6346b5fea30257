"""`KernelSupport`: the formats, GPUs, activation functions and sizes that a backend's kernels support."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ..problem.moe_problem import Activation
from ..problem.schemes import A16, FULL, ActFormat, Scheme, WeightFormat, int_format

Compute = tuple[int, int]
"""Compute capability: (major, minor)."""


@dataclass(frozen=True, slots=True)
class WeightSupport:
    """Weight formats that kernels read in one layout.

    Attributes:
        formats: the formats; dtypes of their scales are listed in `KernelSupport.scales`.
        layout: the layout; empty if the kernels' library prepares the weights itself.
        dtypes: supported model dtypes.
        any_act: computed with 16-bit activations, whatever the checkpoint declares.
        acts: declared activation formats that it is computed with, unless `any_act`.
        own_scales: the layout takes scales of any dtype, which it keeps or converts.
        lowest: the first compute capability with these kernels; None for that of the backend.
        untried: these kernels have not been run on a GPU and their results compared yet.
    """

    formats: tuple[WeightFormat, ...]
    layout: str = ""
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    any_act: bool = False
    acts: tuple[ActFormat, ...] = (A16,)
    own_scales: bool = False
    lowest: Compute | None = None
    untried: bool = False

    def takes(self, scheme: Scheme) -> bool:
        """Whether these kernels compute layers of `scheme`; the dtype of its scales is not compared."""
        return scheme.weight in self.formats and (self.any_act or scheme.act in self.acts)


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """What the kernels of one backend support.

    Attributes:
        weights: weight formats, by layout.
        lowest, highest: range of compute capabilities; None for no upper bound.
        gated, ungated: activation functions for experts with and without a gate.
        scales: safetensors dtypes of the scales; None for any.
        multiple: required divisor of the hidden and the intermediate size.
        weight_on_input: tokens can be multiplied by the router's weight before the first GEMM.
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
        """Every supported weight format."""
        return tuple(format for row in self.weights for format in row.formats)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weight formats, without repeats."""
        return tuple(dict.fromkeys(format.name for format in self.formats))

    @property
    def groups(self) -> str:
        """The group sizes in words, without whole rows."""
        *others, last = sorted({format.group for format in self.formats if format.group > 0})
        return f"{', '.join(map(str, others))} and {last}" if others else str(last)

    @property
    def capability(self) -> str:
        """The compute capabilities in words: ``9.0``, ``8.0 or newer``."""
        return ".".join(map(str, self.lowest)) + ("" if self.highest else " or newer")

    def reads(self, weight: WeightFormat) -> bool:
        """True when this format is supported; the dtype of its scales is not compared."""
        return weight in self.formats

    def row(self, name: str) -> WeightSupport | None:
        """The first row with a format of this name, or None."""
        return next((row for row in self.weights if any(format.name == name for format in row.formats)), None)

    def row_of(self, weight: WeightFormat) -> WeightSupport | None:
        """The row with this format, or None; the dtype of its scales is not compared."""
        return next((row for row in self.weights if weight in row.formats), None)

    def act_of(self, scheme: Scheme) -> ActFormat | None:
        """The activation format that `scheme` is computed with; None if it is not supported.

        Example:
            >>> from moectl.capabilities.own_kernels import TRITON
            >>> from moectl.problem.schemes import FP8_ACT_GROUP_128, FP8_BLOCK, Scheme
            >>> TRITON.act_of(Scheme(FP8_BLOCK, FP8_ACT_GROUP_128)) == FP8_ACT_GROUP_128
            True
        """
        row = self.row_for(scheme)
        return None if row is None else A16 if row.any_act else scheme.act

    def row_for(self, scheme: Scheme) -> WeightSupport | None:
        """The first row that takes layers of `scheme`, or None."""
        return next((row for row in self.weights if row.takes(scheme)), None)

    def layout_of(self, scheme: Scheme) -> str:
        """The layout of a layer's weights; any for a scheme that is not supported."""
        return (self.row_for(scheme) or self.row(scheme.weight.name) or self.weights[0]).layout

    def untried(self, scheme: Scheme) -> bool:
        """Whether the kernels for `scheme` have never been run on a GPU and compared."""
        row = self.row_for(scheme)
        return row is not None and row.untried

    def runs_on(self, capability: Compute) -> bool:
        """True for a GPU with this compute capability."""
        return self.lowest <= capability and (self.highest is None or capability <= self.highest)

    def activation_refusal(self, activation: Activation) -> str:
        """Why `activation` is not supported, as a clause; empty if it is."""
        known = self.gated if activation.gated else self.ungated
        if activation.name in known:
            return ""
        kind = "gated experts" if activation.gated else "experts without a gate"
        return f"for {kind} it has {', '.join(known)}, the layer has {activation.name}"


GROUPS = (FULL, 32, 64, 128)
"""Group sizes of integer formats; `FULL` for one scale per row."""


def integers(bits: int, zero_points: tuple[bool, ...] = (False, True)) -> tuple[WeightFormat, ...]:
    """The integer formats with `bits` bits and the usual group sizes."""
    return tuple(int_format(bits, group, zero_point=zero) for group, zero in product(GROUPS, zero_points))
