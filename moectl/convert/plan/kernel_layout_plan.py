"""Plans a conversion into a kernel layout from tensor headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ...checkpoint.checkpoint import Checkpoint, LayerGroup
from ...errors import CheckpointError, Unavailable, UsageError
from ...files.safetensors_writer import TensorSpec, plan_file
from ...files.tensor_table import TensorInfo, files_of
from ...problem.moe_problem import MoEProblem
from ...problem.rank_sizes import check_slices
from ...torch_dtypes import TORCH_DTYPES
from ..layouts.registry import WeightLayout
from ..manifest.manifest_records import (
    FORMAT_VERSION,
    GroupRecord,
    LayoutRecord,
    RoleRecord,
    is_plain_name,
    layer_metadata,
    source_tensor_record,
)
from ..rank_slice import RankShard, RankSlice
from ..recipe.recipe import Recipe
from ..sources import LayerMapping, map_layer, output_name, output_prefix
from ..stream.layer_writer import prepared_writer
from .conversion_plan import RESERVED, ConversionPlan, LayerPlan, PassthroughPlan, layer_file
from .memory_budget import default_memory, plan_batch


def plan_conversion(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    *,
    max_memory: int | None = None,
    experts_only: bool = False,
    shard: RankShard = RankShard(),
) -> ConversionPlan:
    """The `ConversionPlan` to convert every MoE layer of `checkpoint` to `layout`.

    Args:
        max_memory: bytes that the conversion may use on top of the process's baseline; by default a
            quarter of the machine's memory.
        experts_only: skip passthrough tensors.
        shard: the rank whose slice of every layer is converted; by default the whole layer. What several
            ranks share (`shared_passthrough`) is not part of a rank's plan.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype.
        Unavailable: there are no tensor headers to plan from.
        NoBackend: the layout cannot hold a layer, or the rank's slice of it.
        UsageError: the storage format has no converter, a layer cannot be sliced that way, or one expert
            does not fit into `max_memory`.
    """
    memory = default_memory() if max_memory is None else max_memory
    check_plannable(checkpoint)
    groups: list[GroupRecord] = []
    layers: list[LayerPlan] = []
    consumed: dict[str, str] = {}
    for group in checkpoint.groups:
        rank_slice = RankSlice(group.problem, shard)
        check_slices(group.problem, shard.tp_size, layout.name)
        maps = map_group(checkpoint, group)
        consumed |= {info.name: info.file for mapped in maps for info in mapped.tensors}
        record, planned = _plan_group(group, rank_slice, maps, layout, memory)
        groups.append(record)
        layers += planned
    layers.sort(key=lambda layer: layer.layer)
    kept = shard.ranks == 1 and not experts_only
    passthrough = tuple(plan_passthrough(checkpoint, consumed)) if kept else ()
    layout_record = LayoutRecord(
        layout.name,
        layout.target,
        layout.version,
        layout.archs,
        tuple(map(str, layout.readers)),
        layout.verified,
    )
    return ConversionPlan(
        checkpoint, layout_record, shard, tuple(groups), tuple(layers), passthrough, experts_only, memory
    )


def shared_passthrough(plan: ConversionPlan) -> tuple[PassthroughPlan, ...]:
    """The passthrough tensors of the checkpoint that `plan` converts for one of several ranks."""
    consumed = {info.name: info.file for layer in plan.layers for info in layer.whole.tensors}
    return () if plan.experts_only else tuple(plan_passthrough(plan.checkpoint, consumed))


def check_plannable(checkpoint: Checkpoint) -> None:
    """Raises unless there are MoE layers with tensor headers, in files whose names an output can keep."""
    if not checkpoint.groups:
        raise CheckpointError("the checkpoint has no MoE layers, so there is nothing to convert.")
    if not checkpoint.tensors:
        raise Unavailable(
            f"{checkpoint.origin.name} gives no tensor headers; a conversion is planned from them.",
            hint="Give a directory or repository with its safetensors files.",
        )
    check_file_names(checkpoint)


def map_group(checkpoint: Checkpoint, group: LayerGroup) -> list[LayerMapping]:
    """The mapped layers of `group`; CheckpointError unless all store their experts the same way."""
    maps = [map_layer(checkpoint, group, layer) for layer in group.layers]
    for mapped in maps:
        check_uniform(mapped, maps[0])
    return maps


def _plan_group(
    group: LayerGroup, rank_slice: RankSlice, whole: list[LayerMapping], layout: WeightLayout, memory: int
) -> tuple[GroupRecord, list[LayerPlan]]:
    _refuse_other_dtypes(whole)
    problem = rank_slice.padded(layout.pad)
    maps = [mapped.of_experts(*rank_slice.experts) for mapped in whole]
    recipe = layout.recipe(problem, rank_slice.shapes(maps[0].shapes))
    for role, (dtype, shape) in recipe.stored.items():
        if dtype not in TORCH_DTYPES:
            raise UsageError(
                f"layout {layout.name} stores {role} as {dtype} {list(shape)}, which safetensors cannot hold."
            )
    slices = recipe.shapes if rank_slice.sliced else {}
    batch, working = plan_batch(maps[0], prepared_writer(maps[0], recipe), slices, memory)
    planned = []
    metadata = layer_metadata(FORMAT_VERSION, layout.name, layout.version)
    for mapped, layer in zip(maps, whole, strict=True):
        writer = prepared_writer(mapped, recipe)
        file = plan_file(layer_file(mapped.layer), writer.specs, metadata)
        dtypes = {output_name(mapped.prefix, role): dtype for role, dtype in layout.logical_dtypes.items()}
        planned.append(LayerPlan(mapped, layer, rank_slice, problem, writer, file, batch, working, dtypes))
    return _group_record(group, rank_slice, problem, layout, maps[0], recipe), planned


def _refuse_other_dtypes(layers: list[LayerMapping]) -> None:
    """Raises CheckpointError unless tensors of one kind have one dtype: the manifest has it once for all.

    Bytes of several dtypes are read alike, such as scales of E8M0 as U8, and would come back as the first's.
    """
    for kinds in zip(*(layer.mapped for layer in layers), strict=True):
        first = kinds[0].tensors[0]
        others = (info for kind in kinds for info in kind.tensors if info.dtype != first.dtype)
        if (other := next(others, None)) is not None:
            raise CheckpointError(
                f"tensor {other.name} is {other.dtype}, and {first.name} is {first.dtype}.",
                reason="The source could not be restored: one dtype is kept for tensors of a kind.",
                hint="Store both with one dtype.",
            )


def check_uniform(mapped: LayerMapping, first: LayerMapping) -> None:
    """Raises CheckpointError unless both layers store their experts in the same way."""
    mappings = [tuple(tensors.mapping for tensors in layer.mapped) for layer in (mapped, first)]
    if mappings[0] != mappings[1]:
        different = next(a.stored for a, b in zip(*mappings, strict=False) if a != b)
        raise CheckpointError(
            f"layers {first.layer} and {mapped.layer} store their experts differently, first in {different}.",
            reason="Layers of one group must be alike.",
        )


def _group_record(
    group: LayerGroup,
    rank_slice: RankSlice,
    problem: MoEProblem,
    layout: WeightLayout,
    mapped: LayerMapping,
    recipe: Recipe,
) -> GroupRecord:
    names = group.names.experts
    return GroupRecord(
        layers=tuple(group.layers),
        problem=problem,
        experts=rank_slice.experts,
        intermediate=rank_slice.intermediate,
        whole_intermediate=rank_slice.whole.dims.intermediate,
        pad_value=0,
        prefix=output_prefix(names[mapped.mapped[0].mapping.stored]),
        canonical=dict(recipe.shapes),
        roles={role: role_record(role, recipe, layout) for role in recipe.stored}
        | {role: RoleRecord(dtype, shape, dtype, None) for role, (dtype, shape) in mapped.kept.items()},
        parts={
            tensors.mapping.stored: source_tensor_record(tensors, names[tensors.mapping.stored])
            for tensors in mapped.mapped
        },
        router=dict(group.names.router),
    )


def role_record(role: str, recipe: Recipe, layout: WeightLayout) -> RoleRecord:
    """The manifest record of a stored role of `recipe`."""
    dtype, shape = recipe.stored[role]
    output = recipe.outputs[role].to_json() if role in recipe.outputs else None
    return RoleRecord(dtype, shape, layout.logical_dtypes.get(role, dtype), output)


def check_file_names(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a tensor file whose name is unsafe or would clash in the output."""
    for file in sorted(files_of(checkpoint.tensors) - {""}):
        if not is_plain_name(file) or file.startswith(RESERVED):
            raise CheckpointError(
                f"tensor file {file!r} must have a plain name in the checkpoint's own directory that does "
                f"not begin with {RESERVED}."
            )


def plan_passthrough(
    checkpoint: Checkpoint, consumed: Mapping[str, str], prefix: str = f"{RESERVED}rest-"
) -> Iterable[PassthroughPlan]:
    """One `PassthroughPlan` per file with passthrough tensors; files without experts are kept whole.

    `consumed` maps converted tensors to their files; names of new files begin with `prefix`.
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
            yield PassthroughPlan(file, tuple(infos), None)
        elif infos:
            specs = [TensorSpec(i.name, i.dtype, i.shape) for i in infos]
            name = f"{prefix}{Path(file).stem}.safetensors"
            yield PassthroughPlan(file, tuple(infos), plan_file(name, specs, {"format": "pt"}))
