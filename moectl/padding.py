"""The one table of sizes: what each weight layout rounds up, and what it cannot round.

A rule rounds `hidden` and the per-rank `intermediate` up with zeros. Layouts may pad further inside
their own tiles; such lanes are seen by no kernel as a size and are not stated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import UsageError
from .problem import Align
from .schemes import FULL, WeightFormat

_NONE = Align()


@dataclass(frozen=True, slots=True)
class SizeRule:
    """`align` is what the layout rounds up to; `needs` the multiples that a size must already have."""

    align: Align = _NONE
    needs: Align = _NONE


def _marlin_int(weight: WeightFormat) -> SizeRule:
    """Whole 64-wide tiles of whole groups; the hidden size is not padded."""
    group = 1 if weight.group == FULL else weight.group
    return SizeRule(Align(1, math.lcm(64, group)), needs=Align(128, 1))


def _mtile64(weight: WeightFormat) -> SizeRule:
    """Tiles of 64 rows by 64 columns, and whole groups along the columns."""
    columns = math.lcm(64, max(weight.group, 1))
    return SizeRule(Align(columns, columns))


RULES: Mapping[str, SizeRule | Callable[[WeightFormat], SizeRule]] = {
    "marlin-int4": _marlin_int,
    "marlin-int8": _marlin_int,
    "marlin-mxfp4": SizeRule(Align(256, 128)),
    "trtllm-mxfp4": SizeRule(Align(256, 128)),
    "trtllm-mxint4": SizeRule(needs=Align(256, 256)),
    "triton-hopper": SizeRule(Align(1, 64)),
    "cutlass-sm90": SizeRule(Align(128, 128)),
    "moectl-mtile64": _mtile64,
}
"""Size rules by the name of the layout."""


def size_rule(layout: str, weight: WeightFormat) -> SizeRule:
    """The rule of `layout` for `weight`; UsageError for a layout that has none."""
    rule = RULES.get(layout)
    if rule is None:
        raise UsageError(f"no weight layout is called {layout!r}; known are {', '.join(RULES)}.")
    return rule if isinstance(rule, SizeRule) else rule(weight)


def padding(layout: str, weight: WeightFormat) -> Align:
    """The multiples to which `layout` rounds sizes up for `weight`; UsageError for an unknown layout."""
    return size_rule(layout, weight).align
