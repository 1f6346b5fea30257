"""How a storage format's tensors become canonical roles, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...checkpoint.model import Checkpoint, LayerGroup, TensorInfo
from ...checkpoint.storage import STORAGES, Stored, format_sizes
from ...checkpoint.tensor_table import names_beginning
from ...errors import CheckpointError, UsageError
from ...problem import MoEProblem
from ..canonical import canonical_shapes
from ..safetensors_file import nbytes
from ..transforms import Shape
from ..values import Shapes
from .part import LayerMap, Part, PartForm, PartMap

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
    """A storage format: the parts it stores and the canonical roles that they fill.

    Attributes:
        name: as `MoEProblem.storage`.
        parts: from a group of layers to the parts that it has.
        refuse: why a problem cannot be converted from this format; empty when it can.
        check: what is wrong with one expert's values of a tensor that carries no weights.
    """

    name: str
    parts: Callable[[LayerGroup], tuple[Part, ...]]
    refuse: Callable[[MoEProblem], str] = lambda problem: ""
    check: Callable[[Part, MoEProblem, tuple[int, ...]], str] = lambda part, problem, values: ""

    def stored(self, part: Part) -> Stored:
        """The dtypes and the shape that `part` may have."""
        for storage in STORAGES:
            if self.name in storage.format.storages:
                for found in storage.tensors.values():
                    if found.role == part.stored:
                        return found
        raise AssertionError(f"no storage {self.name} with {part.stored}")


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
    problem = group.problem
    reason = source.refuse(problem)
    if reason:
        raise UsageError(f"layer {layer}: {reason}.")
    parts = source.parts(group)
    inputs = any(part.role.endswith("_input") for part in parts)
    shapes = canonical_shapes(problem, problem.experts, inputs)
    templates = {part: _template(source, group, part) for part in parts}
    mapped = tuple(
        _map_part(source, part, template, checkpoint, problem, layer, shapes)
        for part, template in templates.items()
    )
    for role, (shape, _) in shapes.items():
        _check_filled(role, shape[1], [m for m in mapped if m.part.role == role], layer)
    consumed = {info.name for m in mapped for info in m.tensors}
    _refuse_extra(checkpoint, {expert_prefix(name, layer) for name in templates.values()}, consumed, layer)
    first = next(iter(templates.values()))
    return LayerMap(layer, output_prefix(first).replace("{layer}", str(layer)), mapped, shapes)


def _template(source: Source, group: LayerGroup, part: Part) -> str:
    template = group.names.experts.get(part.stored)
    if template is None:
        raise CheckpointError(
            f"the checkpoint's names give no {part.stored} tensor, which {source.name} storage needs.",
            reason=f"Known kinds: {', '.join(sorted(group.names.experts))}.",
        )
    return template


def _map_part(
    source: Source,
    part: Part,
    template: str,
    checkpoint: Checkpoint,
    problem: MoEProblem,
    layer: int,
    shapes: Shapes,
) -> PartMap:
    per_expert = "{expert}" in template
    infos = _find(source.stored(part), template, checkpoint, problem, layer)
    shape = infos[0].shape if per_expert else infos[0].shape[1:]
    dtype = "U8" if infos[0].dtype in ONE_BYTE else infos[0].dtype
    height = _height(part, infos[0], dtype, shape, shapes) if part.role else 0
    for info in infos:
        if info.dtype != infos[0].dtype:
            raise CheckpointError(
                f"tensor {info.name} must be {infos[0].dtype} like the first, got {info.dtype}."
            )
    first = height if part.half == 1 else 0
    return PartMap(PartForm(part, dtype, shape, (first, first + height)), infos, per_expert)


def _height(part: Part, info: TensorInfo, dtype: str, shape: Shape, shapes: Shapes) -> int:
    """Canonical rows that a part fills; CheckpointError when it does not make rows of its role."""
    form = part.chain.storage_shape((1, *shape), dtype)
    for value in part.values:
        form = value.shape(*form)
    (_, *found), kind = form
    (_, *wanted), expected = shapes[part.role]
    if kind != expected:
        raise CheckpointError(
            f"tensor {info.name} must be {expected} like the rest of the model, got {info.dtype}."
        )
    # Blocks of a row may be an axis of their own: the bytes are the same.
    if nbytes(kind, tuple(found[1:])) != nbytes(kind, tuple(wanted[1:])):
        raise CheckpointError(
            f"tensor {info.name} {list(info.shape)} does not hold rows of {part.role} {wanted}."
        )
    return int(found[0])


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
) -> tuple[TensorInfo, ...]:
    experts = range(problem.experts) if "{expert}" in template else range(1)
    sizes = {
        "experts": problem.experts,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        **format_sizes(problem.scheme),
    }
    expected = tuple(axis.value(sizes) for axis in stored.shape)
    name_of = template.replace("{layer}", str(layer))
    result: list[TensorInfo] = []
    for expert in experts:
        name = name_of.replace("{expert}", str(expert))
        info = checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"tensor {name} is missing; layer {layer} has {problem.experts} experts and needs it.",
                hint="Check that every file of the checkpoint is there.",
            )
        if info.dtype not in stored.dtypes or info.shape != expected:
            raise CheckpointError(
                f"tensor {name} must be {' or '.join(stored.dtypes)} {list(expected)}, "
                f"got {info.dtype} {list(info.shape)}.",
                reason="The sizes come from the config and the other tensors of the layer.",
            )
        result.append(info)
    return tuple(result)


def _refuse_extra(checkpoint: Checkpoint, prefixes: set[str], consumed: set[str], layer: int) -> None:
    extra = set(names_beginning(checkpoint.tensors, prefixes)) - consumed
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"tensor {min(extra)}{more} lies among the experts of layer {layer} and nothing reads it.",
            reason="A tensor that nobody reads may change results.",
            hint="Check the checkpoint's quantization config and sizes.",
        )
