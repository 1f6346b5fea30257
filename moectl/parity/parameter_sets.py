"""Sets of parameters: dumps, converted directories, and checkpoints laid out on the fly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import open_checkpoint
from ..checkpoint.source.open_checkpoint import MANIFEST
from ..checkpoint.source.shards import CONFIG
from ..convert.layouts.registry import WeightLayout, layout_for
from ..convert.manifest.manifest import Deployment, Manifest, load_directory
from ..convert.rank_slice import RankShard, RankSlice, shard_of
from ..convert.recipe.recipe import SIDE
from ..convert.sources import output_name, output_prefix
from ..convert.stream.source_reader import FolderReader, as_bytes
from ..errors import CheckpointError, UsageError
from ..files.folder_handle import open_inside
from ..files.safe_reading import open_given
from ..files.safetensors_header import METADATA, header_length, read_header
from ..files.strict_json import parse_json_object
from ..files.tensor_table import TensorInfo
from ..layer.experts import layout_recipe
from ..layer.layer_source import CheckpointLayers
from ..layer.rank_share import rank_share
from ..problem.rank_sizes import check_slices
from .parameter_dump import PLACES, ParameterRecord

LayerParameters = Mapping[str, ParameterRecord]

LARGEST_DIMENSIONS = 16
"""Most axes of a dumped tensor."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def dumped(path: Path) -> LayerParameters:
    """The parameters in a file of `dump_parameters`, or in all safetensors files of a directory.

    Strides are known if the metadata have them. Raises UsageError if `path` cannot be read, CheckpointError
    for damaged files, or names twice.
    """
    whole = path.is_dir()
    if not whole:
        with open_given(path, str(path), "a safetensors file"):
            pass  # what it links to is opened below, under a name that the user did not give
    folder = path if whole else path.resolve().parent
    names = sorted(file.name for file in path.glob("*.safetensors")) if whole else [path.resolve().name]
    if not names:
        raise CheckpointError(f"{path} has no safetensors files.", hint="Write them with dump_parameters.")
    found: dict[str, ParameterRecord] = {}
    for name in names:
        for record in _records(folder, name):
            if record.name in found:
                raise CheckpointError(f"{path} has {record.name} twice.")
            found[record.name] = record
    return found


def _records(folder: Path, name: str) -> Iterator[ParameterRecord]:
    path = folder / name
    with open_inside(folder, name, str(path)) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        raw = file.read(header_length(prefix, size, path.name))
        file.seek(0)
        header = read_header(file, size, path.name)
    text = parse_json_object(raw, f"{path.name}: the header").get(METADATA) or {}
    places = parse_json_object(text[PLACES].encode(), f"{path.name}: {PLACES}") if PLACES in text else {}
    for name, info in header.items():
        stride, offset = _place(places[name], info) if name in places else (None, None)
        yield ParameterRecord(name, info.dtype, info.shape, stride, offset, _StoredBytes(folder, info))


def _place(place: object, info: TensorInfo) -> tuple[tuple[int, ...], int]:
    match place:
        case [list(stride), int(offset)] if len(stride) == len(info.shape) <= LARGEST_DIMENSIONS:
            if all(isinstance(step, int) for step in stride):
                return tuple(stride), offset
    raise CheckpointError(f"{info.file}: the strides of {info.name} do not fit its shape {list(info.shape)}.")


class _StoredBytes:
    """Reads a tensor's bytes from its file, when asked."""

    def __init__(self, folder: Path, info: TensorInfo) -> None:
        self._folder, self._info = folder, info

    def __call__(self) -> Tensor:
        buffer = torch.empty(self._info.nbytes, dtype=torch.uint8)
        with FolderReader(self._folder) as reader:
            reader.read(self._info.file, as_bytes(buffer), self._info.start)
        return buffer


def converted(manifest: Manifest, layer: int) -> LayerParameters:
    """The stored tensors of one layer of a converted directory, under the names of its files."""
    locations = manifest.open_layer(layer)
    return {
        item.spec.name: ParameterRecord(
            item.spec.name,
            item.record.logical_dtype if item.spec.dtype == "U8" else item.spec.dtype,
            item.spec.shape,
            row_major(item.spec.shape),
            0,
            _StoredBytes(manifest.folder, locations[role]),
        )
        for role, item in manifest.tensors(layer).items()
        if not role.startswith(SIDE)
    }


def laid_out(
    source: CheckpointLayers, layout: WeightLayout, layer: int, shard: RankShard = RankShard()
) -> LayerParameters:
    """Rank `shard`'s share of one layer of a checkpoint in `layout`, under names of a converted directory.

    Raises UsageError if the layer cannot be sharded so.
    """
    whole = source.layer(layer)
    check_slices(whole.problem, shard.tp_size, layout.name)
    experts = rank_share(whole, shard)
    share = experts.rank_slice or RankSlice(experts.problem)
    recipe = layout_recipe(layout.name, share, experts.recipe.shapes)
    tensors = experts.repack(recipe, torch.device("cpu"))
    names = source.checkpoint.group_of(layer).names.experts
    prefix = output_prefix(next(iter(names.values()))).replace("{layer}", str(layer))
    found = {}
    for role, t in tensors.items():
        dtype = recipe.stored[role].dtype
        logical = layout.logical_dtypes.get(role, dtype) if dtype == "U8" else dtype
        name, flat = output_name(prefix, role), t.reshape(-1).view(torch.uint8)
        found[name] = ParameterRecord(
            name,
            logical,
            tuple(t.shape),
            row_major(t.shape),
            0,
            lambda flat=flat: flat,  # type: ignore[misc]
        )
    return found


class ParameterSource:
    """What a user names as one side of a comparison: its parameters, a layer at a time where it has layers.

    Attributes:
        ref: a converted directory, that of several ranks, a checkpoint, or a dump.
        layers: numbers of its layers; None for a dump, which has no numbers but those in names.
        shard: the rank that it is of: of a directory of several ranks the first; None for a checkpoint, which
            has every rank's share, and for a dump, which does not say.
        every_rank: whether it has all ranks of its deployment.
    """

    def __init__(
        self,
        ref: str,
        layout: str | None = None,
        arch: str | None = None,
        act: str | None = None,
        offline: bool = False,
    ) -> None:
        """Opens `ref`; a checkpoint needs the target `layout`, and the others where that is ambiguous."""
        path = Path(ref)
        self.ref = ref
        self.layers: tuple[int, ...] | None = None
        self.shard: RankShard | None = None
        self.every_rank = False
        self._directory: Manifest | Deployment | None = None
        self._checkpoint: CheckpointLayers | None = None
        is_folder = path.is_dir() and not (path / CONFIG).exists()
        if (path / MANIFEST).exists():
            found = load_directory(path)
            self._directory, self.every_rank = found, isinstance(found, Deployment)
            if isinstance(found, Deployment):
                self.layers, self.shard = found.record.layers, found.record.shard(0)
            else:
                self.layers, self.shard = found.layers, found.record.shard
        elif path.suffix != ".safetensors" and not is_folder:
            checkpoint = open_checkpoint(ref, offline=offline)
            if layout is None:
                raise UsageError(
                    f"{ref} is a checkpoint, whose tensors are in no kernel's layout",
                    hint="give --to LAYOUT to lay them out",
                )
            if not checkpoint.groups:
                raise CheckpointError(f"{ref} has no MoE layers")
            self._checkpoint, self.every_rank = CheckpointLayers(checkpoint), True
            self._layout = layout_for(layout, checkpoint.groups[0].problem.scheme.weight, arch, act)
            self.layers = tuple(self._checkpoint.layers())

    def parameters(self, layer: int | None, shard: RankShard = RankShard()) -> LayerParameters:
        """Those that rank `shard` has of one layer; of a dump, all of them."""
        if self._directory is not None:
            assert layer is not None
            found = self._directory
            return converted(found.rank(shard.rank) if isinstance(found, Deployment) else found, layer)
        if self._checkpoint is not None:
            assert layer is not None
            return laid_out(self._checkpoint, self._layout, layer, shard)
        return dumped(Path(self.ref))


def ranks_compared(
    sides: Sequence[ParameterSource], tp_size: int | None, ep_size: int | None, rank: int | None
) -> tuple[RankShard, ...]:
    """The ranks that are compared: the one that is named or a side is of, else all of the deployment.

    The deployment's sizes are those that are given, else a side's. Raises UsageError if sides and sizes
    contradict each other, or a dump, which is of one rank, stands beside several.
    """
    sizes = {side.ref: (side.shard.tp_size, side.shard.ep_size) for side in sides if side.shard is not None}
    if tp_size is not None or ep_size is not None:
        sizes["--tp-size and --ep-size"] = tp_size or 1, ep_size or 1
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{of}: tp {tp}, ep {ep}" for of, (tp, ep) in sizes.items())
        raise UsageError(f"these are of different deployments: {said}", hint="compare those of one")
    tp, ep = next(iter(sizes.values()), (1, 1))
    fixed = {side.shard.rank: side for side in sides if side.shard is not None and not side.every_rank}
    numbers = {*fixed, *(() if rank is None else (rank,))}
    if len(numbers) > 1:
        said = ", ".join(f"{side.ref} is of rank {number}" for number, side in fixed.items())
        raise UsageError(f"two ranks cannot be compared: {said}", hint="compare what is of one rank")
    if not numbers and tp * ep > 1 and not all(side.every_rank for side in sides):
        dump = next(side for side in sides if not side.every_rank)
        raise UsageError(f"{dump.ref} is of one of {tp * ep} ranks", hint="say which with --rank")
    return tuple(shard_of(number, tp, ep) for number in (numbers or range(tp * ep)))
