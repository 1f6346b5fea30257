"""One layer's experts, from a checkpoint or a converted folder, in the layout a backend reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint.model import Checkpoint, LayerGroup, TensorInfo
from .checkpoint.opening import rank_folder
from .convert.batches import FolderReader, as_bytes, as_tensor
from .convert.canonical import CONCATENATED
from .convert.codecs import check_scales, decode_role
from .convert.layout import layout_named
from .convert.manifest import (
    Manifest,
    check_layer,
    load_layer,
    load_manifest,
    read_file_header,
)
from .convert.manifest_record import group_recipe, group_share, unpadded
from .convert.ranks import ranks_in
from .convert.recipe import Output, Recipe
from .convert.safetensors_file import TORCH_DTYPES, nbytes
from .convert.shards import Share
from .convert.sources import LayerMap, map_layer, read_batch, source_for
from .convert.values import Facts, Shapes
from .errors import CheckpointError, NoBackend, Unavailable, UsageError
from .kernels.prepared import DenseExpert, DenseExperts, PreparedMoE, Router
from .kernels.runners import ANY_LAYOUT, RUNNERS, runner_for
from .problem import MoEProblem

CANONICAL = "canonical"
"""Name of the storage that no chain has touched: what a checkpoint's own tensors are read into."""

BATCH_BYTES = 256 << 20
"""Canonical bytes that are moved through a chain at a time."""

SCALES_AT_ONCE = 16 << 20
"""Stored bytes of scales that are looked at together."""

Ids = Sequence[int] | Tensor


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts where they are now, whatever they are stored as.

    Attributes:
        problem: with logical sizes.
        layer: its number in the model.
        layout: name of the stored layout; `CANONICAL` for a checkpoint.
        recipe: how it is stored; of a checkpoint, every canonical role as it is.
        canonical: canonical roles of a batch of experts, on the CPU or where the layer lies.
        stored: all experts' stored tensors, on a device.
        router: the layer's router; None when it is not stored beside the experts.
        share: what a rank has of the layer, where that is not all; its experts are counted from its first.
    """

    problem: MoEProblem
    layer: int
    layout: str
    recipe: Recipe
    canonical: Callable[[Ids], Mapping[str, Tensor]]
    stored: Callable[[torch.device], Mapping[str, Tensor]]
    router: Router | None
    share: Share | None = None

    @property
    def partial(self) -> str:
        """What is computed on a rank that has a share of the layer, in a sentence; empty for all of it."""
        return self.share.partial if self.share else ""

    def reference(self, expert: int) -> DenseExpert:
        """Expert `expert` decoded from what is stored, without any backend's layout in between."""
        return decode(self.canonical([expert]), self.problem)[0]

    def prepared(self, backend: str, device: torch.device | str) -> PreparedMoE:
        """The layer in the layout that `backend` reads, on `device`.

        A layer that is stored so already is loaded as it is; otherwise it goes through its canonical
        form, expert batch by expert batch, and `PreparedMoE.relaid` says so.

        Raises:
            NoBackend: the layout cannot hold the problem.
            UsageError: no runner is called `backend`.
            Unavailable: the device has too little memory.
        """
        device = torch.device(device)
        wanted = runner_for(backend).layout or self.layout
        try:
            recipe = self.recipe
            if wanted != CANONICAL and runner_for(backend).layout is not None:
                share = self.share or Share(self.problem)
                recipe = layout_recipe(wanted, share, self.recipe.shapes)
            # A folder of an older version has the same name and other steps: those are the way back.
            if wanted == self.layout and recipe == self.recipe:
                weights, relaid = self.stored(device), ""
            else:
                weights = self._laid_out(recipe, device)
                older = " of another version" if wanted == self.layout else ""
                relaid = "" if self.layout == CANONICAL else f"{self.layout}{older} -> {wanted}"
        except torch.OutOfMemoryError as error:
            raise Unavailable(
                f"layer {self.layer} does not fit the memory of {device}", hint="free memory, or use the CPU"
            ) from error
        dense, first = self._dense(weights, recipe), self.share.experts[0] if self.share else 0
        return PreparedMoE(self.problem, backend, wanted, weights, dense, relaid, first)

    def _laid_out(self, recipe: Recipe, device: torch.device) -> dict[str, Tensor]:
        stored = {name: recipe.stored[name] for name in recipe.outputs}
        out = {
            name: torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device=device)
            for name, (shape, dtype) in stored.items()
        }
        facts: Facts = {}
        for ids in self._batches() if recipe.facts else ():
            facts = recipe.look(self.canonical(ids), facts)
        for ids in self._batches():
            batch = {role: t.to(device) for role, t in self.canonical(ids).items()}
            for name, output in recipe.outputs.items():
                if not output.per_layer:
                    output.apply(batch, facts, out[name][ids.start : ids.stop])
                elif ids.start == 0:
                    output.apply(batch, facts, out[name])
        return out

    def _batches(self) -> Iterator[range]:
        experts = self.problem.local_experts
        step = max(1, BATCH_BYTES // max(1, self.problem.expert_bytes()))
        return (range(first, min(experts, first + step)) for first in range(0, experts, step))

    def _dense(self, weights: Mapping[str, Tensor], recipe: Recipe) -> Callable[[Ids], DenseExperts]:
        """Decoded experts: from `weights` themselves where nothing was lost on the way to them."""

        def dense(ids: Ids) -> DenseExperts:
            device = weights["w13"].device
            if recipe.kept:
                return decode({role: t.to(device) for role, t in self.canonical(ids).items()}, self.problem)
            index = torch.as_tensor(ids, dtype=torch.long, device=device)
            chosen = {
                name: weights[name].index_select(0, index)
                for name, output in recipe.outputs.items()
                if not output.per_layer
            }
            return decode(recipe.restore(chosen, len(index)), self.problem)

        return dense


def decode(roles: Mapping[str, Tensor], problem: MoEProblem) -> DenseExperts:
    """Canonical roles of a batch of experts as fp32 matrices."""
    halves = 2 if problem.activation.gated and problem.rows == CONCATENATED else 1

    def matrix(role: str) -> Tensor:
        return decode_role(problem.scheme.weight, roles, role, halves if role == "w13" else 1)

    def bias(role: str) -> Tensor | None:
        return roles[role].float() if role in roles else None

    return DenseExperts(matrix("w13"), matrix("w2"), bias("w13_bias"), bias("w2_bias"))


def layout_recipe(layout: str, share: Share, shapes: Shapes) -> Recipe:
    """The `Recipe` of `layout` for a share with the canonical roles of `shapes`; NoBackend if it has none."""
    found = layout_named(layout)
    return found.recipe(share.padded(found.pad), shapes)


def checkpoint_layer(checkpoint: Checkpoint, layer: int | None = None) -> ExpertLayer:
    """One layer of a checkpoint whose tensors are in a folder; the first MoE layer for None.

    Raises:
        UsageError: there is no such MoE layer, or its storage has no reader.
        Unavailable: the tensors are not on this machine.
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype.
    """
    group, number = _group_of(checkpoint, layer)
    folder = checkpoint.folder
    if folder is None:
        raise Unavailable(
            f"the weights of {checkpoint.origin.name} are not on this machine",
            hint="download the checkpoint and give its folder",
        )
    mapped = map_layer(source_for(checkpoint, group), checkpoint, group, number)

    def canonical(ids: Ids) -> dict[str, Tensor]:
        with FolderReader(folder) as reader:
            return read_experts(reader, mapped, ids)

    def stored(device: torch.device) -> dict[str, Tensor]:
        return {role: t.to(device) for role, t in canonical(range(group.problem.local_experts)).items()}

    recipe = Recipe(mapped.shapes, {role: Output(role) for role in mapped.shapes})
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


def read_experts(reader: FolderReader, mapped: LayerMap, experts: Ids) -> dict[str, Tensor]:
    """The canonical tensors ``[len(experts), ...]`` of a layer, read from a checkpoint's files.

    Raises CheckpointError for a file that is too short, and for scales that are not numbers.
    """

    def read(info: TensorInfo, at: int, view: memoryview) -> None:
        reader.read(info.file, view, info.start + at)

    ids = list(map(int, experts))
    batch = {
        role: torch.empty((len(ids), *shape[1:]), dtype=TORCH_DTYPES[dtype])
        for role, (shape, dtype) in mapped.shapes.items()
    }
    for first, last in _runs(ids):
        at = {role: t[first:last] for role, t in batch.items()}
        read_batch(mapped, ids[first], ids[last - 1] + 1, read, at)
    for role, t in batch.items():
        if role.endswith("_scale"):
            check_scales(t)
    return batch


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Places of `ids` cut where an id does not follow the one before."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, i
            first = i


def read_router(folder: Path, tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> Router | None:
    """The router of tensors named ``weight``, ``bias`` and ``correction_bias`` in `names`.

    None when `tensors` has no weight of that name.
    """
    with FolderReader(folder) as reader:
        found = {key: _read_tensor(reader, tensors[name]) for key, name in names.items() if name in tensors}
    if "weight" not in found:
        return None
    return Router(found["weight"], found.get("bias"), found.get("correction_bias"))


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
        check_layer(manifest, number)
        _check_scales(problem.local_experts, manifest, recipe, places)

    def stored(device: torch.device) -> dict[str, Tensor]:
        return {role: t.to(device) for role, t in load_layer(manifest, number).items()}

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
    with FolderReader(manifest.folder) as reader:
        for role, (shape, dtype) in scales.shapes.items():
            step = max(1, SCALES_AT_ONCE * experts // nbytes(dtype, shape))
            for first in range(0, experts, step):
                ids = range(first, min(experts, first + step))
                check_scales(_restored(reader, scales, places, ids)[role])


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
    tensors: dict[str, TensorInfo] = {}
    for record in manifest.record.rest:
        found = read_file_header(manifest.folder, record.file, record.size)
        tensors |= {name: info for name, info in found.items() if name in names.values()}
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
    place = Path(folder)
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
    opened = converted_layer(found, layer, check=check)
    name = backend or _reader_of(opened, torch.device(device))
    return opened.prepared(name, device)


def _reader_of(layer: ExpertLayer, device: torch.device) -> str:
    """The backend that reads a layer as it is stored and runs on `device`; else the one for any layout."""
    for name in RUNNERS:
        try:
            runner = runner_for(name)
        except NoBackend:
            continue
        if runner.layout == layer.layout and not runner.refusal(layer.problem, device):
            return name
    return ANY_LAYOUT
