"""The MoE layers as config.json alone declares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from ..problem import Dims, MoEProblem
from .families import DTYPES, KEYS, Family, Fields, family_of
from .model import ExpertNames, LayerGroup
from .quantization import parse_quantization


@dataclass(frozen=True)
class Declared:
    """What a config says: one group of all its MoE layers, the number of its layers, and its family."""

    group: LayerGroup
    layers: int
    family: Family


def declared_layers(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None = None,
    quantization_file: str = "",
) -> Declared:
    """The MoE layers that `config`, config.json's object, declares; tensor names stay empty.

    `quantization` is the quantization config where it stands in a file of its own, `quantization_file`.

    Raises:
        CheckpointError: a key is missing or of a wrong kind, the sizes contradict each other, or the
            family or quantization method is not understood.
    """
    fields = Fields(config)
    family = family_of(fields)
    count = fields.integer("layers", KEYS["layers"])
    experts = fields.integer("experts", KEYS["experts"])
    top_k = fields.integer("top_k", KEYS["top_k"])
    if top_k > experts:
        raise CheckpointError(
            f"config.json: top-k {top_k} is more than the {experts} experts.", hint="Check config.json."
        )
    dims = Dims(fields.integer("hidden", KEYS["hidden"]), fields.integer("intermediate", family.intermediate))
    layers = family.moe_layers(fields, count)
    if not layers:
        raise CheckpointError(
            f"config.json: none of the {count} layers is a Mixture-of-Experts layer.",
            reason=f"{family.name} configs name them by first_k_dense_replace and moe_layer_freq.",
            hint="Give the checkpoint of a Mixture-of-Experts model.",
        )
    described, place = _quantization_config(config, fields, quantization, quantization_file)
    found = parse_quantization(described, model_type=fields.model_type)
    told = {key: source.replace("quantization_config", place, 1) for key, source in found.sources.items()}
    problem = MoEProblem(
        dims,
        experts,
        top_k,
        found.scheme,
        activation=family.read_activation(fields),
        routing=family.read_routing(fields),
        storage=found.storage,
        rows=family.rows,
        act_order=found.act_order,
        bias=family.bias,
        shared_experts=int(family.shared_experts.read("shared_experts", fields, family.name)),
        dtype=_dtype(fields),
    )
    sources = {**fields.sources, **told}
    sources.update(dict.fromkeys(("rows", "bias"), f"family:{family.name}"))
    sources.setdefault("storage", sources["scheme"])
    return Declared(LayerGroup(layers, problem, ExpertNames({}), sources), count, family)


def _quantization_config(
    config: Mapping[str, Any], fields: Fields, apart: Mapping[str, Any] | None, file: str
) -> tuple[Mapping[str, Any] | None, str]:
    """The first quantization config there is, and where: top level, text model, or a file of its own."""
    key = "quantization_config"
    for values, prefix in ((config, ""), (fields.values, fields.prefix)):
        if values.get(key) is not None:
            return values[key], prefix + key
    return apart, file if apart is not None else key


def _dtype(fields: Fields) -> str:
    key = fields.key_of(KEYS["dtype"])
    if key is None:
        fields.sources["dtype"] = "assumed"
        return "bf16"
    value = fields.values[key]
    if not isinstance(value, str) or value not in DTYPES:
        raise fields.refuse(key, f"one of {', '.join(DTYPES)}")
    fields.sources["dtype"] = f"config:{fields.prefix}{key}"
    return DTYPES[value]
