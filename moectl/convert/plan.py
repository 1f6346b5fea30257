"""A conversion decided from headers alone: what is read, what is written, and how much of everything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .. import __version__
from ..checkpoint.model import Checkpoint, LayerGroup, TensorInfo
from ..checkpoint.tensor_table import files_of
from ..errors import CheckpointError, Unavailable, UsageError
from ..problem import MoEProblem
from .budget import BASE_MEMORY, MIB, default_memory, plan_batch, slot_buffers
from .layout import WeightLayout
from .manifest_record import (
    FORMAT_VERSION,
    GroupRecord,
    LayerRecord,
    LayoutRecord,
    RestRecord,
    RoleRecord,
    TensorForm,
    is_plain_name,
    part_record,
)
from .pipeline import SLOTS
from .portions import Portion
from .recipe import Recipe
from .records import to_json
from .safetensors_file import TORCH_DTYPES, FilePlan, TensorSpec, plan_file
from .shards import Shard, Share
from .sources import LayerMap, map_layer, output_name, output_prefix, source_for
from .writer import Writer, prepared_writer


@dataclass(frozen=True)
class LayerPlan:
    """One layer: the unit of work, of files, and of resuming.

    `map` has the experts of `share` alone, each of them whole; `problem` is the rank's, padded. `batch`
    is the number of experts converted at once, `working` the bytes that this takes beside the buffers;
    `holds` says what the bytes of each tensor mean, where its dtype does not.
    """

    map: LayerMap
    share: Share
    problem: MoEProblem
    writer: Writer
    file: FilePlan
    batch: int
    working: int
    holds: Mapping[str, str]

    @property
    def layer(self) -> int:
        return self.map.layer

    @property
    def bytes_in(self) -> int:
        """Bytes of expert tensors read."""
        return sum(stop - start for _, start, stop in self.map.extents)

    @property
    def buffers(self) -> tuple[int, int, int]:
        """Bytes of a batch as it is read, of what is made of it, and as it is written."""
        return slot_buffers(self.map, self.writer, self.batch)


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


class Ending(Protocol):
    """What completes an output that is no prepared folder.

    `mark` is the file whose presence says that all tensors are there.
    """

    @property
    def mark(self) -> str: ...

    def check_finished(self, plan: Plan, folder: Path, out: Path) -> None:
        """Raises UsageError when the finished `out` is not what `plan` makes of `folder`."""

    def finish(
        self,
        plan: Plan,
        folder: Path,
        out: Path,
        layers: Sequence[LayerRecord],
        rest: Sequence[RestRecord],
        producer: Mapping[str, str],
    ) -> tuple[str, ...]:
        """Writes the last files; names of small files of the source `folder` that were left out."""


@dataclass(frozen=True)
class Plan:
    """Everything `convert` does, decided and checked before anything is created.

    `ending` is None for a prepared folder, which a manifest and READY complete.
    """

    checkpoint: Checkpoint
    layout: LayoutRecord
    shard: Shard
    groups: tuple[GroupRecord, ...]
    layers: tuple[LayerPlan, ...]
    rest: tuple[RestPlan, ...]
    experts_only: bool
    max_memory: int
    ending: Ending | None = None

    @property
    def index(self) -> dict[str, Any]:
        """The index document: every tensor's file."""
        weight_map = {name: layer.file.name for layer in self.layers for name in layer.file.tensors}
        weight_map.update({info.name: item.name for item in self.rest for info in item.tensors})
        total = sum(info.nbytes for layer in self.layers for info in layer.file.tensors.values())
        metadata = {"total_size": total + self.rest_bytes}
        return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}

    @property
    def tensors_in(self) -> int:
        """Expert tensors read."""
        return sum(1 for layer in self.layers for _ in layer.map.tensors)

    @property
    def tensors_out(self) -> int:
        """Expert tensors written."""
        return sum(len(layer.file.tensors) for layer in self.layers)

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
        return self._beside + self.slots * sum(self.buffers)

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of the buffers that a batch of any layer is read into, made in and written from."""
        return tuple(map(max, zip((0, 0, 0), *(layer.buffers for layer in self.layers), strict=True)))

    @property
    def slots(self) -> int:
        """Batches that may be under way at once within `max_memory`."""
        return max(1, min(SLOTS, (self.max_memory - self._beside) // max(1, sum(self.buffers))))

    @property
    def _beside(self) -> int:
        """Bytes held at most beside the buffers."""
        return BASE_MEMORY + max((layer.working for layer in self.layers), default=0)

    def of_portion(self, portion: Portion) -> Plan:
        """The same for the layers of one part, and other tensors where they are that part's."""
        rest = self.rest if portion.has_rest else ()
        return replace(self, layers=tuple(portion.share(self.layers)), rest=rest)

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
    def shard(self) -> Shard: ...
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
        "rank": str(conversion.shard),
        "experts only": "yes" if conversion.experts_only else "no",
        "layer groups": digest_of(to_json(conversion.groups)),
    }


def digest_of(value: object) -> str:
    """SHA-256 of JSON data, equal for equal data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


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
    shard: Shard = Shard(),
) -> Plan:
    """The `Plan` to convert every MoE layer of `checkpoint` to `layout`.

    Args:
        max_memory: bytes that the conversion may hold above the program's own; a quarter of the
            machine's memory by default.
        experts_only: leave out tensors that are no experts.
        shard: the rank whose share of every layer is converted; all of it by default.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype.
        Unavailable: there are no tensor headers to plan from.
        NoBackend: the layout cannot hold a layer, or the rank's slice of it.
        UsageError: the storage format has no converter, a layer cannot be shared so, or one expert
            does not fit `max_memory`.
    """
    memory = default_memory() if max_memory is None else max_memory
    check_plannable(checkpoint)
    groups: list[GroupRecord] = []
    layers: list[LayerPlan] = []
    consumed: dict[str, str] = {}
    for group in checkpoint.groups:
        share = Share(group.problem, shard)
        maps = map_group(checkpoint, group)
        consumed |= {info.name: info.file for mapped in maps for info in mapped.tensors}
        record, planned = _plan_group(group, share, maps, layout, memory)
        groups.append(record)
        layers += planned
    layers.sort(key=lambda layer: layer.layer)
    rest = () if experts_only else tuple(plan_rest(checkpoint, consumed))
    facts = LayoutRecord(
        layout.name,
        layout.target,
        layout.version,
        layout.archs,
        tuple(map(str, layout.readers)),
        layout.verified,
    )
    return Plan(checkpoint, facts, shard, tuple(groups), tuple(layers), rest, experts_only, memory)


def check_plannable(checkpoint: Checkpoint) -> None:
    """Raises unless there are MoE layers, their headers, and files that an output can have beside its own."""
    if not checkpoint.groups:
        raise CheckpointError("the checkpoint has no MoE layers, so there is nothing to convert.")
    if not checkpoint.tensors:
        raise Unavailable(
            f"{checkpoint.origin.name} gives no tensor headers; a conversion is planned from them.",
            hint="Give a folder or repository with its safetensors files.",
        )
    check_file_names(checkpoint)


def map_group(checkpoint: Checkpoint, group: LayerGroup) -> list[LayerMap]:
    """The layers of `group`, all alike, every header checked."""
    source = source_for(checkpoint, group)
    maps = [map_layer(source, checkpoint, group, layer) for layer in group.layers]
    for mapped in maps:
        check_alike(mapped, maps[0])
    return maps


def _plan_group(
    group: LayerGroup, share: Share, whole: list[LayerMap], layout: WeightLayout, memory: int
) -> tuple[GroupRecord, list[LayerPlan]]:
    problem = share.padded(layout.pad)
    maps = [mapped.of_experts(*share.experts) for mapped in whole]
    recipe = layout.recipe(problem, share.shapes(maps[0].shapes))
    for role, (shape, dtype) in recipe.stored.items():
        if dtype not in TORCH_DTYPES:
            raise UsageError(
                f"layout {layout.name} stores {role} as {dtype} {list(shape)}, which has no place."
            )
    slices = recipe.shapes if share.sliced else {}
    batch, working = plan_batch(maps[0], prepared_writer(maps[0], recipe), slices, memory)
    planned = []
    for mapped in maps:
        writer = prepared_writer(mapped, recipe)
        file = plan_file(layer_file(mapped.layer), writer.specs, _metadata(layout))
        holds = {output_name(mapped.prefix, role): kind for role, kind in layout.logical_dtypes.items()}
        planned.append(LayerPlan(mapped, share, problem, writer, file, batch, working, holds))
    return _group_record(group, share, problem, layout, maps[0], recipe), planned


def _metadata(layout: WeightLayout) -> dict[str, str]:
    return {
        "format": "pt",
        "moectl.format_version": str(FORMAT_VERSION),
        "moectl.layout": f"{layout.name} {layout.version}",
    }


def check_alike(mapped: LayerMap, first: LayerMap) -> None:
    """CheckpointError unless both layers store their experts in the same forms."""
    forms = [tuple(part.form for part in layer.parts) for layer in (mapped, first)]
    if forms[0] != forms[1]:
        different = next(a.part.stored for a, b in zip(*forms, strict=False) if a != b)
        raise CheckpointError(
            f"layers {first.layer} and {mapped.layer} store their experts differently, first in {different}.",
            reason="Layers of one group must be alike.",
        )


def _group_record(
    group: LayerGroup,
    share: Share,
    problem: MoEProblem,
    layout: WeightLayout,
    mapped: LayerMap,
    recipe: Recipe,
) -> GroupRecord:
    names = group.names.experts
    return GroupRecord(
        layers=tuple(group.layers),
        problem=problem,
        experts=share.experts,
        intermediate=share.intermediate,
        whole_intermediate=share.whole.dims.intermediate,
        pad_value=0,
        prefix=output_prefix(names[mapped.parts[0].part.stored]),
        canonical={role: TensorForm(dtype, shape) for role, (shape, dtype) in recipe.shapes.items()},
        roles={role: role_record(role, recipe, layout) for role in recipe.stored}
        | {role: RoleRecord(dtype, shape, dtype, None) for role, (shape, dtype) in mapped.kept.items()},
        parts={part.part.stored: part_record(part, names[part.part.stored]) for part in mapped.parts},
        router=dict(group.names.router),
    )


def role_record(role: str, recipe: Recipe, layout: WeightLayout) -> RoleRecord:
    """The record of a stored role of `recipe`."""
    shape, dtype = recipe.stored[role]
    made = recipe.outputs[role].to_json() if role in recipe.outputs else None
    return RoleRecord(dtype, shape, layout.logical_dtypes.get(role, dtype), made)


def check_file_names(checkpoint: Checkpoint) -> None:
    """CheckpointError for a tensor file whose name could not stand, or would clash, in the output."""
    for file in sorted(files_of(checkpoint.tensors) - {""}):
        if not is_plain_name(file) or file.startswith(RESERVED):
            raise CheckpointError(
                f"tensor file {file!r} must have a plain name in the checkpoint's own folder that does not "
                f"begin with {RESERVED}."
            )


def plan_rest(
    checkpoint: Checkpoint, consumed: Mapping[str, str], prefix: str = f"{RESERVED}rest-"
) -> Iterable[RestPlan]:
    """One `RestPlan` per file with other tensors: files without experts stay whole.

    `consumed` has the experts' tensors and their files; names of new files begin with `prefix`.
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
            name = f"{prefix}{Path(file).stem}.safetensors"
            yield RestPlan(file, tuple(infos), plan_file(name, specs, {"format": "pt"}))
