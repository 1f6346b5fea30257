"""Whether an engine would serve a checkpoint or converted directory with moectl's experts."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.source.catalogue import weights_missing
from ..checkpoint.source.open_checkpoint import MANIFEST, rank_folder
from ..convert.manifest.manifest import Manifest
from ..convert.rank_slice import RankShard
from ..environment import Device, Packages
from ..environment.cache_folder import cache_folder
from ..environment.installed_packages import distribution_version
from ..errors import MoectlError, NoBackend, UsageError, install_hint
from ..files.folder_handle import file_findings
from ..kernels.registry import RUNNERS
from ..layer.layer_source import CheckpointLayers, ConvertedLayers
from ..oracle.machine_packages import packages_from
from ..oracle.registry import policy_named
from ..oracle.select import select
from ..problem.layer_ranges import ranges
from ..problem.layouts import LAYOUTS
from ..problem.moe_problem import MoEProblem
from ..run.run_plan import POLICY
from .engine_names import kernels_asked
from .limits import reasons_and_hints
from .model_experts import BACKEND, OWN, ModelExperts, open_experts, takes_over
from .serve_report import FINE, REFUSED, WARNING, ServedLayers, ServeFinding, ServeReport
from .served_engines import RELAID, ServedEngine

OLDEST = 80
"""Lowest compute capability of moectl's kernels in engines, as ten times its number."""

DTYPES = ("auto", "bfloat16", "float16", "half")
SPARE_DISK = 2 << 30
"""Bytes that compiled kernels may need on the disk of the caches."""

FULL = 0.95
"""Share of a GPU's memory beyond which weights leave an engine nothing to work with: it has a context of its
own, activations and a KV cache beside them."""

HASHED = 64 << 20
"""Largest size in bytes of a document or tokenizer's file that is always hashed."""


@dataclass(frozen=True)
class ServeRequest:
    """What is to be served, where and how.

    Attributes:
        checkpoint: a directory or Hub id.
        device: the GPU of each rank.
        tp, ep: sizes of tensor and expert parallelism, as the engine counts.
        options: of the engine's command line, ``--name`` to value; True and False for flags.
        release: of the engine, to be assumed; None for what is installed.
        verify: hash all files of a converted directory.
        offline: do not contact the Hub.
        stated: whether `device` was stated, not found on this machine.
    """

    checkpoint: str
    engine: ServedEngine
    device: Device
    tp: int = 1
    ep: int = 1
    options: Mapping[str, object] = field(default_factory=dict)
    release: str | None = None
    verify: bool = False
    offline: bool = False
    stated: bool = False


def check_serving(request: ServeRequest) -> ServeReport:
    """Every reason why `request` would not work, and what would; reads headers, no weights.

    Errors of the checkpoint are findings. Raises UsageError for arguments that mean nothing.
    """
    engine = request.engine
    sizes = engine.deployed(request.tp, request.ep, request.options)
    request = replace(request, tp=sizes.tp, ep=sizes.ep, options=sizes.options)
    findings = list(_engine_findings(request))
    findings += [ServeFinding("ranks", REFUSED, says, "use --tp and --ep") for says in sizes.unclear]
    findings += _option_findings(request)
    findings += _device_findings(request)
    findings += _backend_findings(request)
    layers: tuple[ServedLayers, ...] = ()
    converted: bool | None = None
    read, served = _places(request.checkpoint)
    shards = engine.shards(request.tp, request.ep, request.options)
    if isinstance(shards, str):
        findings.append(ServeFinding("ranks", REFUSED, shards, "choose other sizes"))
        shards = ()
    try:
        experts = open_experts(read, offline=request.offline, described=True)
        converted = experts.converted
        if top := _above(experts):
            served = str(top)
            says = f"{request.checkpoint} has one rank's experts alone, and no config.json"
            findings.append(ServeFinding("files", REFUSED, says, f"serve {top}"))
        files = list(_file_findings(request, experts, shards))
        findings += files
        findings += _head_findings(request, experts)
        if shards and (not converted or all(finding.level != REFUSED for finding in files)):
            kinds = tuple(_kinds(request, experts, shards[0]))
            layers = tuple(kind.layers for kind in kinds)
            findings += _layer_findings(request, experts, kinds, shards[0])
            findings += _memory_findings(request, experts, shards)
    except MoectlError as error:
        findings.append(_finding("checkpoint", error))
    given = request.options.items()
    kept = {name: value for name, value in given if not _refused_option(engine, name, value)}
    return ServeReport(
        checkpoint=request.checkpoint,
        engine=engine.name,
        release=_release(request),
        gpu=request.device.name,
        tp=request.tp,
        ep=request.ep,
        converted=converted,
        findings=tuple(findings),
        layers=layers,
        serve=engine.command(served, request.tp, request.ep, kept, (Path(read) / MANIFEST).exists()),
    )


def _refused_option(engine: ServedEngine, name: str, value: object) -> bool:
    """Whether an option is to be left out of the command."""
    own = name == "--quantization" or (name == "--dtype" and value not in DTYPES)
    return own or bool(engine.refusals({name: value}))


def _finding(about: str, error: MoectlError) -> ServeFinding:
    says = ". ".join(filter(None, (error.what, error.reason.removesuffix("."))))
    return ServeFinding(about, REFUSED, says, error.hint)


def _places(checkpoint: str) -> tuple[str, str]:
    """What to read, and what to serve: a directory of ranks is read in its first."""
    folder = Path(checkpoint)
    first = rank_folder(folder, 0)
    if (folder / MANIFEST).exists() or not (first / MANIFEST).exists():
        return checkpoint, checkpoint
    return str(first), checkpoint if (folder / "config.json").exists() else str(first)


def _above(experts: ModelExperts) -> Path | None:
    """The directory that has what a rank's own lacks; None if what was opened is whole."""
    source = experts.source
    if isinstance(source, ConvertedLayers) and source.manifest.top != source.folder:
        return source.manifest.top
    return None


def _release(request: ServeRequest) -> str | None:
    package = request.engine.package
    return request.release or distribution_version(package, package) or None


def _engine_findings(request: ServeRequest) -> Iterator[ServeFinding]:
    engine, release = request.engine, _release(request)
    known = " and ".join(engine.releases)
    if release is None:
        says, get = f"{engine.title} is not installed here", install_hint(engine.extra)
        yield ServeFinding("engine", REFUSED, says, f"{get}, or state its version with --release")
        return
    if not engine.has_adapter(release):
        says = f"moectl has no adapter for {engine.title} {release}, only for {known}"
        yield ServeFinding("engine", REFUSED, says, f"use one of these releases of {engine.title}")
    else:
        where = "assumed" if request.release else "installed"
        yield ServeFinding("engine", FINE, f"{engine.title} {release} ({where}) has an adapter")
    if not engine.group or request.release:
        return
    if "moectl" not in {point.name for point in entry_points(group=engine.group)}:
        says = f"{engine.title} does not find moectl: no entry point {engine.group} is called moectl"
        yield ServeFinding("plug-in", REFUSED, says, "install moectl in the engine's environment with pip")
        return
    allowed = os.environ.get(engine.allowed, "")
    if allowed and "moectl" not in (name.strip() for name in allowed.split(",")):
        says = f"{engine.allowed}={allowed} keeps {engine.title} from loading moectl"
        yield ServeFinding("plug-in", REFUSED, says, f"add moectl to {engine.allowed}")
    else:
        yield ServeFinding("plug-in", FINE, f"{engine.title} finds moectl by its entry point")


def _option_findings(request: ServeRequest) -> Iterator[ServeFinding]:
    options = request.options
    if met := request.engine.refusals(options):
        says, do = reasons_and_hints(request.engine.title, met)
        yield ServeFinding("options", REFUSED, says, do)
    asked = options.get("--quantization")
    if asked not in (None, "moectl"):
        says = f"--quantization {asked} keeps moectl from computing experts"
        yield ServeFinding("options", REFUSED, says, "leave it out")
    if request.engine.group:
        try:
            kernels_asked()
        except MoectlError as error:
            yield _finding("options", error)
    dtype = str(options.get("--dtype", "auto"))
    if dtype not in DTYPES:
        says = f"moectl's experts take bfloat16 or float16, not {dtype}"
        yield ServeFinding("options", REFUSED, says, "use --dtype bfloat16")


def _device_findings(request: ServeRequest) -> Iterator[ServeFinding]:
    device, name = request.device, request.device.name
    digits = device.arch.removeprefix("sm")
    capable = device.platform == "cuda" and digits.isdecimal() and int(digits) >= OLDEST
    if not capable and request.engine.own_only:
        says = f"moectl's kernels need an NVIDIA GPU of sm{OLDEST} or newer; {name} is {device.arch}"
        do = "serve it without moectl there" if request.stated else "state the server's with --gpu"
        yield ServeFinding("device", REFUSED, says, do)
    free = shutil.disk_usage(_existing(cache_folder())).free
    if free < SPARE_DISK:
        says = f"only {free >> 20} MiB are free for compiled kernels in {cache_folder()}"
        yield ServeFinding("disk", WARNING, says, "free some, or set XDG_CACHE_HOME")


def _asked(request: ServeRequest) -> str:
    """The backend of every layer that `BACKEND` names, or the engine's word for its own; else empty."""
    name = _named(request)
    return name if name in RUNNERS or name == request.engine.own_kernels else ""


def _named(request: ServeRequest) -> str:
    # Where a program imports moectl itself, it also names the backend.
    return os.environ.get(BACKEND, "") if request.engine.group else ""


def _backend_findings(request: ServeRequest) -> Iterator[ServeFinding]:
    name = _named(request)
    if name and not _asked(request):
        own = request.engine.own_kernels
        known = ", ".join([*([own] if own else []), *OWN])
        says = f"{BACKEND}={name} names no backend in {request.engine.title}"
        yield ServeFinding("backend", REFUSED, says, f"unset it, or choose from {known}")


def _forced(request: ServeRequest) -> bool:
    """Whether `BACKEND` leaves all experts to the engine's own kernels."""
    return bool(request.engine.own_kernels) and _asked(request) == request.engine.own_kernels


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _file_findings(
    request: ServeRequest, experts: ModelExperts, shards: Iterable[RankShard]
) -> Iterator[ServeFinding]:
    """Whether each rank finds its own files, whole; sizes and headers only, unless hashes are asked for."""
    if isinstance(experts.source, CheckpointLayers):
        checkpoint = experts.source.checkpoint
        if checkpoint.folder is None:
            yield _download_finding(request, checkpoint)
        else:
            says = "every file of the checkpoint is there, with the sizes in its headers"
            yield ServeFinding("files", FINE, says)
        if checkpoint.origin.kind != "catalogue":  # which lists experts alone
            yield from _lone_experts(experts, checkpoint.tensors)
        return
    folders = []
    for shard in shards:
        try:
            source = experts.directory(shard)
            for number in source.layers():
                source.manifest.open_layer(number)
            _ = source.manifest.passthrough
        except UsageError as error:
            # Said once for all ranks.
            found = _finding("files", error)
            yield replace(found, do=_sizes_hint(request, experts, shard, found.do))
            return
        except MoectlError as error:
            yield _finding("files", error)
        else:
            folders.append(source)
    if not folders:
        return
    manifest = folders[0].manifest
    changed = tuple(_changed_documents(manifest))
    yield from changed
    if not changed:
        ranks = f"{len(folders)} ranks, " if len(folders) > 1 else ""
        says = f"{ranks}{len(manifest.layers)} layers as {manifest.layout.name}, complete"
        yield ServeFinding("files", FINE, says)
    if not manifest.passthrough:
        says = "the directory has experts only, no engine finds the other weights in it"
        yield ServeFinding("files", REFUSED, says, "convert without --experts-only")
    else:
        yield from _lone_experts(experts, manifest.passthrough)
    if request.verify:
        yield from _hash_findings(folders)


def _download_finding(request: ServeRequest, checkpoint: Checkpoint) -> ServeFinding:
    """What happens at a start without the weights of a model of the Hub."""
    missing = weights_missing(checkpoint.origin.name)
    if request.offline:
        return _finding("files", missing)
    size = sum(info.nbytes for info in checkpoint.tensors.values()) / 2**30
    says = f"{missing.what}: {request.engine.name} downloads them when it starts, experts of {size:.3g} GiB"
    return ServeFinding("files", WARNING, says, missing.hint)


def _changed_documents(manifest: Manifest) -> Iterator[ServeFinding]:
    """What is not as written of the files that engines read themselves: config.json, index, tokenizer."""
    record = manifest.record
    for item in (*record.documents, *record.files):
        sha256 = item.sha256 if item.size <= HASHED else ""
        for says in file_findings(manifest.top, item.file, item.size, sha256):
            yield ServeFinding("files", REFUSED, says, "put back what was written, or convert again")


def _sizes_hint(request: ServeRequest, experts: ModelExperts, shard: RankShard, hint: str) -> str:
    """What to do about a directory for another deployment: serve that one, if the engine has it."""
    here: RankShard = experts.source.shard
    tp, ep = here.ranks, here.ep_size
    sizes = (here.tp_size, here.ep_size)
    theirs = request.engine.shards(tp, ep, request.options)
    has = not isinstance(theirs, str) and (theirs[0].tp_size, theirs[0].ep_size) == sizes
    if not has or sizes == (shard.tp_size, shard.ep_size):
        return hint
    return f"use --tp {tp}{f' --ep {ep}' if ep > 1 else ''}, or {hint[:1].lower()}{hint[1:]}"


def _lone_experts(experts: ModelExperts, names: Iterable[str]) -> Iterator[ServeFinding]:
    """A warning if no MoE layer has weights outside its MoE block, as every model does: norms, attention.

    `names` are those of the tensors that are not converted.
    """
    patterns = set()
    for name in experts.expert_names:
        before, number, rest = name.partition(r"\d+")
        block = rest.split(r"\.")[1]
        patterns.add(rf"{before}{number}\.(?!{block}\.)")
    others = re.compile("|".join(patterns))
    if not any(others.match(name) for name in names):
        says = "its layers have no weights but those of experts and routers, and engines need all"
        yield ServeFinding("files", WARNING, says, "serve a whole checkpoint: `moectl synth` writes no more")


def _head_findings(request: ServeRequest, experts: ModelExperts) -> Iterator[ServeFinding]:
    """Whether the tensor-parallel ranks divide the model's attention heads, where these are known."""
    ranks = request.engine.attention_ranks(request.tp, request.options)
    heads, pairs = experts.model.attention_heads, experts.model.kv_heads
    if heads % ranks:
        says = f"{ranks} tensor-parallel ranks do not divide {heads} attention heads"
    elif pairs and pairs % ranks and ranks % pairs:
        says = f"{ranks} tensor-parallel ranks neither divide {pairs} key and value heads nor are a multiple"
    else:
        return
    yield ServeFinding("ranks", REFUSED, says, "choose another --tp")


def _hash_findings(folders: Iterable[ConvertedLayers]) -> Iterator[ServeFinding]:
    from ..convert.restore.verify import verify

    for source in folders:
        report = verify(source.folder, None)
        for finding in report.findings:
            yield ServeFinding("hashes", REFUSED, str(finding), "convert again")
        if report.ok:
            yield ServeFinding("hashes", FINE, f"every byte of {source.folder} is as written")


@dataclass(frozen=True)
class _Kind:
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


def _kinds(request: ServeRequest, experts: ModelExperts, shard: RankShard) -> Iterator[_Kind]:
    """Who computes the layers of a rank, by the same rules as in the engine."""
    assumed = request.release is not None
    try:
        packages = packages_from("torch,triton" if assumed else None)
    except MoectlError:
        packages = packages_from(None)
    numbers: dict[MoEProblem, list[int]] = {}
    for number in sorted(experts.layers):
        numbers.setdefault(experts.problem_of(number, shard), []).append(number)
    asked = _asked(request)
    engines = _forced(request) or (not asked and bool(_engine_layout(request, experts, shard)))
    for problem, found in numbers.items():
        own, unmet = _backend(request, problem, packages, experts.converted), ""
        name = "" if engines else asked or own
        if asked and not engines:
            # Nobody knows the packages of another machine.
            there = packages_from("full") if assumed else packages
            unmet = _unmet(request, problem, there, asked)
        yield _Kind(ServedLayers(tuple(found), str(problem.scheme), name), problem, own, unmet)


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


def _relaid(engine: ServedEngine, layout: str, backend: str) -> bool:
    """Whether the experts of a directory in `layout` are laid out again for `backend` of moectl."""
    reading = [
        name
        for name, facts in LAYOUTS.items()
        if any(reader.engine == POLICY and backend in reader.backends for reader in facts.readers)
    ]
    return engine.own_only and bool(layout and reading) and layout not in reading


def _layer_findings(
    request: ServeRequest, experts: ModelExperts, kinds: Iterable[_Kind], shard: RankShard
) -> Iterator[ServeFinding]:
    engine, own, layout = request.engine, False, _engine_layout(request, experts, shard)
    stored = experts.layout_of(shard)
    for kind in kinds:
        found = kind.layers
        which = f"layers {ranges(found.layers)} ({found.scheme})"
        own = own or bool(found.backend)
        left = "" if found.backend else layout
        if why := engine.refuses(kind.problem, left):
            other = f"convert --to {POLICY}, or " if kind.own and not engine.refuses(kind.problem) else ""
            do = f"{other}serve the checkpoint without moectl"
            yield ServeFinding("kernels", REFUSED, f"{which}: {why}", do)
        elif kind.unmet:
            says = f"{which}: {BACKEND}={found.backend}: {kind.unmet}"
            yield ServeFinding("kernels", REFUSED, says, "unset it, or name another backend")
        elif found.backend and _relaid(engine, stored, found.backend):
            says = f"{which}: moectl's backend {found.backend}, {RELAID} from {stored}"
            yield ServeFinding("kernels", WARNING, says, "convert for that backend, to start sooner")
        elif found.backend:
            yield ServeFinding("kernels", FINE, f"{which}: moectl's backend {found.backend}")
        elif layout:
            yield _engine_kernels(request, which, layout)
        elif _forced(request):
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


def _memory_findings(
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
