"""Who would compute the layers of a checkpoint or converted directory in an engine, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..capabilities.own_kernels import TRITON
from ..convert.rank_slice import RankShard
from ..environment import Packages
from ..errors import MoectlError, NoBackend
from ..layer.layer_source import CheckpointLayers
from ..oracle.machine_packages import packages_from
from ..oracle.registry import policy_named
from ..oracle.select import select
from ..problem.layer_ranges import layers_of
from ..problem.layouts import LAYOUTS, OWN_LAYOUTS
from ..problem.moe_problem import MoEProblem
from ..run.run_plan import POLICY
from .model_experts import BACKEND, OWN, ModelExperts, takes_over
from .serve_report import FINE, REFUSED, WARNING, ServedLayers, ServeFinding
from .serve_request import ServeRequest, asked_backend, left_to_engine
from .served_engines import RELAID, ServedEngine

FULL = 0.95
"""Share of a GPU's memory beyond which weights leave an engine nothing to work with: it has a context of its
own, activations and a KV cache beside them."""


@dataclass(frozen=True)
class KindOfLayers:
    """Layers of one kind.

    Attributes:
        layers: who computes them.
        own: moectl's backend that would compute them in its layout; empty if there is none.
        unmet: why the backend that was named does not; empty if it does.
    """

    layers: ServedLayers
    problem: MoEProblem
    own: str
    unmet: str = ""


def kinds_of_layers(request: ServeRequest, experts: ModelExperts, shard: RankShard) -> Iterator[KindOfLayers]:
    """Who computes the layers of a rank, by the same rules as in the engine."""
    assumed = request.release is not None
    try:
        packages = packages_from("torch,triton" if assumed else None)
    except MoectlError:
        packages = packages_from(None)
    numbers: dict[MoEProblem, list[int]] = {}
    for number in sorted(experts.layers):
        numbers.setdefault(experts.problem_of(number, shard), []).append(number)
    asked = asked_backend(request)
    engines = left_to_engine(request) or (not asked and bool(_engine_layout(request, experts, shard)))
    for problem, found in numbers.items():
        own, unmet = _backend(request, problem, packages, experts.converted), ""
        name = "" if engines else asked or own
        if asked and not engines:
            # Nobody knows the packages of another machine.
            there = packages_from("full") if assumed else packages
            unmet = _unmet(request, problem, there, asked)
        yield KindOfLayers(ServedLayers(tuple(found), str(problem.scheme), name), problem, own, unmet)


def _engine_layout(request: ServeRequest, experts: ModelExperts, shard: RankShard) -> str:
    """The layout of a converted directory that kernels of the engine itself compute with; else empty."""
    layout = experts.layout_of(shard)
    return layout if layout in request.engine.own_layouts else ""


def _unmet(request: ServeRequest, problem: MoEProblem, packages: Packages, asked: str) -> str:
    """Why the backend `asked` does not compute layers such as `problem`; empty if it does."""
    try:
        select(problem, request.device, packages, policy_named(POLICY), asked).require()
    except NoBackend as error:
        return error.what
    return ""


def _backend(request: ServeRequest, problem: MoEProblem, packages: Packages, converted: bool) -> str:
    try:
        decision = select(problem, request.device, packages, policy_named(POLICY))
    except NoBackend:
        return ""
    name = decision.best_first[0].backend.runner if decision.best_first else ""
    ours = takes_over(name, problem) or (converted and name in OWN)
    return name if ours or not request.engine.own_only else ""


def _relaid(engine: ServedEngine, layout: str, backend: str, problem: MoEProblem) -> bool:
    """Whether layers of a directory in `layout` are laid out again for `backend` of moectl."""
    reading = [
        name
        for name, facts in LAYOUTS.items()
        if any(reader.engine == POLICY and backend in reader.backends for reader in facts.readers)
    ]
    other = layout not in reading or (layout in OWN_LAYOUTS and layout != TRITON.layout_of(problem.scheme))
    return engine.own_only and bool(layout and reading) and other


def findings_of_layers(
    request: ServeRequest, experts: ModelExperts, kinds: Iterable[KindOfLayers], shard: RankShard
) -> Iterator[ServeFinding]:
    """Who computes each kind of layer, or why nobody does."""
    engine, own, layout = request.engine, False, _engine_layout(request, experts, shard)
    stored = experts.layout_of(shard)
    for kind in kinds:
        found = kind.layers
        which = f"{layers_of(found.layers)} ({found.scheme})"
        own = own or bool(found.backend)
        left = "" if found.backend else layout
        if why := engine.refuses(kind.problem, left):
            other = f"convert --to {POLICY}, or " if kind.own and not engine.refuses(kind.problem) else ""
            do = f"{other}serve the checkpoint without moectl"
            yield ServeFinding("kernels", REFUSED, f"{which}: {why}", do)
        elif kind.unmet:
            says = f"{which}: {BACKEND}={found.backend}: {kind.unmet}"
            yield ServeFinding("kernels", REFUSED, says, "unset it, or name another backend")
        elif found.backend and _relaid(engine, stored, found.backend, kind.problem):
            says = f"{which}: moectl's backend {found.backend}, {RELAID} from {stored}"
            yield ServeFinding("kernels", WARNING, says, "convert for that backend, to start sooner")
        elif found.backend:
            yield ServeFinding("kernels", FINE, f"{which}: moectl's backend {found.backend}")
        elif layout:
            yield _engine_kernels(request, which, layout)
        elif left_to_engine(request):
            yield _forced_finding(request, experts, which, stored)
        elif experts.converted or not engine.own_only:
            says = f"{which}: moectl has no kernel for them on {request.device.name}"
            yield ServeFinding("kernels", REFUSED, says, "serve the published checkpoint without moectl")
        else:
            says = f"{which}: left to {engine.title}, moectl has no kernel for them on {request.device.name}"
            yield ServeFinding("kernels", WARNING, says, "" if own else "serve it without moectl")


def _engine_kernels(request: ServeRequest, which: str, layout: str) -> ServeFinding:
    """Whether the engine's own kernels for `layout` are for this GPU."""
    device, takes = request.device, LAYOUTS[layout].archs
    if device.arch in takes:
        says = f"{which}: {request.engine.title}'s own kernels, on {layout} as it is"
        return ServeFinding("kernels", FINE, says)
    says = f"{which}: {layout} is for {', '.join(takes)}, {device.name} is {device.arch}"
    return ServeFinding("kernels", REFUSED, says, "convert for this GPU")


def _forced_finding(request: ServeRequest, experts: ModelExperts, which: str, stored: str) -> ServeFinding:
    """What `BACKEND` does that leaves experts to the engine's own kernels, of which none takes `stored`."""
    engine = request.engine
    asked = f"{BACKEND}={engine.own_kernels}"
    if not experts.converted:
        says = f"{which}: left to {engine.title} by {asked}"
        return ServeFinding("kernels", WARNING, says, f"unset {BACKEND} for moectl's kernels")
    says = f"{which}: {asked} asks for {engine.title}'s own kernels, none of which takes {stored} as it is"
    return ServeFinding("kernels", REFUSED, says, f"unset {BACKEND}, or convert to another layout")


def findings_of_memory(
    request: ServeRequest, experts: ModelExperts, shards: tuple[RankShard, ...]
) -> Iterator[ServeFinding]:
    """Whether one rank's weights fit; the KV cache and activations come on top."""
    memory, weights = request.device.memory_bytes, weight_bytes(experts, shards, request.tp)
    if not memory:
        return
    name, gib = request.device.name, 2**30
    what = "weights"
    if isinstance(experts.source, CheckpointLayers) and experts.source.checkpoint.origin.kind == "catalogue":
        what = "experts"
    text = f"{what} of {weights / gib:.3g} GiB per GPU, {name} has {memory / gib:.3g} GiB"
    if weights > FULL * memory:
        yield ServeFinding("memory", REFUSED, text, "use more GPUs: --tp, --ep")
    elif weights > 0.85 * memory:
        yield ServeFinding("memory", WARNING, f"{text}: little is left for the KV cache", "use more GPUs")
    else:
        yield ServeFinding("memory", FINE, text)


def weight_bytes(experts: ModelExperts, shards: tuple[RankShard, ...], tp: int) -> int:
    """Bytes of weights on the GPU of one of `shards`; what is no expert is divided by `tp`."""
    source: Any = experts.source
    if isinstance(source, CheckpointLayers):
        known = experts.tensor_names(experts.layers)
        sizes = {True: 0, False: 0}
        for name, info in source.checkpoint.tensors.items():
            sizes[known.fullmatch(name) is not None] += info.nbytes
        return sizes[True] // len(shards) + sizes[False] // tp
    manifest = experts.directory(shards[0]).manifest
    stored = sum(layer.size for layer in manifest.record.layers)
    return int(stored) + sum(info.nbytes for info in manifest.passthrough.values()) // tp
