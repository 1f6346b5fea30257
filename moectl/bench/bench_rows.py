"""Rows of a bench: one backend on one layer at one number of tokens and one routing. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cache.backend_times import FEWEST_ROUNDS
from ..errors import UsageError
from ..files.records import from_cells, to_cells

Key = tuple[str, str, str, str, int, str, str]
"""Model, layers, scheme, backend, tokens, routing and parallel: equal keys, same case."""

CELL = ("model", "layers", "scheme", "backend", "tokens", "routing", "parallel")
"""Fields of a row that make up its key."""

TIMES = ("median_us", "q1_us", "q3_us", "fastest_us")
"""Fields of a row that are times of a call."""

NOISY_SPREAD = 0.1
"""Distance between the quartiles, as a share of the median, above which a time counts as noisy. Of 224 rows
taken on a GPU with settled clocks half are below 0.008 and nine in ten below 0.045. At this limit the
standard error of a median over 11 rounds is 2.8%, and two such runs must differ by 17% for `moectl compare`
to call one slower."""


@dataclass(frozen=True, slots=True)
class PreparationCosts:
    """What preparing a backend's weights costs before the first call; None where unknown.

    Attributes:
        read_s: reading the stored layer, or drawing a random one, in seconds.
        repack_s: repacking it for the backend, without reading it: what an engine pays at every start.
        first_s: cold start: both, the first time in this process, with compilation and loading of libraries.
        load_s: warm load: copying the prepared weights from host memory to the device.
        weight_bytes: size of the prepared weights.
        held_bytes: device memory resident once the layer is ready, with what a library derived.
        peak_bytes: peak device memory while they were repacked, including the weights.
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
        model, layers, layer: the model, its group of equal layers, and the number of the one measured.
        tactic: what the backend reports that it launches, or who chooses that; empty if there is no choice
            or nothing ran.
        parallel: ``1``, or how the layer is sharded, as ``tp2 ep4``: the first rank is measured.
        caches: how cold the weights were, in words.
        experts: active experts of a call, the mean over routings.
        ok: whether the result was right; None when there was none.
        error_rms, error_max: against the fp32 reference, relative (`kernels.tolerance`).
        checked_tokens: tokens of all calls that were compared with the reference; the others must be finite.
        reason: why there is no time; empty where there is one.
        refused: the backend does not support the layer and rejected it before anything ran: not a failure.
        median_us, q1_us, q3_us, fastest_us: of a call, over `rounds` interleaved measurements of `calls`
            calls each: the other backends of the case are timed in between.
        method: how a measurement was made.
        bytes, flops: the least a call must move and compute (`LayerWork`).
        gb_per_s, tflop_per_s: the rates that these amount to in the median time.
        floor_us, bound: roofline time on this device, and what bounds it.
        floor_percent: the roofline time as a share of the median, in percent.
        sm_mhz, memory_mhz: lowest clocks while the case was timed; None if unknown.
        throttled: why the driver throttled the clocks meanwhile; empty if it did not, or if unknown.
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
        """The values of the fields `CELL`."""
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
        """True when there is a time; only right results have one."""
        return self.median_us is not None

    @property
    def failed(self) -> bool:
        """True when there is no time although the backend supports the layer."""
        return not self.timed and not self.refused

    @property
    def spread_us(self) -> float | None:
        """Distance between the first and the third quartile."""
        return None if self.q1_us is None or self.q3_us is None else self.q3_us - self.q1_us

    @property
    def spread(self) -> float | None:
        """`spread_us` as a share of the median; None for fewer than `FEWEST_ROUNDS` rounds."""
        if self.spread_us is None or not self.median_us or self.rounds < FEWEST_ROUNDS:
            return None
        return self.spread_us / self.median_us

    @property
    def noisy(self) -> bool:
        """True when the rounds differ by more than `NOISY_SPREAD`: other work may have run, too."""
        return self.spread is not None and self.spread > NOISY_SPREAD

    def to_json(self) -> dict[str, Any]:
        """As flat data, costs included; non-finite numbers become None."""
        return to_cells(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> BenchRow:
        """The row that flat `data` describes; UsageError if it does not describe one."""
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
    """A line of text on what was compiled, or what `failed` to."""

    text: str
    failed: bool = False
