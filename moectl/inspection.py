"""The kernels that published models meet on a GPU, compiled and examined without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .checkpoint.catalogue import built_in
from .checkpoint.declared import declared_layers
from .errors import UsageError
from .experts import unfilled
from .kernels.prepared import PreparedMoE
from .kernels.triton.inspection.report import KernelReport
from .kernels.triton.inspection.shipped import Shipped, inspect, shipped
from .kernels.triton.inspection.standin import STAND_INS, StandIn
from .kernels.triton.launch import Launch

MODELS = (
    "openai/gpt-oss-120b",
    "openai/gpt-oss-20b",
    "moonshotai/Kimi-K2-Thinking",
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
)
"""Built-in models whose layers are examined unless others are named."""

BACKEND = "triton"


@dataclass(frozen=True)
class Inspected:
    """One call of a model's layer on a GPU, and the kernels that it launches, in their order."""

    model: str
    arch: int
    launch: Launch
    tokens: int
    kernels: tuple[KernelReport, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """What must not be in its kernels, each with the kernel's name."""
        return tuple(f"{kernel.name}: {fault}" for kernel in self.kernels for fault in kernel.faults)


def gpu_of(arch: int) -> StandIn:
    """The GPU that stands for ``sm_{arch}``; UsageError names the choices."""
    if arch not in STAND_INS:
        raise UsageError(f"no GPU stands for sm_{arch}; choose from {', '.join(map(str, STAND_INS))}")
    return STAND_INS[arch]


def layer_without_weights(model: str) -> PreparedMoE:
    """An MoE layer of a built-in model, in shapes alone."""
    return unfilled(declared_layers(built_in(model).config).group.problem, BACKEND)


def one_of_each_family(launches: Iterable[Shipped]) -> tuple[Shipped, ...]:
    """Of each family of kernels, the launch for the most tokens: the largest tile."""
    return tuple({it.launch.regime: it for it in launches}.values())


def inspections(models: Iterable[str], archs: Iterable[int], *, every: bool = False) -> Iterator[Inspected]:
    """Calls of the layers of `models` on a GPU of each of `archs`, as they ship.

    One launch of each family of kernels, at the first number of tokens that takes it; with `every`, all
    launches at all numbers of tokens that the inspection knows, whose kernels differ by more than the tile.
    """
    for model in models:
        layer = layer_without_weights(model)
        for arch in archs:
            gpu = gpu_of(arch)
            launches = shipped(layer, gpu)
            for it in launches if every else one_of_each_family(launches):
                for tokens in it.tokens if every else it.tokens[:1]:
                    yield Inspected(model, arch, it.launch, tokens, inspect(layer, tokens, it.launch, gpu))
