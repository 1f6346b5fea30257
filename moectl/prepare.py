"""One layer's experts, from a checkpoint or a converted folder, in the layout a backend reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint.model import Checkpoint, LayerGroup, TensorInfo
from .convert.batches import FolderReader, as_bytes, as_tensor, expert_bytes, pieces
from .convert.canonical import CONCATENATED
from .convert.codecs import check_scales, decode_role
from .convert.layout import Chain, layout_named
from .convert.manifest import (
    Manifest,
    check_layer,
    load_layer,
    load_manifest,
    read_file_header,
    unpadded,
)
from .convert.safetensors_file import TORCH_DTYPES
from .convert.sources import SIDE, RoleMap, map_layer, source_named
from .errors import CheckpointError, Unavailable, UsageError
from .kernels.prepared import DenseExpert, DenseExperts, PreparedMoE, Router
from .kernels.runners import runner_for
from .padding import padding
from .problem import MoEProblem

CANONICAL = "canonical"
"""Name of the storage that no chain has touched: what a checkpoint's own tensors are read into."""

BATCH_BYTES = 256 << 20
"""Canonical bytes that are moved through a chain at a time."""

SCALES_AT_ONCE = 16 << 20
"""Stored bytes of scales that are looked at together."""

Ids = Sequence[int] | Tensor


@dataclass(frozen=True)
class Form:
    """One role's canonical form and the chain that leads to the stored one.

    `shape` is canonical, with all experts first; `dtype` is a safetensors spelling.
    """

    shape: tuple[int, ...]
    dtype: str
    chain: Chain

    def undo(self, stored: Tensor) -> Tensor:
        """The canonical tensor of a batch of experts, from their stored one."""
        return self.chain.undo(stored, (len(stored), *self.shape[1:]), self.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Room for the stored tensor of all experts."""
        shape, dtype = self.chain.storage_shape(self.shape, self.dtype)
        return torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device=device)


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts where they are now, whatever they are stored as.

    Attributes:
        problem: with logical sizes.
        layer: its number in the model.
        layout: name of the stored layout; `CANONICAL` for a checkpoint.
        roles: canonical shape and dtype by role.
        canonical: canonical roles of a batch of experts, on the CPU or where the layer lies.
        stored: all experts' stored tensors, on a device.
        router: the layer's router; None when it is not stored beside the experts.
    """

    problem: MoEProblem
    layer: int
    layout: str
    roles: Mapping[str, Form]
    canonical: Callable[[Ids], Mapping[str, Tensor]]
    stored: Callable[[torch.device], Mapping[str, Tensor]]
    router: Router | None

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
            forms = self.roles
            if wanted != CANONICAL and runner_for(backend).layout is not None:
                forms = layout_forms(wanted, self.problem, self.roles)
            # A folder of an older version has the same name and other steps: those are the way back.
            if wanted == self.layout and forms == self.roles:
                weights, relaid = self.stored(device), ""
            else:
                weights = self._laid_out(forms, device)
                older = " of another version" if wanted == self.layout else ""
                relaid = "" if self.layout == CANONICAL else f"{self.layout}{older} -> {wanted}"
        except torch.OutOfMemoryError as error:
            raise Unavailable(
                f"layer {self.layer} does not fit the memory of {device}", hint="free memory, or use the CPU"
            ) from error
        return PreparedMoE(
            self.problem, backend, wanted, weights, _dense(weights, forms, self.problem), relaid
        )

    def _laid_out(self, forms: Mapping[str, Form], device: torch.device) -> dict[str, Tensor]:
        out = {role: form.empty(device) for role, form in forms.items()}
        experts = self.problem.local_experts
        step = max(1, BATCH_BYTES // max(1, self.problem.expert_bytes()))
        for first in range(0, experts, step):
            ids = range(first, min(experts, first + step))
            for role, tensor in self.canonical(ids).items():
                out[role][ids.start : ids.stop] = forms[role].chain.apply(tensor.to(device))
        return out


def decode(roles: Mapping[str, Tensor], problem: MoEProblem) -> DenseExperts:
    """Canonical roles of a batch of experts as fp32 matrices."""
    halves = 2 if problem.activation.gated and problem.rows == CONCATENATED else 1

    def matrix(role: str) -> Tensor:
        return decode_role(problem.scheme.weight, roles, role, halves if role == "w13" else 1)

    def bias(role: str) -> Tensor | None:
        return roles[role].float() if role in roles else None

    return DenseExperts(matrix("w13"), matrix("w2"), bias("w13_bias"), bias("w2_bias"))


def _dense(
    weights: Mapping[str, Tensor], forms: Mapping[str, Form], problem: MoEProblem
) -> Callable[[Ids], DenseExperts]:
    def dense(ids: Ids) -> DenseExperts:
        device = weights["w13"].device
        index = torch.as_tensor(ids, dtype=torch.long, device=device)
        chosen = {role: form.undo(weights[role].index_select(0, index)) for role, form in forms.items()}
        return decode(chosen, problem)

    return dense


def layout_forms(layout: str, problem: MoEProblem, roles: Mapping[str, Form]) -> dict[str, Form]:
    """The `Form` of every role in `layout`, from the roles' canonical shapes and dtypes.

    Raises UsageError when the layout reads other roles than the layer has.
    """
    dims = padding(layout, problem.scheme.weight).apply(problem.dims)
    chains = layout_named(layout).chains(replace(problem, dims=dims))
    if chains.keys() != roles.keys():
        different = ", ".join(sorted(chains.keys() ^ roles.keys()))
        raise UsageError(
            f"layout {layout} and the layer do not have the same tensors; they differ in {different}"
        )
    return {role: Form(form.shape, form.dtype, chains[role]) for role, form in roles.items()}


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
    mapped = map_layer(source_named(group.problem.storage), checkpoint, group, number)
    maps = {role.role: role for role in mapped.roles if not role.role.startswith(SIDE)}

    def canonical(ids: Ids) -> dict[str, Tensor]:
        with FolderReader(folder) as reader:
            return {name: read_role(reader, role, ids) for name, role in maps.items()}

    def stored(device: torch.device) -> dict[str, Tensor]:
        everything = range(group.problem.local_experts)
        with FolderReader(folder) as reader:
            return {name: read_role(reader, role, everything).to(device) for name, role in maps.items()}

    forms = {name: Form(role.shape, role.dtype, Chain(())) for name, role in maps.items()}
    names = {key: name.replace("{layer}", str(number)) for key, name in group.names.router.items()}
    router = read_router(folder, checkpoint.tensors, names)
    return ExpertLayer(group.problem, number, CANONICAL, forms, canonical, stored, router)


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


def read_role(reader: FolderReader, role: RoleMap, experts: Ids) -> Tensor:
    """The canonical tensor ``[len(experts), ...]`` of one role, read from a checkpoint's files.

    Raises CheckpointError for a file that is too short, and for scales that are not numbers.
    """
    each = expert_bytes(role)
    buffer = torch.empty(len(experts) * each, dtype=torch.uint8)
    view = as_bytes(buffer)
    for i, expert in enumerate(map(int, experts)):
        for piece in pieces(role, expert, expert + 1):
            info, at = piece.tensor.info, i * each + piece.batch_at
            reader.read(info.file, view[at : at + piece.nbytes], info.start + piece.tensor_at)
    canonical = as_tensor(buffer, role.dtype, (len(experts), *role.shape[1:]))
    if role.role.endswith("_scale"):
        check_scales(canonical)
    return canonical


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


def converted_layer(manifest: Manifest, layer: int | None = None) -> ExpertLayer:
    """One layer of a converted folder; the first converted layer for None.

    Raises:
        CheckpointError: the folder has no such layer, or its file differs from the manifest, in a
            hash or otherwise.
    """
    number = manifest.layers[0] if layer is None else layer
    group = manifest.group_of(number)
    problem = unpadded(group.problem)
    forms = {
        role: Form(record.shape, record.dtype, Chain.from_json(record.chain))
        for role, record in group.roles.items()
        if not role.startswith(SIDE)
    }

    places = manifest.open_layer(number)
    check_layer(manifest, number)
    _check_scales(manifest, forms, places)

    def stored(device: torch.device) -> dict[str, Tensor]:
        return load_layer(manifest, number, place=lambda role: device)

    def canonical(ids: Ids) -> dict[str, Tensor]:
        with FolderReader(manifest.folder) as reader:
            return {role: form.undo(_rows(reader, places[role], ids)) for role, form in forms.items()}

    names = {key: name.replace("{layer}", str(number)) for key, name in group.router.items()}
    router = _converted_router(manifest, names)
    return ExpertLayer(problem, number, manifest.layout.name, forms, canonical, stored, router)


def _check_scales(manifest: Manifest, forms: Mapping[str, Form], places: Mapping[str, TensorInfo]) -> None:
    """CheckpointError when a stored scale is not a number: hashes say only what was written."""
    with FolderReader(manifest.folder) as reader:
        for role, form in forms.items():
            if role.endswith("_scale"):
                experts = places[role].shape[0]
                step = max(1, SCALES_AT_ONCE * experts // places[role].nbytes)
                for first in range(0, experts, step):
                    ids = range(first, min(experts, first + step))
                    check_scales(form.undo(_rows(reader, places[role], ids)))


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
    folder: Path, layer: int | None, backend: str, device: torch.device | str = "cpu"
) -> PreparedMoE:
    """One layer of a converted `folder`: a plain load when `backend` reads its layout, else laid out anew.

    `PreparedMoE.relaid` says which of the two it was. Errors as of `ExpertLayer.prepared` and
    `converted_layer`.
    """
    return converted_layer(load_manifest(folder), layer).prepared(backend, device)
