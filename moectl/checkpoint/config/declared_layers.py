"""The MoE layers that config.json declares, before any tensor header is read."""

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
from .user_assumptions import UserAssumptions

CONFIG_ONLY = (
    "read from the config alone; only tensor headers show names, arrangement and dtypes, whether the "
    "config's formats are those stored, the router's dtype and its biases"
)
"""Note on every layer group for which no tensor header was read."""


@dataclass(frozen=True)
class DeclaredLayers:
    """The MoE layers that a config declares.

    Attributes:
        group: all MoE layers, with the problem that most of them share; its tensor names are empty.
        layers: total number of the model's layers, dense ones included.
        family: the architecture whose rules the config was read by.
        precision: the number format of each layer's experts.
        hash_layers: number of leading layers that select experts from a table of token ids.
        limits: per-layer clamp of the activation, 0 for none; empty when all layers share one.
        shared_widths: intermediate sizes that all shared experts together may have.
        quantization_source: the key path or file that holds the quantization config.
        notes: what the config leaves open or states in an unusual way.
        quantization: the quantization config; None without one.
    """

    group: LayerGroup
    layers: int
    family: Family
    precision: Precision
    hash_layers: int = 0
    limits: tuple[float, ...] = ()
    shared_widths: tuple[int, ...] = ()
    quantization_source: str = ""
    notes: tuple[str, ...] = ()
    quantization: Mapping[str, Any] | None = None

    def problem_of(
        self, layer: int, modules: Iterable[str] | None = None
    ) -> tuple[MoEProblem, dict[str, str]]:
        """One layer's problem and the source of each of its fields.

        `modules` are the names of the layer's expert matrices; None when no header was read.
        """
        problem, sources = self.group.problem, dict(self.group.sources)
        precision = self.precision
        quantization = precision.guess(layer) if modules is None else precision.of_layer(layer, modules)
        if quantization is not precision.main:
            sources |= _quantization_sources(quantization, self.quantization_source)
            problem = replace(
                problem,
                scheme=quantization.scheme,
                storage=quantization.storage,
                act_order=quantization.act_order,
            )
        if layer < self.hash_layers:
            routing = replace(problem.routing, hashed=True, correction_bias=False)
            problem = replace(problem, routing=routing)
            sources["routing.correction_bias"] = sources["routing.hashed"]
        if layer < len(self.limits) and self.limits[layer]:
            name = problem.activation.name
            clamped = ACTIVATIONS["swiglustep"] if name == "silu" else problem.activation
            problem = replace(problem, activation=replace(clamped, limit=self.limits[layer]))
        return problem, sources

    def groups(self) -> tuple[LayerGroup, ...]:
        """The declared layers grouped by equal problem, in layer order."""
        declared = replace(self, precision=self.precision.likely())
        notes = (*self.notes, CONFIG_ONLY)
        groups: list[LayerGroup] = []
        for layer in self.group.layers:
            problem, sources = declared.problem_of(layer)
            for index, group in enumerate(groups):
                if group.problem == problem:
                    groups[index] = replace(group, layers=(*group.layers, layer))
                    break
            else:
                groups.append(LayerGroup((layer,), problem, ExpertNames({}), sources, notes))
        return tuple(groups)


def declared_layers(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None = None,
    quantization_file: str = "",
    assumptions: UserAssumptions = UserAssumptions(),
) -> DeclaredLayers:
    """The MoE layers that a config declares.

    Args:
        config: the parsed object of config.json.
        quantization: the quantization config when it is stored in a separate file, `quantization_file`;
            one inside `config` takes precedence.
        assumptions: activation and routing as the user states them; they override the config.

    Raises:
        CheckpointError: a key is missing or has the wrong type, the sizes contradict each other, or the
            quantization method is not supported.

    Example:
        >>> config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8,
        ...           "num_experts_per_tok": 2, "hidden_size": 4096, "intermediate_size": 14336}
        >>> group = declared_layers(config).group
        >>> group.layers, group.problem.experts, group.problem.top_k
        ((0, 1), 8, 2)
    """
    fields = ConfigFields(config)
    family = family_of(fields)
    count = layer_count(fields)
    dims, model_hidden, experts, top_k = _sizes(fields)
    layers = _moe_layers(fields, count)
    quantization_config, source = _quantization_config(config, fields, quantization, quantization_file)
    expert_dtype = fields.get("expert_dtype")
    expert_format = parse_quantization(
        quantization_config,
        model_type=_storage_type(fields, family),
        expert_dtype=expert_dtype if isinstance(expert_dtype, str) else "",
    )
    notes: list[str] = []
    shared, widths = _shared(fields, family, dims.intermediate)
    hash_layers = fields.integer("hash_layers", KEYS["hash_layers"], 0, low=0)
    sources = fields.sources
    if "hash_layers" in sources:
        sources["routing.hashed"] = sources.pop("hash_layers")
    problem = MoEProblem(
        dims,
        experts,
        top_k,
        expert_format.scheme,
        activation=_activation(fields, family, assumptions.activation),
        routing=_routing(fields, family, assumptions, experts),
        storage=expert_format.storage,
        rows=str(family.read_field("rows", FieldChoice(default="concatenated"), fields)),
        act_order=expert_format.act_order,
        bias=bool(family.read_field("bias", FieldChoice(default=False), fields)),
        shared_experts=shared,
        dtype=_dtype(fields, notes),
        model_hidden=model_hidden,
        model_type=fields.model_type,
    )
    sources.update({f"routing.{name}": "asked" for name in assumptions.routing})
    sources.update(_quantization_sources(expert_format, source), router_dtype="assumed")
    problem = replace(problem, router_dtype=_router_dtype(fields, problem.dtype))
    notes += _assumption_notes(sources, problem)
    group = LayerGroup(layers, problem, ExpertNames({}), sources)
    return DeclaredLayers(
        group,
        count,
        family,
        read_precision(expert_format, quantization_config, family, problem.activation.gated),
        hash_layers,
        _limits(fields),
        widths,
        source,
        tuple(notes),
        quantization_config,
    )


def _moe_layers(fields: ConfigFields, count: int) -> tuple[int, ...]:
    """Indices of the layers with experts; CheckpointError when there are none."""
    layers = moe_layers(fields, count)
    if not layers:
        raise CheckpointError(
            f"config.json: none of the {count} layers is a Mixture-of-Experts layer.",
            reason=f"The config names them by {fields.sources['layers'].replace('config:', '')}.",
            hint="Give the checkpoint of a Mixture-of-Experts model.",
        )
    return layers


def _sizes(fields: ConfigFields) -> tuple[Dims, int, int, int]:
    """The experts' dims, the model's hidden size, the number of experts and top-k."""
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
    """The number of shared experts, and the intermediate sizes that all of them together may have.

    Models differ on whether a separate width is that of one shared expert or of all of them.
    """
    width = fields.integer("shared_width", KEYS["shared_width"], 0, low=0)
    width_source = fields.sources.pop("shared_width", "")
    count = fields.integer("shared_experts", KEYS["shared_experts"], -1, low=0)
    if count < 0 and width_source:
        fields.sources["shared_experts"] = width_source
        count = 1 if width else 0
    elif count < 0:
        choice = FieldChoice(KEYS["shared_experts"], int, default=0)
        count = int(family.read_field("shared_experts", choice, fields))
    return count, (count * intermediate, width, count * width) if count else ()


def _routing(fields: ConfigFields, family: Family, assumptions: UserAssumptions, experts: int) -> Routing:
    """The routing; CheckpointError for groups that do not divide the experts, and for zero experts."""
    routing = family.read_routing(fields, assumptions.routing)
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


def _activation(fields: ConfigFields, family: Family, assumed: Activation | None) -> Activation:
    if assumed is None:
        return family.read_activation(fields)
    fields.sources["activation"] = "asked"
    return assumed


def _limits(fields: ConfigFields) -> tuple[float, ...]:
    """Per-layer clamps of the activation, if the config lists them (Step-3.5)."""
    listed = fields.get("swiglu_limits")
    if listed is None:
        return ()
    valid = isinstance(listed, list) and all(
        value is None or (type(value) in (int, float) and 0 <= value < 1e6) for value in listed
    )
    if not valid:
        raise fields.invalid("swiglu_limits", "a number from 0 for each layer")
    fields.sources["activation.limit"] = fields.source_of("swiglu_limits")
    return tuple(float(value or 0) for value in listed)


def _storage_type(fields: ConfigFields, family: Family) -> str:
    """The model type that selects gpt-oss' fused MXFP4 blocks, normalized to one spelling."""
    return "gpt_oss" if family.name == "gpt-oss" else fields.model_type


def _quantization_sources(quantization: Quantization, path: str) -> dict[str, str]:
    """The source of each field of the format; `path` is the actual location of the quantization config."""
    sources = {
        key: source.replace("quantization_config", path, 1) if source != "config:expert_dtype" else source
        for key, source in quantization.sources.items()
    }
    sources.setdefault("storage", sources["scheme"])
    if not quantization.act_stated:
        sources["scheme.act"] = "assumed"
    return sources


def _assumption_notes(sources: Mapping[str, str], problem: MoEProblem) -> list[str]:
    """One note listing the routing and activation fields that were assumed; empty if there are none."""
    assumed = [
        f"{name} ({_shown_value(problem, name)})"
        for name, source in sources.items()
        if source == "assumed" and name.split(".")[0] in ("routing", "activation")
    ]
    if not assumed:
        return []
    return [f"assumed, as no key says it: {', '.join(assumed)}; state it with --routing or --activation"]


def _shown_value(problem: MoEProblem, name: str) -> str:
    """The value of one field of the routing or activation, for a sentence."""
    part, _, inner = name.partition(".")
    value = getattr(getattr(problem, part), inner or "name")
    words = {None: "none", True: "yes", False: "no"}
    return (
        words[value]
        if value is None or isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _router_dtype(fields: ConfigFields, dtype: str) -> str:
    """The dtype of the router's weights, `dtype` unless the config states another."""
    key = "moe_router_dtype"
    value = fields.get(key)
    if value is None:
        return dtype
    short = _ROUTER_DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
    if short is None:
        raise fields.invalid(key, f"one of {', '.join(_ROUTER_DTYPES)}")
    fields.sources["router_dtype"] = fields.source_of(key)
    return short


_ROUTER_DTYPES: Mapping[str, str] = {
    **CONFIG_DTYPES,
    **dict.fromkeys(WIDE_CONFIG_DTYPES, "fp32"),
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
}
"""`MoEProblem.router_dtype` by its spelling in configs."""


def _quantization_config(
    config: Mapping[str, Any], fields: ConfigFields, separate: Mapping[str, Any] | None, file: str
) -> tuple[Mapping[str, Any] | None, str]:
    """The quantization config and its location: the top level, the text model, else a separate file.

    An empty object says nothing. Between the two levels, `thinker_config` may hold it as well; early
    compressed-tensors files call it `compression_config`, in which it may be nested once more.
    """
    levels: list[tuple[Mapping[str, Any], str]] = [(config, "")]
    path = fields.prefix.rstrip(".").split(".") if fields.prefix else []
    for count, name in enumerate(path):
        levels.append((levels[-1][0][name], ".".join(path[: count + 1]) + "."))
    for values, prefix in levels:
        for key in ("quantization_config", "compression_config"):
            found = values.get(key)
            if found is None or found == {}:
                continue
            inner = found.get("quantization_config") if isinstance(found, Mapping) else None
            if key == "compression_config" and isinstance(inner, Mapping) and inner:
                return inner, f"{prefix}{key}.quantization_config"
            return found, prefix + key
    return separate, file if separate is not None else "quantization_config"


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
