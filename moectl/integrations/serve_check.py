"""Whether an engine would serve a checkpoint or converted directory with moectl's experts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from ..checkpoint.source.open_checkpoint import MANIFEST, rank_folder
from ..environment.cache_folder import cache_folder
from ..environment.installed_packages import distribution_version
from ..errors import MoectlError, install_hint
from ..layer.layer_source import ConvertedLayers
from .engine_names import kernels_asked
from .limits import reasons_and_hints
from .model_experts import BACKEND, OWN, ModelExperts, open_experts
from .serve_files import findings_of_files
from .serve_layers import findings_of_layers, findings_of_memory, kinds_of_layers
from .serve_report import FINE, REFUSED, WARNING, ServedLayers, ServeFinding, ServeReport
from .serve_request import ServeRequest, asked_backend, named_backend, refusal_of
from .served_engines import ServedEngine

OLDEST = 80
"""Lowest compute capability of moectl's kernels in engines, as ten times its number."""

DTYPES = ("auto", "bfloat16", "float16", "half")
SPARE_DISK = 2 << 30
"""Bytes that compiled kernels may need on the disk of the caches."""


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
        files = list(findings_of_files(request, experts, shards))
        findings += files
        findings += _head_findings(request, experts)
        if shards and (not converted or all(finding.level != REFUSED for finding in files)):
            kinds = tuple(kinds_of_layers(request, experts, shards[0]))
            layers = tuple(kind.layers for kind in kinds)
            findings += findings_of_layers(request, experts, kinds, shards[0])
            findings += findings_of_memory(request, experts, shards)
    except MoectlError as error:
        findings.append(refusal_of("checkpoint", error))
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
            yield refusal_of("options", error)
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


def _backend_findings(request: ServeRequest) -> Iterator[ServeFinding]:
    name = named_backend(request)
    if name and not asked_backend(request):
        own = request.engine.own_kernels
        known = ", ".join([*([own] if own else []), *OWN])
        says = f"{BACKEND}={name} names no backend in {request.engine.title}"
        yield ServeFinding("backend", REFUSED, says, f"unset it, or choose from {known}")


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


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
