"""Schemes from the spellings of each quantization tool: ModelOpt, compressed-tensors, Quark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import CheckpointError, UsageError
from ...files.strict_json import shown
from ...problem.schemes import (
    A16,
    FP8_ACT_TENSOR_STATIC,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    ActFormat,
    Scheme,
    WeightFormat,
    act_format,
    block_formats,
    float_format,
    int_format,
    weight_format,
)

Config = Mapping[str, Any]


_DIGITS = re.compile(r"-?[0-9]{1,9}")


def refuse(key: str, expected: str, got: object) -> CheckpointError:
    """The error for a key of the quantization config whose value is not what is `expected`."""
    return CheckpointError(
        f"quantization_config.{key} must be {expected}, got {shown(got)}.",
        hint="Check config.json, or ask for this format to be added.",
    )


def integer(config: Config, key: str, where: str, default: int | None = None) -> int:
    """The integer at `key`, also as a string; `default` when absent. CheckpointError for anything else."""
    value = config.get(key, default)
    if value is None:
        value = default
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(f"{where}{key}", "an integer", config.get(key))
    return value


def group_size(config: Config, key: str, where: str, default: int | None = None) -> int:
    """The group size at `key`: `FULL` or positive."""
    size = integer(config, key, where, default)
    if size != FULL and size < 1:
        raise refuse(f"{where}{key}", "-1 or a positive group size", size)
    return size


def word(config: Config, key: str, default: str = "") -> str:
    """The string at `key` in lower case; `default` when absent. Another value is returned as its repr, which
    matches no known word.
    """
    value = config.get(key)
    return default if value is None else value.lower() if isinstance(value, str) else shown(value)


def pair(config: Config, key: str, where: str) -> tuple[int, int]:
    """The two positive integers at `key`."""
    block = config.get(key)
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        raise refuse(f"{where}{key}", "two positive integers", block)
    if any(type(side) is not int or side < 1 for side in block):
        raise refuse(f"{where}{key}", "two positive integers", block)
    return block[0], block[1]


def mapping(config: Config, key: str) -> Config:
    """The object at `key`; empty when absent."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse(key, "an object", value)
    return value


def names(config: Config, *keys: str) -> tuple[str, ...]:
    """The module names in the lists at `keys`, concatenated."""
    modules: list[str] = []
    for key in keys:
        value = config.get(key) or ()
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise refuse(key, "a list of module names", value)
        modules += [str(name) for name in value]
    return tuple(modules)


_ONE_LAYER = re.compile(r"(?:layers|blocks)\W+\d")


def is_general_expert_rule(name: str) -> bool:
    """True when a module pattern names routed experts of all layers, not of one."""
    return is_expert_rule(name) and not _ONE_LAYER.search(name)


def is_expert_rule(name: str) -> bool:
    """True when a module pattern names routed experts of the main model."""
    text = name.lower()
    return "expert" in text and "shared" not in text and "mtp" not in text


MODELOPT_ALGORITHMS = {
    "FP8": Scheme(FP8_TENSOR, FP8_ACT_TENSOR_STATIC),
    "NVFP4": Scheme(NVFP4, NVFP4_ACT),
    "NVFP4_AWQ": Scheme(NVFP4, NVFP4_ACT),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(FP8_CHANNEL, act_format("fp8", (1, FULL))),
    "FP8_PB_WO": Scheme(FP8_BLOCK, act_format("fp8", (1, 128))),
    "W4A16_NVFP4": Scheme(NVFP4),
    "MXFP8": Scheme(MXFP8, MXFP8_ACT),
    "MXFP4": Scheme(MXFP4),
    "W4A16_MXFP4": Scheme(MXFP4),
}


def modelopt_scheme(name: object, key: str, entry: Config | None = None) -> Scheme:
    """The scheme of ModelOpt's algorithm `name`.

    Raises CheckpointError, which names `key`, for an unknown one, and for a `group_size` in `entry` that is
    not the one of the format.
    """
    if not isinstance(name, str) or not is_modelopt(name):
        raise refuse(key, f"one of {', '.join(MODELOPT_ALGORITHMS)}", name)
    scheme = MODELOPT_ALGORITHMS[name.upper()]
    if entry and scheme.weight.number.block and entry.get("group_size") is not None:
        check_group(scheme.weight, integer(entry, "group_size", ""), "group_size")
    return scheme


def is_modelopt(name: object) -> bool:
    """True for the name of one of ModelOpt's algorithms."""
    return isinstance(name, str) and name.upper() in MODELOPT_ALGORITHMS


def check_group(weight: WeightFormat, size: int, key: str) -> None:
    """CheckpointError, which asks for the right one of two, unless `size` is the format's group size."""
    if size == weight.group:
        return
    others = [
        number.name.upper()
        for number in block_formats()
        if number.bits == weight.bits and weight_format(number.name).group == size
    ]
    raise CheckpointError(
        f"quantization_config.{key} must be {weight.group} for {weight.name.upper()}, got {size}.",
        hint=f"Is the format {weight.name.upper()} or {' or '.join(others)}? Correct config.json."
        if others
        else f"Are the groups {weight.group} or {size} wide? No known tool writes {weight.name.upper()} with "
        f"{size}; correct config.json if it is mistaken.",
    )


def modelopt_algorithm(scheme: Scheme) -> str:
    """ModelOpt's first name for `scheme`; UsageError when it has none."""
    for name, known in MODELOPT_ALGORITHMS.items():
        if known == scheme:
            return name
    raise UsageError(f"ModelOpt has no name for {scheme}.", hint="Choose another --container.")


def group_scheme(group: Config, where: str) -> Scheme:
    """The scheme of a compressed-tensors config group at path `where`; CheckpointError if not understood."""
    weights, inputs = mapping(group, "weights"), mapping(group, "input_activations")
    weight = _compressed_weight(weights, f"{where}.weights.")
    stated = _BLOCK_FORMAT.match(word(group, "format"))
    named = weight_format(stated[1]) if stated else None
    if word(weights, "strategy") == "tensor_group" and weights.get("num_bits") == NVFP4.bits:
        named = NVFP4
    if named is not None and weight.name != named.name:
        check_group(named, weight.group, f"{where}.weights.group_size")
    return Scheme(weight, _compressed_act(inputs, where))


_BLOCK_FORMAT = re.compile(r"(nvfp4|mxfp4|mxfp8)-")
"""The number format in the name of a compressed-tensors `format` that has only one."""


def _blocks(spec: Config, where: str) -> tuple[int, int]:
    strategy = word(spec, "strategy", "group" if spec.get("group_size") else "tensor")
    if strategy in ("group", "tensor_group"):
        return 1, group_size(spec, "group_size", where)
    if strategy == "block":
        return pair(spec, "block_structure", where)
    shapes = {"channel": (1, FULL), "token": (1, FULL), "tensor": (FULL, FULL)}
    if strategy not in shapes:
        raise refuse(f"{where}strategy", "tensor, channel, token, group, tensor_group or block", strategy)
    return shapes[strategy]


def _compressed_weight(spec: Config, where: str) -> WeightFormat:
    bits, kind = integer(spec, "num_bits", where), word(spec, "type", "int")
    block = _blocks(spec, where)
    if kind == "int" and bits in (4, 8) and block[0] == 1:
        return int_format(bits, block[1], zero_point=spec.get("symmetric") is False)
    if kind == "float" and bits in (4, 8):
        weight = float_format(bits, block)
        if weight is None:
            raise refuse(f"{where}group_size", _spelled_groups(bits), block[1])
        return weight
    raise refuse(f"{where}type", "int (4 or 8 bits, groups or channels) or float (4 or 8 bits)", kind)


def _spelled_groups(bits: int) -> str:
    """The group sizes of the block floats with `bits` bits: ``32 (MXFP4) or 16 (NVFP4)``."""
    formats = [number for number in block_formats() if number.bits == bits and not number.grid.integer]
    return " or ".join(f"{weight_format(number.name).group} ({number.name.upper()})" for number in formats)


def _compressed_act(spec: Config, where: str) -> ActFormat:
    if not spec:
        return A16
    bits, kind = integer(spec, "num_bits", f"{where}.input_activations."), word(spec, "type", "int")
    if bits == 16:
        return A16
    block = _blocks(spec, f"{where}.input_activations.")
    weight = float_format(bits, block) if kind == "float" else None
    if weight is not None and weight.number.block:
        return act_format(weight.name)
    if bits != 8 or kind not in ("int", "float"):
        raise refuse(f"{where}.input_activations.num_bits", "8, or 4-bit floats in groups of 16 or 32", bits)
    return act_format({"int": "int8", "float": "fp8"}[kind], block, bool(spec.get("dynamic", False)))


def quark_scheme(rule: Config, where: str) -> Scheme:
    """The scheme of a Quark rule at path `where`; CheckpointError if it is not understood."""
    weight, act = _quark_spec(rule, "weight"), _quark_spec(rule, "input_tensors")
    return Scheme(_quark_weight(weight, where), _quark_act(act, where))


def _quark_spec(rule: Config, key: str) -> Config:
    """One tensor's format; the last of a list of stages, which is the one that is stored."""
    stages = rule.get(key)
    if isinstance(stages, list) and stages and isinstance(stages[-1], Mapping):
        return dict(stages[-1])
    return mapping(rule, key)


def _quark_block(spec: Config, where: str) -> tuple[int, int]:
    shapes = {"per_tensor": (FULL, FULL), "per_channel": (1, FULL)}
    kind = word(spec, "qscheme")
    if kind == "per_group":
        return 1, group_size(spec, "group_size", where)
    if kind == "per_block":
        return pair(spec, "block_size", where)
    if kind not in shapes:
        raise refuse(f"{where}qscheme", "per_tensor, per_channel, per_group or per_block", kind)
    return shapes[kind]


def _quark_weight(spec: Config, where: str) -> WeightFormat:
    if not spec:
        raise refuse(f"{where}.weight", "a weight format", None)
    block = _quark_block(spec, f"{where}.weight.")
    formats = {
        ("fp4", (1, 32)): MXFP4,
        ("fp8_e4m3", (1, 32)): MXFP8,
        ("int4", block): int_format(4, block[1], "F32"),
        ("int8", block): int_format(8, block[1], "F32"),
        ("fp8_e4m3", (FULL, FULL)): FP8_TENSOR,
        ("fp8_e4m3", (1, FULL)): FP8_CHANNEL,
        **({("fp8_e4m3", block): weight_format("fp8", block)} if block[0] > 1 else {}),
    }
    key = (word(spec, "dtype"), block)
    if key not in formats:
        raise refuse(f"{where}.weight.dtype", "fp4 (groups of 32), fp8_e4m3, int4 or int8", key[0])
    return formats[key]


def _quark_act(spec: Config, where: str) -> ActFormat:
    if not spec:
        return A16
    block, dynamic = _quark_block(spec, f"{where}.input_tensors."), bool(spec.get("is_dynamic"))
    kinds = {"fp4": "mxfp4", "fp8_e4m3": "fp8", "int8": "int8"}
    kind = word(spec, "dtype")
    if kind not in kinds or (kind == "fp4" and block != (1, 32)):
        raise refuse(f"{where}.input_tensors.dtype", "fp4 in groups of 32, fp8_e4m3 or int8", kind)
    return act_format("mxfp8" if (kind, block) == ("fp8_e4m3", (1, 32)) else kinds[kind], block, dynamic)
