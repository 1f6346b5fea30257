"""From settings to a bench that is ready to be measured."""

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
    """The bench that `settings` ask for, on this machine.

    Args:
        source: what the checkpoint's name stands for; None where models are named.
        rates: of the device; measured where they are None, unless `measure_rates` is False.
        say, begins: as of `Bench`.

    Raises UsageError, NoBackend, Unavailable and CheckpointError for what cannot be measured at all.
    """
    machine = this_machine(settings.device or None)
    targets = targets_of(settings, source, machine.torch)
    for target in targets:
        if target.experts.partial:
            say(target.experts.partial)
    if rates is None:
        rates = measured_rates(machine.torch) if measure_rates else DeviceRates(1.0, 1.0, "not measured")
    return Bench(settings, machine, targets, rates, say, begins)
