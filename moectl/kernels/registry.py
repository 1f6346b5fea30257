"""The runners by their backends' names, and the packages that each one imports. Needs no torch itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import NoBackend, UsageError

if TYPE_CHECKING:
    from .runner import Runner


@dataclass(frozen=True, slots=True)
class RunnerEntry:
    """Where a runner is defined, and what must be installed to import it.

    Attributes:
        path: ``module:NAME`` of the `Runner`.
        packages: what the module imports besides moectl and the standard library.
    """

    path: str
    packages: tuple[str, ...] = ("torch",)

    def load(self) -> Runner:
        """The runner; its module is imported now."""
        module, _, name = self.path.partition(":")
        runner: Runner = getattr(import_module(module), name)
        return runner


_TRITON = ("torch", "triton")

RUNNERS: dict[str, RunnerEntry] = {
    "torch": RunnerEntry("moectl.kernels.torch_backends.torch_runner:RUNNER"),
    "moectl": RunnerEntry("moectl.kernels.triton.triton_runner:RUNNER", _TRITON),
    "moectl_marlin": RunnerEntry("moectl.kernels.triton.marlin:RUNNER", _TRITON),
    "humming": RunnerEntry("moectl.kernels.external.humming:RUNNER", _TRITON),
    "humming_grouped": RunnerEntry("moectl.kernels.external.humming:GROUPED_RUNNER", _TRITON),
    "marlin": RunnerEntry("moectl.kernels.external.vllm_marlin:RUNNER", _TRITON),
    "triton_kernels": RunnerEntry("moectl.kernels.external.triton_kernels:RUNNER", _TRITON),
    "triton": RunnerEntry("moectl.kernels.external.vllm_triton:RUNNER", _TRITON),
    "cutlass": RunnerEntry("moectl.kernels.external.vllm_cutlass:RUNNER", _TRITON),
    "flashinfer_cutlass": RunnerEntry("moectl.kernels.external.flashinfer_cutlass:RUNNER"),
    "flashinfer_trtllm": RunnerEntry("moectl.kernels.external.flashinfer_trtllm:RUNNER"),
    "flashinfer_trtllm_monolithic": RunnerEntry("moectl.kernels.external.flashinfer_trtllm:MONOLITHIC"),
    "flashinfer_trtllm_afp8": RunnerEntry("moectl.kernels.external.flashinfer_trtllm:FP8"),
    "flashinfer_trtllm_afp8_monolithic": RunnerEntry(
        "moectl.kernels.external.flashinfer_trtllm:FP8_MONOLITHIC"
    ),
    "deep_gemm": RunnerEntry("moectl.kernels.external.deep_gemm:RUNNER", _TRITON),
    "batched_deep_gemm": RunnerEntry("moectl.kernels.external.deep_gemm:MASKED", _TRITON),
    "torch_grouped": RunnerEntry("moectl.kernels.external.torch_grouped:RUNNER", _TRITON),
    "sonic_moe": RunnerEntry("moectl.kernels.external.sonic_moe:RUNNER", _TRITON),
    "emulation": RunnerEntry("moectl.kernels.torch_backends.emulation:RUNNER"),
}
"""Every backend that runs here. Other projects' packages are imported only when a layer is checked or run."""

REFERENCES = ("torch", "emulation")
"""Backends that show what is right, not what is fast: no comparison of times is with them."""

ANY_LAYOUT = "torch"
"""The backend that supports every layout on every device."""


def runner_for(name: str) -> Runner:
    """The runner called `name`.

    Raises:
        UsageError: there is none; the message lists the choices.
        NoBackend: a package that it imports is not installed, or lacks what is imported from it.

    Example:
        >>> runner_for("torch").name
        'torch'
    """
    if name not in RUNNERS:
        raise UsageError(f"backend {name!r} cannot be run here; choose from {', '.join(RUNNERS)}")
    entry = RUNNERS[name]
    with _needing(entry.packages, name):
        return entry.load()


@contextmanager
def _needing(packages: tuple[str, ...], name: str) -> Iterator[None]:
    """Turns a failed import of one of `packages` into NoBackend; any other ImportError is a bug and stays."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        raise NoBackend(
            f"the {name} backend needs the package {package}: {error}", hint=f"pip install {package}"
        ) from error
