"""Parsing `quantization_config`: how a checkpoint's expert weights are stored and computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import CheckpointError
from ...files.strict_json import json_words
from ...problem.schemes import (
    A16,
    BF16,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    Scheme,
    act_format,
    int_format,
    weight_format,
)
from .module_patterns import REGEX
from .quantization_formats import (
    Config,
    check_group,
    group_scheme,
    group_size,
    integer,
    is_expert_rule,
    is_general_expert_rule,
    is_modelopt,
    mapping,
    modelopt_scheme,
    names,
    pair,
    quark_scheme,
    refuse,
    word,
)


@dataclass(frozen=True)
class Quantization:
    """How expert weights are stored and computed, as a quantization config declares it.

    Attributes:
        storage: as `MoEProblem.storage`.
        scheme: weight and activation formats.
        act_order: as `MoEProblem.act_order`.
        sources: config key of each field above.
        ignore: patterns of modules that stay unquantized, as the config spells them.
        method: the config's `quant_method`; ``""`` without a quantization config.
        act_stated: False when no key describes the activations, not even as 16-bit.
    """

    storage: str
    scheme: Scheme
    act_order: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    method: str = ""
    act_stated: bool = True


UNQUANTIZED = Quantization("plain", Scheme(BF16), sources={"scheme": "config:no quantization_config"})
"""The format of a model without a quantization config."""


def parse_quantization(
    quantization_config: Config | None, *, model_type: str = "", expert_dtype: str = ""
) -> Quantization:
    """The `Quantization` of most expert weights; plain BF16 when the config is absent or empty.

    Args:
        quantization_config: the parsed object.
        model_type: distinguishes gpt-oss, whose MXFP4 experts are fused blocks, from other checkpoints.
        expert_dtype: `expert_dtype` of config.json, which overrides the format of the experts alone.

    Raises:
        CheckpointError: the method is unknown, or a key that decides the format has a value that no
            known tool writes.

    Example:
        >>> config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
        >>> quantization = parse_quantization(config)
        >>> quantization.storage, quantization.scheme.weight.group
        ('gptq', 128)
    """
    if quantization_config is None:
        return UNQUANTIZED
    if not isinstance(quantization_config, Mapping):
        raise CheckpointError(
            f"quantization_config must be an object, got {json_words(quantization_config)}.",
            hint="Check config.json.",
        )
    if not quantization_config:
        return UNQUANTIZED
    method = quantization_method(quantization_config)
    parser = _METHODS.get(method)
    if parser is None:
        raise CheckpointError(
            f"quantization method {quantization_config.get('quant_method')!r} is not understood; "
            f"known ones are {', '.join(KNOWN_METHODS)}.",
            hint="Check quantization_config.quant_method in config.json, or ask for this method to be added.",
        )
    storage, scheme, order, keys, ignore = parser(quantization_config, model_type)
    sources = {name: f"config:quantization_config.{key}" for name, key in keys.items()}
    if method == "fp8" and expert_dtype.lower() == "fp4" and scheme.weight.name == "fp8":
        storage, scheme = "mxfp4", Scheme(MXFP4)
        sources = dict.fromkeys((key for key in sources if key != "token_scales"), "config:expert_dtype")
    return Quantization(storage, scheme, order, sources, ignore, method, _states_act(quantization_config))


def quantization_method(config: Config) -> str:
    """The `quant_method` of a quantization config in its usual spelling; ``""`` if it is not a known one.

    Letter case and the choice of dash or underscore do not matter. A config without the key is recognized by
    a key that only one tool writes.
    """
    stated = config.get("quant_method")
    if isinstance(stated, str):
        return _SPELLINGS.get(_spelled(stated), "")
    if stated is None and isinstance(config.get("config_groups"), Mapping):
        return "compressed-tensors"
    inner = config.get("quantization")
    if stated is None and "quant_algo" in (inner if isinstance(inner, Mapping) else config):
        return "modelopt"
    return ""


def _spelled(method: str) -> str:
    return method.lower().replace("_", "-").removeprefix("intel/")


Parsed = tuple[str, Scheme, str, dict[str, str], tuple[str, ...]]
"""Storage, scheme, act order, config key of each of these fields, and ignored module patterns."""


def _mxfp4(config: Config, model_type: str) -> Parsed:
    storage = "gpt_oss" if model_type == "gpt_oss" else "mxfp4"
    keys = {"storage": "quant_method", "scheme": "quant_method"}
    return storage, Scheme(MXFP4), "", keys, names(config, "modules_to_not_convert", "ignored_layers")


def _mxfp8(config: Config, model_type: str) -> Parsed:
    keys = {"storage": "quant_method", "scheme": "quant_method"}
    ignore = names(config, "ignored_layers", "modules_to_not_convert")
    return "fp8", Scheme(MXFP8, MXFP8_ACT), "", keys, ignore


def _fp8(config: Config, model_type: str) -> Parsed:
    ignore = names(config, "modules_to_not_convert", "ignored_layers", "ignore")
    if "moe_quant_algo" in config:
        scheme = modelopt_scheme(config["moe_quant_algo"], "moe_quant_algo", config)
        return "modelopt", scheme, "", {"storage": "moe_quant_algo", "scheme": "moe_quant_algo"}, ignore
    if config.get("weight_block_size") is not None:
        rows, columns = pair(config, "weight_block_size", "")
        act = act_format("fp8", (1, columns))
        keys = {"storage": "quant_method", "scheme": "weight_block_size"}
        if word(config, "scale_fmt").lower() == "ue8m0":
            act, keys["token_scales"] = replace(act, scale_dtype="E8M0"), "scale_fmt"
        return "fp8", Scheme(weight_format("fp8", (rows, columns)), act), "", keys, ignore
    activations = {"static": FP8_ACT_TENSOR_STATIC, "dynamic": FP8_ACT_TENSOR}
    name = word(config, "activation_scheme", "dynamic")
    if name not in activations:
        raise refuse("activation_scheme", "'static' or 'dynamic'", name)
    scheme = Scheme(FP8_TENSOR, activations[name])
    return "fp8", scheme, "", {"storage": "quant_method", "scheme": "activation_scheme"}, ignore


def _modelopt(config: Config, model_type: str) -> Parsed:
    inner = mapping(config, "quantization") or config
    ignore = names(inner, "ignore", "exclude_modules")
    name, key = inner.get("quant_algo"), "quant_algo"
    if name is None and "quant_algo" in inner:
        return "plain", Scheme(BF16), "", {"storage": key, "scheme": key}, ignore
    entry = inner
    if isinstance(name, str) and name.upper() == MIXED_PRECISION:
        key, modules = "quantized_layers", listed_modules(inner)
        if not modules:
            raise refuse(key, "an object that names the quant_algo of modules", None)
        listed = [rule for module, rule in modules.items() if is_expert_rule(module)]
        # Experts may be called otherwise; which modules are theirs is for `read_precision` to say.
        listed = listed or [rule for rule in modules.values() if is_modelopt(rule.get("quant_algo"))]
        if not listed:
            return "plain", Scheme(BF16), "", {"storage": key, "scheme": key}, ignore
        name = Counter(str(rule.get("quant_algo")) for rule in listed).most_common(1)[0][0]
        entry = next(rule for rule in listed if str(rule.get("quant_algo")) == name)
    scheme = modelopt_scheme(name, key, entry)
    return "modelopt", scheme, "", {"storage": "quant_method", "scheme": key}, ignore


MIXED_PRECISION = "MIXED_PRECISION"
"""ModelOpt's `quant_algo` of a model whose modules have several, listed as `quantized_layers`."""


def listed_modules(config: Config) -> dict[str, Config]:
    """ModelOpt's entry of each module that it lists as quantized; empty without a list."""
    listed = mapping(config, "quantized_layers").items()
    return {module: entry for module, entry in listed if isinstance(entry, Mapping)}


_ACT_ORDERS = {
    None: "",
    False: "",
    True: "group",
    "weight": "weight",
    "static": "weight",
    "group": "group",
    "dynamic": "group",
}


def _compressed_group(config: Config) -> tuple[str, Config]:
    groups = mapping(config, "config_groups")
    usable = {name: group for name, group in groups.items() if isinstance(group, Mapping)}
    if not usable or len(usable) != len(groups):
        raise refuse("config_groups", "an object with at least one group", config.get("config_groups"))

    def rank(item: tuple[str, Config]) -> int:
        targets = names(item[1], "targets")
        if any(map(is_general_expert_rule, targets)):
            return 0
        return 1 if any(map(is_class_of_experts, targets)) else 2 if any(map(is_expert_rule, targets)) else 3

    return min(usable.items(), key=rank)


def is_class_of_experts(target: str) -> bool:
    """True for a target of compressed-tensors that is a class of modules to which experts belong."""
    name = target.lower()
    is_class = "." not in target and not target.startswith(REGEX)
    return is_class and (name == "linear" or "expert" in name or "moe" in name)


def _compressed(config: Config, model_type: str) -> Parsed:
    name, group = _compressed_group(config)
    return compressed_group(config, name, group)


def compressed_group(config: Config, name: str, group: Config) -> Parsed:
    """The parsed group `name` of a compressed-tensors config; CheckpointError if it is not understood."""
    where = f"config_groups.{name}"
    order = mapping(group, "weights").get("actorder")
    if isinstance(order, (list, dict)) or order not in _ACT_ORDERS:
        raise refuse(f"{where}.weights.actorder", "null, 'weight', 'static', 'group' or 'dynamic'", order)
    keys = {
        "storage": "quant_method",
        "scheme": f"{where}.weights",
        "act_order": f"{where}.weights.actorder",
    }
    return (
        "compressed-tensors",
        group_scheme(group, where),
        _ACT_ORDERS[order],
        keys,
        names(config, "ignore"),
    )


def _states_act(config: Config) -> bool:
    """False for a compressed-tensors group without the key `input_activations`."""
    if quantization_method(config) != "compressed-tensors":
        return True
    return "input_activations" in _compressed_group(config)[1]


def _lists_experts(modules: object) -> bool:
    """True when GPTQ's list of modules to quantize is empty, absent or includes routed experts."""
    if not isinstance(modules, list) or not modules:
        return True
    flat = [name for entry in modules for name in (entry if isinstance(entry, list) else [entry])]
    return any(isinstance(name, str) and is_expert_rule(name) for name in flat)


def _gptq(config: Config, model_type: str) -> Parsed:
    ignore = names(config, "modules_to_not_convert")
    for name, rule in mapping(config, "dynamic").items():
        if not name.startswith("-:") and is_general_expert_rule(name) and isinstance(rule, Mapping):
            config = {**config, **rule}
            break
    if not _lists_experts(config.get("modules_in_block_to_quantize")):
        key = "modules_in_block_to_quantize"
        return "plain", Scheme(BF16), "", {"storage": key, "scheme": key}, ignore
    bits = integer(config, "bits", "")
    if bits not in (4, 8):
        raise refuse("bits", "4 or 8", bits)
    group = group_size(config, "group_size", "", FULL)
    weight = int_format(bits, group, "F16", zero_point=config.get("sym", True) is False)
    # With one group per column the permuted order changes nothing.
    order = "group" if config.get("desc_act") and group != FULL else ""
    keys = {"storage": "quant_method", "scheme": "bits", "act_order": "desc_act"}
    return "gptq", Scheme(weight), order, keys, ignore


def zeros_less_one(config: Mapping[str, Any]) -> bool:
    """True when GPTQ zero points are stored minus one, as in every version of the format but ``gptq_v2``.

    `config` is the object of config.json, with the quantization config at the top level or in `text_config`.
    """
    text_config = config.get("text_config")
    for values in (config, text_config if isinstance(text_config, Mapping) else {}):
        quantization_config = values.get("quantization_config")
        if isinstance(quantization_config, Mapping):
            return quantization_config.get("checkpoint_format") != "gptq_v2"
    return True


def _awq(config: Config, model_type: str) -> Parsed:
    bits = integer(config, "bits" if "bits" in config else "w_bit", "")
    if bits not in (4, 8):
        raise refuse("bits", "4 or 8", bits)
    group = group_size(config, "group_size" if "group_size" in config else "q_group_size", "", FULL)
    weight = int_format(bits, group, "F16", zero_point=config.get("zero_point", True) is True)
    keys = {"storage": "quant_method", "scheme": "bits"}
    return "awq", Scheme(weight), "", keys, names(config, "modules_to_not_convert")


def _quark(config: Config, model_type: str) -> Parsed:
    chosen, where = mapping(config, "global_quant_config"), "global_quant_config"
    for name, rule in mapping(config, "layer_quant_config").items():
        if is_general_expert_rule(name) and isinstance(rule, Mapping):
            chosen, where = rule, f"layer_quant_config.{name}"
    keys = {"storage": "quant_method", "scheme": where}
    return "quark", quark_scheme(chosen, where), "", keys, names(config, "exclude")


def _auto_round(config: Config, model_type: str) -> Parsed:
    """AutoRound packs integers as AWQ or as GPTQ does, and block floats as compressed-tensors does."""
    kind = word(config, "data_type", "int")
    bits, packing = integer(config, "bits", ""), word(config, "packing_format")
    if bits >= 16:
        return "plain", Scheme(BF16), "", {"storage": "bits", "scheme": "bits"}, ()
    if kind == "int":
        return (_awq if "awq" in packing else _gptq)(config, model_type)
    blocks = {("mx_fp", 4): MXFP4, ("mx_fp", 8): MXFP8, ("nv_fp", 4): NVFP4}
    # Later versions write the bits into the name: mx_fp4, nv_fp4.
    weight = blocks.get((kind.rstrip("48"), bits))
    if weight is None:
        raise refuse("data_type", "int, mx_fp (4 or 8 bits) or nv_fp (4 bits)", f"{kind} with {bits} bits")
    check_group(weight, integer(config, "group_size", "", weight.group), "group_size")
    act = A16
    act_bits = integer(config, "act_bits", "", 16)
    if act_bits < 16:
        act_kind = word(config, "act_data_type", kind)
        named = next(
            (item for (name, size), item in blocks.items() if act_kind.startswith(name) and size == act_bits),
            None,
        )
        if named is None:
            raise refuse(
                "act_data_type", "mx_fp (4 or 8 bits) or nv_fp (4 bits)", f"{act_kind} with {act_bits} bits"
            )
        act = act_format(named.name)
    keys = {"storage": "packing_format", "scheme": "data_type"}
    return "compressed-tensors", Scheme(weight, act), "", keys, names(config, "modules_to_not_convert")


def overridden(config: Config, entry: Config) -> Parsed:
    """The parsed format of modules for which `entry` replaces keys of a GPTQ or AutoRound `config`."""
    merged = {key: value for key, value in config.items() if key not in ("dynamic", "extra_config")} | dict(
        entry
    )
    return _METHODS[quantization_method(config)](merged, "")


_METHODS: dict[str, Callable[[Config, str], Parsed]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "awq_marlin": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "gptq_marlin": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "quark": _quark,
}
_SPELLINGS = {_spelled(method): method for method in _METHODS}
KNOWN_METHODS = tuple(sorted(_METHODS))
"""The `quant_method` names that `parse_quantization` reads."""
