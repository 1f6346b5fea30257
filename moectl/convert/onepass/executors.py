"""One pass over a large tensor for chains whose steps compose into one.

A supported device type has a row in `EXECUTORS`. The pass writes directly to the output without copies,
so it needs less memory than step-by-step conversion, which memory budgets assume.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version

from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor
from ..steps.transforms import Step
from .compose import compose

SMALLEST = 1 << 20
"""Bytes of output from which loading compiled code pays off."""


EXECUTORS: Mapping[str, tuple[str, str]] = {"cpu": ("cpu_pass", "numba"), "cuda": ("cuda_pass", "triton")}
"""By torch's device type: the module that runs programs there, and the package that compiles its kernels."""


def one_pass(
    steps: tuple[Step, ...],
    source: Tensor,
    target: Tensor,
    canonical: TensorType,
    *,
    inverse: bool = False,
    any_size: bool = False,
) -> bool:
    """True when `target` was filled from `source` by all `steps`, or with `inverse` by undoing them.

    Otherwise `target` is untouched, as when it is below `SMALLEST` without `any_size`. `canonical` is the
    type of the canonical tensor.
    """
    if (
        not steps
        or (target.numel() * target.element_size() < SMALLEST and not any_size)
        or source.device != target.device
    ):
        return False
    if not (source.is_contiguous() and target.is_contiguous()):
        return False
    run = load(source.device.type)[0]
    program = compose(steps, canonical.with_first_axis(1), inverse=inverse) if run is not None else None
    if run is None or program is None:
        return False
    return run(program, source, target)


def fast_path() -> str:
    """A sentence on how large tensors are converted on each type of device."""
    return "; ".join(f"{kind}: {load(kind)[1]}" for kind in EXECUTORS)


@cache
def load(kind: str) -> tuple[Callable[..., bool] | None, str]:
    """The function that runs programs on devices of `kind`, or None, and a clause on how they convert."""
    if kind not in EXECUTORS:
        return None, "step by step"
    module, package = EXECUTORS[kind]
    try:
        importlib.import_module(package)
    except ImportError as error:
        return None, f"step by step, because {package} cannot be imported ({error})"
    run: Callable[..., bool] = importlib.import_module(f".{module}", __package__).run
    return run, f"in one pass, compiled by {package} {version(package)}"
