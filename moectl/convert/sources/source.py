"""How a checkpoint's expert tensors become canonical roles, and back: the parts of any storage.

Names and shapes stand in `moectl.checkpoint.tensors.storage`, how numbers lie in `packings`; a part is
derived from the two and from the tensor's own header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...checkpoint.model import Checkpoint, LayerGroup
from ...checkpoint.quantization import zeros_less_one
from ...checkpoint.tensors.storage import Shape as Axes
from ...checkpoint.tensors.storage import Storage, Stored, find_storage, format_sizes
from ...errors import CheckpointError, UsageError
from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorInfo, names_beginning
from ...problem import MoEProblem
from ..canonical import INTERLEAVED, canonical_shapes
from ..values import Shapes
from .packings import PACKINGS, Packing
from .part import LayerMap, Part, PartForm, PartMap
from .parts import part_of

ROLES: Mapping[str, str] = {
    "w13": "w13_weight",
    "w13_scale": "w13_weight_scale",
    "w13_zero": "w13_weight_zero_point",
    "w13_bias": "w13_bias",
    "w2": "w2_weight",
    "w2_scale": "w2_weight_scale",
    "w2_zero": "w2_weight_zero_point",
    "w2_bias": "w2_bias",
}
"""Roles and the parameter names that engines use for them; others are called by their role."""

ONE_BYTE = frozenset(("U8", "I8", "F8_E4M3", "F8_E8M0"))
"""Dtypes whose tensors are read as bytes: the part, not the dtype, says what they mean."""


@dataclass(frozen=True)
class Source:
    """How the experts of one checkpoint's layers are stored.

    Attributes:
        storage: names, dtypes and shapes of the tensors.
        zeros_less_one: stored zero points are one less than the zero points (GPTQ's first version).
    """

    storage: Storage
    zeros_less_one: bool = False

    @property
    def packing(self) -> Packing:
        """How numbers lie in the tensors."""
        return PACKINGS[self.storage.format.packing]

    def stored(self, role: str) -> Stored:
        """The dtypes and the shapes that the tensor of a stored role may have."""
        return next(it for it in self.storage.tensors.values() if it.role == role)

    def refuse(self, problem: MoEProblem) -> str:
        """Why `problem` cannot be read from this storage; empty when it can."""
        weight = problem.scheme.weight
        reason = self.packing.refuse(problem)
        if reason:
            return reason
        if problem.act_order == "group":
            return (
                "experts whose columns are ordered by group (act order, g_idx) cannot be converted or run, "
                "only those in their own order"
            )
        per_word = 32 // weight.bits
        sizes = (problem.dims.hidden, problem.dims.intermediate)
        if self.packing.whole_words and any(size % per_word for size in sizes):
            return (
                f"{weight.name} words hold {per_word} codes, so hidden and intermediate sizes must be "
                f"multiples of {per_word}, got {sizes[0]} and {sizes[1]}"
            )
        if weight.block[0] not in (0, 1):
            if problem.rows == INTERLEAVED:
                return f"{weight} holds gate and up rows in one block where they are interleaved"
            together = "w13" in {stored.role for stored in self.storage.tensors.values()}
            if together and weight.block[0] > 1 and sizes[1] % weight.block[0] and problem.activation.gated:
                return (
                    f"{weight} holds gate and up rows in one block where they are one matrix and the "
                    f"intermediate size {sizes[1]} is no multiple of {weight.block[0]}"
                )
        return ""


def source_for(checkpoint: Checkpoint, group: LayerGroup) -> Source:
    """The `Source` of a group of layers.

    Raises:
        CheckpointError: a tensor is missing, or the tensors' names and dtypes are of no known storage.
    """
    layer = group.layers[0]
    infos = {
        role: _info(checkpoint, template.format(layer=layer, expert=0), layer, group.problem)
        for role, template in group.names.experts.items()
    }
    dtypes = {role: info.dtype for role, info in infos.items()}
    weight, names = group.problem.scheme.weight, group.names
    said = (group.problem.storage, names.arrangement, names.experts)
    # Without dtypes where none fits: the tensor that is wrong is then named when it is mapped.
    storage = find_storage(*said, dtypes, weight) or find_storage(*said, {}, weight)
    if storage is None:
        first = next(iter(infos.values()))
        raise CheckpointError(
            f"layer {layer}: {weight} experts with tensors such as {first.name} ({first.dtype}) are of no "
            "known storage.",
            hint="Check the checkpoint's quantization config against its files.",
        )
    return Source(storage, storage.format.packing == "gptq" and zeros_less_one(checkpoint.config))


def _info(checkpoint: Checkpoint, name: str, layer: int, problem: MoEProblem) -> TensorInfo:
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"tensor {name} is missing; layer {layer} has {problem.experts} experts and needs it.",
            hint="Check that every file of the checkpoint is there.",
        )
    return info


def expert_prefix(template: str, layer: int) -> str:
    """What the names of a layer's expert tensors begin with, from one name template."""
    head = template.split("{expert}")[0] if "{expert}" in template else template.rsplit(".", 1)[0] + "."
    return head.replace("{layer}", str(layer))


def output_prefix(template: str) -> str:
    """What converted tensors' names begin with, ``{layer}`` left in, from one stored name template."""
    prefix = expert_prefix(template.replace("{layer}", "\0"), 0).replace("\0", "{layer}")
    return prefix if prefix.endswith("experts.") else f"{prefix}experts."


def output_name(prefix: str, role: str) -> str:
    """The name of a converted role's tensor, spelled as engines name the parameter."""
    return prefix + ROLES.get(role, role)


def map_layer(source: Source, checkpoint: Checkpoint, group: LayerGroup, layer: int) -> LayerMap:
    """The `LayerMap` of one layer, after every header under the experts' prefix was checked.

    Raises:
        CheckpointError: a tensor is missing, has another dtype or shape than the format and the
            layer's sizes ask for, or lies under the experts' prefix and belongs to nothing.
        NoBackend: the sizes are not whole groups of weights.
        UsageError: experts of this kind cannot be converted from this format.
    """
    problem, templates = group.problem, group.names.experts
    reason = source.refuse(problem) or _refuse_kinds(templates)
    if reason:
        raise UsageError(f"layer {layer}: {reason}.")
    inputs = any(role.endswith("_input") for role in templates)
    shapes = canonical_shapes(problem, problem.experts, inputs)
    mapped = tuple(
        _map_part(source, role, template, checkpoint, problem, layer, shapes)
        for role, template in templates.items()
    )
    for role, (shape, _) in shapes.items():
        _check_filled(role, shape[1], [m for m in mapped if m.part.role == role], layer)
    consumed = {info.name for m in mapped for info in m.tensors}
    _refuse_extra(checkpoint, {expert_prefix(name, layer) for name in templates.values()}, consumed, layer)
    first = next(iter(templates.values()))
    prefix = output_prefix(first).replace("{layer}", str(layer))
    return LayerMap(layer, prefix, mapped, shapes, source.zeros_less_one)


def _refuse_kinds(templates: Mapping[str, str]) -> str:
    """Why experts with tensors of these stored roles cannot be read; empty when they can."""
    for role, template in templates.items():
        if role.endswith("_prequant"):
            leaf = template.rpartition(".")[2]
            return (
                f"experts with {leaf} multiply what enters them by a factor for each column, which no layout "
                "and no runner has a place for"
            )
    return ""


def _map_part(
    source: Source,
    stored: str,
    template: str,
    checkpoint: Checkpoint,
    problem: MoEProblem,
    layer: int,
    shapes: Shapes,
) -> PartMap:
    allowed, per_expert = source.stored(stored), "{expert}" in template
    infos, axes = _find(allowed, template, checkpoint, problem, layer)
    info = infos[0]
    shape, shared = _own_shape(axes, info.shape, problem.experts, per_expert)
    dtype = "U8" if info.dtype in ONE_BYTE else info.dtype
    part = part_of(stored, dtype, shape, source.storage, source.packing, problem, source.zeros_less_one)
    height = _height(part, info, dtype, shape, shapes) if part.role else 0
    first = height if part.half == 1 else 0
    return PartMap(PartForm(part, dtype, shape, (first, first + height), shared), infos, per_expert)


def _own_shape(
    axes: Axes, shape: tuple[int, ...], experts: int, per_expert: bool
) -> tuple[tuple[int, ...], bool]:
    """One expert's shape of a tensor that is read by `axes`, and whether it holds for all experts."""
    if per_expert:
        return shape, False
    first = axes[0] if axes else None
    if first is not None and first.symbol == "experts":
        return shape[1:], False
    if first is not None and first.times == "experts":
        return (shape[0] // experts, *shape[1:]), False
    return shape, True


def _height(part: Part, info: TensorInfo, dtype: str, shape: tuple[int, ...], shapes: Shapes) -> int:
    """Canonical rows that a part fills; CheckpointError when it does not make rows of its role."""
    if part.role not in shapes:
        raise CheckpointError(
            f"tensor {info.name} is a {part.role}, which experts as the config describes them do not have.",
            hint="Check the checkpoint's quantization config.",
        )
    found, kind = part.form((1, *shape), dtype)
    (_, *wanted), expected = shapes[part.role]
    if kind != expected:
        raise CheckpointError(
            f"tensor {info.name} must be {expected} like the rest of the model, got {info.dtype}."
        )
    row = nbytes(expected, tuple(wanted[1:]))
    if not row or nbytes(kind, found) % row:
        raise CheckpointError(
            f"tensor {info.name} {list(info.shape)} does not hold rows of {part.role} {wanted}."
        )
    return nbytes(kind, found) // row


def _check_filled(role: str, height: int, parts: list[PartMap], layer: int) -> None:
    at = 0
    for form in sorted((m.form for m in parts), key=lambda form: form.rows):
        if form.rows[0] != at:
            break
        at = form.rows[1]
    if at != height:
        raise CheckpointError(
            f"layer {layer}: the checkpoint's tensors fill {at} of {height} rows of {role}.",
            hint="Check the checkpoint's quantization config and sizes.",
        )


def _find(
    stored: Stored, template: str, checkpoint: Checkpoint, problem: MoEProblem, layer: int
) -> tuple[tuple[TensorInfo, ...], Axes]:
    """The tensors of one template, all alike, and the axes that their shape is read by."""
    sizes = {
        "experts": problem.experts,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        **format_sizes(problem.scheme),
    }
    expected = {
        tuple(axis.value(sizes) for axis in axes): axes for axes in (*stored.others[::-1], stored.shape)
    }
    name_of = template.replace("{layer}", str(layer))
    result: list[TensorInfo] = []
    for expert in range(problem.experts) if "{expert}" in template else range(1):
        info = _info(checkpoint, name_of.replace("{expert}", str(expert)), layer, problem)
        if info.dtype not in stored.dtypes or info.shape not in expected:
            usual = [axis.value(sizes) for axis in stored.shape]
            raise CheckpointError(
                f"tensor {info.name} must be {' or '.join(stored.dtypes)} {usual}, "
                f"got {info.dtype} {list(info.shape)}.",
                reason="The sizes come from the config and the other tensors of the layer.",
            )
        if result and (info.dtype, info.shape) != (result[0].dtype, result[0].shape):
            raise CheckpointError(
                f"tensor {info.name} must be {result[0].dtype} {list(result[0].shape)} like the first, "
                f"got {info.dtype} {list(info.shape)}."
            )
        result.append(info)
    return tuple(result), expected[result[0].shape]


def _refuse_extra(checkpoint: Checkpoint, prefixes: set[str], consumed: set[str], layer: int) -> None:
    extra = set(names_beginning(checkpoint.tensors, prefixes)) - consumed
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"tensor {min(extra)}{more} lies among the experts of layer {layer} and nothing reads it.",
            reason="A tensor that nobody reads may change results.",
            hint="Check the checkpoint's quantization config and sizes.",
        )
