"""Opens a bench: from settings to layers, backends and rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..kernels.timing.cold_calls import measured_rates
from ..layer.layer_source import LayerSource
from ..problem.roofline import DeviceRates
from ..run import this_machine
from .bench_rows import BenchRow
from .bench_targets import targets_of
from .run_bench import Bench
from .settings import BenchSettings


def open_bench(
    settings: BenchSettings,
    source: LayerSource | None,
    *,
    rates: DeviceRates | None = None,
    measure_rates: bool = True,
    say: Callable[[str], None] = lambda text: None,
    begins: Callable[[Sequence[BenchRow]], None] = lambda rows: None,
) -> Bench:
    """The bench of `settings` on this machine.

    Args:
        source: the opened checkpoint; None for named models.
        rates: of the device; measured if None, unless `measure_rates` is False.
        say, begins: as in `Bench`.

    Raises UsageError, NoBackend, Unavailable or CheckpointError when nothing can be measured.
    """
    machine = this_machine(settings.device or None)
    targets = targets_of(settings, source, machine.torch)
    for target in targets:
        if target.experts.partial:
            say(target.experts.partial)
    if rates is None:
        rates = measured_rates(machine.torch) if measure_rates else DeviceRates(1.0, 1.0, "not measured")
    return Bench(settings, machine, targets, rates, say, begins)
