"""Whether a manifest agrees with itself; its fields already have their types."""

from __future__ import annotations

import math
import re

from ..checkpoint.fields import LIMITS
from ..checkpoint.header import DTYPE_BITS
from ..errors import MoectlError
from .canonical import canonical_shapes
from .layout import Chain
from .manifest_record import (
    CONFIG,
    INDEX,
    SOURCE_CONFIG,
    FileRecord,
    GroupRecord,
    LayerRecord,
    ManifestRecord,
    is_plain_name,
)
from .safetensors_file import TORCH_DTYPES, nbytes
from .sources import SIDE

_MAX_SIZE = 1 << 48
LARGEST_GROWTH = 16
"""How many times larger than what is stored any form of a tensor on the way back may be: codes that are
unpacked take two to eight times as much, and what is stored has been paid for on the disk."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_manifest(record: ManifestRecord) -> list[str]:
    """Everything in which a manifest does not agree with itself, in words; empty when sound."""
    wrong: list[str] = []
    kept: tuple[FileRecord, ...] = (*record.rest, *record.files, *record.documents)
    outputs = [item.file for item in record.layers] + [item.file for item in kept]
    names = outputs + [item.name for item in record.source.files] + [r.source for r in record.rest]
    for name in names:
        if not is_plain_name(name):
            wrong.append(f"file name {name[:80]!r} is not a plain name")
    if {item.file for item in record.documents} != {CONFIG, INDEX, SOURCE_CONFIG}:
        wrong.append("the documents are not config, index and the source's config")
    if len(set(outputs)) != len(outputs):
        wrong.append("a file is listed twice")
    if not all(_SHA256.fullmatch(item.sha256) for item in kept):
        wrong.append("a hash of a file is no SHA-256")
    in_groups = [layer for group in record.groups for layer in group.layers]
    if not record.groups or sorted(in_groups) != sorted(layer.layer for layer in record.layers):
        wrong.append("layer groups and converted layers are not the same layers")
    if len(set(in_groups)) != len(in_groups):
        wrong.append("a layer is listed twice")
    for number, group in enumerate(record.groups):
        wrong += [f"group {number}: {text}" for text in _check_group(group)]
    if not wrong:
        groups = {layer: group for group in record.groups for layer in group.layers}
        files = {file.name for file in record.source.files}
        for layer in record.layers:
            wrong += [f"layer {layer.layer}: {t}" for t in _check_layer(layer, groups[layer.layer], files)]
    return wrong


def _sizes_ok(dtype: str, shape: tuple[int, ...]) -> bool:
    return (
        dtype in TORCH_DTYPES
        and bool(shape)
        and all(size > 0 for size in shape)
        and math.prod(shape) * DTYPE_BITS[dtype] // 8 < _MAX_SIZE
    )


def _check_group(group: GroupRecord) -> list[str]:
    wrong = _check_problem(group)
    if wrong:
        return wrong
    first, last = group.experts
    for role, item in group.roles.items():
        if not _sizes_ok(item.dtype, item.shape) or not _sizes_ok(item.stored_dtype, item.stored_shape):
            wrong.append(f"role {role} has no possible dtype and shape")
            continue
        if item.shape[0] != last - first or item.stored_shape[0] != last - first:
            wrong.append(f"role {role} does not have {last - first} experts")
            continue
        steps = Chain.from_json(item.chain).trace(item.shape, item.dtype)
        if steps[-1] != (item.stored_shape, item.stored_dtype):
            wrong.append(f"the chain of role {role} gives {steps[-1]}, not the stored shape and dtype")
        bound = LARGEST_GROWTH * nbytes(item.stored_dtype, item.stored_shape)
        if any(nbytes(dtype, shape) > bound for shape, dtype in steps):
            wrong.append(f"the chain of role {role} grows to more than {LARGEST_GROWTH} times what is stored")
    wrong = wrong or _check_roles(group)
    if not wrong:
        for role in group.roles:
            wrong += _check_cover(role, group)
        wrong += [f"part {n} fills no role" for n, p in group.parts.items() if p.role not in group.roles]
        if len({part.template for part in group.parts.values()}) != len(group.parts):
            wrong.append("two parts share one name")
    return wrong


def _check_problem(group: GroupRecord) -> list[str]:
    """The problem must have possible sizes."""
    problem, (first, last) = group.problem, group.experts
    sizes = {
        "experts": problem.experts,
        "top_k": problem.top_k,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        "shared_experts": max(problem.shared_experts, 1),
    }
    wrong = [f"{name} is {size}" for name, size in sizes.items() if not 1 <= size <= LIMITS[name]]
    if not 0 <= first < last <= problem.experts or problem.local_experts != last - first:
        wrong.append(f"expert range {first}-{last} does not fit {problem.experts} experts")
    if problem.scheme.weight.bits not in (4, 8, 16):
        wrong.append(f"weights have {problem.scheme.weight.bits} bits")
    return wrong


def _check_roles(group: GroupRecord) -> list[str]:
    """The canonical roles must be those of the problem."""
    first, last = group.experts
    try:
        wanted = canonical_shapes(group.problem, last - first)
    except MoectlError as error:
        return [error.what]
    listed = {r: (item.shape, item.dtype) for r, item in group.roles.items() if not r.startswith(SIDE)}
    return [] if listed == wanted else ["its roles do not have the shapes and dtypes of its problem"]


def _check_cover(role: str, group: GroupRecord) -> list[str]:
    """Parts must fill an expert's matrix exactly: rows in order without gap, and as many bytes."""
    record, experts = group.roles[role], group.experts[1] - group.experts[0]
    parts = sorted((p for p in group.parts.values() if p.role == role), key=lambda p: p.rows)
    height = record.shape[1] if len(record.shape) > 1 else 1
    row = nbytes(record.dtype, record.shape) // (experts * height)
    at = 0
    for part in parts:
        size = nbytes(part.dtype, part.shape) if _sizes_ok(part.dtype, part.shape) else -1
        count = 1 if "{expert}" in part.template else experts
        if part.rows[0] != at or size != (part.rows[1] - at) * row * count:
            return [f"part {part.template[:80]} does not fill rows {list(part.rows)} of role {role}"]
        at = part.rows[1]
    return [] if at == height else [f"the parts of role {role} fill {at} of {height} rows"]


def _check_layer(layer: LayerRecord, group: GroupRecord, files: set[str]) -> list[str]:
    wrong: list[str] = []
    if layer.sha256.keys() != group.roles.keys() or layer.source.keys() != group.parts.keys():
        return ["its roles or parts are not those of its group"]
    if not all(_SHA256.fullmatch(item) for item in layer.sha256.values()):
        wrong.append("a hash of a tensor is no SHA-256")
    for key, hashes in layer.source.items():
        many = "{expert}" in group.parts[key].template
        count = group.experts[1] - group.experts[0] if many else 1
        if len(hashes.sha256) != count or len(hashes.files) != count:
            wrong.append(f"part {key} must have {count} hashes and files")
        if not all(_SHA256.fullmatch(item) for item in hashes.sha256) or not set(hashes.files) <= files:
            wrong.append(f"part {key} has an impossible hash or file")
    return wrong
