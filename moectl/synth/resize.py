"""Published models at other sizes: the config, and every MoE tensor's dtype and shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from ..checkpoint.checkpoint import LayerGroup
from ..checkpoint.config.fields import KEYS, LIMITS, ConfigFields
from ..checkpoint.config.moe_layers import KIND_LISTS, layer_count, moe_layers
from ..checkpoint.source.catalogue import CatalogueEntry, TensorSchema
from ..checkpoint.source.shards import separate_quantization
from ..checkpoint.tensors.layer_groups import layer_groups
from ..checkpoint.tensors.layer_index import LayerTensors
from ..checkpoint.tensors.match_storage import StorageMatch, match_storage
from ..checkpoint.tensors.shapes import parse_shape, shape_at
from ..checkpoint.tensors.storage import Storage, format_sizes
from ..errors import UsageError
from ..files.tensor_table import TensorInfo
from ..problem.schemes import WeightFormat

VOCABULARY = 256
"""Rows of the embedding."""

GROUP_KEYS = (("n_group", "num_expert_group"), ("topk_group", "num_limited_groups"))
"""Config keys of the number of expert groups, and of the number of groups selected."""

AUXILIARY_SHAPES: Mapping[tuple[str, str], str] = {
    ("router", "weight"): "experts model",
    ("router", "bias"): "experts",
    ("router", "correction_bias"): "experts",
    ("router", "hash"): "vocabulary top_k",
    ("router", "expert_scale"): "experts",
    ("router", "input_scale"): "model",
    ("shared", "gate"): "1 model",
    ("latent", "in"): "hidden model",
    ("latent", "norm"): "hidden",
    ("latent", "out"): "model hidden",
}
"""Shapes of auxiliary tensors by kind and role; leading axes of size one may be added."""


@dataclass(frozen=True)
class SynthSizes:
    """Sizes that replace those of a published model; None keeps the published value.

    `layers` counts MoE layers.
    """

    layers: int | None = None
    experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    top_k: int | None = None


def resized(entry: CatalogueEntry, sizes: SynthSizes) -> dict[str, Any]:
    """The published config with `sizes`, under every key that holds them.

    Widths that follow from a size (those of shared experts, the experts' own hidden size) keep their
    proportion to it, lists with a value per layer are shortened, and expert groups become fewer if there are
    not enough experts. Raises UsageError for sizes out of range, or more layers than are published.
    """
    for name, value in vars(sizes).items():
        most = LIMITS.get(name, LIMITS["layers"])
        if value is not None and not 1 <= value <= most:
            raise UsageError(
                f"{name} must be from 1 to {most}, got {value}.", hint="Leave it out for the published size."
            )
    config: dict[str, Any] = json.loads(json.dumps(entry.config))
    fields = ConfigFields(config)
    published = layer_count(fields)
    count = _count(entry, sizes, fields, published)
    experts = sizes.experts or fields.integer("experts", KEYS["experts"])
    top_k = sizes.top_k or min(experts, fields.integer("top_k", KEYS["top_k"]))
    if top_k > experts:
        raise UsageError(
            f"top-k {top_k} is more than the {experts} experts.", hint=f"Choose at most {experts}."
        )
    changes: dict[str, int | None] = {"vocab_size": VOCABULARY}
    changes |= dict.fromkeys(KEYS["layers"], count)
    changes |= dict.fromkeys(KEYS["experts"], experts) | dict.fromkeys(KEYS["top_k"], top_k)
    changes |= _hidden(fields, sizes.hidden) | _intermediate(fields, sizes.intermediate)
    changes |= _groups(fields, experts, top_k)
    inner = cast(dict[str, Any], fields.values)
    for values in (config, inner) if inner is not config else (config,):
        for path, value in changes.items():
            if value is not None:
                _set(values, path, value)
        _cut_lists(values, published, count)
    return config


def _count(entry: CatalogueEntry, sizes: SynthSizes, fields: ConfigFields, published: int) -> int:
    """Number of layers of the config, dense ones included."""
    if sizes.layers is None:
        return published
    numbers = moe_layers(fields, published)
    if sizes.layers > len(numbers):
        raise UsageError(
            f"{entry.name} has {len(numbers)} MoE layers, {sizes.layers} were requested.",
            hint=f"Choose 1 to {len(numbers)}, or leave it out for all.",
        )
    return numbers[sizes.layers - 1] + 1


def _hidden(fields: ConfigFields, hidden: int | None) -> dict[str, int | None]:
    """The hidden size, and that of the experts if they have their own."""
    changes: dict[str, int | None] = dict.fromkeys(KEYS["hidden"], hidden)
    expert_key = fields.key_of(KEYS["expert_hidden"])
    if hidden is not None and expert_key is not None:
        before = fields.integer("hidden", KEYS["hidden"])
        inner = fields.integer("expert_hidden", (expert_key,))
        if hidden * inner % before:
            unit = before // math.gcd(before, inner)
            raise UsageError(
                f"hidden must be a multiple of {unit}, as experts have {inner} of the model's {before} "
                f"features, got {hidden}.",
                hint=f"Choose {-(-hidden // unit) * unit}.",
            )
        changes[expert_key] = hidden * inner // before
    return changes


def _intermediate(fields: ConfigFields, intermediate: int | None) -> dict[str, int | None]:
    """The experts' intermediate size, and the widths of shared experts that the config states."""
    key = fields.key_of(KEYS["intermediate"])
    if intermediate is None or key is None:
        return {}
    before = fields.integer("intermediate", KEYS["intermediate"])
    widths = {
        path: in_proportion(fields.get(path), before, intermediate)
        for path in KEYS["shared_width"]
        if isinstance(fields.get(path), int)
    }
    return {key: intermediate, **widths}


def in_proportion(width: int, before: int, after: int) -> int:
    """`width` scaled from a size `before` to a size `after`, rounded up."""
    return -(-width * after // before)


def _groups(fields: ConfigFields, experts: int, top_k: int) -> dict[str, int | None]:
    """Groups of at least two experts, since a group is scored by its best two, and enough for top-k."""
    key, chosen_key = (fields.key_of(keys) for keys in GROUP_KEYS)
    if key is None or chosen_key is None or not fields.get(key) or not fields.get(chosen_key):
        return {}
    published, chosen = fields.integer("groups", (key,)), fields.integer("topk_groups", (chosen_key,))
    groups = next(n for n in range(published, 0, -1) if experts % n == 0 and (experts // n > 1 or n == 1))
    least = -(-top_k * groups // experts)
    return {key: groups, chosen_key: min(groups, max(chosen, least))}


def _set(values: Any, path: str, value: int) -> None:
    """Sets the key at `path` to `value` if it exists; a list keeps its length."""
    *outer, key = path.split(".")
    for name in outer:
        values = values.get(name)
        if not isinstance(values, dict):
            return
    if values.get(key) is not None:
        values[key] = [value] * len(values[key]) if isinstance(values[key], list) else value


def _cut_lists(values: dict[str, Any], published: int, count: int) -> None:
    """Shortens lists with a value, and strings with a letter, for each of the `published` layers."""
    for key, value in values.items():
        if (isinstance(value, list) or key in KIND_LISTS) and len(value) == published:
            values[key] = value[:count]


def shared_stem(template: str) -> str:
    """Prefix of the names of shared experts' tensors, from one of their templates."""
    return template.rsplit(".", 2)[0] + "."


def match_shared(group: LayerGroup, infos: Mapping[str, TensorInfo]) -> StorageMatch | None:
    """How a layer's shared experts are stored, as one expert; None if they are not listed.

    `infos` are the layer's tensors by template.
    """
    templates = [template for role, template in group.names.shared.items() if role != "gate"]
    if not templates:
        return None
    stem = shared_stem(templates[0])
    leaves = {template.removeprefix(stem): infos[template] for template in templates}
    return match_storage(LayerTensors(group.layers[0], "", "", stem, {0: leaves}), group.problem, 1)


def _of_layers(entry: CatalogueEntry, layers: tuple[int, ...]) -> CatalogueEntry:
    """The entry with the tensors of these MoE layers only."""
    kept = []
    for schema in entry.tensors:
        selected = None if schema.layers is None else tuple(n for n in schema.layers if n in layers)
        if "{layer}" in schema.name and selected != ():
            kept.append(replace(schema, layers=selected))
    return replace(entry, layers=layers, tensors=tuple(kept))


class Resized:
    """The tensors of `entry` at the sizes of `config`, a result of `resized`.

    Layers of multi-token prediction and dense MLPs are left out.
    """

    def __init__(self, entry: CatalogueEntry, config: Mapping[str, Any]) -> None:
        self.entry, self.config = entry, config
        fields = ConfigFields(config)
        self._layers = moe_layers(fields, layer_count(fields))
        tensors = _of_layers(entry, self._layers).listing()
        self._published = self._read(entry.config, tensors)
        hidden = fields.integer("hidden", KEYS["hidden"])
        self._sizes = {
            "experts": fields.integer("experts", KEYS["experts"]),
            "top_k": fields.integer("top_k", KEYS["top_k"]),
            "model": hidden,
            "hidden": fields.integer("expert_hidden", KEYS["expert_hidden"], hidden),
            "intermediate": fields.integer("intermediate", KEYS["intermediate"]),
            "vocabulary": VOCABULARY if fields.has("vocab_size") else 0,
        }
        self._shapes = {id(group): dict(self._group_shapes(group, tensors)) for group in self._published}

    def listing(self) -> dict[str, TensorInfo]:
        """Every MoE tensor by name, layer by layer, with no file and offsets from 0."""
        owners = {layer: group for group in self._published for layer in group.layers}
        tensors: dict[str, TensorInfo] = {}
        for layer in self._layers:
            shapes = self._shapes[id(owners[layer])]
            for schema in self.entry.tensors:
                if (schema.layers is None or layer in schema.layers) and schema.name in shapes:
                    self._list(schema, layer, shapes[schema.name], tensors)
        return tensors

    def groups(self, tensors: Mapping[str, TensorInfo]) -> tuple[LayerGroup, ...]:
        """The layer groups of the resized model with these `tensors`, read as those of any checkpoint."""
        return self._read(self.config, tensors)

    def _read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[LayerGroup, ...]:
        quantization, file = separate_quantization(self.entry.documents)
        return layer_groups(config, tensors, quantization=quantization, quantization_file=file)

    def _list(
        self, schema: TensorSchema, layer: int, shape: tuple[int, ...], tensors: dict[str, TensorInfo]
    ) -> None:
        run = schema.run(layer, self._sizes["experts"], shape)
        tensors |= {info.name: info for info in run.infos()}

    def _group_shapes(
        self, group: LayerGroup, tensors: Mapping[str, TensorInfo]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields every tensor's template and new shape."""
        names, problem = group.names, group.problem
        kinds = {"experts": names.experts, "router": names.router, "shared": names.shared}
        kinds["latent"] = names.latent
        templates = {
            template: (kind, role) for kind, roles in kinds.items() for role, template in roles.items()
        }
        infos = {name: tensors[name.format(layer=group.layers[0], expert=0)] for name in templates}
        storage = group.storage
        assert storage is not None, "the layers were read from tensors"
        self._refuse_partial_groups(storage, problem.scheme.weight)
        sizes = {
            "experts": problem.experts,
            "hidden": problem.dims.hidden,
            "intermediate": problem.dims.intermediate,
            **format_sizes(problem.scheme),
        }
        for role, template in names.experts.items():
            shape = storage.of_role(role).shape_of(infos[template].shape, sizes)
            yield template, shape_at(shape, {**sizes, **self._sizes})
        shared = match_shared(group, infos)
        for template, (kind, role) in templates.items():
            if kind == "shared" and role != "gate" and shared is not None:
                yield (
                    template,
                    self._shared_shape(shared, template, infos[template], problem.dims.intermediate),
                )
            elif kind != "experts":
                yield template, self._auxiliary_shape(kind, role, infos[template])

    def _refuse_partial_groups(self, storage: Storage, weight: WeightFormat) -> None:
        """Raises UsageError unless the experts' rows consist of whole groups, words and bytes of codes."""
        group = weight.group if weight.block[0] == 1 and weight.group > 0 else 1
        word = {"gptq": 32, "awq": 32, "words": 32}.get(storage.format.packing, 8)
        unit = math.lcm(group, max(1, word // weight.bits))
        why = (
            "the weights' group size" if unit == group else f"as {word} bits hold {word // weight.bits} codes"
        )
        for name in ("hidden", "intermediate"):
            size = self._sizes[name]
            if size % unit:
                raise UsageError(
                    f"{name} must be a multiple of {unit}, {why}, got {size}.",
                    hint=f"Choose {-(-size // unit) * unit}.",
                )

    def _shared_shape(
        self, shared: StorageMatch, template: str, info: TensorInfo, intermediate: int
    ) -> tuple[int, ...]:
        stored = shared.storage.tensors[template.removeprefix(shared_stem(template))]
        sizes = {**shared.sizes, "experts": 1}
        width = in_proportion(sizes["intermediate"], intermediate, self._sizes["intermediate"])
        after = {**sizes, "hidden": self._sizes["model"], "intermediate": width}
        return shape_at(stored.shape_of(info.shape, sizes), after)

    def _auxiliary_shape(self, kind: str, role: str, info: TensorInfo) -> tuple[int, ...]:
        if (kind, role) not in AUXILIARY_SHAPES:
            raise UsageError(
                f"{self.entry.name}: the shape of a {kind}'s {role} ({info.name}) at other sizes is unknown.",
                hint="Choose another model; `moectl list models` prints all of them.",
            )
        shape = parse_shape(AUXILIARY_SHAPES[kind, role])
        return (1,) * (len(info.shape) - len(shape)) + shape_at(shape, self._sizes)
