"""The launches of a layer that ship, and their times by the model, on a GPU that need not be here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...capabilities.own_kernels import TRITON, act_used
from ...environment import Device
from ...problem.moe_problem import MoEProblem
from ...problem.roofline import uniform_work
from .launch_model import GpuRates, coefficients, fitted_family, predicted_us
from .launch_plan import TILE_FAMILIES, planned


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
        act: the format to which tokens are quantized, ``a16`` if they stay in 16 bits, whatever the
            checkpoint declares.
        times: by number of tokens, in ascending order.
        median_error: median relative error of predictions on this GPU, of layers that the model was not
            fitted to, the largest of the families among the times; None if one of the launches was not
            measured with weights of the layer's format, on it or at all.
        reason: why there are none, as a clause; empty if there are.
    """

    act: str
    times: tuple[PredictedTime, ...]
    median_error: float | None
    reason: str = ""


@lru_cache(maxsize=64)
def predicted_times(problem: MoEProblem, device: Device, tokens: tuple[int, ...]) -> PredictedTimes:
    """The predicted times of `problem`, a rank's share, on `device` with the launches that ship.

    With expert parallelism they are those of the most loaded rank, as a step takes (`uniform_work`).

    Example:
        >>> from moectl.environment import find_device
        >>> from moectl.problem.published_layers import model_problem
        >>> times = predicted_times(model_problem("gpt-oss-120b"), find_device("h200"), (1, 1024)).times
        >>> [time.family for time in times]
        ['stream', 'mid']
    """
    act = act_used(problem)
    if reason := _unpredicted(device):
        return PredictedTimes(act, (), None, reason)
    major, minor = divmod(device.capability, 10)
    rates = GpuRates.of_gpu(device.name, device.sms, device.bandwidth, (major, minor))
    plan = planned(problem, rates, (major, minor))
    if plan is None:
        return PredictedTimes(act, (), None, f"nothing was measured of {problem.scheme.weight} weights")
    times: list[PredictedTime] = []
    errors: list[float | None] = []
    for m in sorted(tokens):
        launch = plan.launch(m)
        shape = TILE_FAMILIES[launch.family].shape(problem, launch.tile)
        us = predicted_us(problem, m, launch.family, shape, rates, _busiest(problem, m))
        if us is not None:
            times.append(PredictedTime(m, us, launch.family))
            name = fitted_family(launch.family, shape)
            error = coefficients().error(name, problem.scheme.weight, device.name)
            measured = all(gemm.name in coefficients().shapes for gemm in shape.gemms)
            errors += [error if measured else None]
    known = [error for error in errors if error is not None]
    return PredictedTimes(act, tuple(times), max(known) if len(known) == len(errors) > 0 else None)


def _busiest(problem: MoEProblem, tokens: int) -> tuple[float, float] | None:
    """Active experts and assignments of the most loaded rank; None without expert parallelism."""
    if problem.parallel.ep_size == 1:
        return None
    work = uniform_work(problem, tokens)
    return work.experts, work.assignments


def _unpredicted(device: Device) -> str:
    """Why times on a device are not predicted, as a clause; empty if they are."""
    if divmod(device.capability, 10) < TRITON.lowest:
        return "they are predicted for NVIDIA GPUs from SM80 on"
    if not device.sms or not device.bandwidth:
        return f"the multiprocessors or the memory bandwidth of {device.name} are not known"
    return ""
