"""Opens the bench of some settings: its layers, backends and the device's rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..kernels.timing.cold_calls import measured_rates
from ..layer.layer_source import LayerSource
from ..problem.roofline import MeasuredRates
from ..run import this_machine
from .bench_rows import BenchRow
from .bench_targets import targets_of
from .run_bench import Bench
from .settings import BenchSettings


def open_bench(
    settings: BenchSettings,
    source: LayerSource | None,
    *,
    rates: MeasuredRates | None = None,
    measure_rates: bool = True,
    note: Callable[[str], None] = lambda text: None,
    on_start: Callable[[Sequence[BenchRow]], None] = lambda rows: None,
    costs: bool = True,
) -> Bench:
    """The bench of `settings` on this machine.

    Args:
        source: the opened checkpoint; None for named models.
        rates: of the device; measured if None, unless `measure_rates` is False.
        note, on_start, costs: as in `Bench`.

    Raises UsageError, NoBackend, Unavailable or CheckpointError if nothing can be measured.
    """
    machine = this_machine(settings.device or None)
    targets = targets_of(settings, source, machine.torch)
    for target in targets:
        if target.experts.partial:
            note(target.experts.partial)
    if rates is None:
        rates = measured_rates(machine.torch) if measure_rates else MeasuredRates(1.0, 1.0, "not measured")
    return Bench(settings, machine, targets, rates, note, on_start, costs)
