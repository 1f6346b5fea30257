"""A layer's expert tensors mapped to the rows of canonical roles.

The layer's storage, which every header was checked against when the checkpoint was read, gives names and
shapes; `packings` says how numbers are packed in a tensor. Together they determine the rows that it fills.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint, LayerGroup
from ...checkpoint.config.quantization import zeros_less_one
from ...checkpoint.tensors.shapes import SymbolicShape
from ...checkpoint.tensors.storage import Storage, format_sizes
from ...dtypes import MODEL_DTYPES, ONE_BYTE
from ...errors import CheckpointError, UsageError
from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorInfo
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL
from ..canonical import INTERLEAVED, canonical_shapes, halves
from ..recipe.chain import Chain
from ..steps.transforms import Shape, Step, Widen
from ..steps.value_steps import Shapes, ValueStep
from .packings import EXTRAS, PACKINGS, TRANSPOSED, Repeated, Rounded
from .tensor_mapping import LayerMapping, MappedTensors, TensorMapping

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
"""Names of engines' parameters by role; parameters of other roles have the role's name."""

ROLE_AND_HALF: Mapping[str, tuple[str, int | None]] = {
    "w1": ("w13", 0),
    "w3": ("w13", 1),
    "w13": ("w13", None),
    "w2": ("w2", None),
}
"""Canonical role and half of its rows (None for all), by stored matrix."""

NUMBERS = frozenset(("global", "input"))
"""Kinds of roles with one number per matrix, F32 in canonical form."""


def expert_prefix(template: str, layer: int) -> str:
    """The common prefix of the names of a layer's expert tensors, from one name template."""
    head = template.split("{expert}")[0] if "{expert}" in template else template.rsplit(".", 1)[0] + "."
    return head.replace("{layer}", str(layer))


def output_prefix(template: str) -> str:
    """The prefix of converted tensors' names, with ``{layer}`` kept, from one stored name template.

    Example:
        >>> output_prefix("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight")
        'model.layers.{layer}.mlp.experts.'
    """
    prefix = expert_prefix(template.replace("{layer}", "\0"), 0).replace("\0", "{layer}")
    return prefix if prefix.endswith("experts.") else f"{prefix}experts."


def output_name(prefix: str, role: str) -> str:
    """The name of a converted role's tensor: `prefix` and the engines' parameter name.

    Example:
        >>> output_name("model.layers.0.mlp.experts.", "w13_scale")
        'model.layers.0.mlp.experts.w13_weight_scale'
    """
    return prefix + ROLES.get(role, role)


def map_layer(checkpoint: Checkpoint, group: LayerGroup, layer: int) -> LayerMapping:
    """The `LayerMapping` of one layer of a `group` whose tensors are listed.

    Raises:
        CheckpointError: the tensors do not fill the canonical roles of the layer's problem.
        NoBackend: the sizes are not whole groups of weights.
        UsageError: experts of this kind in this storage are not supported.
    """
    problem, templates, storage = group.problem, group.names.experts, group.storage
    if storage is None:
        raise CheckpointError(
            f"layer {layer}: the headers of its tensors were not read.",
            hint="Open the checkpoint with its weights.",
        )
    reason = _refusal(storage, problem) or _unsupported_kind(templates)
    if reason:
        raise UsageError(f"layer {layer}: {reason}.")
    inputs = any(role.endswith("_input") for role in templates)
    shapes = canonical_shapes(problem, problem.experts, inputs)
    one_less = storage.format.packing == "gptq" and zeros_less_one(checkpoint.config)
    mapped = []
    for stored, template in templates.items():
        infos = _tensors(checkpoint, template, layer, problem.experts)
        per_expert = "{expert}" in template
        mapping = _mapping(storage, stored, infos[0], per_expert, problem, shapes, one_less)
        mapped.append(MappedTensors(mapping, infos, per_expert))
    for role, (_, shape) in shapes.items():
        _check_filled(role, shape[1], [m.mapping for m in mapped if m.mapping.role == role], layer)
    prefix = output_prefix(next(iter(templates.values()))).replace("{layer}", str(layer))
    return LayerMapping(layer, prefix, tuple(mapped), shapes, one_less)


def _refusal(storage: Storage, problem: MoEProblem) -> str:
    """Why reading `problem` from `storage` is not supported; empty if it is."""
    weight, packing = problem.scheme.weight, PACKINGS[storage.format.packing]
    reason = packing.refuse(problem)
    if reason:
        return reason
    if problem.act_order == "group":
        return (
            "experts whose columns are ordered by group (act order, g_idx) cannot be converted or run; "
            "only columns in natural order are supported"
        )
    per_word = 32 // weight.bits
    sizes = (problem.dims.hidden, problem.dims.intermediate)
    if packing.whole_words and any(size % per_word for size in sizes):
        return (
            f"{weight.name} words hold {per_word} codes, so hidden and intermediate sizes must be "
            f"multiples of {per_word}, got {sizes[0]} and {sizes[1]}"
        )
    if weight.block[0] not in (0, 1):
        if problem.rows == INTERLEAVED:
            return f"{weight} has gate and up rows in one block when they are interleaved"
        together = "w13" in storage.arrangement.matrices
        if together and weight.block[0] > 1 and sizes[1] % weight.block[0] and problem.activation.gated:
            return (
                f"{weight} has gate and up rows in one block when they are one matrix and the "
                f"intermediate size {sizes[1]} is not a multiple of {weight.block[0]}"
            )
    return ""


def _unsupported_kind(templates: Mapping[str, str]) -> str:
    """Why experts with tensors of these stored roles are not supported; empty if they are."""
    for role, template in templates.items():
        if role.endswith("_prequant"):
            leaf = template.rpartition(".")[2]
            return (
                f"experts with {leaf} multiply their inputs by a factor for each column, which no layout "
                "and no runner supports"
            )
    return ""


def _tensors(checkpoint: Checkpoint, template: str, layer: int, experts: int) -> tuple[TensorInfo, ...]:
    """The tensors of one template: one for each expert, or one for all."""
    name = template.replace("{layer}", str(layer))
    if "{expert}" not in name:
        return (checkpoint.tensors[name],)
    return tuple(checkpoint.tensors[name.replace("{expert}", str(expert))] for expert in range(experts))


def _mapping(
    storage: Storage,
    stored: str,
    info: TensorInfo,
    per_expert: bool,
    problem: MoEProblem,
    shapes: Shapes,
    one_less: bool,
) -> TensorMapping:
    """The mapping of the tensors with role `stored`; `info` is the first of them."""
    sizes = {
        "experts": problem.experts,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        **format_sizes(problem.scheme),
    }
    axes = storage.of_role(stored).shape_of(info.shape, sizes)
    shape, shared = _one_expert(axes, info.shape, problem.experts, per_expert)
    mapping = tensor_mapping(storage, stored, read_dtype(info), shape, problem, one_less)
    height = _height(mapping, info, shapes) if mapping.role else 0
    half = ROLE_AND_HALF[stored.partition("_")[0]][1] if mapping.role else None
    first = height if half == 1 else 0
    return replace(mapping, rows=(first, first + height), shared=shared)


def read_dtype(info: TensorInfo) -> str:
    """The dtype that a tensor is read as: U8 for one-byte dtypes."""
    return "U8" if info.dtype in ONE_BYTE else info.dtype


def _one_expert(axes: SymbolicShape, shape: Shape, experts: int, per_expert: bool) -> tuple[Shape, bool]:
    """The shape of one expert's part of a tensor with `axes`, and whether all experts share the tensor."""
    if per_expert:
        return shape, False
    first = axes[0] if axes else None
    if first is not None and first.symbol == "experts":
        return shape[1:], False
    if first is not None and first.times == "experts":
        return (shape[0] // experts, *shape[1:]), False
    return shape, True


def tensor_mapping(
    storage: Storage, stored: str, dtype: str, shape: Shape, problem: MoEProblem, one_less: bool
) -> TensorMapping:
    """The mapping of the tensors with role `stored`, without the rows that they fill.

    `dtype` and `shape` are one expert's as read; `one_less`: zero points are stored minus one.
    """
    matrix, _, kind = stored.partition("_")
    if _is_extra(kind, problem):
        return TensorMapping(stored, "", dtype, shape)
    role, half = ROLE_AND_HALF[matrix]
    role = f"{role}_{kind}" if kind else role
    weight, packing = problem.scheme.weight, PACKINGS[storage.format.packing]
    steps = packing.steps(weight.bits, one_less).get(kind, ())
    if is_transposed(storage, matrix, shape):
        steps = TRANSPOSED + steps
    dtype_steps, values = _dtype_change(kind, dtype, problem)
    values += packing.values.get(kind, ())
    single = kind in NUMBERS or (kind == "scale" and weight.block == (FULL, FULL))
    if single and half is None and halves(problem, role) == 2 and math.prod(shape) == 1:
        values += (Repeated(2),)
    return TensorMapping(stored, role, dtype, shape, Chain((*steps, *dtype_steps)), values)


def _is_extra(kind: str, problem: MoEProblem) -> bool:
    """True for tensors with no information about the weights beyond that of the problem."""
    stated = {"zero": problem.scheme.weight.zero_point, "bias": problem.bias}
    return kind in EXTRAS and not stated.get(kind, False)


def is_transposed(storage: Storage, matrix: str, shape: Shape) -> bool:
    """True for tensors of two axes with the reduction axis first instead of last."""
    if storage.arrangement.name == "flat":
        return matrix == "w2"
    return storage.arrangement.transposed and len(shape) == 2


def _dtype_change(
    kind: str, dtype: str, problem: MoEProblem
) -> tuple[tuple[Step, ...], tuple[ValueStep, ...]]:
    """Steps and value steps from a float dtype to that of the canonical role of `kind`."""
    if kind in NUMBERS:
        target = "F32"
    elif kind == "bias" or (kind == "" and problem.scheme.weight.bits == 16):
        target = MODEL_DTYPES[problem.dtype]
    else:
        return (), ()
    if dtype == target:
        return (), ()
    if target == "F32":
        return (Widen(dtype),), ()
    return (), (Rounded(dtype, target),)


def _height(mapping: TensorMapping, info: TensorInfo, shapes: Shapes) -> int:
    """Number of canonical rows that a tensor fills; CheckpointError when it is not whole rows of its role."""
    if mapping.role not in shapes:
        raise CheckpointError(
            f"tensor {info.name} is a {mapping.role}, which experts as the config describes them do not "
            "have.",
            hint="Check the checkpoint's quantization config.",
        )
    dtype, shape = mapping.canonical_type()
    expected, (_, *role_shape) = shapes[mapping.role]
    if dtype != expected:
        raise CheckpointError(
            f"tensor {info.name} must be {expected} like the rest of the model, got {info.dtype}."
        )
    row = nbytes(expected, tuple(role_shape[1:]))
    if not row or nbytes(dtype, shape) % row:
        raise CheckpointError(
            f"tensor {info.name} {list(info.shape)} does not hold rows of {mapping.role} {role_shape}."
        )
    return nbytes(dtype, shape) // row


def _check_filled(role: str, height: int, mappings: list[TensorMapping], layer: int) -> None:
    filled = 0
    for mapping in sorted(mappings, key=lambda mapping: mapping.rows):
        if mapping.rows[0] != filled:
            break
        filled = mapping.rows[1]
    if filled != height:
        raise CheckpointError(
            f"layer {layer}: the checkpoint's tensors fill {filled} of {height} rows of {role}.",
            hint="Check the checkpoint's quantization config and sizes.",
        )
