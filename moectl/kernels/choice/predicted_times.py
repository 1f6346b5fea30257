"""The launches of a layer that ship, and their times by the model, on a GPU that need not be here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...capabilities.own_kernels import ROW_FORMATS
from ...environment import Device
from ...environment.named_devices import published_matrix_rate
from ...problem.moe_problem import MoEProblem
from .launch_model import GpuRates, coefficients, predicted_us
from .launch_plan import FITTED_CAPABILITY, MODELLED, planned
from .stream_launches import StreamTile
from .tma_launches import TmaTile

FITTED_ARCH = "sm{}{}".format(*FITTED_CAPABILITY)


@dataclass(frozen=True)
class PredictedTime:
    """A layer's time for a number of tokens, with cold caches and uniform routing.

    Attributes:
        tokens: the number of tokens.
        us: predicted microseconds.
        family: the kernel family of the launch.
    """

    tokens: int
    us: float
    family: str


@dataclass(frozen=True)
class PredictedTimes:
    """Predicted times of a layer on a GPU.

    Attributes:
        times: by number of tokens, in ascending order.
        median_error: median relative error of predictions on this GPU, of layers that the model was not
            fitted to, the largest of the families among the times; None if nothing was measured on it.
        reason: why there are none, or none for more tokens, as a clause; empty if none is missing.
    """

    times: tuple[PredictedTime, ...]
    median_error: float | None
    reason: str = ""


@lru_cache(maxsize=64)
def predicted_times(problem: MoEProblem, device: Device, tokens: tuple[int, ...]) -> PredictedTimes:
    """The predicted times of `problem`, a rank's share, on `device` with the launches that ship.

    Example:
        >>> from moectl.environment import find_device
        >>> from moectl.problem.published_layers import model_problem
        >>> times = predicted_times(model_problem("gpt-oss-120b"), find_device("h200"), (1, 1024)).times
        >>> [time.family for time in times]
        ['stream', 'mid']
    """

    times: list[PredictedTime] = []
    errors: list[float] = []
    if device.arch == FITTED_ARCH and device.sms and device.bandwidth:
        rates = GpuRates.of(device.sms, device.bandwidth, published_matrix_rate(device.name))
        plan = planned(problem, rates, FITTED_CAPABILITY)
        for m in sorted(tokens):
            launch = plan.launch(m) if plan else None
            shape = MODELLED[launch.family].shape if launch else None
            if launch is None or shape is None:
                continue
            us = predicted_us(problem, m, launch.family, shape(problem, launch.tile), rates)
            if us is not None:
                times.append(PredictedTime(m, us, launch.family))
                error = coefficients().error(launch.family, problem.scheme.weight, device.name)
                errors += [] if error is None else [error]
    reason = "" if len(times) == len(tokens) else _unpredicted(problem, device, bool(times))
    return PredictedTimes(tuple(times), max(errors, default=None), reason)


_ANY_TILE = {"tma": TmaTile(8, 1, 1, stages=2), "stream": StreamTile(1, 0, 1, 4, 1, 8, 1, 1, 4, 1, 8, 1)}
"""A tile of each family without which a layer has no plan, that fits every layer of which one does."""


def _unpredicted(problem: MoEProblem, device: Device, some: bool) -> str:
    """Why times of a layer on a GPU are not predicted, as a clause; with `some`, all but some."""
    if device.arch != FITTED_ARCH:
        return f"they are predicted on {FITTED_ARCH.upper()} only"
    if not device.sms or not device.bandwidth:
        return f"the multiprocessors or the memory bandwidth of {device.name} are not known"
    family = "tma" if problem.scheme.weight.name in ROW_FORMATS else "stream"
    refusal = MODELLED[family].fits(problem, _ANY_TILE[family])
    if refusal:
        return f"portable kernels run this layer, whose times are not predicted ({family}: {refusal})"
    more = " more" if some else " so many"
    return f"portable kernels run{more} tokens, whose times are not predicted"
