"""Consistency checks of a manifest whose fields have already been parsed to their types."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ...checkpoint.config.fields import LIMITS
from ...dtypes import DTYPE_BITS, MODEL_DTYPES
from ...errors import MoectlError
from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorType
from ...problem.schemes import FULL
from ...torch_dtypes import TORCH_DTYPES
from ..canonical import canonical_shapes
from ..rank_slice import LARGEST_WORLD, RankShard
from ..recipe.recipe import Recipe
from ..sources import TensorMapping, output_name
from .manifest_records import (
    CONFIG,
    INDEX,
    SOURCE_CONFIG,
    DeploymentRecord,
    FileRecord,
    GroupRecord,
    LayerRecord,
    ManifestRecord,
    RankRecord,
    RoleRecord,
    group_rank_slice,
    is_plain_name,
    rank_manifest,
    unpadded,
)

_MAX_SIZE = 1 << 48
LARGEST_GROWTH = 16
"""How many times larger than its canonical and stored forms an intermediate form of a tensor may be.
Unpacked codes take two to eight times as much; more would let a small file ask for unbounded memory."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_manifest(record: ManifestRecord) -> list[str]:
    """Every inconsistency of a manifest, as phrases; empty if there is none."""
    # The index of version 1 names the layers' files, too.
    indexed = record.format_version == 1 or bool(record.rest)
    return _check_kept(record, [item.file for item in record.layers], indexed=indexed) + check_rank(record)


def check_deployment(record: DeploymentRecord) -> list[str]:
    """Every inconsistency of the manifest above several ranks, as phrases; empty if there is none."""
    wrong = _check_kept(record, [], indexed=bool(record.rest))
    if record.format_version == 1:
        wrong.append("version 1 has no manifest of all ranks")
    sizes = (record.tp_size, record.ep_size)
    if not all(1 <= size <= LARGEST_WORLD for size in sizes) or len(record.ranks) != math.prod(sizes):
        wrong.append(f"there are {len(record.ranks)} ranks with tp {sizes[0]} and ep {sizes[1]}")
    elif len(record.ranks) < 2:
        wrong.append("there is a single rank, which has a manifest of its own")
    if [item.file for item in record.ranks] != [rank_manifest(rank) for rank in range(len(record.ranks))]:
        wrong.append("its ranks are not rank-00, rank-01 and so on")
    if not all(_SHA256.fullmatch(item.sha256) for item in record.ranks):
        wrong.append("a hash of a rank's manifest is no SHA-256")
    if not record.layers or list(record.layers) != sorted(set(record.layers)):
        wrong.append("its layers are not in ascending order")
    return wrong


def _check_kept(record: ManifestRecord | DeploymentRecord, layers: list[str], *, indexed: bool) -> list[str]:
    """Inconsistencies of the files that engines and tokenizers read, beside those of `layers`."""
    wrong: list[str] = []
    kept: tuple[FileRecord, ...] = (*record.rest, *record.files, *record.documents)
    outputs = layers + [item.file for item in kept]
    for name in [*outputs, *(item.source for item in record.rest)]:
        if not is_plain_name(name):
            wrong.append(f"file name {name[:80]!r} is not a plain name")
    documents = {CONFIG, SOURCE_CONFIG, INDEX} if indexed else {CONFIG, SOURCE_CONFIG}
    if {item.file for item in record.documents} != documents:
        wrong.append(f"the documents are not {', '.join(sorted(documents))}")
    if len(set(outputs)) != len(outputs):
        wrong.append("a file is listed twice")
    hashes = [item.sha256 for item in kept]
    for item in record.rest:
        hashes += [item.header_sha256] if item.header_sha256 else []
        hashes += item.tensors.values()
    if not all(map(_SHA256.fullmatch, hashes)):
        wrong.append("a hash of a file is no SHA-256")
    return wrong


def check_rank(record: RankRecord) -> list[str]:
    """Every inconsistency of what a manifest says of its layers, as phrases; empty if there is none."""
    wrong: list[str] = []
    layer_files = [item.file for item in record.layers]
    for name in [*layer_files, *(item.name for item in record.source.files)]:
        if not is_plain_name(name):
            wrong.append(f"file name {name[:80]!r} is not a plain name")
    if len(set(layer_files)) != len(layer_files):
        wrong.append("a file is listed twice")
    in_groups = [layer for group in record.groups for layer in group.layers]
    if not record.groups or sorted(in_groups) != sorted(layer.layer for layer in record.layers):
        wrong.append("layer groups and converted layers are not the same layers")
    if len(set(in_groups)) != len(in_groups):
        wrong.append("a layer is listed twice")
    if not record.shard.possible:
        wrong.append(f"there is no {record.shard}")
    for number, group in enumerate(record.groups if record.shard.possible else ()):
        wrong += [f"group {number}: {text}" for text in _check_group(group, record.shard)]
    if not wrong:
        groups = {layer: group for group in record.groups for layer in group.layers}
        files = {file.name for file in record.source.files}
        for layer in record.layers:
            findings = _check_layer(layer, groups[layer.layer], files, record.shard.tp_size > 1)
            wrong += [f"layer {layer.layer}: {text}" for text in findings]
    return wrong


def _sizes_ok(form: TensorType | RoleRecord) -> bool:
    return (
        form.dtype in TORCH_DTYPES
        and all(size > 0 for size in form.shape)
        and math.prod(form.shape) * DTYPE_BITS[form.dtype] // 8 < _MAX_SIZE
    )


def _check_group(group: GroupRecord, shard: RankShard) -> list[str]:
    wrong = _check_problem(group) or _check_share(group, shard)
    if wrong:
        return wrong
    experts = group.experts[1] - group.experts[0]
    forms: list[tuple[str, RoleRecord | TensorType]] = [*group.roles.items(), *group.canonical.items()]
    forms += [(key, part.raw) for key, part in group.parts.items()]
    wrong = [f"{name} has no possible dtype and shape" for name, form in forms if not _sizes_ok(form)]
    if len({part.template for part in group.parts.values()}) != len(group.parts):
        wrong.append("two parts share one name")
    if wrong:
        return wrong
    try:
        inputs = any(role.endswith("_input") for role in group.canonical)
        expected = canonical_shapes(group.problem, experts, inputs)
        whole = canonical_shapes(group_rank_slice(shard, group).whole, experts, inputs)
        recipe, parts = group.recipe, group.mappings
        if recipe.shapes != expected:
            return ["its roles do not have the shapes and dtypes of its problem"]
        recipe.check()
        wrong = _check_stored(group, recipe, parts)
        return wrong or [text for role in whole for text in _check_cover(role, whole[role], parts)]
    except MoectlError as error:
        return [error.what]


def _check_stored(group: GroupRecord, recipe: Recipe, parts: Mapping[str, TensorMapping]) -> list[str]:
    """Stored roles must follow from the recipe and the kept tensors, and no form may be absurdly large."""
    experts = group.experts[1] - group.experts[0]
    kept = {f.side: f.of_experts(experts) for f in parts.values() if f.kept}
    listed = {role: item.type for role, item in group.roles.items()}
    if listed != {**recipe.stored, **kept}:
        return ["its stored roles are not what its recipe gives"]
    wrong = []
    for key, part in parts.items():
        if part.role and part.role not in recipe.shapes:
            wrong.append(f"part {key[:80]} fills role {part.role[:80]}, which is none of the layer's")
        record = group.parts[key]
        held_experts = 1 if "{expert}" in record.template or part.shared else group.problem.experts
        if math.prod(record.shape) * DTYPE_BITS.get(record.dtype, 0) != 8 * part.each * held_experts:
            wrong.append(f"part {key[:80]} is not as large as what is read of it")
        elif _grows(part, experts):
            wrong.append(f"part {key[:80]} grows to more than {LARGEST_GROWTH} times what it is made of")
    for name, output in recipe.outputs.items():
        canonical, stored = recipe.shapes[output.role], recipe.stored[name]
        bound = LARGEST_GROWTH * max(nbytes(*canonical), nbytes(*stored))
        steps = (*output.steps(*canonical), *output.chain.trace(*output.steps(*canonical)[-1]))
        if any(nbytes(*step) > bound for step in steps):
            wrong.append(f"role {name} grows to more than {LARGEST_GROWTH} times what it is made of")
    return wrong


def _grows(part: TensorMapping, experts: int) -> bool:
    """True if a form between a stored source tensor and its canonical rows is absurdly larger than both."""
    forms = list(part.chain.trace(part.dtype, (experts, *part.shape)))
    for value in part.values:
        forms.append(value.output_type(*forms[-1]))
    sizes = [nbytes(dtype, shape) for dtype, shape in forms]
    return max(sizes) > LARGEST_GROWTH * max(sizes[0], sizes[-1])


def _check_share(group: GroupRecord, shard: RankShard) -> list[str]:
    """The recorded ranges and sizes must be those of the directory's rank."""
    try:
        rank_slice = group_rank_slice(shard, group)
        expected = {
            "expert range": (rank_slice.experts, group.experts),
            "intermediate range": (rank_slice.intermediate, group.intermediate),
            "problem": (rank_slice.problem, unpadded(group.problem)),
        }
    except MoectlError as error:
        return [error.what]
    return [f"its {name} is not that of {shard}" for name, (own, listed) in expected.items() if own != listed]


def _check_problem(group: GroupRecord) -> list[str]:
    """The problem must have plausible sizes."""
    problem, (first, last) = group.problem, group.experts
    sizes = {
        "experts": problem.experts,
        "top_k": problem.top_k,
        "hidden": problem.dims.hidden,
        "intermediate": max(problem.dims.intermediate, group.whole_intermediate),
        "shared_experts": max(problem.shared_experts, 1),
    }
    wrong = [f"{name} is {size}" for name, size in sizes.items() if not 1 <= size <= LIMITS[name]]
    if not 0 <= first < last <= problem.experts or problem.local_experts != last - first:
        wrong.append(f"expert range {first}-{last} does not fit {problem.experts} experts")
    weight = problem.scheme.weight
    if weight.bits not in (4, 8, 16):
        wrong.append(f"weights have {weight.bits} bits")
    if weight.block != (0, 0) and not all(size == FULL or 1 <= size <= _MAX_SIZE for size in weight.block):
        wrong.append(f"a scale is shared by {weight.block} weights")
    if problem.dtype not in MODEL_DTYPES:
        wrong.append(f"the model's dtype is {problem.dtype[:80]!r}")
    return wrong


def _check_cover(role: str, form: TensorType, parts: Mapping[str, TensorMapping]) -> list[str]:
    """The source tensors must fill an expert's matrix exactly: rows without gap or overlap, bytes equal."""
    canonical, (_, rows, *columns) = form
    of_role = {key: part for key, part in parts.items() if part.role == role}
    row_bytes = nbytes(canonical, tuple(columns))
    filled = 0
    for key, part in sorted(of_role.items(), key=lambda item: item[1].rows):
        dtype, shape = part.canonical_type()
        part_bytes = (part.rows[1] - filled) * row_bytes
        if part.rows[0] != filled or dtype != canonical or nbytes(dtype, shape) != part_bytes:
            return [f"part {key[:80]} does not fill rows {list(part.rows)} of role {role}"]
        filled = part.rows[1]
    return [] if filled == rows else [f"the parts of role {role} fill {filled} of {rows} rows"]


def _check_layer(layer: LayerRecord, group: GroupRecord, files: set[str], sliced: bool) -> list[str]:
    wrong: list[str] = []
    names = {output_name(group.prefix.replace("{layer}", str(layer.layer)), role) for role in group.roles}
    if layer.sha256.keys() != names or layer.source.keys() != group.parts.keys():
        return ["its roles or parts are not those of its group"]
    if not all(_SHA256.fullmatch(item) for item in layer.sha256.values()):
        wrong.append("a hash of a tensor is no SHA-256")
    if layer.slices.keys() != (group.canonical.keys() if sliced else set()):
        wrong.append("its hashed slices are not its canonical roles")
    for key, hashes in layer.source.items():
        per_expert = "{expert}" in group.parts[key].template
        count = group.experts[1] - group.experts[0] if per_expert else 1
        if len(hashes.sha256) != count or len(hashes.files) != count:
            wrong.append(f"part {key} must have {count} hashes and files")
        if not all(_SHA256.fullmatch(item) for item in hashes.sha256) or not set(hashes.files) <= files:
            wrong.append(f"part {key} has an impossible hash or file")
    return wrong
