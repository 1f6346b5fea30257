"""Quantization methods as tools write them into configs, and how each names modules that it leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .written_families import WrittenFamily

# How each tool names modules in its lists.


def full_names(names: Sequence[str]) -> list[str]:
    return list(names)


def _parents(names: Sequence[str]) -> list[str]:
    """The experts' modules instead of their matrices."""
    return list(dict.fromkeys(re.sub(r"(\.experts)\.\d+\..*", r"\1", name) for name in names))


def _globs(names: Sequence[str]) -> list[str]:
    return [f"{name}*" if ".experts" in name else name for name in _parents(names)]


def regexes(names: Sequence[str]) -> list[str]:
    return [
        f"re:.*{re.escape(name.split('.', 1)[-1])}" + (".*" if ".experts" in name else "$")
        for name in _parents(names)
    ]


def bare_regexes(names: Sequence[str]) -> list[str]:
    return [text.removeprefix("re:") for text in regexes(names)]


Spelling = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class WrittenMethod:
    """A quantization method: its config, the formats that it stands for, and how it names what it leaves out.

    Attributes:
        answer: storage, weight format and activation format of the experts.
        exclude: puts excluded modules into the config.
        spellings: the languages of its lists.
        override: another format in one layer, and its answer; None where there is no way to write it.
        file: separate file that may hold it instead, and its content.
    """

    config: Mapping[str, Any]
    answer: str
    exclude: Callable[[dict[str, Any], list[str]], None]
    spellings: tuple[Spelling, ...]
    override: Callable[[WrittenFamily, int], tuple[dict[str, Any], str]] | None = None
    file: tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]] | None = None


def _under(key: str) -> Callable[[dict[str, Any], list[str]], None]:
    def put(config: dict[str, Any], modules: list[str]) -> None:
        config[key] = [*config.get(key, ()), *modules]

    return put


def _as_dynamic(config: dict[str, Any], modules: list[str]) -> None:
    config["dynamic"] = {**{f"-:{text}": {} for text in modules}, **config.get("dynamic", {})}


def _as_exceptions(config: dict[str, Any], modules: list[str]) -> None:
    config["extra_config"] = {**config.get("extra_config", {}), **{name: {"bits": 16} for name in modules}}


def _groups(*weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        f"group_{n}": {"targets": ["Linear"], "weights": dict(weight), "input_activations": inputs}
        for n, weight in enumerate(weights)
    }


_CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}


def _layer_regex(family: WrittenFamily, layer: int) -> str:
    return rf".*layers\.{layer}\.{re.escape(family.stem)}.*"


def _second_group(family: WrittenFamily, layer: int) -> tuple[dict[str, Any], str]:
    group = {"targets": [f"re:{_layer_regex(family, layer)}"], "weights": _INT8, "input_activations": None}
    return {"config_groups": {"group_9": group}}, "compressed-tensors int8 a16"


def _eight_bits(family: WrittenFamily, layer: int) -> tuple[dict[str, Any], str]:
    return {"dynamic": {f"+:{_layer_regex(family, layer)}": {"bits": 8}}}, "gptq int8 a16"


def _eight_bits_here(family: WrittenFamily, layer: int) -> tuple[dict[str, Any], str]:
    return {"extra_config": {_layer_regex(family, layer): {"bits": 8}}}, "gptq int8 a16"


def _mxfp8_here(family: WrittenFamily, layer: int) -> tuple[dict[str, Any], str]:
    names = family.experts(layer)
    return {
        "extra_config": {name: {"bits": 8, "act_bits": 8} for name in names}
    }, "compressed-tensors mxfp8 mxfp8"


def _quark_layer(family: WrittenFamily, layer: int) -> tuple[dict[str, Any], str]:
    rule = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": None}
    return {"layer_quant_config": {f"*layers.{layer}.{family.stem}*": rule}}, "quark fp8 a16"


def _hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in config.items() if key not in ("quant_method", "ignore")}
    inner["exclude_modules"] = config.get("ignore", [])
    return {"producer": {"name": "modelopt", "version": "0.37.0"}, "quantization": inner}


def _old_awq(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "zero_point": config["zero_point"],
        "q_group_size": config["group_size"],
        "w_bit": config["bits"],
        "version": "GEMM",
        **{key: config[key] for key in ("modules_to_not_convert",) if key in config},
    }


def _same(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config)


_EMBEDDED = (full_names, _parents, _globs)
METHODS: Mapping[str, WrittenMethod] = {
    "fp8 blocks": WrittenMethod(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "fmt": "e4m3",
        },
        "fp8 fp8 fp8",
        _under("modules_to_not_convert"),
        (full_names, _parents),
    ),
    "fp8 static": WrittenMethod(
        {"quant_method": "fp8", "activation_scheme": "static"},
        "fp8 fp8 fp8",
        _under("ignored_layers"),
        (full_names, _parents),
    ),
    "mxfp8": WrittenMethod(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "fp8 mxfp8 mxfp8",
        _under("ignored_layers"),
        (full_names, _parents),
    ),
    "mxfp4": WrittenMethod(
        {"quant_method": "mxfp4"}, "mxfp4 mxfp4 a16", _under("modules_to_not_convert"), _EMBEDDED
    ),
    "modelopt fp8": WrittenMethod(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "modelopt fp8 fp8",
        _under("ignore"),
        _EMBEDDED,
        file=("hf_quant_config.json", _hf_quant_config),
    ),
    "modelopt nvfp4": WrittenMethod(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "modelopt nvfp4 nvfp4",
        _under("ignore"),
        _EMBEDDED,
        file=("hf_quant_config.json", _hf_quant_config),
    ),
    "int4 groups": WrittenMethod(
        {**_CT, "format": "pack-quantized", "config_groups": _groups(_INT4)},
        "compressed-tensors int4 a16",
        _under("ignore"),
        (full_names, regexes),
        _second_group,
    ),
    "fp8 dynamic": WrittenMethod(
        {**_CT, "format": "float-quantized", "config_groups": _groups(_FP8, inputs=_FP8_TOKEN)},
        "compressed-tensors fp8 fp8",
        _under("ignore"),
        (full_names, regexes),
        _second_group,
    ),
    "nvfp4 groups": WrittenMethod(
        {
            **_CT,
            "format": "nvfp4-pack-quantized",
            "config_groups": _groups(_NVFP4, inputs={**_NVFP4, "dynamic": "local"}),
        },
        "compressed-tensors nvfp4 nvfp4",
        _under("ignore"),
        (full_names, regexes),
        _second_group,
    ),
    "mxfp4 groups": WrittenMethod(
        {**_CT, "format": "mxfp4-pack-quantized", "config_groups": _groups(_MXFP4)},
        "compressed-tensors mxfp4 a16",
        _under("ignore"),
        (full_names, regexes),
        _second_group,
    ),
    "gptq": WrittenMethod(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
        "gptq int4 a16",
        _as_dynamic,
        (bare_regexes,),
        _eight_bits,
        ("quantize_config.json", _same),
    ),
    "awq": WrittenMethod(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "awq int4 a16",
        _under("modules_to_not_convert"),
        (full_names, _parents),
        file=("quant_config.json", _old_awq),
    ),
    "auto-round": WrittenMethod(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
        },
        "gptq int4 a16",
        _as_exceptions,
        (full_names, bare_regexes),
        _eight_bits_here,
        ("quantization_config.json", _same),
    ),
    "auto-round mx_fp": WrittenMethod(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "data_type": "mx_fp",
            "act_bits": 4,
            "act_data_type": "mx_fp_rceil",
            "packing_format": "auto_round:llm_compressor",
        },
        "compressed-tensors mxfp4 mxfp4",
        _as_exceptions,
        (full_names, bare_regexes),
        _mxfp8_here,
    ),
    "auto-round nv_fp": WrittenMethod(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 16,
            "data_type": "nv_fp",
            "act_bits": 4,
            "act_data_type": "nv_fp4_with_static_gs",
            "packing_format": "auto_round:llm_compressor",
        },
        "compressed-tensors nvfp4 nvfp4",
        _as_exceptions,
        (full_names, bare_regexes),
    ),
    "quark": WrittenMethod(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": _QUARK, "input_tensors": {**_QUARK, "is_dynamic": True}},
        },
        "quark mxfp4 mxfp4",
        _under("exclude"),
        (full_names, regexes),
        _quark_layer,
    ),
}
