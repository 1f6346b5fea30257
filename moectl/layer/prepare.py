"""Loads one layer's experts from a checkpoint or a converted directory, in the layout a backend reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ..checkpoint.checkpoint import Checkpoint, LayerGroup
from ..checkpoint.source.catalogue import weights_missing
from ..convert.canonical import byte_scales
from ..convert.codecs import check_scales
from ..convert.manifest.manifest import (
    ALWAYS_CHECKED,
    Manifest,
    begin_layer,
    check_layer,
    load_layer,
    load_manifest,
    other_bytes,
)
from ..convert.manifest.manifest_records import group_rank_slice, unpadded
from ..convert.manifest.rank_directories import load_rank, rank_numbers
from ..convert.recipe.recipe import Recipe, StoredOutput
from ..convert.sources import map_layer
from ..convert.stream.expert_batches import ExpertBatches
from ..convert.stream.file_transfers import Transfer, flat, transfer
from ..convert.stream.source_reader import FolderReader, as_bytes, as_tensor, spans
from ..convert.stream.tensor_reading import TensorReading
from ..errors import CheckpointError, NoBackend, UsageError
from ..files.safetensors_writer import nbytes
from ..files.tensor_table import TensorInfo
from ..kernels.prepared_layer import CANONICAL, PreparedMoE, Router
from ..kernels.registry import ANY_LAYOUT, RUNNERS, runner_for
from ..torch_dtypes import TORCH_DTYPES
from .experts import CPU, ExpertLayer, Ids

RESTORED_SCALES = 16 << 20
"""Canonical bytes of scales that are restored from a converted directory at once, for checking."""

ROUTED = frozenset(("weight", "bias", "correction_bias", "expert_scale", "hash", "input_scale"))
"""The supported router tensors: those of its logits, and the arguments of `kernels.routing.route`."""


def checkpoint_layer(checkpoint: Checkpoint, layer: int | None = None) -> ExpertLayer:
    """One layer of a checkpoint on this machine; the first MoE layer for None.

    Raises:
        UsageError: there is no such MoE layer, its storage is not supported, or there is only a config.
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
                hint="give the directory of its checkpoint",
            )
        raise weights_missing(origin.name)
    mapped = map_layer(checkpoint, group, number)
    batches = ExpertBatches(mapped, frozenset(mapped.shapes))

    def canonical(ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        with FolderReader(folder) as reader:
            batch = batches.canonical(ids, reader, device or CPU)
        for role, t in batch.items():
            if role.endswith("_scale"):
                check_scales(t, byte_scales(group.problem))
        return batch

    def stored(device: torch.device) -> dict[str, Tensor]:
        return canonical(range(group.problem.local_experts), device)

    recipe = Recipe(mapped.shapes, {role: StoredOutput(role) for role in mapped.shapes})
    names = {key: name.replace("{layer}", str(number)) for key, name in group.names.router.items()}
    router = read_router(folder, checkpoint.tensors, names)
    templates = group.names.experts
    parts = {templates[m.mapping.stored].replace("{layer}", str(number)): m.mapping for m in mapped.mapped}
    return ExpertLayer(group.problem, number, CANONICAL, recipe, canonical, stored, router, parts=parts)


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


def read_router(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    names: Mapping[str, str],
    hashes: Mapping[str, str] = MappingProxyType({}),
) -> Router | None:
    """The router whose tensors are called `names`, by the keys of `ROUTED`.

    None if `tensors` lacks its weight, or the router is quantized. Raises CheckpointError for values that
    cannot route tokens, and for a tensor that does not have its SHA-256 in `hashes`, if it is there.
    """
    if not names.keys() <= ROUTED:
        return None
    with FolderReader(folder) as reader:
        router = {
            key: _read_tensor(reader, tensors[name], hashes.get(name))
            for key, name in names.items()
            if name in tensors
        }
    if "weight" not in router:
        return None
    for key, tensor in router.items():
        if tensor.is_floating_point() and not _all_finite(tensor):
            raise CheckpointError(
                f"tensor {names[key]} has numbers that are not finite, and routes tokens",
                hint="get the file again: no backend could compute that right",
            )
    correction, table = router.get("correction_bias"), router.get("hash")
    if table is not None and not 0 <= int(table.min()) <= int(table.max()) < len(router["weight"]):
        raise CheckpointError(
            f"tensor {names['hash']} must hold ids of {len(router['weight'])} experts, "
            f"got {int(table.min())} to {int(table.max())}"
        )
    return Router(
        router["weight"],
        router.get("bias"),
        None if correction is None else correction.flatten(),
        router.get("expert_scale"),
        table,
        router.get("input_scale"),
    )


EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
"""Dtype -> integers of its size, and the bits of its exponent, which are all set in NaN and infinities."""


def _all_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor on the CPU are finite.

    NumPy looks at their exponents in this thread. torch's threads would wait for those that read a server's
    other layers meanwhile: 60 ms for each router of gpt-oss-20b.
    """
    if tensor.dtype not in EXPONENTS:
        return bool(torch.isfinite(tensor.float()).all())
    integers, exponent = EXPONENTS[tensor.dtype]
    return not bool(((tensor.view(integers).numpy() & exponent) == exponent).any())


def _read_tensor(reader: FolderReader, info: TensorInfo, sha256: str | None) -> Tensor:
    if info.dtype not in TORCH_DTYPES:
        raise CheckpointError(f"tensor {info.name} of dtype {info.dtype} cannot be read")
    buffer = torch.empty(info.nbytes, dtype=torch.uint8, device=CPU)
    reader.read(info.file, as_bytes(buffer), info.start)
    if sha256 is not None and hashlib.sha256(as_bytes(buffer)).hexdigest() != sha256:
        raise other_bytes(info.name, info.file)
    return as_tensor(buffer, info.dtype, info.shape)


def converted_layer(manifest: Manifest, layer: int | None = None, *, check: bool = True) -> ExpertLayer:
    """One layer of a converted directory; the first converted layer for None.

    The file's size and header are always checked against the manifest, and so are the hashes of the router
    and of tensors of at most `ALWAYS_CHECKED` bytes; with `check`, also those of the others, and scales.

    Raises:
        CheckpointError: the directory has no such layer, or its file does not match the manifest.
    """
    number = manifest.layers[0] if layer is None else layer
    group = manifest.group_of(number)
    problem = unpadded(group.problem)
    recipe, locations = group.recipe, manifest.open_layer(number)
    check_layer(manifest, number, locations, None if check else ALWAYS_CHECKED)
    if check:
        _check_scales(problem.local_experts, manifest, recipe, locations)

    def canonical(ids: Ids, device: torch.device | None = None) -> dict[str, Tensor]:
        with FolderReader(manifest.folder) as reader:
            return _restored(reader, recipe, locations, ids, device or CPU)

    names = {key: name.replace("{layer}", str(number)) for key, name in group.router.items()}
    router = _converted_router(manifest, names, check)
    rank_slice = group_rank_slice(manifest.record.shard, group)
    mappings = group.mappings
    parts = {
        part.template.replace("{layer}", str(number)): mappings[name] for name, part in group.parts.items()
    }
    return ExpertLayer(
        problem,
        number,
        manifest.layout.name,
        recipe,
        canonical,
        ConvertedTensors(manifest, number, locations),
        router,
        rank_slice,
        parts=parts,
    )


@dataclass(frozen=True)
class ConvertedTensors:
    """`ExpertLayer.stored` of a converted directory's layer, whose file was opened before (`locations`)."""

    manifest: Manifest
    number: int
    locations: Mapping[str, TensorInfo]

    def __call__(self, device: torch.device) -> dict[str, Tensor]:
        return load_layer(self.manifest, self.number, self.locations, device=device)

    def begin(self, device: torch.device) -> TensorReading | None:
        """The same tensors, being read; None on a CPU, where the file is mapped and nothing is read."""
        return None if device.type == "cpu" else begin_layer(self.manifest, self.locations, device)


def _restored(
    reader: FolderReader,
    recipe: Recipe,
    locations: Mapping[str, TensorInfo],
    ids: Ids,
    device: torch.device = CPU,
) -> dict[str, Tensor]:
    roles = [name for name, output in recipe.outputs.items() if not output.per_layer]
    roles += [recipe.side(role) for role in recipe.kept]
    return recipe.restore(_rows(reader, {role: locations[role] for role in roles}, ids, device), len(ids))


def _check_scales(
    experts: int, manifest: Manifest, recipe: Recipe, locations: Mapping[str, TensorInfo]
) -> None:
    """Raises CheckpointError for a NaN scale; hashes only show that the file is what was written."""
    scales = Recipe(
        {role: form for role, form in recipe.shapes.items() if role.endswith("_scale")},
        {name: output for name, output in recipe.outputs.items() if output.role.endswith("_scale")},
    )
    # Scales that can only be restored together with other roles need the whole recipe.
    whole = not set(scales.kept) <= set(recipe.kept)
    with FolderReader(manifest.folder) as reader:
        for role, (dtype, shape) in scales.shapes.items():
            size = manifest.problem.expert_bytes() * experts if whole else nbytes(dtype, shape)
            step = max(1, RESTORED_SCALES * experts // size)
            for first, last in spans(experts, step):
                restored = _restored(reader, recipe if whole else scales, locations, range(first, last))
                check_scales(restored[role], byte_scales(manifest.problem))


def _rows(
    reader: FolderReader, stored: Mapping[str, TensorInfo], experts: Ids, device: torch.device
) -> dict[str, Tensor]:
    """The selected experts of stored tensors ``[experts, ...]``, on `device`."""
    rows = {}
    transfers = []
    for role, info in stored.items():
        shape, size = (len(experts), *info.shape[1:]), info.nbytes // info.shape[0]
        rows[role] = torch.empty(shape, dtype=TORCH_DTYPES[info.dtype], device=device)
        target = flat(rows[role])
        transfers += [
            Transfer(info.file, info.start + expert * size, size, target, i * size)
            for i, expert in enumerate(map(int, experts))
        ]
    transfer(reader, transfers, device)
    return rows


def _converted_router(manifest: Manifest, names: Mapping[str, str], check: bool) -> Router | None:
    """The router among the passthrough tensors; None if those were skipped.

    Directories of earlier versions have hashes of whole files alone, which are checked where `check` asks.
    """
    passthrough, hashes = manifest.passthrough, manifest.passthrough_sha256
    tensors = {name: passthrough[name] for name in names.values() if name in passthrough}
    for name, info in tensors.items():
        if check and name not in hashes:
            manifest.check_passthrough(info.file)
    return read_router(manifest.top, tensors, names, hashes)


def prepare(
    checkpoint: Checkpoint, layer: int | None, backend: str, device: torch.device | str = "cpu"
) -> PreparedMoE:
    """One layer of `checkpoint` in the layout that `backend` reads; raises like `ExpertLayer.prepared`."""
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
    """One layer of a converted directory, ready to run.

    On the CPU the weights are views of the file's memory map: data is read on first use, and processes
    that load the same file share its pages. Writes to them stay private to the process. The file must not
    change while they are in use. On other devices the weights are copies. If `backend` reads another layout
    than the directory's, the layer is repacked, which is reported in `PreparedMoE.relaid`.

    Args:
        folder: output directory of `moectl convert`; with `rank`, the directory of all ranks.
        layer: its number in the model; the first converted one for None.
        backend: ``moectl``, ``torch``, ...; for None the one that reads the directory's layout on
            `device`, or ``torch``, which reads every layout.
        device: device of the weights.
        rank: the rank to load from a directory of all ranks. Expert numbers are relative to its first
            expert (`PreparedMoE.local_ids`), and its output is a partial sum.
        tp_size, ep_size: the deployment that the directory must have been converted for; None for any.
        check: check every tensor against its SHA-256 and every scale for NaN, which reads the whole
            layer. Headers, the router, and tensors of at most 1 MiB are always checked.

    Raises:
        CheckpointError: not a finished converted directory, no such layer or rank, another deployment, or
            a file that does not match the manifest.
        UsageError: there is no such backend.
        NoBackend: the backend's layout cannot hold the layer.
        Unavailable: the device has too little memory.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from moectl.checkpoint import open_checkpoint
        >>> from moectl.convert.execute.convert import convert
        >>> from moectl.convert.layouts.registry import layout_for
        >>> from moectl.convert.plan.kernel_layout_plan import plan_conversion
        >>> from moectl.synth import synthesize
        >>> with tempfile.TemporaryDirectory() as temporary:
        ...     directory = Path(temporary)
        ...     small = {"layers": 1, "experts": 4, "hidden": 128, "intermediate": 128}
        ...     source = open_checkpoint(str(synthesize("openai/gpt-oss-20b", directory / "source", **small)))
        ...     layout = layout_for("marlin", source.groups[0].problem.scheme.weight)
        ...     converted = convert(plan_conversion(source, layout), directory / "marlin").folder
        ...     layer = load_prepared(converted, backend="torch", check=True)
        >>> layer.layout, len(layer.weights["w13"])
        ('marlin-mxfp4', 4)
    """
    manifest = _manifest_of(Path(folder), rank, tp_size, ep_size)
    expert_layer = converted_layer(manifest, layer, check=check)
    name = backend or _reader_of(expert_layer, torch.device(device))
    return expert_layer.prepared(name, device)


def _manifest_of(folder: Path, rank: int | None, tp_size: int | None, ep_size: int | None) -> Manifest:
    """The manifest in `folder`, or of its `rank`; CheckpointError if it is of another deployment."""
    if rank is None and rank_numbers(folder):
        raise CheckpointError(
            f"{folder} holds the directories of several ranks, and none was asked for.",
            hint="Give rank=0 or another.",
        )
    manifest = load_manifest(folder) if rank is None else load_rank(folder, rank)
    shard = manifest.record.shard
    pairs = {
        "rank": (rank, shard.rank),
        "tp_size": (tp_size, shard.tp_size),
        "ep_size": (ep_size, shard.ep_size),
    }
    differing = [
        f"{name} is {actual}, not {requested}"
        for name, (requested, actual) in pairs.items()
        if requested not in (None, actual)
    ]
    if differing:
        raise CheckpointError(
            f"{manifest.folder} is of another deployment: {', '.join(differing)}.",
            hint="Convert for this one.",
        )
    return manifest


def _reader_of(layer: ExpertLayer, device: torch.device) -> str:
    """The backend that reads the layer's stored layout and runs on `device`; else the one for any layout."""
    for name in RUNNERS:
        try:
            runner = runner_for(name)
        except NoBackend:
            continue
        if runner.layout_of(layer.problem) == layer.layout and not runner.refusal(layer.problem, device):
            return name
    return ANY_LAYOUT
