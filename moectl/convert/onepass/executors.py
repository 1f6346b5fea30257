"""Chains in one pass over large tensors, where they compose into one and something here can run it.

A device type has a row in `EXECUTORS`. The pass writes straight into the output and holds no copy of a
tensor, so it needs less than the step-by-step way, which memory plans count with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor

from ...files.tensor_table import TensorType
from ..steps.transforms import Rearrange, Step, Xor
from .compose import compose

SMALLEST = 1 << 20
"""Bytes of output from which loading compiled code pays."""


@dataclass(frozen=True)
class Executor:
    """What runs programs on one type of device: its module here, and the package that this compiles with."""

    module: str
    package: str


EXECUTORS: Mapping[str, Executor] = {
    "cpu": Executor("cpu_pass", "numba"),
    "cuda": Executor("cuda_pass", "triton"),
}
"""By torch's device type."""

_TURNED: tuple[Step, ...] = (Rearrange("e n k -> e k n"),)
_COPIED: tuple[Step, ...] = (Xor(1),)


def one_pass(
    steps: tuple[Step, ...], source: Tensor, target: Tensor, canonical: TensorType, *, back: bool = False
) -> bool:
    """True when `target` now holds `source` with all `steps` done, or with `back` undone.

    Otherwise it is untouched. `canonical` is the canonical tensor's type.
    """
    if not steps or target.numel() * target.element_size() < SMALLEST or source.device != target.device:
        return False
    if not (source.is_contiguous() and target.is_contiguous()):
        return False
    run = load(source.device.type)[0]
    program = compose(steps, canonical.with_first_axis(1), back=back) if run is not None else None
    if run is None or program is None:
        return False
    return run(program, source, target)


def warm_up(kind: str = "cpu") -> None:
    """Loads what converts on devices of `kind`, so that its memory and time count as an import's.

    Compiled code is some 110 MB resident on a CPU; the first call after an installation compiles it.
    """
    run = load(kind)[0]
    for steps in (_TURNED, _COPIED):
        program = compose(steps, TensorType("U8", (1, 16, 16)))
        if run is not None and program is not None:
            t = torch.zeros((1, 16, 16), dtype=torch.uint8, device=kind)
            run(program, t, torch.empty_like(t))


def fast_path() -> str:
    """How large tensors are converted on each type of device, for a person to read."""
    return "; ".join(f"{kind}: {load(kind)[1]}" for kind in EXECUTORS)


@cache
def load(kind: str) -> tuple[Callable[..., bool] | None, str]:
    """What runs a program on devices of `kind`, or None, and a sentence about it."""
    if kind not in EXECUTORS:
        return None, "step by step"
    package = EXECUTORS[kind].package
    try:
        importlib.import_module(package)
    except ImportError as error:
        return None, f"step by step, because {package} cannot be imported ({error})"
    run: Callable[..., bool] = importlib.import_module(f".{EXECUTORS[kind].module}", __package__).run
    return run, f"in one pass, compiled by {package} {version(package)}"
