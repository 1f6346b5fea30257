"""The kernels of published models, compiled and examined without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from moectl.checkpoint.config.declared_layers import declared_layers
from moectl.checkpoint.source.catalogue import built_in
from moectl.errors import UsageError
from moectl.kernels.choice.launch import Launch
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.offline_gpu import OfflineGpu
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.layer.experts import empty_layer
from moectl.problem.published_layers import MODELS as TIMED

from .kernel_report import KernelReport
from .offline_gpu import OFFLINE_GPUS
from .shipped_kernels import Examined, candidates, inspect, shipped

MODELS = (
    "openai/gpt-oss-120b",
    "openai/gpt-oss-20b",
    "moonshotai/Kimi-K2-Thinking",
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
    "deepseek-v3",
)
"""Built-in models and timed layers that are examined by default."""

IN_ROWS = ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-FP8")
"""Built-in models whose weights are read in rows, for the kernels that only they take."""

BACKEND = "moectl"


@dataclass(frozen=True)
class Inspected:
    """One call of a model's layer on a GPU, and the kernels that it launches, in order."""

    model: str
    arch: int
    launch: Launch
    tokens: int
    kernels: tuple[KernelReport, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults of its kernels, each after the kernel's name."""
        return tuple(f"{kernel.name}: {fault}" for kernel in self.kernels for fault in kernel.faults)


def gpu_of(arch: int) -> OfflineGpu:
    """The GPU that represents ``sm_{arch}``; UsageError names the choices."""
    if arch not in OFFLINE_GPUS:
        raise UsageError(f"no GPU is defined for sm_{arch}; choose from {', '.join(map(str, OFFLINE_GPUS))}")
    return OFFLINE_GPUS[arch]


def layer_without_weights(model: str) -> PreparedMoE:
    """An MoE layer of a built-in model or a timed layer in its usual format, without weights."""
    problem = TIMED.get(model) or declared_layers(built_in(model).config).group.problem
    return empty_layer(problem, BACKEND)


def largest_of_each_family(launches: Iterable[Examined]) -> tuple[Examined, ...]:
    """The launch of each kernel family for the most tokens, which has its largest tile."""
    return tuple({examined.launch.family: examined for examined in launches}.values())


LAUNCHES: dict[str, Callable[[PreparedMoE, OfflineGpu], tuple[Examined, ...]]] = {
    "families": lambda layer, gpu: largest_of_each_family((*candidates(layer, gpu), *shipped(layer, gpu))),
    "shipped": shipped,
    "candidates": candidates,
}
"""Selections of launches: one for each kernel family, preferably shipped; all that ship; all that tuning may
measure."""


def inspections(
    models: Iterable[str],
    archs: Iterable[int],
    launches: str = "families",
    *,
    every: bool = False,
    families: Collection[str] | None = None,
) -> Iterator[Inspected]:
    """Calls of the layers of `models` on a GPU of each of `archs`, with the `LAUNCHES` selected.

    Each launch is examined for the first of its numbers of tokens; with `every` for all of them, as kernels
    depend on more than the tile. `families` selects kernel families; UsageError for an unknown name.
    """
    for name in families or ():
        if name not in FAMILIES:
            raise UsageError(f"no kernel family is called {name!r}; choose from {', '.join(FAMILIES)}")
    for model in models:
        layer = layer_without_weights(model)
        for arch in archs:
            gpu = gpu_of(arch)
            for examined in LAUNCHES[launches](layer, gpu):
                launch = examined.launch
                if families is not None and launch.family not in families:
                    continue
                for tokens in examined.tokens if every else examined.tokens[:1]:
                    yield Inspected(model, arch, launch, tokens, inspect(layer, tokens, launch, gpu))
