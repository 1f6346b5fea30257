"""How a storage format's tensors become canonical roles, and back, as places of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...checkpoint.model import Checkpoint, LayerGroup, TensorInfo
from ...checkpoint.storage import STORAGES, Stored, format_sizes
from ...checkpoint.tensor_table import names_beginning
from ...errors import CheckpointError, UsageError
from ...problem import MoEProblem
from ..canonical import canonical_shapes

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
"""Canonical roles and the parameter names that engines use for them."""

SIDE = "source."
"""Roles that begin so carry no weights: they are kept as they are, for the exact way back."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of stored tensor and its place in a canonical role.

    Attributes:
        stored: its role as `ExpertNames.experts` and the table of storages spell it, where its
            dtypes and shape are stated.
        role: canonical role; ``source.*`` for a tensor that carries no weights and is kept aside.
        half: 0 or 1 for the first or second half of the role's rows, None for all of them.
        gated: only gated experts have it.
    """

    stored: str
    role: str
    half: int | None = None
    gated: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint and the canonical rows that it holds.

    Attributes:
        info: where its bytes are.
        part: the kind it is.
        expert: the expert it belongs to; None when it holds all of them.
        rows: first and last row (exclusive) within an expert's canonical matrix.
    """

    info: TensorInfo
    part: Part
    expert: int | None
    rows: tuple[int, int]


@dataclass(frozen=True)
class Source:
    """A storage format: the parts it stores and the canonical roles that they fill.

    Bytes are only placed, never changed: the rows of every format here are canonical rows.

    Attributes:
        name: as `MoEProblem.storage`.
        refuse: why a problem cannot be converted from this format; empty when it can.
        check_side: what is wrong with one expert's values of a tensor kept aside; empty when nothing.
    """

    name: str
    parts: tuple[Part, ...]
    refuse: Callable[[MoEProblem], str] = lambda problem: ""
    check_side: Callable[[Part, MoEProblem, tuple[int, ...]], str] = lambda part, problem, values: ""

    def stored(self, part: Part) -> Stored:
        """The dtypes and the shape that `part` may have."""
        for storage in STORAGES:
            if self.name in storage.format.storages:
                for found in storage.tensors.values():
                    if found.role == part.stored:
                        return found
        raise AssertionError(f"no storage {self.name} with {part.stored}")


@dataclass(frozen=True)
class RoleMap:
    """One canonical role of one layer and the stored tensors that fill it.

    `shape` is the canonical shape with all experts, `dtype` its safetensors dtype.
    """

    role: str
    dtype: str
    shape: Shape
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class LayerMap:
    """One layer's expert tensors by canonical role. `prefix` begins the names of its converted tensors."""

    layer: int
    prefix: str
    roles: tuple[RoleMap, ...]

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Every tensor of the checkpoint that this layer consumes."""
        return tuple(t for role in self.roles for t in role.tensors)


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
    canonical = canonical_shapes(problem, problem.experts)
    found: dict[Part, list[StoredTensor]] = {}
    templates: list[str] = []
    for part in source.parts:
        wanted = part.role in canonical or part.role.startswith(SIDE)
        if wanted and (problem.activation.gated or not part.gated):
            templates.append(_template(source, group, part))
            found[part] = _find(source.stored(part), part, templates[-1], checkpoint, problem, layer)
    consumed = {t.info.name for tensors in found.values() for t in tensors}
    _refuse_extra(checkpoint, {expert_prefix(name, layer) for name in templates}, consumed, layer)
    roles = tuple(_role_map(role, found, canonical, problem) for role in dict.fromkeys(p.role for p in found))
    return LayerMap(layer, output_prefix(templates[0]).replace("{layer}", str(layer)), roles)


def _template(source: Source, group: LayerGroup, part: Part) -> str:
    template = group.names.experts.get(part.stored)
    if template is None:
        raise CheckpointError(
            f"the checkpoint's names give no {part.stored} tensor, which {source.name} storage needs.",
            reason=f"Known kinds: {', '.join(sorted(group.names.experts))}.",
        )
    return template


def _find(
    stored: Stored, part: Part, template: str, checkpoint: Checkpoint, problem: MoEProblem, layer: int
) -> list[StoredTensor]:
    experts: list[int | None] = list(range(problem.experts)) if "{expert}" in template else [None]
    sizes = {
        "experts": problem.experts,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        **format_sizes(problem.scheme),
    }
    expected = tuple(axis.value(sizes) for axis in stored.shape)
    height = expected[0 if "{expert}" in template else 1]
    first = height if part.half == 1 else 0
    name_of = template.replace("{layer}", str(layer))
    result: list[StoredTensor] = []
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
        result.append(StoredTensor(info, part, expert, (first, first + height)))
    return result


def _refuse_extra(checkpoint: Checkpoint, prefixes: set[str], consumed: set[str], layer: int) -> None:
    extra = set(names_beginning(checkpoint.tensors, prefixes)) - consumed
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"tensor {min(extra)}{more} lies among the experts of layer {layer} and nothing reads it.",
            reason="A tensor that nobody reads may change results.",
            hint="Check the checkpoint's quantization config and sizes.",
        )


def _role_map(
    role: str,
    found: Mapping[Part, list[StoredTensor]],
    canonical: Mapping[str, tuple[Shape, str]],
    problem: MoEProblem,
) -> RoleMap:
    tensors = [t for part, own in found.items() if part.role == role for t in own]
    tensors.sort(key=lambda t: (-1 if t.expert is None else t.expert, t.rows))
    kept = tensors[0].info
    shape, dtype = canonical.get(role, ((problem.experts, *kept.shape), kept.dtype))
    for tensor in tensors:
        if dtype not in ("U8", tensor.info.dtype):
            raise CheckpointError(
                f"tensor {tensor.info.name} must be {dtype} like the rest of the model, "
                f"got {tensor.info.dtype}."
            )
    return RoleMap(role, dtype, shape, tuple(tensors))
