"""Rows of a bench: one backend on one layer at one number of tokens and one routing. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cache.backend_times import FEWEST_ROUNDS
from ..errors import UsageError
from ..files.records import from_cells, to_cells

Key = tuple[str, str, str, str, int, str, str]
"""Model, layers, scheme, backend, tokens, routing and parallel: what makes two rows the same cell."""

CELL = ("model", "layers", "scheme", "backend", "tokens", "routing", "parallel")
"""Fields of a row that make its key."""

TIMES = ("median_us", "q1_us", "q3_us", "fastest_us")
"""Fields of a row that are times of a call."""

UNSTEADY = 0.1
"""Distance of the quartiles, as a share of the median, above which a time is called unsteady. Of 224 rows of
a GPU with settled clocks half have less than 0.008, and nine of ten less than 0.045. With this one the
standard error of a median over 11 rounds is 2.8%, and two such runs must differ by 17% for `moectl compare`
to call one slower."""


@dataclass(frozen=True, slots=True)
class PreparationCosts:
    """What a backend's weights cost before the first call; None where it cannot be told.

    Attributes:
        read_s: reading the stored layer, or drawing a random one, in seconds.
        repack_s: laying it out for the backend, without reading it: what an engine pays at every start.
        first_s: all of it the first time in this process, what had to be compiled or loaded included.
        load_s: bringing the same weights to the device when they lie ready in host memory.
        weight_bytes: of the weights as the backend is given them.
        held_bytes: device memory that the layer holds once it is ready, what a library made of them included.
        peak_bytes: device memory at its highest while they were laid out, the weights included.
    """

    read_s: float | None = None
    repack_s: float | None = None
    first_s: float | None = None
    load_s: float | None = None
    weight_bytes: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One backend on one layer at one number of tokens and one routing.

    Attributes:
        model, layers, layer: whose, the layers that are alike, and which of them it is.
        tactic: what the backend says that it launches, or who chooses that; empty where there is no choice
            or nothing ran.
        parallel: ``1``, or how the layer is shared, as ``tp2 ep4``: the row is of the first rank.
        caches: how cold the weights were, in words.
        experts: hit by a call, the mean of the routings.
        ok: whether the result was right; None when there was none.
        error_rms, error_max: against the fp32 reference, relative (`kernels.tolerance`).
        checked_tokens: tokens that were compared, of all calls; all others are checked to be finite.
        reason: why there is no time; empty where there is one.
        refused: the backend cannot serve the layer, and said so before anything ran: no failure.
        median_us, q1_us, q3_us, fastest_us: of a call, over `rounds` measurements of `calls` calls each,
            between which the other backends of the cell took their turns.
        method: how a measurement was made.
        bytes, flops: what a call must do at least (`floors.Work`).
        gb_per_s, tflop_per_s: what the median makes of them.
        floor_us, bound: the least time on this device, and what sets it.
        floor_percent: the floor's share of the median, in percent.
        sm_mhz, memory_mhz: lowest clocks while the cell was timed; None where nobody tells.
        throttled: why the driver held clocks down meanwhile; empty where it did not, or nobody tells.
    """

    model: str
    layers: str
    layer: int
    scheme: str
    backend: str
    tokens: int
    routing: str
    parallel: str = "1"
    layout: str = ""
    tactic: str = ""
    caches: str = ""
    experts: float | None = None
    ok: bool | None = None
    error_rms: float | None = None
    error_max: float | None = None
    checked_tokens: int = 0
    reason: str = ""
    refused: bool = False
    median_us: float | None = None
    q1_us: float | None = None
    q3_us: float | None = None
    fastest_us: float | None = None
    rounds: int = 0
    calls: int = 0
    method: str = ""
    bytes: int | None = None
    flops: int | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    floor_us: float | None = None
    bound: str = ""
    floor_percent: float | None = None
    costs: PreparationCosts = field(default_factory=PreparationCosts)
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    throttled: str = ""

    @property
    def key(self) -> Key:
        """What tells its cell from others: the fields `CELL`."""
        return (
            self.model,
            self.layers,
            self.scheme,
            self.backend,
            self.tokens,
            self.routing,
            self.parallel,
        )

    @property
    def timed(self) -> bool:
        """True when there is a time, which there is of right results alone."""
        return self.median_us is not None

    @property
    def failed(self) -> bool:
        """True when there is no time, and there should be one."""
        return not self.timed and not self.refused

    @property
    def spread_us(self) -> float | None:
        """Distance between the first and the third quartile."""
        return None if self.q1_us is None or self.q3_us is None else self.q3_us - self.q1_us

    @property
    def spread(self) -> float | None:
        """`spread_us` as a share of the median; None of fewer than `FEWEST_ROUNDS` rounds."""
        if self.spread_us is None or not self.median_us or self.rounds < FEWEST_ROUNDS:
            return None
        return self.spread_us / self.median_us

    @property
    def unsteady(self) -> bool:
        """True when the rounds differ by more than `UNSTEADY`: other work may have run meanwhile."""
        return self.spread is not None and self.spread > UNSTEADY

    def to_json(self) -> dict[str, Any]:
        """As flat data, costs among the rest; numbers that are not finite are None."""
        return to_cells(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> BenchRow:
        """The row that flat `data` describes; UsageError when it describes none."""
        row = from_cells(cls, data, where, "row of a bench", UsageError)
        for name in TIMES:
            value = getattr(row, name)
            if value is not None and value <= 0:
                raise UsageError(f"{where}: {name} must be above 0, got {value:g}")
        if row.timed and not row.ok:
            raise UsageError(f"{where} has a time, which only right results have, and ok is {row.ok}")
        if row.q1_us is not None and row.q3_us is not None and row.q1_us > row.q3_us:
            raise UsageError(f"{where}: q1_us {row.q1_us:g} is above q3_us {row.q3_us:g}")
        return row


@dataclass(frozen=True)
class CompileOutcome:
    """A line about what was compiled, or about what `failed`."""

    text: str
    failed: bool = False
