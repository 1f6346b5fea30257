"""`open_checkpoint`: from a directory, a config.json, the Hub cache, the Hub or the built-in catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ...errors import CheckpointError, MoectlError, Unavailable
from ...files.folder_handle import open_inside
from ...files.strict_json import parse_document, shown
from ...files.tensor_table import TensorInfo
from ..checkpoint import Checkpoint, Origin
from ..config.other_weights import blocked_matrices
from ..config.user_assumptions import UserAssumptions
from ..tensors.layer_groups import layer_groups
from .catalogue import CatalogueEntry, built_in, find_entry, near_names, suggestion
from .hub_cache import may_be_cached
from .shards import (
    CONFIG,
    INDEX,
    QUANTIZATION_FILES,
    SUFFIX,
    read_document,
    read_folder,
    separate_quantization,
    weight_files,
)

MANIFEST = "moectl.json"
"""The manifest file, which identifies a converted directory."""

LOG = "progress.jsonl"
"""The log of a conversion's finished layers, which an unfinished output has."""


OTHER_WORK = {"restored": "unconvert", "synthetic": "synth"}
"""Commands other than `convert` that keep a log in their output, by what its first line has as the layout."""


def interrupted_command(folder: Path) -> str | None:
    """The command whose unfinished output `folder` is, such as ``unconvert``; None if it has no log.

    A log that cannot be read counts as that of ``convert``, which says what is wrong with it.
    """
    if not (folder / LOG).exists():
        return None
    try:
        with open_inside(folder, LOG, LOG) as file:
            first = parse_document(file.readline(1 << 20), LOG)
    except (MoectlError, OSError):
        return "convert"
    logged = first.get("conversion")
    return OTHER_WORK.get(str(logged.get("layout")), "convert") if isinstance(logged, dict) else "convert"


_RANK = re.compile(r"rank-(\d{2,5})", re.ASCII)


def rank_folder(folder: Path, rank: int) -> Path:
    """The converted directory of one rank, inside the directory of all ranks."""
    return folder / f"rank-{rank:02d}"


def rank_number(folder: Path) -> int | None:
    """The rank whose directory's name `folder` has; None for any other name."""
    match = _RANK.fullmatch(folder.name)
    return None if match is None else int(match[1])


_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9_][\w.\-]*/[A-Za-z0-9_][\w.\-]*)(?:@(?!\S*\.\.)(?P<revision>[\w.\-/]+))?", re.ASCII
)
_HUB_URL = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/tree/([^?#]+?))?/?"
)


def open_checkpoint(
    ref: str | Path,
    *,
    token: str | None = None,
    offline: bool = False,
    allow_catalogue: bool = True,
    assumptions: UserAssumptions = UserAssumptions(),
) -> Checkpoint:
    """Opens a checkpoint: reads its config, checks its tensor headers, groups its MoE layers.

    ``org/name`` is looked up as a directory, in the Hub cache if complete there, on the Hub, as a lone
    config.json in the cache, then in the catalogue; offline only in the cache, then in the catalogue. With
    a revision the catalogue is skipped. `Checkpoint.origin` tells where it was found.

    Args:
        ref: a directory, a ``config.json``, a Hub id ``org/name[@revision]``, the URL of a model's page
            (``https://huggingface.co/org/name[/tree/revision]``) or a built-in model.
        token: Hub token; by default HF_TOKEN or the one stored by `hf auth login`.
        offline: do not use the network, as with HF_HUB_OFFLINE.
        allow_catalogue: False to exclude the built-in models.
        assumptions: activation and routing as the user states them; they override config and headers.

    Raises:
        CheckpointError: the checkpoint does not exist, or is damaged, incomplete, converted or not
            understood.
        Unavailable: the Hub is needed, and cannot be reached or requires a login.

    Example:
        >>> checkpoint = open_checkpoint("gpt-oss-20b", offline=True)
        >>> (group,) = checkpoint.groups
        >>> str(group.problem.scheme), group.problem.experts, group.problem.top_k
        ('mxfp4 group 32, a16 activations', 32, 4)
    """
    return _checkpoint(_find(str(ref), token, offline, allow_catalogue), assumptions)


def open_built_in(name: str, assumptions: UserAssumptions = UserAssumptions()) -> Checkpoint:
    """Opens the built-in model `name` from the catalogue, wherever else it may be.

    Raises UsageError with the nearest names if there is none.

    Example:
        >>> open_built_in("gpt-oss-20b").origin.kind
        'catalogue'
    """
    return _checkpoint(_open_entry(built_in(name)), assumptions)


def _checkpoint(source: _OpenedSource, assumptions: UserAssumptions) -> Checkpoint:
    """What a source's files describe."""
    if source.entry is not None and assumptions == UserAssumptions():
        return replace(_as_published(source.entry), origin=source.origin)
    return _described(source, assumptions)


RECENT = 64
"""Built-in models that are kept once they are read."""


@lru_cache(maxsize=RECENT)
def _as_published(entry: CatalogueEntry) -> Checkpoint:
    return _described(_open_entry(entry), UserAssumptions())


def _described(source: _OpenedSource, assumptions: UserAssumptions) -> Checkpoint:
    quantization, quantization_file = separate_quantization(source.documents)
    groups = layer_groups(
        source.config,
        source.tensors,
        quantization=quantization,
        quantization_file=quantization_file,
        assumptions=assumptions,
    )
    in_blocks = any(group.problem.scheme.weight.name == "fp8" for group in groups)
    return Checkpoint(
        source.config,
        source.tensors or {},
        groups,
        source.origin,
        source.folder,
        quantization,
        quantization_file,
        blocked_matrices(source.config, quantization, quantization_file) if in_blocks else (),
    )


@dataclass(frozen=True)
class _OpenedSource:
    """The files read from a checkpoint; `tensors` is None for a config alone, `folder` without weights.

    `entry` is the built-in model that they belong to, if they do.
    """

    config: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, Any] | None]
    tensors: Mapping[str, TensorInfo] | None
    origin: Origin
    folder: Path | None
    entry: CatalogueEntry | None = None


def _find(ref: str, token: str | None, offline: bool, allow_catalogue: bool) -> _OpenedSource:
    """Looks `ref` up in each place in order and reads it."""
    name = _without_url(ref)
    if not name.strip():
        raise CheckpointError(
            "the name of the checkpoint is empty, expected a folder, config.json, Hub id or built-in model.",
            hint="Give one; `.` is the folder you are in.",
        )
    path = _path(name)
    with _readable(name):
        if path.is_dir():
            return _open_folder(path, Origin("folder", name, path=path))
        if path.is_file():
            return _open_config(path, name)
        if path.exists():
            raise CheckpointError(
                f"the checkpoint {shown(name)} is a pipe or device, expected a folder or a config.json.",
                hint="Give the folder of a checkpoint.",
            )
    if _looks_like_a_path(name):
        raise CheckpointError(
            f"there is no {shown(name)}.",
            hint="Check the path, or give a Hub id org/name or a built-in model.",
        )
    match = _HUB_ID.fullmatch(name)
    if match is not None:
        return _open_id(match["repo"], match["revision"], token, offline, allow_catalogue)
    entry = find_entry(name) if allow_catalogue else None
    if entry is not None:
        folder = None
        if may_be_cached(entry.name):
            from .hub import cached_folder

            folder = cached_folder(entry.name, None)
        whole = folder is not None and _is_whole(folder)
        return _open_cached(folder, entry.name, "") if folder and whole else _open_entry(entry)
    raise CheckpointError(
        f"no folder, config.json, Hub id or built-in model is called {shown(name)}.",
        hint=f"Check the path. {suggestion(name)}",
    )


def _without_url(ref: str) -> str:
    """`ref`, with the URL of a model's page replaced by its Hub id; CheckpointError for any other URL."""
    match = _HUB_URL.fullmatch(ref)
    if match is not None:
        return match[1] if match[2] is None else f"{match[1]}@{unquote(match[2])}"
    if "://" in ref:
        raise CheckpointError(
            f"the address {shown(ref)} is not that of a model's page on the Hub.",
            hint="Give https://huggingface.co/org/name or org/name, or download the checkpoint.",
        )
    return ref


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"the path {shown(name)} names the home folder of a user who has none.",
            hint="Give the whole path.",
        ) from error


def _looks_like_a_path(name: str) -> bool:
    """True for a name that cannot be a Hub id, whose revision, after ``@``, may contain slashes."""
    before = name.partition("@")[0]
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or before.count("/") > 1
        or before.endswith(("/", ".json", SUFFIX))
    )


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Converts the system's errors about an invalid or inaccessible path to CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {shown(name)} cannot be read: {error.strerror or error}.",
            hint="Check the path and its permissions.",
        ) from error


def _open_folder(folder: Path, origin: Origin) -> _OpenedSource:
    if (rank_folder(folder, 0) / MANIFEST).exists():
        raise CheckpointError(
            f"{folder} holds the converted folders of several ranks, and is no checkpoint.",
            hint=f"`moectl run` takes one of them, such as {rank_folder(folder, 0)}; "
            "`moectl unconvert` makes a checkpoint of all of them.",
        )
    if (folder / MANIFEST).exists():
        raise _converted(str(folder))
    config = read_document(folder, CONFIG)
    if config is None:
        if command := interrupted_command(folder):
            raise CheckpointError(
                f"{folder} is the unfinished output of `moectl {command}`: it has {LOG} and no config.json.",
                hint=f"Finish it with the same `moectl {command}` command{_RESUMED_BY[command]}.",
            )
        _refuse_other_models(folder)
        raise CheckpointError(
            f"{folder} has no config.json.",
            hint="Give the folder of a whole checkpoint, or a built-in model.",
        )
    documents = {name: read_document(folder, name) for name in QUANTIZATION_FILES}
    tensors = read_folder(folder)
    if tensors is None:
        origin = Origin("config", origin.name, origin.revision, origin.path, "it holds no safetensors file")
    return _OpenedSource(config, documents, tensors, origin, None if tensors is None else folder)


_RESUMED_BY = {
    "convert": " and --resume",
    "unconvert": ", which begins again",
    "synth": " after removing the directory",
}
"""How the same command finishes an output that it has left unfinished."""


def _refuse_other_models(folder: Path) -> None:
    """Raises CheckpointError for a directory without config.json that holds a LoRA adapter or GGUF files."""
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} holds a LoRA adapter, expected a whole checkpoint.",
            hint="Give the base model; `moectl explain` plans for an adapter with --assume lora=yes, and to "
            "convert, merge it first (PeftModel.merge_and_unload).",
        )
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if gguf is not None:
        raise _gguf(gguf)


def _gguf(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a GGUF file, which moectl does not read.",
        hint="Give the safetensors checkpoint that it was made from: its directory, Hub id or built-in name.",
    )


def _open_config(path: Path, name: str) -> _OpenedSource:
    if path.suffix.lower() == ".gguf":
        raise _gguf(path)
    if path.suffix != ".json":
        kind = "one weight file" if path.suffix == SUFFIX else "a file"
        raise CheckpointError(
            f"{path} is {kind}, expected a folder or a config.json.", hint=f"Give its folder, {path.parent}."
        )
    config = read_document(path.parent, path.name)
    assert config is not None, "the caller saw the file"
    if path.name == INDEX or "weight_map" in config:
        raise CheckpointError(
            f"{path} is an index, expected a config.json.", hint=f"Give its folder, {path.parent}."
        )
    siblings = {name: read_document(path.parent, name) for name in QUANTIZATION_FILES}
    documents = siblings if path.name == CONFIG else {}
    return _OpenedSource(config, documents, None, Origin("config", name, path=path), None)


def _open_id(
    repo: str, revision: str | None, token: str | None, offline: bool, allow_catalogue: bool
) -> _OpenedSource:
    from .hub import NotOnHub, cached_folder, hub_is_offline
    from .hub_limits import HubUnreachable

    offline = offline or hub_is_offline()
    folder = cached_folder(repo, revision)
    if folder is not None and (offline or _is_whole(folder)):
        return _open_cached(folder, repo, "")
    why: MoectlError
    if offline:
        why = Unavailable(
            f"{repo}{f'@{revision}' if revision else ''} is not in the Hub cache, and the network is off.",
            hint=f"Unset HF_HUB_OFFLINE or leave --offline out. {suggestion(repo)}",
        )
    else:
        try:
            return _open_hub(repo, revision, token)
        except (NotOnHub, HubUnreachable) as error:
            why = error
    if folder is not None:
        return _open_cached(folder, repo, why.what)
    entry = find_entry(repo) if allow_catalogue and revision is None else None
    if entry is not None:
        return _open_entry(entry, why.what)
    near = near_names(repo) if not offline else []
    if near:
        raise type(why)(why.what, reason=why.reason, hint=f"{why.hint} {suggestion(repo)}") from why
    raise why


def _is_whole(folder: Path) -> bool:
    """True when every weight file of a cached checkpoint is present; no error for an incomplete one."""
    try:
        return bool(weight_files(folder)[0])
    except CheckpointError:
        return False


def _open_cached(folder: Path, repo: str, note: str) -> _OpenedSource:
    from .hub_cache import HeaderCache

    origin = Origin("cache", repo, folder.name, folder, note)
    if _is_whole(folder):
        return _open_folder(folder, origin)
    config = read_document(folder, CONFIG)
    assert config is not None, "the cache lookup saw the file"
    documents = {name: read_document(folder, name) for name in QUANTIZATION_FILES}
    tensors = HeaderCache(repo, folder.name).tensors(read_document(folder, INDEX))
    cached = "config.json" if tensors is None else "headers"
    note = "; ".join(part for part in (note, f"the cache holds its {cached}, not its weights") if part)
    return _OpenedSource(config, documents, tensors, Origin("cache", repo, folder.name, folder, note), None)


def _open_hub(repo: str, revision: str | None, token: str | None) -> _OpenedSource:
    from .hub import read_hub

    repository = read_hub(repo, revision, token, (INDEX, *QUANTIZATION_FILES))
    if MANIFEST in repository.files:
        raise _converted(repo)
    origin = Origin("hub", repo, repository.revision, note=repository.note)
    return _OpenedSource(repository.documents[CONFIG], repository.documents, repository.tensors, origin, None)


def _open_entry(entry: CatalogueEntry, note: str = "") -> _OpenedSource:
    note = "; ".join(part for part in (note, entry.note) if part)
    origin = Origin("catalogue", entry.name, entry.revision, note=note)
    return _OpenedSource(entry.config, entry.documents, entry.listing(), origin, None, entry)


def _converted(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is a converted folder, not a checkpoint.",
        reason=f"It holds {MANIFEST}.",
        hint="Use it with `moectl run`, `moectl bench` or `moectl verify`; "
        "`moectl unconvert` makes a checkpoint of it again.",
    )
