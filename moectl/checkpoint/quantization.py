"""What a checkpoint's `quantization_config` says about its expert weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError
from ..schemes import (
    A16,
    BF16,
    FULL,
    MXFP4,
    MXFP4_ACT,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    ActFormat,
    Scheme,
    WeightFormat,
    int_format,
)

Config = Mapping[str, Any]

FP8_TENSOR = ActFormat("fp8", 8, (FULL, FULL))
FP8_TENSOR_STATIC = ActFormat("fp8", 8, (FULL, FULL), dynamic=False)
FP8_TENSOR_WEIGHT = WeightFormat("fp8", 8, (FULL, FULL), "F32")


@dataclass(frozen=True)
class Quantization:
    """How expert weights are stored and computed, as a quantization config declares it.

    Attributes:
        storage: as `MoEProblem.storage`.
        scheme: weight and activation formats.
        act_order: as `MoEProblem.act_order`.
        sources: for each of the fields above, the config key that it was read from.
        ignore: module name patterns that stay unquantized, in the config's own spelling.
        method: `quant_method` as the config spells it; ``""`` without a config.
        act_stated: False when the config has no word on activations, not even that they stay 16-bit.
    """

    storage: str
    scheme: Scheme
    act_order: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    method: str = ""
    act_stated: bool = True


UNQUANTIZED = Quantization("plain", Scheme(BF16), sources={"scheme": "config:no quantization_config"})
"""What a model without a quantization config has."""


def parse_quantization(
    quantization_config: Config | None, *, model_type: str = "", expert_dtype: str = ""
) -> Quantization:
    """The `Quantization` of most expert weights; plain BF16 when the config is absent or empty.

    `model_type` tells gpt-oss, whose MXFP4 experts are fused blocks, from other MXFP4 checkpoints;
    `expert_dtype` is the model config's key of that name, which speaks of the experts alone.

    Raises:
        CheckpointError: the method is unknown, or a key that decides the format has a value that no
            known writer produces.
    """
    if quantization_config is None:
        return UNQUANTIZED
    if not isinstance(quantization_config, Mapping):
        raise CheckpointError(
            f"quantization_config must be an object, got {type(quantization_config).__name__}.",
            hint="Check config.json.",
        )
    if not quantization_config:
        return UNQUANTIZED
    method = quantization_config.get("quant_method")
    parser = _METHODS.get(method) if isinstance(method, str) else None
    if parser is None or not isinstance(method, str):
        raise CheckpointError(
            f"quantization method {method!r} is not understood; known ones are {', '.join(KNOWN_METHODS)}.",
            hint="Check quantization_config.quant_method in config.json.",
        )
    storage, scheme, order, keys, ignore = parser(quantization_config, model_type)
    named = {name: f"config:quantization_config.{key}" for name, key in keys.items()}
    if method == "fp8" and expert_dtype == "fp4" and scheme.weight.name == "fp8":
        storage, scheme = "mxfp4", Scheme(MXFP4)
        named = dict.fromkeys(named, "config:expert_dtype")
    return Quantization(storage, scheme, order, named, ignore, method, _states_act(quantization_config))


Parsed = tuple[str, Scheme, str, dict[str, str], tuple[str, ...]]


def _refuse(key: str, expected: str, got: object) -> CheckpointError:
    return CheckpointError(
        f"quantization_config.{key} must be {expected}, got {got!r}.",
        hint="Check config.json, or ask for this format to be added.",
    )


def _integer(config: Config, key: str, where: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        value = default
    if isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(f"{where}{key}", "an integer", config.get(key))
    return value


def _group(config: Config, key: str, where: str, default: int | None = None) -> int:
    size = _integer(config, key, where, default)
    if size != FULL and size < 1:
        raise _refuse(f"{where}{key}", "-1 or a positive group size", size)
    return size


def _pair(config: Config, key: str, where: str) -> tuple[int, int]:
    block = config.get(key)
    good = isinstance(block, (list, tuple)) and len(block) == 2
    if not isinstance(block, (list, tuple)) or not good or any(type(b) is not int or b < 1 for b in block):
        raise _refuse(f"{where}{key}", "two positive integers", block)
    return block[0], block[1]


def _mapping(config: Config, key: str) -> Config:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse(key, "an object", value)
    return value


def _names(config: Config, *keys: str) -> tuple[str, ...]:
    found: list[str] = []
    for key in keys:
        value = config.get(key) or ()
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise _refuse(key, "a list of module names", value)
        found += [str(name) for name in value]
    return tuple(found)


def is_expert_rule(name: str) -> bool:
    """True when a module pattern speaks of routed experts of the main model."""
    text = name.lower()
    return "expert" in text and "shared" not in text and "mtp" not in text


def _mxfp4(config: Config, model_type: str) -> Parsed:
    storage = "gpt_oss" if model_type == "gpt_oss" else "mxfp4"
    keys = {"storage": "quant_method", "scheme": "quant_method"}
    return storage, Scheme(MXFP4), "", keys, _names(config, "modules_to_not_convert", "ignored_layers")


def _mxfp8(config: Config, model_type: str) -> Parsed:
    keys = {"storage": "quant_method", "scheme": "quant_method"}
    ignore = _names(config, "ignored_layers", "modules_to_not_convert")
    return "fp8", Scheme(MXFP8, MXFP8_ACT), "", keys, ignore


def _fp8(config: Config, model_type: str) -> Parsed:
    ignore = _names(config, "modules_to_not_convert", "ignored_layers", "ignore")
    if "moe_quant_algo" in config:
        scheme = modelopt_scheme(config["moe_quant_algo"], "moe_quant_algo")
        return "modelopt", scheme, "", {"storage": "moe_quant_algo", "scheme": "moe_quant_algo"}, ignore
    if config.get("weight_block_size") is not None:
        rows, columns = _pair(config, "weight_block_size", "")
        weight, act = (
            WeightFormat("fp8", 8, (rows, columns), "F32"),
            ActFormat("fp8", 8, (1, columns)),
        )
        return (
            "fp8",
            Scheme(weight, act),
            "",
            {"storage": "quant_method", "scheme": "weight_block_size"},
            ignore,
        )
    activations = {"static": FP8_TENSOR_STATIC, "dynamic": FP8_TENSOR}
    name = config.get("activation_scheme", "dynamic")
    if name not in activations:
        raise _refuse("activation_scheme", "'static' or 'dynamic'", name)
    scheme = Scheme(FP8_TENSOR_WEIGHT, activations[name])
    return "fp8", scheme, "", {"storage": "quant_method", "scheme": "activation_scheme"}, ignore


_MODELOPT_ALGORITHMS = {
    "FP8": Scheme(FP8_TENSOR_WEIGHT, FP8_TENSOR_STATIC),
    "NVFP4": Scheme(NVFP4, NVFP4_ACT),
    "NVFP4_AWQ": Scheme(NVFP4, NVFP4_ACT),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(
        WeightFormat("fp8", 8, (1, FULL), "F32"), ActFormat("fp8", 8, (1, FULL))
    ),
    "FP8_PB_WO": Scheme(WeightFormat("fp8", 8, (128, 128), "F32"), ActFormat("fp8", 8, (1, 128))),
    "W4A16_NVFP4": Scheme(NVFP4),
    "MXFP8": Scheme(MXFP8, MXFP8_ACT),
    "MXFP4": Scheme(MXFP4),
    "W4A16_MXFP4": Scheme(MXFP4),
}


def modelopt_scheme(name: object, key: str) -> Scheme:
    """The scheme that ModelOpt calls `name`; CheckpointError, naming `key`, for another word."""
    if not isinstance(name, str) or name.upper() not in _MODELOPT_ALGORITHMS:
        raise _refuse(key, f"one of {', '.join(_MODELOPT_ALGORITHMS)}", name)
    return _MODELOPT_ALGORITHMS[name.upper()]


def _modelopt(config: Config, model_type: str) -> Parsed:
    inner = _mapping(config, "quantization") or config
    ignore = _names(inner, "ignore", "exclude_modules")
    name, key = inner.get("quant_algo"), "quant_algo"
    if name is None and "quant_algo" in inner:
        return "plain", Scheme(BF16), "", {"storage": key, "scheme": key}, ignore
    if name == "MIXED_PRECISION":
        found = Counter(listed_algorithms(inner).values())
        if not found:
            raise _refuse("quantized_layers", "an object that names the quant_algo of routed experts", None)
        name, key = found.most_common(1)[0][0], "quantized_layers"
    return "modelopt", modelopt_scheme(name, key), "", {"storage": "quant_method", "scheme": key}, ignore


def listed_algorithms(config: Config) -> dict[str, str]:
    """ModelOpt's name of the format of each module of routed experts, where the config lists modules."""
    return {
        module: str(entry.get("quant_algo"))
        for module, entry in _mapping(config, "quantized_layers").items()
        if isinstance(entry, Mapping) and is_expert_rule(module)
    }


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
    groups = _mapping(config, "config_groups")
    usable = {name: group for name, group in groups.items() if isinstance(group, Mapping)}
    if not usable or len(usable) != len(groups):
        raise _refuse("config_groups", "an object with at least one group", config.get("config_groups"))

    def rank(item: tuple[str, Config]) -> int:
        targets = _names(item[1], "targets")
        return 0 if any(is_expert_rule(target) for target in targets) else 1 if "Linear" in targets else 2

    return min(usable.items(), key=rank)


def _compressed(config: Config, model_type: str) -> Parsed:
    name, group = _compressed_group(config)
    where = f"config_groups.{name}"
    order = _mapping(group, "weights").get("actorder")
    if isinstance(order, (list, dict)) or order not in _ACT_ORDERS:
        raise _refuse(f"{where}.weights.actorder", "null, 'weight', 'static', 'group' or 'dynamic'", order)
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
        _names(config, "ignore"),
    )


def _states_act(config: Config) -> bool:
    """False for groups of compressed-tensors in which the key of activations is missing."""
    if config.get("quant_method") != "compressed-tensors":
        return True
    return "input_activations" in _compressed_group(config)[1]


def group_scheme(group: Config, where: str) -> Scheme:
    """The scheme of one of compressed-tensors' config_groups; CheckpointError, naming `where` it stands."""
    weights, inputs = _mapping(group, "weights"), _mapping(group, "input_activations")
    return Scheme(_compressed_weight(weights, f"{where}.weights."), _compressed_act(inputs, where))


def _blocks(spec: Config, where: str) -> tuple[int, int]:
    strategy = spec.get("strategy")
    if strategy is None:
        strategy = "group" if spec.get("group_size") else "tensor"
    if strategy in ("group", "tensor_group"):
        return 1, _group(spec, "group_size", where)
    if strategy == "block":
        return _pair(spec, "block_structure", where)
    shapes = {"channel": (1, FULL), "token": (1, FULL), "tensor": (FULL, FULL)}
    if strategy not in shapes:
        raise _refuse(f"{where}strategy", "tensor, channel, token, group, tensor_group or block", strategy)
    return shapes[strategy]


def _compressed_weight(spec: Config, where: str) -> WeightFormat:
    bits, kind = _integer(spec, "num_bits", where), spec.get("type", "int")
    block = _blocks(spec, where)
    if kind == "int" and bits in (4, 8) and block[0] == 1:
        return int_format(bits, block[1], zero_point=spec.get("symmetric") is False)
    if (kind, bits) == ("float", 4):
        return _float4(spec, block, where)
    if (kind, bits) == ("float", 8):
        return MXFP8 if block == (1, 32) else WeightFormat("fp8", 8, block, "F32")
    raise _refuse(f"{where}type", "int (4 or 8 bits, groups or channels) or float (4 or 8 bits)", kind)


def _float4(spec: Config, block: tuple[int, int], where: str) -> WeightFormat:
    formats = {(1, 32): MXFP4, (1, 16): NVFP4}
    if block not in formats:
        raise _refuse(f"{where}group_size", "32 (MXFP4) or 16 (NVFP4)", block[1])
    return formats[block]


def _compressed_act(spec: Config, where: str) -> ActFormat:
    if not spec:
        return A16
    bits, kind = _integer(spec, "num_bits", f"{where}.input_activations."), spec.get("type", "int")
    if bits == 16:
        return A16
    block = _blocks(spec, f"{where}.input_activations.")
    names = {
        ("float", 8, (1, 32)): MXFP8_ACT,
        ("float", 4, (1, 32)): MXFP4_ACT,
        ("float", 4, (1, 16)): NVFP4_ACT,
    }
    if (kind, bits, block) in names:
        return names[kind, bits, block]
    if bits != 8 or kind not in ("int", "float"):
        raise _refuse(f"{where}.input_activations.num_bits", "8, or 4-bit floats in groups of 16 or 32", bits)
    return ActFormat({"int": "int8", "float": "fp8"}[kind], 8, block, bool(spec.get("dynamic", False)))


def _lists_experts(modules: object) -> bool:
    """True when routed experts are on GPTQ's list of what to quantize, or there is none."""
    if not isinstance(modules, list) or not modules:
        return True
    flat = [name for entry in modules for name in (entry if isinstance(entry, list) else [entry])]
    return any(isinstance(name, str) and is_expert_rule(name) for name in flat)


def _gptq(config: Config, model_type: str) -> Parsed:
    rules = _mapping(config, "dynamic")
    ignore = tuple(name[2:] for name in rules if name.startswith("-:"))
    for name, rule in rules.items():
        if not name.startswith("-:") and is_expert_rule(name) and isinstance(rule, Mapping):
            config = {**config, **rule}
    if not _lists_experts(config.get("modules_in_block_to_quantize")):
        key = "modules_in_block_to_quantize"
        return "plain", Scheme(BF16), "", {"storage": key, "scheme": key}, ignore
    bits = _integer(config, "bits", "")
    if bits not in (4, 8):
        raise _refuse("bits", "4 or 8", bits)
    group = _group(config, "group_size", "", FULL)
    weight = int_format(bits, group, "F16", zero_point=config.get("sym", True) is False)
    # With one group per column the permuted order changes nothing.
    order = "group" if config.get("desc_act") and group != FULL else ""
    keys = {"storage": "quant_method", "scheme": "bits", "act_order": "desc_act"}
    return "gptq", Scheme(weight), order, keys, ignore + _names(config, "modules_to_not_convert")


def _awq(config: Config, model_type: str) -> Parsed:
    bits = _integer(config, "bits" if "bits" in config else "w_bit", "")
    if bits not in (4, 8):
        raise _refuse("bits", "4 or 8", bits)
    group = _group(config, "group_size" if "group_size" in config else "q_group_size", "", FULL)
    weight = int_format(bits, group, "F16", zero_point=config.get("zero_point", True) is True)
    keys = {"storage": "quant_method", "scheme": "bits"}
    return "awq", Scheme(weight), "", keys, _names(config, "modules_to_not_convert")


def _quark(config: Config, model_type: str) -> Parsed:
    chosen, where = _mapping(config, "global_quant_config"), "global_quant_config"
    for name, rule in _mapping(config, "layer_quant_config").items():
        if is_expert_rule(name) and isinstance(rule, Mapping):
            chosen, where = rule, f"layer_quant_config.{name}"
    keys = {"storage": "quant_method", "scheme": where}
    return "quark", quark_scheme(chosen, where), "", keys, _names(config, "exclude")


def quark_scheme(rule: Config, where: str) -> Scheme:
    """The scheme of one of Quark's rules; CheckpointError, naming `where` it stands."""
    weight, act = _quark_spec(rule, "weight"), _quark_spec(rule, "input_tensors")
    return Scheme(_quark_weight(weight, where), _quark_act(act, where))


def _quark_spec(rule: Config, key: str) -> Config:
    """One tensor's format; of several that it went through, the last, which is what is stored."""
    found = rule.get(key)
    if isinstance(found, list) and found and isinstance(found[-1], Mapping):
        return dict(found[-1])
    return _mapping(rule, key)


def _quark_block(spec: Config, where: str) -> tuple[int, int]:
    shapes = {"per_tensor": (FULL, FULL), "per_channel": (1, FULL)}
    kind = spec.get("qscheme")
    if kind == "per_group":
        return 1, _group(spec, "group_size", where)
    if kind == "per_block":
        return _pair(spec, "block_size", where)
    if kind not in shapes:
        raise _refuse(f"{where}qscheme", "per_tensor, per_channel, per_group or per_block", kind)
    return shapes[kind]


def _quark_weight(spec: Config, where: str) -> WeightFormat:
    if not spec:
        raise _refuse(f"{where}.weight", "a weight format", None)
    block = _quark_block(spec, f"{where}.weight.")
    formats = {
        ("fp4", (1, 32)): MXFP4,
        ("fp8_e4m3", (1, 32)): MXFP8,
        ("int4", block): int_format(4, block[1], "F32"),
        ("int8", block): int_format(8, block[1], "F32"),
        ("fp8_e4m3", (FULL, FULL)): FP8_TENSOR_WEIGHT,
        ("fp8_e4m3", (1, FULL)): WeightFormat("fp8", 8, (1, FULL), "F32"),
        **({("fp8_e4m3", block): WeightFormat("fp8", 8, block, "F32")} if block[0] > 1 else {}),
    }
    key = (str(spec.get("dtype")), block)
    if key not in formats:
        raise _refuse(f"{where}.weight.dtype", "fp4 (groups of 32), fp8_e4m3, int4 or int8", key[0])
    return formats[key]


def _quark_act(spec: Config, where: str) -> ActFormat:
    if not spec:
        return A16
    block, dynamic = _quark_block(spec, f"{where}.input_tensors."), bool(spec.get("is_dynamic"))
    kinds = {"fp4": ("mxfp4", 4), "fp8_e4m3": ("fp8", 8), "int8": ("int8", 8)}
    kind = str(spec.get("dtype"))
    if kind not in kinds or (kind == "fp4" and block != (1, 32)):
        raise _refuse(f"{where}.input_tensors.dtype", "fp4 in groups of 32, fp8_e4m3 or int8", kind)
    name, bits = kinds[kind]
    return ActFormat("mxfp8" if (name, block) == ("fp8", (1, 32)) else name, bits, block, dynamic)


def _auto_round(config: Config, model_type: str) -> Parsed:
    """AutoRound packs as one of the two others, and says as which."""
    return (_awq if "awq" in str(config.get("packing_format")) else _gptq)(config, model_type)


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
KNOWN_METHODS = tuple(sorted(_METHODS))
"""The `quant_method` names that `parse_quantization` reads."""
