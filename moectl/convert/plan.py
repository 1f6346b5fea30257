"""A conversion decided from headers alone: what is read, what is written, and how much of everything."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from .. import __version__
from ..checkpoint.model import Checkpoint, LayerGroup, TensorInfo
from ..checkpoint.tensor_table import files_of
from ..errors import CheckpointError, Unavailable, UsageError
from ..padding import padding
from ..problem import MoEProblem
from .batches import Arena
from .layout import BLOCK_BYTES, Chain, WeightLayout
from .manifest_record import (
    FORMAT_VERSION,
    GroupRecord,
    LayoutRecord,
    PartRecord,
    RoleRecord,
    is_plain_name,
)
from .records import to_json
from .safetensors_file import TORCH_DTYPES, FilePlan, TensorSpec, nbytes, plan_file
from .sources import SIDE, LayerMap, RoleMap, Source, map_layer, output_name, output_prefix, source_named

MIB = 1 << 20
BASE_MEMORY = 24 * MIB
"""Held whatever the batch: copy buffers, headers, the allocator's slack."""

LARGEST_BATCH = 64 * MIB
"""Canonical bytes of a batch beyond which larger batches are no faster."""

CHAIN_COPIES = 6
"""Copies of a block of experts, the larger of input and output, that a chain may hold at once: codes
unpacked to bytes are two, and a step holds its input and its output."""


@dataclass(frozen=True)
class RolePlan:
    """One role of one layer: where it comes from, the chain, where it goes.

    `batch` is the number of experts converted at once; `spec` the stored tensor.
    """

    source: RoleMap
    chain: Chain
    spec: TensorSpec
    logical_dtype: str
    batch: int
    peak_memory: int

    @property
    def role(self) -> str:
        return self.source.role

    @property
    def experts(self) -> int:
        return self.source.shape[0]

    @property
    def buffers(self) -> tuple[int, int]:
        """Bytes of a batch as it is read and as it is written."""
        each = (nbytes(self.source.dtype, self.source.shape), self.spec.nbytes)
        return each[0] // self.experts * self.batch, each[1] // self.experts * self.batch


@dataclass(frozen=True)
class LayerPlan:
    """One layer: the unit of work, of files, and of resuming."""

    layer: int
    problem: MoEProblem
    source: Source
    roles: tuple[RolePlan, ...]
    file: FilePlan
    bytes_in: int


@dataclass(frozen=True)
class RestPlan:
    """Tensors that are no experts, all from one source file.

    `file` is the safetensors file they are extracted to; None when the whole source file is kept.
    """

    source: str
    tensors: tuple[TensorInfo, ...]
    file: FilePlan | None

    @property
    def name(self) -> str:
        return self.file.name if self.file else self.source


@dataclass(frozen=True)
class Plan:
    """Everything `convert` does, decided and checked before anything is created."""

    checkpoint: Checkpoint
    layout: LayoutRecord
    groups: tuple[GroupRecord, ...]
    layers: tuple[LayerPlan, ...]
    rest: tuple[RestPlan, ...]
    experts_only: bool
    max_memory: int

    @property
    def tensors_in(self) -> int:
        """Expert tensors read."""
        return sum(len(role.source.tensors) for layer in self.layers for role in layer.roles)

    @property
    def tensors_out(self) -> int:
        """Expert tensors written."""
        return sum(len(layer.roles) for layer in self.layers)

    @property
    def bytes_in(self) -> int:
        """Bytes of expert tensors read."""
        return sum(layer.bytes_in for layer in self.layers)

    @property
    def bytes_out(self) -> int:
        """Bytes of the converted layers' files."""
        return sum(layer.file.size for layer in self.layers)

    @property
    def rest_bytes(self) -> int:
        """Bytes of the tensors that are no experts."""
        return sum(info.nbytes for item in self.rest for info in item.tensors)

    @property
    def disk_needed(self) -> int:
        """Bytes that the output takes when no file can be linked."""
        extracted = sum(item.file.size for item in self.rest if item.file)
        whole = sum(info.nbytes for item in self.rest if not item.file for info in item.tensors)
        return self.bytes_out + extracted + whole + 16 * MIB

    @property
    def peak_memory(self) -> int:
        """Bytes needed above the program's own at the largest step."""
        return max(role.peak_memory for layer in self.layers for role in layer.roles)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers that batches of every role are read into and converted into."""
        return max(Arena.size(*role.buffers) for layer in self.layers for role in layer.roles)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same for a conversion to be resumed, by name."""
        infos = sorted((i.name, i.dtype, i.shape, i.file, i.start) for i in self.checkpoint.tensors.values())
        return {
            "moectl": __version__,
            "config": digest_of(self.checkpoint.config),
            "tensor headers": digest_of(infos),
            **conversion_facts(self),
        }


class Conversion(Protocol):
    """A conversion that is planned, or that a manifest records."""

    @property
    def layout(self) -> LayoutRecord: ...
    @property
    def groups(self) -> tuple[GroupRecord, ...]: ...
    @property
    def experts_only(self) -> bool: ...


def conversion_facts(conversion: Conversion) -> dict[str, str]:
    """What tells one conversion of a checkpoint from another, by name."""
    return {
        "format": str(FORMAT_VERSION),
        "layout": conversion.layout.name,
        "layout version": str(conversion.layout.version),
        "experts only": "yes" if conversion.experts_only else "no",
        "layer groups": digest_of(to_json(conversion.groups)),
    }


def digest_of(value: object) -> str:
    """SHA-256 of JSON data, equal for equal data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def default_memory() -> int:
    """A quarter of this machine's memory, bytes."""
    return int(psutil.virtual_memory().total) // 4


RESERVED = "moectl-"
"""Tensor files of a converted folder begin so; no source file may."""


def layer_file(layer: int) -> str:
    """Name of the file that holds a converted layer."""
    return f"{RESERVED}layer-{layer:05d}.safetensors"


def plan_conversion(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    *,
    max_memory: int | None = None,
    experts_only: bool = False,
) -> Plan:
    """The `Plan` to convert every MoE layer of `checkpoint` to `layout`.

    Args:
        max_memory: bytes that the conversion may hold above the program's own; a quarter of the
            machine's memory by default.
        experts_only: leave out tensors that are no experts.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype.
        Unavailable: there are no tensor headers to plan from.
        NoBackend: the layout cannot hold a layer.
        UsageError: the storage format has no converter, or one expert does not fit `max_memory`.
    """
    memory = default_memory() if max_memory is None else max_memory
    if not checkpoint.groups:
        raise CheckpointError("the checkpoint has no MoE layers, so there is nothing to convert.")
    if not checkpoint.tensors:
        raise Unavailable(
            f"{checkpoint.origin.name} gives no tensor headers; a conversion is planned from them.",
            hint="Give a folder or repository with its safetensors files.",
        )
    groups: list[GroupRecord] = []
    layers: list[LayerPlan] = []
    for group in checkpoint.groups:
        record, planned = _plan_group(checkpoint, group, layout, memory)
        groups.append(record)
        layers += planned
    layers.sort(key=lambda layer: layer.layer)
    _check_file_names(checkpoint)
    infos = (t.info for layer in layers for role in layer.roles for t in role.source.tensors)
    consumed = {info.name: info.file for info in infos}
    rest = () if experts_only else tuple(_plan_rest(checkpoint, consumed))
    facts = LayoutRecord(
        layout.name, layout.target, layout.version, tuple(layout.archs), tuple(map(str, layout.readers))
    )
    return Plan(checkpoint, facts, tuple(groups), tuple(layers), rest, experts_only, memory)


def _plan_group(
    checkpoint: Checkpoint, group: LayerGroup, layout: WeightLayout, memory: int
) -> tuple[GroupRecord, list[LayerPlan]]:
    source = source_named(group.problem.storage)
    dims = padding(layout.name, group.problem.scheme.weight).apply(group.problem.dims)
    problem = replace(group.problem, dims=dims)
    maps = [map_layer(source, checkpoint, group, layer) for layer in group.layers]
    chains = layout.chains(problem)
    for mapped in maps:
        _check_roles(mapped, maps[0], chains, layout)
    roles = {r.role: _plan_role(r, chains, layout, memory) for r in maps[0].roles}
    prefix = output_prefix(next(iter(group.names.experts.values())))
    planned = []
    for mapped in maps:
        specs = {r: replace(p.spec, name=output_name(mapped.prefix, r)) for r, p in roles.items()}
        file = plan_file(layer_file(mapped.layer), specs.values(), _metadata(layout))
        own = tuple(replace(roles[m.role], source=m, spec=specs[m.role]) for m in mapped.roles)
        bytes_in = sum(t.info.nbytes for t in mapped.stored)
        planned.append(LayerPlan(mapped.layer, problem, source, own, file, bytes_in))
    return _group_record(group, problem, prefix, roles, maps[0], source), planned


def _metadata(layout: WeightLayout) -> dict[str, str]:
    return {
        "format": "pt",
        "moectl.format_version": str(FORMAT_VERSION),
        "moectl.layout": f"{layout.name} {layout.version}",
    }


def _check_roles(
    mapped: LayerMap, first: LayerMap, chains: Mapping[str, Chain], layout: WeightLayout
) -> None:
    weights = {r.role for r in mapped.roles if not r.role.startswith(SIDE)}
    if weights != set(chains):
        unread, unmet = sorted(weights - set(chains)), sorted(set(chains) - weights)
        parts = [f"does not read {', '.join(unread)}"] if unread else []
        parts += [f"needs {', '.join(unmet)}, which the checkpoint lacks"] if unmet else []
        raise UsageError(f"layer {mapped.layer}: layout {layout.name} {' and '.join(parts)}.")
    forms = [{r.role: (r.tensors[0].info.dtype, r.dtype, r.shape) for r in m.roles} for m in (mapped, first)]
    if forms[0] != forms[1]:
        raise CheckpointError(
            f"layers {first.layer} and {mapped.layer} store their experts differently, "
            f"expected {forms[1]}, got {forms[0]}.",
            reason="Layers of one group must be alike.",
        )


def _plan_role(source: RoleMap, chains: Mapping[str, Chain], layout: WeightLayout, memory: int) -> RolePlan:
    side = source.role.startswith(SIDE)
    chain = Chain(()) if side else chains[source.role]
    shape, dtype = chain.storage_shape(source.shape, source.dtype)
    if shape[0] != source.shape[0] or dtype not in TORCH_DTYPES:
        raise UsageError(
            f"layout {layout.name} stores {source.role} as {dtype} {list(shape)}, "
            "which cannot be written expert by expert."
        )
    experts = source.shape[0]
    read = math.ceil(nbytes(source.dtype, source.shape) / experts)
    written = math.ceil(nbytes(dtype, tuple(shape)) / experts)
    batch = min(experts, max(1, LARGEST_BATCH // max(read, written)))
    while (peak := step_memory(batch, read, written, bool(chain.steps))) > memory and batch > 1:
        batch = batch * 3 // 4
    if peak > memory:
        raise UsageError(
            f"one expert's {source.role} needs {math.ceil(peak / MIB)} MiB, "
            f"--max-memory allows {f'{memory / MIB:.4g} MiB' if memory >= MIB else f'{memory} bytes'}.",
            hint=f"Give --max-memory {math.ceil(peak / MIB)}MiB or more.",
        )
    logical = source.dtype if side else layout.logical_dtypes.get(source.role, dtype)
    return RolePlan(source, chain, TensorSpec(source.role, dtype, tuple(shape)), logical, batch, peak)


def step_memory(batch: int, read: int, written: int, chained: bool) -> int:
    """Bytes held at most while batches are converted whose experts have `read` and `written` bytes."""
    largest = max(read, written)
    block = max(largest, min(batch * largest, BLOCK_BYTES)) if chained else 0
    return BASE_MEMORY + Arena.size(batch * read, batch * written) + CHAIN_COPIES * block


def _group_record(
    group: LayerGroup,
    problem: MoEProblem,
    prefix: str,
    roles: Mapping[str, RolePlan],
    mapped: LayerMap,
    source: Source,
) -> GroupRecord:
    first = {t.part.stored: t for role in reversed(mapped.roles) for t in reversed(role.tensors)}
    return GroupRecord(
        layers=tuple(group.layers),
        problem=problem,
        experts=(0, problem.experts),
        pad_value=0,
        prefix=prefix,
        roles={
            role: RoleRecord(
                dtype=plan.source.dtype,
                shape=plan.source.shape,
                stored_dtype=plan.spec.dtype,
                stored_shape=plan.spec.shape,
                logical_dtype=plan.logical_dtype,
                chain=plan.chain.to_json(),
            )
            for role, plan in roles.items()
        },
        parts={
            part.stored: PartRecord(
                template=group.names.experts[part.stored],
                role=part.role,
                dtype=first[part.stored].info.dtype,
                shape=first[part.stored].info.shape,
                rows=first[part.stored].rows,
            )
            for part in source.parts
            if part.stored in first
        },
        router=dict(group.names.router),
    )


def _check_file_names(checkpoint: Checkpoint) -> None:
    for file in sorted(files_of(checkpoint.tensors) - {""}):
        if not is_plain_name(file) or file.startswith(RESERVED):
            raise CheckpointError(
                f"tensor file {file!r} must have a plain name in the checkpoint's own folder that does not "
                f"begin with {RESERVED}."
            )


def _plan_rest(checkpoint: Checkpoint, consumed: Mapping[str, str]) -> Iterable[RestPlan]:
    """One `RestPlan` per file with other tensors: files without experts stay whole.

    `consumed` has the experts' tensors and their files.
    """
    by_file: dict[str, list[TensorInfo]] = {file: [] for file in files_of(checkpoint.tensors)}
    mixed = set(consumed.values())
    for name in checkpoint.tensors:
        if name not in consumed:
            info = checkpoint.tensors[name]
            by_file[info.file].append(info)
    for file in sorted(by_file):
        infos = sorted(by_file[file], key=lambda info: info.start)
        if file not in mixed:
            yield RestPlan(file, tuple(infos), None)
        elif infos:
            specs = [TensorSpec(i.name, i.dtype, i.shape) for i in infos]
            name = f"{RESERVED}rest-{Path(file).stem}.safetensors"
            yield RestPlan(file, tuple(infos), plan_file(name, specs, {"format": "pt"}))
