"""The kernels that published models meet on a GPU, compiled and examined without one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from .checkpoint.catalogue import built_in
from .checkpoint.declared import declared_layers
from .errors import UsageError
from .experts import unfilled
from .kernels.prepared import PreparedMoE
from .kernels.triton.inspection.report import KernelReport
from .kernels.triton.inspection.shipped import Examined, candidates, inspect, shipped
from .kernels.triton.inspection.standin import STAND_INS, StandIn
from .kernels.triton.launch import Launch
from .kernels.triton.runner import REGIMES
from .models import MODELS as TIMED

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


def gpu_of(arch: int) -> StandIn:
    """The GPU that stands for ``sm_{arch}``; UsageError names the choices."""
    if arch not in STAND_INS:
        raise UsageError(f"no GPU stands for sm_{arch}; choose from {', '.join(map(str, STAND_INS))}")
    return STAND_INS[arch]


def layer_without_weights(model: str) -> PreparedMoE:
    """An MoE layer of a built-in model, or of `models.MODELS` in its usual format, in shapes alone."""
    problem = TIMED.get(model) or declared_layers(built_in(model).config).group.problem
    return unfilled(problem, BACKEND)


def one_of_each_family(launches: Iterable[Examined]) -> tuple[Examined, ...]:
    """Of each family of kernels, the launch for the most tokens: the largest tile."""
    return tuple({it.launch.regime: it for it in launches}.values())


LAUNCHES: dict[str, Callable[[PreparedMoE, StandIn], tuple[Examined, ...]]] = {
    "families": lambda layer, gpu: one_of_each_family((*candidates(layer, gpu), *shipped(layer, gpu))),
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
        if name not in REGIMES:
            raise UsageError(f"no kernels are called {name!r}; choose from {', '.join(REGIMES)}")
    for model in models:
        layer = layer_without_weights(model)
        for arch in archs:
            gpu = gpu_of(arch)
            wanted = LAUNCHES[launches](layer, gpu)
            for it in wanted if families is None else (w for w in wanted if w.launch.regime in families):
                for tokens in it.tokens if every else it.tokens[:1]:
                    yield Inspected(model, arch, it.launch, tokens, inspect(layer, tokens, it.launch, gpu))
