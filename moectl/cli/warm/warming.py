"""Compiles kernels of layers in advance, for the commands that do: what is said meanwhile, and the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import Device
from ...errors import UsageError
from ...problem.layer_ranges import layers_of
from ..output import Output

if TYPE_CHECKING:
    from ...layer.warm_layers import WarmLayer, WarmOutcome, WarmPlan

MOST_TOKENS = 16384
"""Tokens of a call up to which kernels are compiled, unless another number is given."""


@dataclass(frozen=True)
class Warmed:
    """What was compiled for one GPU.

    Attributes:
        cache: where Triton keeps the kernels.
    """

    plan: "WarmPlan"
    outcomes: Sequence["WarmOutcome"]
    cache: Path

    @property
    def failed(self) -> bool:
        """Whether a kernel did not compile."""
        return any(outcome.result and outcome.result.failed for outcome in self.outcomes)

    def document(self) -> dict[str, Any]:
        """Plain data."""
        from .text import outcome_document

        return {
            "gpu": self.plan.gpu.name,
            "arch": self.plan.gpu.arch,
            "tokens": self.plan.tokens,
            "cache": str(self.cache),
            "layers": [outcome_document(outcome) for outcome in self.outcomes],
        }

    def draw(self, console: Any) -> None:
        """Prints a table."""
        from .text import draw_outcomes

        draw_outcomes(self.outcomes, self.plan, self.cache, console)


def compiled(layers: Sequence["WarmLayer"], plan: "WarmPlan", out: Output) -> Warmed:
    """Compiles the kernels of `layers`, with a bar of progress; says what was not compiled, and why."""
    from ...layer.compile_ahead import cache_directory
    from ...layer.warm_layers import warm

    outcomes = []
    with out.progress("compiling", unit="kernels") as progress:
        for outcome in warm(layers, plan, progress):
            outcomes.append(outcome)
            if outcome.why:
                out.note(
                    f"{layers_of(outcome.layer.layers)}: {outcome.why}; its library compiles its kernels"
                )
            for text in outcome.result.failed if outcome.result else ():
                out.warn(f"not compiled: {text}")
            if outcome.result and outcome.result.note:
                out.note(f"compiled in one process, {outcome.result.note}")
    return Warmed(plan, outcomes, cache_directory())


def converted_layers(folder: Path) -> "list[WarmLayer]":
    """The different layers of a converted directory, or of all ranks whose directories are in `folder`."""
    from ...convert.manifest.rank_directories import rank_numbers
    from ...layer.converted_ranks import ConvertedRanks
    from ...layer.layer_source import ConvertedLayers
    from ...layer.warm_layers import warm_layers
    from ...problem.moe_problem import Parallel

    ranks = bool(rank_numbers(folder))
    source = ConvertedRanks(folder, check=False) if ranks else ConvertedLayers(folder, check=False)
    return warm_layers(source, Parallel())


def named_gpu(name: str | None, option: str = "--gpu") -> Device:
    """The GPU called `name`, or this machine's; UsageError if it is not one of CUDA's."""
    from ...environment import detect_device, find_device

    device = find_device(name) if name else detect_device()
    if device.platform != "cuda":
        where = f"{option} {name} is" if name else "this machine has"
        raise UsageError(
            f"{where} {device.name}: kernels are compiled for CUDA GPUs",
            hint=f"name a CUDA GPU, for example {option} h200",
        )
    return device
