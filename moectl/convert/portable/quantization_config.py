"""The `quantization_config` of each container, as its readers expect it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import __version__
from ...checkpoint.config.quantization_formats import modelopt_algorithm
from ...dtypes import DTYPES
from ...errors import UsageError
from ...problem.number_formats import NumberFormat
from ...problem.schemes import FULL, ActFormat, Scheme, WeightFormat

Json = dict[str, Any]

QUANTIZATION_KEYS = ("quantization_config", "compression_config", "expert_dtype")
"""Config keys that describe quantization, at the top level or in the text model's section."""


@dataclass(frozen=True)
class Described:
    """Modules with the same scheme.

    Attributes:
        scheme: their weight and activation formats.
        targets: module names, or ``re:`` with a regular expression.
    """

    scheme: Scheme
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """The content of an output's quantization config.

    Attributes:
        experts: schemes of the routed experts, the first group's first.
        others: other quantized modules.
        plain: modules whose weights are not quantized.
    """

    experts: tuple[Described, ...]
    others: tuple[Described, ...]
    plain: tuple[str, ...]

    @property
    def single(self) -> Scheme:
        """The only scheme of everything quantized; UsageError if there are several."""
        first, *more = (*self.experts, *self.others)
        for other in more:
            if other.scheme.weight != first.scheme.weight:
                raise UsageError(
                    f"this container holds one format, but {other.targets[0]} would be "
                    f"{other.scheme.weight} and the others {first.scheme.weight}.",
                    hint="Choose --container compressed-tensors, which holds several.",
                )
        return first.scheme


def with_quantization(config: Mapping[str, Any], quantization: Json | None) -> Json:
    """`config` with its quantization replaced by `quantization`; None for a model that is not quantized."""
    updated: Json = {}
    for key, value in config.items():
        if key in QUANTIZATION_KEYS:
            continue
        inner = isinstance(value, Mapping) and any(name in value for name in QUANTIZATION_KEYS)
        updated[key] = {k: v for k, v in value.items() if k not in QUANTIZATION_KEYS} if inner else value
    if quantization is not None:
        updated["quantization_config"] = quantization
    return updated


def _compressed(description: Description) -> Json:
    groups: Json = {}
    described_modules = (*description.experts, *description.others)
    for i, described in enumerate(described_modules):
        scheme = described.scheme
        groups[f"group_{i}"] = {
            "format": scheme.weight.number.compressed_tensors,
            "input_activations": _compressed_act(scheme.act),
            "output_activations": None,
            "targets": list(described.targets) if described_modules[1:] else ["Linear"],
            "weights": _compressed_weight(scheme.weight),
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": sorted({*description.plain, "lm_head"}),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _strategy(block: tuple[int, int], rows: str, two_level: bool = False) -> Json:
    """A block in the terms of compressed-tensors; `rows` is its term for one scale per row."""
    if block == (FULL, FULL):
        return {"strategy": "tensor", "group_size": None, "block_structure": None}
    if block == (1, FULL):
        return {"strategy": rows, "group_size": None, "block_structure": None}
    if block[0] == 1:
        return {
            "strategy": "tensor_group" if two_level else "group",
            "group_size": block[1],
            "block_structure": None,
        }
    return {"strategy": "block", "group_size": None, "block_structure": list(block)}


def _kind(number: NumberFormat) -> str:
    return "int" if number.grid.integer else "float"


def _compressed_weight(weight: WeightFormat) -> Json:
    arguments = {
        "actorder": None,
        "dynamic": False,
        "num_bits": weight.bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "symmetric": not weight.zero_point,
        "type": _kind(weight.number),
        **_strategy(weight.block, "channel", weight.number.global_scale),
    }
    if not weight.number.byte_scale:
        return arguments
    scale = "U8" if weight.number.byte_scale == "E8M0" else weight.number.byte_scale
    return arguments | {"scale_dtype": f"torch.{DTYPES[scale].torch}"}


def _compressed_act(act: ActFormat) -> Json | None:
    if act.bits == 16:
        return None
    return {
        "actorder": None,
        "dynamic": "local" if act.number.global_scale else act.dynamic,
        "num_bits": act.bits,
        "observer": None,
        "observer_kwargs": {},
        "symmetric": True,
        "type": _kind(act.number),
        **_strategy(act.block, "token", act.number.global_scale),
    }


def _gptq(description: Description) -> Json:
    weight = description.single.weight
    return {
        "quant_method": "gptq",
        "bits": weight.bits,
        "group_size": weight.group,
        "sym": not weight.zero_point,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in description.plain},
        "lm_head": False,
        "meta": {"quantizer": [f"moectl:{__version__}"]},
    }


def _modelopt(description: Description) -> Json:
    scheme = description.single
    return {
        "quant_method": "modelopt",
        "quant_algo": modelopt_algorithm(scheme),
        "group_size": scheme.weight.group,
        "ignore": sorted({*description.plain, "lm_head"}),
        "producer": {"name": "moectl", "version": __version__},
    }


def _fp8(description: Description) -> Json:
    weight, act = description.single.weight, description.single.act
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **({"scale_fmt": "ue8m0"} if act.rounds_scales else {}),
        "weight_block_size": list(weight.block),
        "modules_to_not_convert": sorted({*description.plain, "lm_head"}),
    }


def _mxfp4(description: Description) -> Json:
    assert description.single
    return {"quant_method": "mxfp4", "modules_to_not_convert": sorted({*description.plain, "lm_head"})}


DOCUMENTS: Mapping[str, Callable[[Description], Json | None]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gpt_oss": _mxfp4,
    "plain": lambda description: None,
}
"""Quantization configs by `MoEProblem.storage`; None for weights that are not quantized."""


def expert_targets(templates: Sequence[str], layers: Sequence[int]) -> tuple[str, ...]:
    """Targets that match experts' modules, from templates of their names; all layers if `layers` is empty."""
    if not templates:
        return ()
    heads = {template.split("{layer}")[0] for template in templates}
    middles = {template.split("{layer}")[1].split("{expert}")[0] for template in templates}
    tails = {template.split("{expert}")[1] for template in templates}
    layer = "|".join(map(str, sorted(layers))) or r"\d+"
    return (f"re:{_alternatives(heads)}({layer}){_alternatives(middles)}\\d+{_alternatives(tails)}$",)


def _alternatives(texts: set[str]) -> str:
    """A regular expression that matches any of `texts`."""
    pattern = "|".join(sorted(map(re.escape, texts)))
    return pattern if len(texts) == 1 else f"({pattern})"
