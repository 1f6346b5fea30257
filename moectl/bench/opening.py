"""From settings to a bench that is ready to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..floors import Rates
from ..kernels.timing import measured_rates
from ..layer.source import LayerSource
from ..run import this_machine
from .measure import Bench
from .rows import Row
from .settings import Settings
from .targets import targets_of


def open_bench(
    settings: Settings,
    source: LayerSource | None,
    *,
    rates: Rates | None = None,
    measure_rates: bool = True,
    say: Callable[[str], None] = lambda text: None,
    begins: Callable[[Sequence[Row]], None] = lambda rows: None,
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
        rates = measured_rates(machine.torch) if measure_rates else Rates(1.0, 1.0, "not measured")
    return Bench(settings, machine, targets, rates, say, begins)
