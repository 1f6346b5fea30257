"""Rows of a bench: one backend on one layer at one number of tokens and one routing. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..cache.backend_times import FEWEST_ROUNDS, Microseconds, current_name
from ..errors import UsageError
from ..files.records import Count, From0, Size, from_cells, to_cells

RowKey = tuple[str, str, str, str, int, str, str]
"""Model, layers, scheme, backend, tokens, routing and parallel of a row."""

KEY_FIELDS = ("model", "layers", "scheme", "backend", "tokens", "routing", "parallel")
"""Fields that make up a row's key."""

NOISY_SPREAD = 0.1
"""Distance between the quartiles, as a share of the median, above which a time counts as noisy. Of 224 rows
measured on a GPU with stable clocks half are below 0.008 and 90% below 0.045. At this limit the
standard error of a median over 11 rounds is 2.8%, and two such runs must differ by 17% for `moectl compare`
to call one slower."""


@dataclass(frozen=True, slots=True)
class PreparationCosts:
    """What preparing a backend's weights costs before the first call; None where unknown.

    Attributes:
        read_s: reading the stored layer, or drawing a random one, in seconds.
        repack_s: repacking it for the backend, without reading: what an engine pays at every start.
        first_s: cold start: reading and repacking for the first time in this process, which includes
            compilation and loading of libraries.
        load_s: warm load: copying the prepared weights from host memory to the device.
        weight_bytes: size of the prepared weights.
        held_bytes: device memory resident once the layer is ready, including tensors that a library derived.
        peak_bytes: peak device memory during repacking, including the weights.
    """

    read_s: From0 | None = None
    repack_s: From0 | None = None
    first_s: From0 | None = None
    load_s: From0 | None = None
    weight_bytes: Size | None = None
    held_bytes: Size | None = None
    peak_bytes: Size | None = None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One backend on one layer at one number of tokens and one routing.

    Attributes:
        model, layers, layer: the model, a group of identical layers, and the number of the one measured.
        tactic: the launch that the backend reports, or who selects it; empty if there is no choice or nothing
            ran.
        predicted_us: time of the launch by the backend's own model, in microseconds; None if it has none.
        parallel: ``1``, or the sharding of the layer, such as ``tp2 ep4``; the first rank is measured.
        caches: how cold the weights were, as a phrase.
        experts: active experts of a call, the mean over routings.
        ok: whether the result was right; None without a result.
        error_rms, error_max: relative errors against the fp32 reference (`kernels.tolerance`).
        checked_tokens: tokens of all calls that were compared with the reference; the others must be finite.
        reason: why there is no time; empty if there is one.
        refused: the backend does not support the layer, so nothing ran; this is not a failure.
        median_us, q1_us, q3_us, fastest_us: times of a call over `rounds` interleaved measurements of `calls`
            calls each; the other backends of the case are timed in between.
        method: how a measurement was made.
        bytes, flops: the least a call must move and compute (`LayerWork`).
        gb_per_s, tflop_per_s: the resulting rates at the median time.
        floor_us, bound: roofline time on this device, and its bottleneck.
        floor_percent: the roofline time as a share of the median, in percent.
        sm_mhz, memory_mhz: lowest clocks while the case was timed; None if unknown.
        throttled: why the driver throttled the clocks during the case; empty if it did not, or if unknown.
    """

    model: str
    layers: str
    layer: Size
    scheme: str
    backend: str
    tokens: Count
    routing: str
    parallel: str = "1"
    layout: str = ""
    tactic: str = ""
    caches: str = ""
    experts: From0 | None = None
    ok: bool | None = None
    error_rms: From0 | None = None
    error_max: From0 | None = None
    checked_tokens: Size = 0
    reason: str = ""
    refused: bool = False
    median_us: Microseconds | None = None
    q1_us: Microseconds | None = None
    q3_us: Microseconds | None = None
    fastest_us: Microseconds | None = None
    rounds: Size = 0
    calls: Size = 0
    method: str = ""
    bytes: Size | None = None
    flops: Size | None = None
    gb_per_s: From0 | None = None
    tflop_per_s: From0 | None = None
    floor_us: From0 | None = None
    bound: str = ""
    floor_percent: From0 | None = None
    costs: PreparationCosts = field(default_factory=PreparationCosts)
    sm_mhz: Size | None = None
    memory_mhz: Size | None = None
    throttled: str = ""
    predicted_us: float | None = None

    def __repr__(self) -> str:
        time = f"{self.median_us:.4g} us" if self.median_us is not None else self.reason
        return f"BenchRow({self.model} layers {self.layers}, {self.backend}, {self.tokens} tokens: {time})"

    @property
    def key(self) -> RowKey:
        """The values of `KEY_FIELDS`."""
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
        """True if there is a time; only right results have one."""
        return self.median_us is not None

    @property
    def failed(self) -> bool:
        """True if there is no time although the backend supports the layer."""
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
        """True if the rounds spread by more than `NOISY_SPREAD`: other work may have run at the same time."""
        return self.spread is not None and self.spread > NOISY_SPREAD

    def to_json(self) -> dict[str, Any]:
        """As flat data, costs included; non-finite numbers become None."""
        return to_cells(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str, *, text: bool = False) -> BenchRow:
        """The row in flat `data`, whose values are strings if it is `text`; UsageError if it is not one."""
        row = from_cells(cls, data, where, "row of a bench", UsageError, text=text)
        if row.timed and not row.ok:
            raise UsageError(f"{where} has a time although only right results have one, and ok is {row.ok}")
        if row.q1_us is not None and row.q3_us is not None and row.q1_us > row.q3_us:
            raise UsageError(f"{where}: q1_us {row.q1_us:g} is above q3_us {row.q3_us:g}")
        # Files before 2026-11-22 call moectl's own backend triton, now an engine's, which has other formats.
        own = row.backend == "triton" and row.timed and row.scheme.startswith(("mxfp4", "int"))
        return replace(row, backend="moectl" if own else current_name(row.backend))


@dataclass(frozen=True)
class CompileOutcome:
    """A line of text on a case that was compiled, or `failed` to."""

    text: str
    failed: bool = False
