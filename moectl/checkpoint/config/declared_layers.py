"""The MoE layers as config.json alone declares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...dtypes import CONFIG_DTYPES, WIDE_CONFIG_DTYPES
from ...errors import CheckpointError
from ...files.strict_json import shown
from ...problem.moe_problem import Activation, Dims, MoEProblem, Routing
from ..checkpoint import ExpertNames, LayerGroup
from .families import ACTIVATIONS, Family, family_of
from .fields import KEYS, ConfigFields, FieldChoice
from .layer_precision import Precision, read_precision
from .moe_layers import layer_count, moe_layers
from .quantization import Quantization, parse_quantization
from .user_assumptions import Stated

CONFIG_ONLY = (
    "read from the config alone; only tensor headers tell names, arrangement and dtypes, whether the "
    "config's formats are those stored, the router's dtype and its biases"
)
"""Said of every layer group that no header was read for."""


@dataclass(frozen=True)
class Declared:
    """What a config says of its MoE layers.

    Attributes:
        group: all of them with what most have in common; tensor names stay empty.
        layers: the number of the model's layers, with experts or not.
        family: what read the config.
        precision: the format of each layer's experts.
        hashed: the first so many layers choose experts by a table of token ids.
        limits: the activation's clamp in each layer, where layers differ; 0 for none.
        shared_widths: widths that all shared experts together may have.
        place: where the quantization config stands.
        notes: what the config leaves open or says strangely.
    """

    group: LayerGroup
    layers: int
    family: Family
    precision: Precision
    hashed: int = 0
    limits: tuple[float, ...] = ()
    shared_widths: tuple[int, ...] = ()
    place: str = ""
    notes: tuple[str, ...] = ()

    def at(self, layer: int, modules: Iterable[str] | None = None) -> tuple[MoEProblem, dict[str, str]]:
        """One layer's problem with its sources; `modules` name its expert matrices, None: not known."""
        problem, sources = self.group.problem, dict(self.group.sources)
        found = self.precision.guess(layer) if modules is None else self.precision.at(layer, modules)
        if found is not self.precision.main:
            sources |= _told(found, self.place)
            problem = replace(problem, scheme=found.scheme, storage=found.storage, act_order=found.act_order)
        if layer < self.hashed:
            routing = replace(problem.routing, hashed=True, correction_bias=False)
            problem = replace(problem, routing=routing)
            sources["routing.correction_bias"] = sources["routing.hashed"]
        if layer < len(self.limits) and self.limits[layer]:
            name = problem.activation.name
            clamped = ACTIVATIONS["swiglustep"] if name == "silu" else problem.activation
            problem = replace(problem, activation=replace(clamped, limit=self.limits[layer]))
        return problem, sources

    def groups(self) -> tuple[LayerGroup, ...]:
        """The declared layers in groups of equal ones, in layer order."""
        plain = replace(self, precision=self.precision.likely())
        notes = (*self.notes, CONFIG_ONLY)
        found: list[LayerGroup] = []
        for layer in self.group.layers:
            problem, sources = plain.at(layer)
            for at, group in enumerate(found):
                if group.problem == problem:
                    found[at] = replace(group, layers=(*group.layers, layer))
                    break
            else:
                found.append(LayerGroup((layer,), problem, ExpertNames({}), sources, notes))
        return tuple(found)


def declared_layers(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None = None,
    quantization_file: str = "",
    stated: Stated = Stated(),
) -> Declared:
    """The MoE layers that `config`, config.json's object, declares.

    `quantization` is the quantization config where it stands in a file of its own, `quantization_file`;
    what is `stated` goes before the config.

    Raises:
        CheckpointError: a key is missing or of a wrong kind, the sizes contradict each other, or the
            quantization method is not understood.
    """
    fields = ConfigFields(config)
    family = family_of(fields)
    count = layer_count(fields)
    dims, model_hidden, experts, top_k = _sizes(fields)
    layers = _moe_layers(fields, count)
    described, place = _quantization_config(config, fields, quantization, quantization_file)
    expert_dtype = fields.get("expert_dtype")
    found = parse_quantization(
        described,
        model_type=_storage_type(fields, family),
        expert_dtype=expert_dtype if isinstance(expert_dtype, str) else "",
    )
    notes: list[str] = []
    shared, widths = _shared(fields, family, dims.intermediate)
    hashed = fields.integer("hash_layers", KEYS["hash_layers"], 0, low=0)
    sources = fields.sources
    if "hash_layers" in sources:
        sources["routing.hashed"] = sources.pop("hash_layers")
    problem = MoEProblem(
        dims,
        experts,
        top_k,
        found.scheme,
        activation=_activation(fields, family, stated.activation),
        routing=_routing(fields, family, stated, experts),
        storage=found.storage,
        rows=str(family.fact("rows", FieldChoice(default="concatenated"), fields)),
        act_order=found.act_order,
        bias=bool(family.fact("bias", FieldChoice(default=False), fields)),
        shared_experts=shared,
        dtype=_dtype(fields, notes),
        model_hidden=model_hidden,
        model_type=fields.model_type,
    )
    sources.update({f"routing.{name}": "asked" for name in stated.routing})
    sources.update(_told(found, place), router_dtype="assumed")
    problem = replace(problem, router_dtype=problem.dtype)
    notes += _assumptions(sources)
    group = LayerGroup(layers, problem, ExpertNames({}), sources)
    return Declared(
        group,
        count,
        family,
        read_precision(found, described),
        hashed,
        _limits(fields),
        widths,
        place,
        tuple(notes),
    )


def _moe_layers(fields: ConfigFields, count: int) -> tuple[int, ...]:
    """The layers with experts; CheckpointError when there is none."""
    layers = moe_layers(fields, count)
    if not layers:
        raise CheckpointError(
            f"config.json: none of the {count} layers is a Mixture-of-Experts layer.",
            reason=f"The config names them by {fields.sources['layers'].replace('config:', '')}.",
            hint="Give the checkpoint of a Mixture-of-Experts model.",
        )
    return layers


def _sizes(fields: ConfigFields) -> tuple[Dims, int, int, int]:
    """The experts' sizes, the model's hidden size, the number of experts and top-k."""
    experts = fields.integer("experts", KEYS["experts"])
    top_k = fields.integer("top_k", KEYS["top_k"])
    if top_k > experts:
        raise CheckpointError(
            f"config.json: top-k {top_k} is more than the {experts} experts.", hint="Check config.json."
        )
    model_hidden = fields.integer("hidden", KEYS["hidden"])
    fields.sources["model_hidden"] = fields.sources["hidden"]
    hidden = fields.integer("expert_hidden", KEYS["expert_hidden"], model_hidden)
    if "expert_hidden" in fields.sources:
        fields.sources["hidden"] = fields.sources.pop("expert_hidden")
    return Dims(hidden, fields.integer("intermediate", KEYS["intermediate"])), model_hidden, experts, top_k


def _shared(fields: ConfigFields, family: Family, intermediate: int) -> tuple[int, tuple[int, ...]]:
    """The number of shared experts, and the widths that all of them together may have.

    A key that states a width of their own means one expert's or all experts', as models differ.
    """
    width = fields.integer("shared_width", KEYS["shared_width"], 0, low=0)
    place = fields.sources.pop("shared_width", "")
    count = fields.integer("shared_experts", KEYS["shared_experts"], -1, low=0)
    if count < 0 and place:
        fields.sources["shared_experts"] = place
        count = 1 if width else 0
    elif count < 0:
        take = FieldChoice(KEYS["shared_experts"], int, default=0)
        count = int(family.fact("shared_experts", take, fields))
    return count, (count * intermediate, width, count * width) if count else ()


def _routing(fields: ConfigFields, family: Family, stated: Stated, experts: int) -> Routing:
    """The routing; CheckpointError when the experts do not fall into its groups, or some do nothing."""
    routing = family.read_routing(fields, stated.routing)
    groups, chosen = routing.groups or 1, routing.topk_groups or 1
    if experts % groups or chosen > groups:
        raise CheckpointError(
            f"config.json: {experts} experts cannot be chosen from the best {chosen} of {groups} groups.",
            hint="Check config.json, or state the groups with --routing.",
        )
    if fields.integer("zero_experts", ("zero_expert_num",), 0, low=0):
        raise CheckpointError(
            f"config.json: {fields.prefix}zero_expert_num counts experts that hand a token on as it is, "
            "which are not supported.",
            hint="Ask for them to be added, or give another checkpoint.",
        )
    return routing


def _activation(fields: ConfigFields, family: Family, stated: Activation | None) -> Activation:
    if stated is None:
        return family.read_activation(fields)
    fields.sources["activation"] = "asked"
    return stated


def _limits(fields: ConfigFields) -> tuple[float, ...]:
    """The clamp of each layer, where the config lists one for each (Step-3.5)."""
    listed = fields.get("swiglu_limits")
    if listed is None:
        return ()
    good = isinstance(listed, list) and all(
        value is None or (type(value) in (int, float) and 0 <= value < 1e6) for value in listed
    )
    if not good:
        raise fields.refuse("swiglu_limits", "a number from 0 for each layer")
    fields.sources["activation.limit"] = fields.place("swiglu_limits")
    return tuple(float(value or 0) for value in listed)


def _storage_type(fields: ConfigFields, family: Family) -> str:
    """The model type by which gpt-oss' fused blocks are told, however the config spells it."""
    return "gpt_oss" if family.name == "gpt-oss" else fields.model_type


def _told(found: Quantization, place: str) -> dict[str, str]:
    """Sources of the format's facts, with where the quantization config really stands."""
    told = {
        key: source.replace("quantization_config", place, 1) if source != "config:expert_dtype" else source
        for key, source in found.sources.items()
    }
    told.setdefault("storage", told["scheme"])
    if not found.act_stated:
        told["scheme.act"] = "assumed"
    return told


def _assumptions(sources: Mapping[str, str]) -> list[str]:
    """One note that names what was assumed of routing and activation; nothing when nothing was."""
    assumed = [
        name
        for name, source in sources.items()
        if source == "assumed" and name.split(".")[0] in ("routing", "activation")
    ]
    if not assumed:
        return []
    return [f"assumed, as no key says it: {', '.join(assumed)}; state it with --routing or --activation"]


def _quantization_config(
    config: Mapping[str, Any], fields: ConfigFields, apart: Mapping[str, Any] | None, file: str
) -> tuple[Mapping[str, Any] | None, str]:
    """The first quantization config there is, and where: top level, text model, or a file of its own."""
    key = "quantization_config"
    for values, prefix in ((config, ""), (fields.values, fields.prefix)):
        if values.get(key) is not None:
            return values[key], prefix + key
    return apart, file if apart is not None else key


def _dtype(fields: ConfigFields, notes: list[str]) -> str:
    outer = [(fields.outer, "")] if fields.prefix else []
    for values, prefix in [(fields.values, fields.prefix), *outer]:
        for key in KEYS["dtype"]:
            value = values.get(key)
            if value is None:
                continue
            if isinstance(value, str) and value in WIDE_CONFIG_DTYPES:
                notes.append(f"the config says {value}, which engines round; bf16 is assumed")
                break
            if not isinstance(value, str) or value not in CONFIG_DTYPES:
                spellings = ", ".join((*CONFIG_DTYPES, *WIDE_CONFIG_DTYPES))
                raise CheckpointError(
                    f"config.json: {prefix}{key} must be one of {spellings}, got {shown(value)}.",
                    hint="Check config.json.",
                )
            fields.sources["dtype"] = f"config:{prefix}{key}"
            return CONFIG_DTYPES[value]
    fields.sources["dtype"] = "assumed"
    return "bf16"
