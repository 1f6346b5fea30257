"""The kernels of published models, compiled and examined without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from moectl.checkpoint.config.declared_layers import declared_layers
from moectl.checkpoint.source.catalogue import built_in
from moectl.errors import UsageError
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.launches import Launch
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.layer.experts import empty_layer
from moectl.problem.published_layers import MODELS as TIMED

from .kernel_report import KernelReport
from .offline_gpu import OFFLINE_GPUS, OfflineGpu
from .shipped_kernels import Examined, candidates, inspect, shipped

MODELS = (
    "openai/gpt-oss-120b",
    "openai/gpt-oss-20b",
    "moonshotai/Kimi-K2-Thinking",
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
    "deepseek-v3",
)
"""Built-in models and timed layers that are examined unless others are named."""

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


def gpu_of(arch: int) -> OfflineGpu:
    """The GPU that stands for ``sm_{arch}``; UsageError names the choices."""
    if arch not in OFFLINE_GPUS:
        raise UsageError(f"no GPU stands for sm_{arch}; choose from {', '.join(map(str, OFFLINE_GPUS))}")
    return OFFLINE_GPUS[arch]


def layer_without_weights(model: str) -> PreparedMoE:
    """An MoE layer of a built-in model, or of `models.MODELS` in its usual format, in shapes alone."""
    problem = TIMED.get(model) or declared_layers(built_in(model).config).group.problem
    return empty_layer(problem, BACKEND)


def largest_of_each_family(launches: Iterable[Examined]) -> tuple[Examined, ...]:
    """Of each kernel family, the launch for the most tokens: the largest tile."""
    return tuple({it.launch.family: it for it in launches}.values())


LAUNCHES: dict[str, Callable[[PreparedMoE, OfflineGpu], tuple[Examined, ...]]] = {
    "families": lambda layer, gpu: largest_of_each_family((*candidates(layer, gpu), *shipped(layer, gpu))),
    "shipped": shipped,
    "candidates": candidates,
}
"""What may be examined: one launch of each family of kernels, shipped where one is; all that ship; all
that may be measured for the table that ships."""


def inspections(
    models: Iterable[str],
    archs: Iterable[int],
    launches: str = "families",
    *,
    every: bool = False,
    families: Collection[str] | None = None,
) -> Iterator[Inspected]:
    """Calls of the layers of `models` on a GPU of each of `archs`.

    Of the `LAUNCHES` that are asked for, each at the first number of tokens that it is for; with `every`, at
    all of them: kernels differ by more than the tile. `families` leaves the others out; UsageError for a name
    that is none.
    """
    for name in families or ():
        if name not in FAMILIES:
            raise UsageError(f"no kernels are called {name!r}; choose from {', '.join(FAMILIES)}")
    for model in models:
        layer = layer_without_weights(model)
        for arch in archs:
            gpu = gpu_of(arch)
            wanted = LAUNCHES[launches](layer, gpu)
            for it in wanted if families is None else (w for w in wanted if w.launch.family in families):
                for tokens in it.tokens if every else it.tokens[:1]:
                    yield Inspected(model, arch, it.launch, tokens, inspect(layer, tokens, it.launch, gpu))
