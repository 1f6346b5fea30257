"""One layer's experts, from a checkpoint or a converted folder, in the layout a backend reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.checkpoint import Checkpoint, LayerGroup
from ..checkpoint.source.open_checkpoint import rank_folder
from ..convert.canonical import byte_scales
from ..convert.codecs import check_scales
from ..convert.manifest.manifest import Manifest, check_layer, load_layer, load_manifest
from ..convert.manifest.manifest_records import group_recipe, group_share, unpadded
from ..convert.manifest.rank_directories import ranks_in
from ..convert.recipe.recipe import Recipe, StoredOutput
from ..convert.sources import map_layer
from ..convert.stream.expert_batches import ExpertBatches
from ..convert.stream.source_reader import FolderReader, as_bytes, as_tensor, spans
from ..errors import CheckpointError, NoBackend, Unavailable, UsageError
from ..files.safetensors_writer import nbytes
from ..files.tensor_table import TensorInfo
from ..kernels.prepared_layer import CANONICAL, PreparedMoE, Router
from ..kernels.registry import ANY_LAYOUT, RUNNERS, runner_for
from ..torch_dtypes import TORCH_DTYPES
from .experts import ExpertLayer, Ids

RESTORED_SCALES = 16 << 20
"""Canonical bytes of scales that are restored at once from a converted folder, to be checked."""

ROUTED = frozenset(("weight", "bias", "correction_bias", "expert_scale", "hash", "input_scale"))
"""Tensors of a router that can be computed: of its logits, and what `kernels.routing.route` takes beside."""


def checkpoint_layer(checkpoint: Checkpoint, layer: int | None = None) -> ExpertLayer:
    """One layer of a checkpoint whose tensors are in a folder; the first MoE layer for None.

    Raises:
        UsageError: there is no such MoE layer, its storage has no reader, or it is a config alone.
        Unavailable: the tensors are not on this machine.
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype.
    """
    group, number = _group_of(checkpoint, layer)
    folder = checkpoint.folder
    if folder is None:
        origin = checkpoint.origin
        if origin.kind == "config":
            raise UsageError(
                f"{origin.name} is a config alone, which has no weights",
                hint="give the folder of the checkpoint that it is of",
            )
        raise Unavailable(
            f"the weights of {origin.name} are not on this machine",
            hint="download the checkpoint and give its folder",
        )
    mapped = map_layer(checkpoint, group, number)
    batches = ExpertBatches(mapped)

    def canonical(ids: Ids) -> dict[str, Tensor]:
        with FolderReader(folder) as reader:
            return read_experts(reader, batches, ids, byte_scales(group.problem))

    def stored(device: torch.device) -> dict[str, Tensor]:
        return {role: t.to(device) for role, t in canonical(range(group.problem.local_experts)).items()}

    recipe = Recipe(mapped.shapes, {role: StoredOutput(role) for role in mapped.shapes})
    names = {key: name.replace("{layer}", str(number)) for key, name in group.names.router.items()}
    router = read_router(folder, checkpoint.tensors, names)
    return ExpertLayer(group.problem, number, CANONICAL, recipe, canonical, stored, router)


def _group_of(checkpoint: Checkpoint, layer: int | None) -> tuple[LayerGroup, int]:
    if not checkpoint.groups:
        raise CheckpointError(f"{checkpoint.origin.name} has no MoE layers")
    try:
        group = checkpoint.group_of(layer)
    except KeyError as error:
        layers = sorted(n for g in checkpoint.groups for n in g.layers)
        raise UsageError(
            f"layer {layer} has no experts; MoE layers are {layers[0]} to {layers[-1]}",
            hint="choose one of them with --layer",
        ) from error
    return group, group.layers[0] if layer is None else layer


def read_experts(
    reader: FolderReader, batches: ExpertBatches, experts: Ids, meaning: str = "E8M0"
) -> dict[str, Tensor]:
    """The canonical tensors ``[len(experts), ...]`` of a layer, read from a checkpoint's files.

    `meaning` is what scales that are bytes are. Raises CheckpointError for a file that is too short, and
    for scales that are not numbers.
    """

    def read(info: TensorInfo, at: int, view: memoryview) -> None:
        reader.read(info.file, view, info.start + at)

    batch = batches.canonical(experts, read)
    for role, t in batch.items():
        if role.endswith("_scale"):
            check_scales(t, meaning)
    return batch


def read_router(folder: Path, tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> Router | None:
    """The router of tensors named ``weight`` and as in `ROUTED` in `names`.

    None when `tensors` has no weight of that name, or the router is quantized. Raises CheckpointError for
    tensors that no token can be routed by.
    """
    if not names.keys() <= ROUTED:
        return None
    with FolderReader(folder) as reader:
        found = {key: _read_tensor(reader, tensors[name]) for key, name in names.items() if name in tensors}
    if "weight" not in found:
        return None
    for key, tensor in found.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise CheckpointError(
                f"tensor {names[key]} has numbers that are not finite, and routes tokens",
                hint="get the file again: no backend could compute that right",
            )
    correction, table = found.get("correction_bias"), found.get("hash")
    if table is not None and not 0 <= int(table.min()) <= int(table.max()) < len(found["weight"]):
        raise CheckpointError(
            f"tensor {names['hash']} must hold ids of {len(found['weight'])} experts, "
            f"got {int(table.min())} to {int(table.max())}"
        )
    return Router(
        found["weight"],
        found.get("bias"),
        None if correction is None else correction.flatten(),
        found.get("expert_scale"),
        table,
        found.get("input_scale"),
    )


def _read_tensor(reader: FolderReader, info: TensorInfo) -> Tensor:
    if info.dtype not in TORCH_DTYPES:
        raise CheckpointError(f"tensor {info.name} of dtype {info.dtype} cannot be read")
    buffer = torch.empty(info.nbytes, dtype=torch.uint8)
    reader.read(info.file, as_bytes(buffer), info.start)
    return as_tensor(buffer, info.dtype, info.shape)


def converted_layer(manifest: Manifest, layer: int | None = None, *, check: bool = True) -> ExpertLayer:
    """One layer of a converted folder; the first converted layer for None.

    The file's size and header are always held to the manifest; with `check`, hashes and scales too.

    Raises:
        CheckpointError: the folder has no such layer, or its file differs from the manifest.
    """
    number = manifest.layers[0] if layer is None else layer
    group = manifest.group_of(number)
    problem = unpadded(group.problem)
    recipe, places = group_recipe(group), manifest.open_layer(number)
    if check:
        check_layer(manifest, number, places)
        _check_scales(problem.local_experts, manifest, recipe, places)

    def stored(device: torch.device) -> dict[str, Tensor]:
        return {role: t.to(device) for role, t in load_layer(manifest, number, places).items()}

    def canonical(ids: Ids) -> dict[str, Tensor]:
        with FolderReader(manifest.folder) as reader:
            return _restored(reader, recipe, places, ids)

    names = {key: name.replace("{layer}", str(number)) for key, name in group.router.items()}
    router = _converted_router(manifest, names)
    share = group_share(manifest.record.shard, group)
    return ExpertLayer(problem, number, manifest.layout.name, recipe, canonical, stored, router, share)


def _restored(
    reader: FolderReader, recipe: Recipe, places: Mapping[str, TensorInfo], ids: Ids
) -> dict[str, Tensor]:
    roles = [name for name, output in recipe.outputs.items() if not output.per_layer]
    roles += [recipe.side(role) for role in recipe.kept]
    return recipe.restore({role: _rows(reader, places[role], ids) for role in roles}, len(ids))


def _check_scales(experts: int, manifest: Manifest, recipe: Recipe, places: Mapping[str, TensorInfo]) -> None:
    """CheckpointError when a stored scale is not a number: hashes say only what was written."""
    scales = Recipe(
        {role: form for role, form in recipe.shapes.items() if role.endswith("_scale")},
        {name: output for name, output in recipe.outputs.items() if output.role.endswith("_scale")},
    )
    # Scales that come back only with other roles take the whole recipe.
    whole = not set(scales.kept) <= set(recipe.kept)
    with FolderReader(manifest.folder) as reader:
        for role, (dtype, shape) in scales.shapes.items():
            size = manifest.problem.expert_bytes() * experts if whole else nbytes(dtype, shape)
            step = max(1, RESTORED_SCALES * experts // size)
            for first, last in spans(experts, step):
                found = _restored(reader, recipe if whole else scales, places, range(first, last))
                check_scales(found[role], byte_scales(manifest.problem))


def _rows(reader: FolderReader, info: TensorInfo, experts: Ids) -> Tensor:
    """The chosen experts of a stored tensor with experts first."""
    each = info.nbytes // info.shape[0]
    buffer = torch.empty(len(experts) * each, dtype=torch.uint8)
    view = as_bytes(buffer)
    for i, expert in enumerate(map(int, experts)):
        reader.read(info.file, view[i * each : (i + 1) * each], info.start + expert * each)
    return as_tensor(buffer, info.dtype, (len(experts), *info.shape[1:]))


def _converted_router(manifest: Manifest, names: Mapping[str, str]) -> Router | None:
    """The router among the tensors that were not converted; None where they were left out."""
    there = manifest.passthrough
    tensors = {name: there[name] for name in names.values() if name in there}
    return read_router(manifest.folder, tensors, names)


def prepare(
    checkpoint: Checkpoint, layer: int | None, backend: str, device: torch.device | str = "cpu"
) -> PreparedMoE:
    """One layer of `checkpoint` in the layout that `backend` reads; errors as of `ExpertLayer.prepared`."""
    return checkpoint_layer(checkpoint, layer).prepared(backend, device)


def load_prepared(
    folder: str | Path,
    layer: int | None = None,
    backend: str | None = None,
    device: torch.device | str = "cpu",
    *,
    rank: int | None = None,
    tp_size: int | None = None,
    ep_size: int | None = None,
    check: bool = False,
) -> PreparedMoE:
    """One layer of a converted folder, ready to run.

    On the CPU the weights are views of the file's memory map: nothing is read before it is used, and
    processes that load the same file share its pages. They are for reading; what is written to them
    stays in this process and never reaches the file. The file must stay as it is while they live. On
    another device they are copies. Where `backend` reads another layout than the folder's, the layer is
    laid out anew, and `PreparedMoE.relaid` says so.

    Args:
        folder: what `moectl convert` has written; with `rank`, the folder of all ranks.
        layer: its number in the model; the first converted one for None.
        backend: ``triton``, ``torch``, ...; for None the one that reads the folder's layout on `device`,
            or ``torch``, which reads every layout.
        device: where the weights are to be.
        rank: whose share to load of a folder that has several. Its experts are counted from its first
            (`PreparedMoE.local_ids`), and its output is a partial sum.
        tp_size, ep_size: what the folder must have been sliced and spread over; None for anything.
        check: hold every tensor to its SHA-256 and every scale to being a number, which reads the whole
            layer. Sizes, dtypes and shapes are always held to the manifest.

    Raises:
        CheckpointError: no finished converted folder, no such layer or rank, another deployment's, or a
            file that differs from the manifest.
        UsageError: no backend is called so.
        NoBackend: the backend's layout cannot hold the layer.
        Unavailable: the device has too little memory.
    """
    found = _manifest_of(Path(folder), rank, tp_size, ep_size)
    opened = converted_layer(found, layer, check=check)
    name = backend or _reader_of(opened, torch.device(device))
    return opened.prepared(name, device)


def _manifest_of(place: Path, rank: int | None, tp_size: int | None, ep_size: int | None) -> Manifest:
    """The manifest in `place`, or of its `rank`; CheckpointError when it is of another deployment."""
    if rank is None and ranks_in(place):
        raise CheckpointError(
            f"{place} holds the folders of several ranks, and none was asked for.",
            hint="Give rank=0 or another.",
        )
    found = load_manifest(place if rank is None else rank_folder(place, rank))
    held = found.record.shard
    asked = {
        "rank": (rank, held.rank),
        "tp_size": (tp_size, held.tp_size),
        "ep_size": (ep_size, held.ep_size),
    }
    wrong = [
        f"{name} is {has}, not {wanted}" for name, (wanted, has) in asked.items() if wanted not in (None, has)
    ]
    if wrong:
        raise CheckpointError(
            f"{found.folder} is of another deployment: {', '.join(wrong)}.", hint="Convert for this one."
        )
    return found


def _reader_of(layer: ExpertLayer, device: torch.device) -> str:
    """The backend that reads a layer as it is stored and runs on `device`; else the one for any layout."""
    for name in RUNNERS:
        try:
            runner = runner_for(name)
        except NoBackend:
            continue
        if runner.layout_of(layer.problem) == layer.layout and not runner.refusal(layer.problem, device):
            return name
    return ANY_LAYOUT
