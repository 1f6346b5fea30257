"""The layers of a model whose kernels are compiled in advance, and what that came to for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..convert.manifest.rank_directories import rank_numbers
from ..convert.rank_slice import RankSlice, shard_of
from ..environment import Device
from ..kernels.registry import runner_for
from ..kernels.triton.layer_binaries import OWN
from ..kernels.triton.offline_gpu import OfflineGpu, standing_in
from ..problem.layouts import OWN_LAYOUTS
from ..problem.moe_problem import MoEProblem, Parallel
from .compile_ahead import (
    CompileRequest,
    CompileResult,
    Report,
    compile_binaries,
    refuse_unwritable_cache,
    remember,
)
from .converted_ranks import ConvertedRanks
from .kernel_files import export_kernels, import_kernels
from .layer_source import CheckpointLayers, ConvertedLayers, LayerSource


@dataclass(frozen=True)
class WarmLayer:
    """Equal layers of a model: their numbers, and the problem of one rank or several.

    Attributes:
        layers: their numbers, in ascending order.
        layout: the layout in which a converted directory has them; empty for a checkpoint.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    layout: str = ""

    def backend(self, asked: str, device: torch.device) -> tuple[str, str]:
        """The backend whose kernels are compiled, and why there is none; one of the two is empty.

        `asked`, or the one that reads the layout, else ``moectl``.
        """
        named = [asked] if asked else [name for name in OWN if runner_for(name).layout == self.layout]
        name = (named or [OWN[0]])[0]
        refusal = runner_for(name).refusal(self.problem, device)
        return ("", f"the {name} backend does not support it: {refusal}") if refusal else (name, "")


@dataclass(frozen=True)
class WarmOutcome:
    """What warming one `WarmLayer` came to.

    Attributes:
        backend: the backend whose kernels these are; empty if there is none.
        why: why there is none.
        result: what was compiled; None without a backend.
        taken: kernels taken from a directory before.
        written: kernels written to a directory.
    """

    layer: WarmLayer
    backend: str
    why: str = ""
    result: CompileResult | None = None
    taken: int = 0
    written: int = 0


@dataclass(frozen=True)
class WarmPlan:
    """What to compile, and where compiled kernels come from and go to.

    Attributes:
        tokens: most tokens of a call.
        jobs: worker processes; 0 for as many as the machine has cores and memory for.
        backend: the backend; empty for the one that would run each layer.
        source, target: directories of `kernel_files` to read first, and to write.
    """

    gpu: Device
    tokens: int
    jobs: int = 0
    batched: bool = False
    backend: str = ""
    source: Path | None = None
    target: Path | None = None


def own_layouts() -> tuple[str, ...]:
    """Layouts of converted directories that moectl's own kernels read as they are."""
    named = (runner_for(name).layout for name in OWN)
    return (*OWN_LAYOUTS, *(layout for layout in named if isinstance(layout, str)))


def warm_layers(source: LayerSource, parallel: Parallel) -> list[WarmLayer]:
    """The different layers of a checkpoint or converted directory, on all ranks of `parallel`.

    A converted directory has the ranks' shares already; `parallel` is not looked at. Raises UsageError when
    the experts cannot be spread over the ranks.
    """
    found: dict[tuple[MoEProblem, str], set[int]] = {}
    for layers, problem, layout in _shares(source, parallel):
        found.setdefault((problem, layout), set()).update(layers)
    return [WarmLayer(tuple(sorted(layers)), *key) for key, layers in found.items()]


def _shares(source: LayerSource, parallel: Parallel) -> Iterator[tuple[Sequence[int], MoEProblem, str]]:
    """Layers, the problem that a rank has of them, as a server's ranks find it, and their layout."""
    if isinstance(source, CheckpointLayers):
        for part in source.checkpoint.groups:
            for rank in range(parallel.ranks):
                shard = shard_of(rank, parallel.tp_size, parallel.ep_size)
                yield part.layers, RankSlice(part.problem, shard).problem, ""
    elif isinstance(source, ConvertedRanks):
        for rank in rank_numbers(source.folder):
            yield from _shares(source.rank(rank), parallel)
    elif isinstance(source, ConvertedLayers):
        from ..convert.manifest.manifest_records import unpadded

        for group in source.manifest.record.groups:
            yield group.layers, unpadded(group.problem), source.manifest.record.layout.name


def warm(layers: Sequence[WarmLayer], plan: WarmPlan, report: Report | None = None) -> Iterator[WarmOutcome]:
    """Compiles the kernels of `layers`; yields an outcome after each.

    Raises UsageError for a GPU without kernels of moectl's, Unavailable if kernels are missing from Triton's
    cache and it cannot be written, and what `kernel_files` raises.
    """
    gpu = OfflineGpu.of(plan.gpu)
    for layer in layers:
        with standing_in(gpu):
            backend, why = layer.backend(plan.backend, torch.device("cuda"))
        if not backend:
            yield WarmOutcome(layer, "", why)
            continue
        request = CompileRequest(layer.problem, backend, gpu, plan.tokens, plan.batched)
        with standing_in(gpu):
            binaries = request.binaries()
            if not all(binary.cached for binary in binaries):
                refuse_unwritable_cache()
            taken = import_kernels(binaries, plan.source) if plan.source else 0
            result = compile_binaries(request, binaries, plan.jobs, report)
            remember(request, result)
            written = export_kernels(binaries, plan.target) if plan.target else 0
        yield WarmOutcome(layer, backend, "", result, taken, written)
