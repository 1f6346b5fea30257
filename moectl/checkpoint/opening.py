"""Finding a checkpoint: a folder, a config.json, the Hub cache, the Hub, or the built-in catalogue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MoectlError, Unavailable
from .catalogue import Entry, catalogue, find_entry
from .layers import layer_groups
from .model import Checkpoint, Origin, TensorInfo
from .shards import CONFIG, INDEX, read_document, read_folder, weight_files
from .strict_json import shown

MANIFEST = "moectl.json"
"""The file that marks a converted folder."""

QUANTIZATION_FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
}
"""Files of their own that describe the quantization, and the method whose keys they hold."""

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9_][\w.\-]*/[A-Za-z0-9_][\w.\-]*)(?:@(?P<revision>[\w.\-/]+))?", re.ASCII
)


def open_checkpoint(
    ref: str | Path, *, token: str | None = None, offline: bool = False, allow_catalogue: bool = True
) -> Checkpoint:
    """The checkpoint that `ref` names: config, checked tensor headers, MoE layer groups.

    `ref` is a folder, a ``config.json``, a Hub id ``org/name[@revision]`` or a built-in model.
    ``org/name`` is looked up as a folder, in the Hub cache (when whole), on the Hub, as a config.json
    in the cache, then in the catalogue; without the network, cache, then catalogue. A revision never
    comes from the catalogue. `Checkpoint.origin` says where it was found.

    Args:
        token: Hub token; default: HF_TOKEN or the one stored by `hf auth login`.
        offline: stay off the network; HF_HUB_OFFLINE does the same.
        allow_catalogue: False to leave the built-in models out.

    Raises:
        CheckpointError: nothing there, or damaged, incomplete, converted or not understood.
        Unavailable: the Hub is needed, and cannot be reached or wants a login.
    """
    path = Path(ref).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(str(ref))} cannot be a path: {error}.") from error
    if is_folder:
        return _open_folder(path, Origin("folder", str(ref), path=path))
    if is_file:
        return _open_config(path, str(ref))
    match = _HUB_ID.fullmatch(str(ref))
    if match is not None:
        return _open_id(match["repo"], match["revision"], token, offline, allow_catalogue)
    entry = find_entry(str(ref)) if allow_catalogue else None
    if entry is not None:
        return _open_entry(entry)
    raise CheckpointError(
        f"{shown(str(ref))} is no folder, config.json, Hub id or built-in model.",
        hint=f"Check the path, or try one of {', '.join(catalogue())}.",
    )


def _open_folder(folder: Path, origin: Origin) -> Checkpoint:
    if (folder / MANIFEST).exists():
        raise _converted(str(folder))
    config = read_document(folder, CONFIG)
    if config is None:
        raise CheckpointError(f"{folder} has no config.json.", hint="Give the folder of a checkpoint.")
    documents = {name: read_document(folder, name) for name in QUANTIZATION_FILES}
    tensors = read_folder(folder)
    if tensors is None:
        origin = Origin("config", origin.name, origin.revision, origin.path, "it holds no safetensors file")
    return _checkpoint(config, documents, tensors, origin, None if tensors is None else folder)


def _open_config(path: Path, name: str) -> Checkpoint:
    if path.suffix != ".json":
        raise CheckpointError(f"{path} is a file, expected a folder or a config.json.")
    config = read_document(path.parent, path.name)
    assert config is not None, "the caller saw the file"
    if path.name == INDEX or "weight_map" in config:
        raise CheckpointError(f"{path} is an index, expected a config.json.", hint="Give its folder.")
    return _checkpoint(config, {}, None, Origin("config", name, path=path), None)


def _open_id(
    repo: str, revision: str | None, token: str | None, offline: bool, allow_catalogue: bool
) -> Checkpoint:
    from .hub import HubUnreachable, NotOnHub, cached_folder, hub_is_offline

    offline = offline or hub_is_offline()
    folder = cached_folder(repo, revision)
    if folder is not None and (offline or _is_whole(folder)):
        return _open_cached(folder, repo, "")
    why: MoectlError
    if offline:
        why = Unavailable(
            f"{repo}{f'@{revision}' if revision else ''} is not in the Hub cache, and the network is off.",
            hint="Unset HF_HUB_OFFLINE or leave --offline out, or give a folder or a built-in model.",
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
    raise why


def _is_whole(folder: Path) -> bool:
    """True when every weight file of a cached checkpoint is there; an incomplete one is no error yet."""
    try:
        return bool(weight_files(folder)[0])
    except CheckpointError:
        return False


def _open_cached(folder: Path, repo: str, note: str) -> Checkpoint:
    origin = Origin("cache", repo, folder.name, folder, note)
    if _is_whole(folder):
        return _open_folder(folder, origin)
    config = read_document(folder, CONFIG)
    assert config is not None, "the cache lookup saw the file"
    documents = {name: read_document(folder, name) for name in QUANTIZATION_FILES}
    note = "; ".join(part for part in (note, "the cache holds its config.json, not its weights") if part)
    return _checkpoint(config, documents, None, Origin("cache", repo, folder.name, folder, note), None)


def _open_hub(repo: str, revision: str | None, token: str | None) -> Checkpoint:
    from .hub import read_hub

    found = read_hub(repo, revision, token, (INDEX, *QUANTIZATION_FILES))
    if MANIFEST in found.files:
        raise _converted(repo)
    origin = Origin("hub", repo, found.revision)
    return _checkpoint(found.documents[CONFIG], found.documents, found.tensors, origin, None)


def _open_entry(entry: Entry, note: str = "") -> Checkpoint:
    origin = Origin("catalogue", entry.name, entry.revision, note=note)
    return _checkpoint(entry.config, {}, entry.listing(), origin, None)


def _checkpoint(
    config: Mapping[str, Any],
    documents: Mapping[str, Mapping[str, Any] | None],
    tensors: Mapping[str, TensorInfo] | None,
    origin: Origin,
    folder: Path | None,
) -> Checkpoint:
    quantization, source = None, ""
    for name, method in QUANTIZATION_FILES.items():
        document = documents.get(name)
        if document is not None:
            quantization, source = {"quant_method": method, **document}, name
            break
    groups = layer_groups(config, tensors, quantization=quantization, quantization_file=source)
    return Checkpoint(config, tensors or {}, groups, origin, folder)


def _converted(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is a converted folder, not a checkpoint.",
        reason=f"It holds {MANIFEST}.",
        hint="Use it with `moectl run`, `moectl bench` or `moectl verify`; "
        "`moectl unconvert` makes a checkpoint of it again.",
    )
