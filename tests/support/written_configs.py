"""Configs of quantized checkpoints as publishers write them: families x methods x exclusions x dialects.

Each says what was put in, so that a reader of configs can be held to it: the format of every layer's experts,
or words of the refusal. Nothing here reads a config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EXPERTS, TOP_K, LAYERS = 4, 2, 4

PLAIN = "plain bf16 a16"
"""The format of experts that a config excludes."""


@dataclass(frozen=True)
class WrittenFamily:
    """An architecture: its config without quantization, and the names of a layer's modules.

    Attributes:
        root: prefix of a layer's names, with ``{n}`` for its number.
        matrices: the experts' matrices after `root`, gate first and down last, with ``{e}`` for the expert.
        others: modules of a MoE layer that are not routed experts; the last is a block of its own.
        moe: the layers with experts.
        nested: path of the text model's config.
    """

    config: Mapping[str, Any]
    root: str
    matrices: tuple[str, ...]
    others: tuple[str, ...]
    moe: tuple[int, ...] = (0, 1, 2, 3)
    nested: tuple[str, ...] = ()

    def experts(self, layer: int) -> list[str]:
        """The full names of all matrices of one layer's experts."""
        names = [
            self.root.format(n=layer) + matrix.format(e=e) for e in range(EXPERTS) for matrix in self.matrices
        ]
        return list(dict.fromkeys(names))

    def around(self) -> list[str]:
        """Modules outside of the experts: the others of every MoE layer, MLPs of dense layers, the head."""
        others = [self.root.format(n=layer) + name for layer in self.moe for name in self.others]
        dense = [f"{self.root.format(n=n)}mlp.down_proj" for n in range(LAYERS) if n not in self.moe]
        return ["lm_head", *dense, *others]

    @property
    def stem(self) -> str:
        """The experts' module after `root`."""
        return self.matrices[0].partition(".{e}.")[0] if "{e}" in self.matrices[0] else self._common()

    def _common(self) -> str:
        return self.matrices[0].rpartition(".")[0]


_SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 512, "torch_dtype": "bfloat16", "hidden_act": "silu"}
_COUNTS = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 256}
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": 256}
_DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
}


def _numbered(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{{e}}.{name}" for name in names)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")
_SHARED = ("self_attn.q_proj", "mlp.gate", "mlp.shared_experts.up_proj", "mlp.shared_experts")

FAMILIES: Mapping[str, WrittenFamily] = {
    "deepseek-v3": WrittenFamily(
        {**_SIZES, **_DEEPSEEK, "model_type": "deepseek_v3", "first_k_dense_replace": 1},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        _SHARED,
        (1, 2, 3),
    ),
    "kimi-k2.5": WrittenFamily(
        {**_SIZES, **_DEEPSEEK, "model_type": "kimi_k2", "first_k_dense_replace": 1},
        "language_model.model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        _SHARED,
        (1, 2, 3),
        ("text_config",),
    ),
    "glm-4.7": WrittenFamily(
        {**_SIZES, **_DEEPSEEK, "model_type": "glm4_moe", "first_k_dense_replace": 2},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        _SHARED,
        (2, 3),
    ),
    "deepseek-v4": WrittenFamily(
        {
            **_SIZES,
            **_DEEPSEEK,
            "model_type": "deepseek_v4",
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": 10,
        },
        "layers.{n}.",
        _numbered("ffn.experts", *_MIXTRAL),
        ("attn.wq_a", "ffn.gate", "ffn.shared_experts.w1", "attn"),
    ),
    "kimi-k3": WrittenFamily(
        {
            **_SIZES,
            "model_type": "kimi_linear",
            "num_experts": EXPERTS,
            "num_experts_per_token": TOP_K,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.0,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
        },
        "language_model.model.layers.{n}.",
        _numbered("block_sparse_moe.experts", *_MIXTRAL),
        ("self_attn.q_proj", "block_sparse_moe.gate", "block_sparse_moe.shared_experts.up_proj", "mlp"),
        (1, 2, 3),
        ("text_config",),
    ),
    "qwen3": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "self_attn"),
    ),
    "qwen3.5": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 256},
        "model.language_model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("linear_attn.out_proj", "mlp.gate", "mlp.shared_expert.up_proj", "mlp.shared_expert"),
        nested=("text_config",),
    ),
    "qwen3-omni": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "qwen3_omni_moe_text", "norm_topk_prob": True},
        "thinker.model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "self_attn"),
        nested=("thinker_config", "text_config"),
    ),
    "mixtral": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "mixtral"},
        "model.layers.{n}.",
        _numbered("block_sparse_moe.experts", *_MIXTRAL),
        ("self_attn.q_proj", "block_sparse_moe.gate", "self_attn"),
    ),
    "minimax-m2": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True},
        "model.layers.{n}.",
        _numbered("block_sparse_moe.experts", *_MIXTRAL),
        ("self_attn.q_proj", "block_sparse_moe.gate", "self_attn"),
    ),
    "llama4": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "llama4_text", "interleave_moe_layer_step": 1},
        "language_model.model.layers.{n}.",
        _numbered("feed_forward.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "feed_forward.router", "feed_forward.shared_expert.up_proj", "mlp"),
        nested=("text_config",),
    ),
    "gemma4": WrittenFamily(
        {
            **_SIZES,
            "model_type": "gemma4_text",
            "num_experts": EXPERTS,
            "top_k_experts": TOP_K,
            "moe_intermediate_size": 256,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "model.language_model.layers.{n}.",
        _numbered("experts", *_PROJECTIONS),
        ("self_attn.q_proj", "router.proj", "mlp.up_proj", "mlp"),
        nested=("text_config",),
    ),
    "step-3.5": WrittenFamily(
        {
            **_SIZES,
            "model_type": "step3p5",
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
            "moe_intermediate_size": 256,
            "moe_layers_enum": "1,2,3",
            "share_expert_dim": 256,
        },
        "model.layers.{n}.",
        ("moe.gate_proj", "moe.up_proj", "moe.down_proj"),
        ("self_attn.q_proj", "share_expert.up_proj", "mlp"),
        (1, 2, 3),
    ),
    "jamba": WrittenFamily(
        {
            **_SIZES,
            "model_type": "jamba",
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "intermediate_size": 256,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        "model.layers.{n}.",
        _numbered("feed_forward.experts", *_PROJECTIONS),
        ("mamba.in_proj", "feed_forward.router", "mamba"),
        (1, 3),
    ),
    "nemotron-h": WrittenFamily(
        {
            **_SIZES,
            **_DEEPSEEK,
            "model_type": "nemotron_h",
            "mlp_hidden_act": "relu2",
            "hybrid_override_pattern": "MEME",
        },
        "backbone.layers.{n}.",
        _numbered("mixer.experts", "up_proj", "down_proj"),
        ("mixer.gate", "mixer.shared_experts.up_proj", "mixer.shared_experts"),
        (1, 3),
    ),
    "granite": WrittenFamily(
        {**_SIZES, **_LOCAL, "model_type": "granitemoe"},
        "model.layers.{n}.",
        ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
        ("self_attn.q_proj", "block_sparse_moe.router.layer", "self_attn"),
    ),
    "ernie": WrittenFamily(
        {
            **_SIZES,
            "model_type": "ernie4_5_moe",
            "moe_num_experts": EXPERTS,
            "moe_k": TOP_K,
            "moe_intermediate_size": 256,
            "moe_layer_start_index": 1,
        },
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "mlp.shared_experts.up_proj", "mlp.shared_experts"),
        (1, 2, 3),
    ),
    "unknown": WrittenFamily(
        {**_SIZES, **_COUNTS, "model_type": "motif", "scoring_func": "softmax", "norm_topk_prob": True},
        "model.layers.{n}.",
        _numbered("mlp.experts", *_PROJECTIONS),
        ("self_attn.q_proj", "mlp.gate", "self_attn"),
    ),
}


# How each tool names modules in its lists.


def _full(names: Sequence[str]) -> list[str]:
    return list(names)


def _parents(names: Sequence[str]) -> list[str]:
    """The experts' modules instead of their matrices."""
    return list(dict.fromkeys(re.sub(r"(\.experts)\.\d+\..*", r"\1", name) for name in names))


def _globs(names: Sequence[str]) -> list[str]:
    return [f"{name}*" if ".experts" in name else name for name in _parents(names)]


def _regexes(names: Sequence[str]) -> list[str]:
    return [
        f"re:.*{re.escape(name.split('.', 1)[-1])}" + (".*" if ".experts" in name else "$")
        for name in _parents(names)
    ]


def _bare_regexes(names: Sequence[str]) -> list[str]:
    return [text.removeprefix("re:") for text in _regexes(names)]


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


_EMBEDDED = (_full, _parents, _globs)
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
        (_full, _parents),
    ),
    "fp8 static": WrittenMethod(
        {"quant_method": "fp8", "activation_scheme": "static"},
        "fp8 fp8 fp8",
        _under("ignored_layers"),
        (_full, _parents),
    ),
    "mxfp8": WrittenMethod(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "fp8 mxfp8 mxfp8",
        _under("ignored_layers"),
        (_full, _parents),
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
        (_full, _regexes),
        _second_group,
    ),
    "fp8 dynamic": WrittenMethod(
        {**_CT, "format": "float-quantized", "config_groups": _groups(_FP8, inputs=_FP8_TOKEN)},
        "compressed-tensors fp8 fp8",
        _under("ignore"),
        (_full, _regexes),
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
        (_full, _regexes),
        _second_group,
    ),
    "mxfp4 groups": WrittenMethod(
        {**_CT, "format": "mxfp4-pack-quantized", "config_groups": _groups(_MXFP4)},
        "compressed-tensors mxfp4 a16",
        _under("ignore"),
        (_full, _regexes),
        _second_group,
    ),
    "gptq": WrittenMethod(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
        "gptq int4 a16",
        _as_dynamic,
        (_bare_regexes,),
        _eight_bits,
        ("quantize_config.json", _same),
    ),
    "awq": WrittenMethod(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "awq int4 a16",
        _under("modules_to_not_convert"),
        (_full, _parents),
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
        (_full, _bare_regexes),
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
        (_full, _bare_regexes),
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
        (_full, _bare_regexes),
    ),
    "quark": WrittenMethod(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": _QUARK, "input_tensors": {**_QUARK, "is_dynamic": True}},
        },
        "quark mxfp4 mxfp4",
        _under("exclude"),
        (_full, _regexes),
        _quark_layer,
    ),
}


@dataclass(frozen=True)
class WrittenConfig:
    """One config, and what it says.

    Attributes:
        quantization: the quantization config alone, in its usual spelling.
        documents: separate files by name.
        answers: storage, weight and activation format by MoE layer; empty for a refusal.
        refusal: words of the error that the config deserves.
    """

    name: str
    family: WrittenFamily
    method: str
    config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, Any]]
    answers: Mapping[int, str] = field(default_factory=dict)
    refusal: str = ""


def _exclusions(
    family: WrittenFamily, spell: Spelling
) -> Iterator[tuple[str, list[str], Callable[[int], bool] | str]]:
    """What is left out: a name, the patterns, and the layers whose experts they mean, or a refusal."""
    last = family.moe[-1]
    around = family.around()
    yield "nothing", [], lambda layer: False
    yield "all around", spell(around), lambda layer: False
    yield "one layer's experts", spell([*around, *family.experts(last)]), lambda layer: layer == last
    first = family.moe[0]
    mtp = [f"mtp.layers.{first}.{matrix.format(e=e)}" for e in range(EXPERTS) for matrix in family.matrices]
    yield (
        "those of the MTP layer",
        spell(["lm_head", *mtp]) if spell is not _bare_regexes and spell is not _regexes else [],
        lambda layer: False,
    )
    if spell in (_full,):
        down = [
            name for name in family.experts(last) if name.endswith(family.matrices[-1].rpartition(".")[2])
        ]
        yield "down alone", spell(down), "must all have one format"


def _merge(config: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `more`; objects at the same key are joined, those of `more` first."""
    return {
        **config,
        **{
            key: {**value, **config[key]} if isinstance(value, dict) and key in config else value
            for key, value in more.items()
        },
    }


def _placed(
    family: WrittenFamily, method: WrittenMethod, quantization: dict[str, Any], dialect: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole config, with the quantization where `dialect` puts it, and separate files."""
    text: dict[str, Any] = dict(family.config)
    key = "compression_config" if dialect == "compression_config" else "quantization_config"
    documents: dict[str, Any] = {}
    if dialect in ("file", "file, empty beside"):
        assert method.file is not None
        documents[method.file[0]] = method.file[1](quantization)
        outer: dict[str, Any] = {key: {}} if dialect != "file" else {}
    elif dialect == "inner":
        text[key], outer = quantization, {}
    else:
        outer = {key: quantization}
    for name in reversed(family.nested):
        text = {name: text}
        if dialect == "middle" and name == family.nested[-1]:
            text, outer = {**text, **outer}, {}
    return {**({"architectures": ["Model"]} if family.nested else {}), **text, **outer}, documents


def _respelled(quantization: dict[str, Any], dialect: str) -> dict[str, Any]:
    changed = dict(quantization)
    if dialect == "upper case":
        changed["quant_method"] = changed["quant_method"].upper()
        for key in ("quant_algo", "activation_scheme", "data_type"):
            if key in changed:
                changed[key] = changed[key].swapcase()
    if dialect == "underscores":
        changed["quant_method"] = changed["quant_method"].replace("-", "_")
    if dialect == "strings":
        changed |= {key: str(changed[key]) for key in ("bits", "group_size") if key in changed}
    if dialect == "compression_config":
        return {"quantization_config": changed} if "format" in changed else changed
    return changed


def _dialects(family: WrittenFamily, method: WrittenMethod) -> list[str]:
    found = ["plain", "upper case", "underscores", "strings"]
    found += ["inner"] if family.nested else []
    found += ["middle"] if len(family.nested) > 1 else []
    found += ["file", "file, empty beside"] if method.file else []
    found += ["compression_config"] if "config_groups" in method.config else []
    return found


def written_configs() -> Iterator[WrittenConfig]:
    """Every family with every method: each exclusion in each language, in dialects that take turns."""
    turn = 0
    for family_name, family in FAMILIES.items():
        for method_name, method in METHODS.items():
            dialects = _dialects(family, method)
            for spell in method.spellings:
                for what, patterns, excluded in _exclusions(family, spell):
                    for overridden in (
                        (False, True) if method.override and what in ("nothing", "all around") else (False,)
                    ):
                        turn += 1
                        dialect = dialects[turn % len(dialects)]
                        quantization: dict[str, Any] = dict(method.config)
                        answers = dict.fromkeys(family.moe, method.answer)
                        if patterns:
                            method.exclude(quantization, patterns)
                        if overridden:
                            assert method.override is not None
                            more, answer = method.override(family, family.moe[-1])
                            quantization = _merge(quantization, more)
                            answers[family.moe[-1]] = answer
                        refusal = excluded if isinstance(excluded, str) else ""
                        if not isinstance(excluded, str):
                            answers |= {layer: PLAIN for layer in family.moe if excluded(layer)}
                        config, documents = _placed(
                            family, method, _respelled(quantization, dialect), dialect
                        )
                        spelled = spell.__name__.strip("_").replace("_", " ")
                        kind = f"{what}{', one layer apart' if overridden else ''}"
                        yield WrittenConfig(
                            f"{family_name}, {method_name}, {kind} as {spelled}, {dialect}",
                            family,
                            method_name,
                            config,
                            quantization,
                            documents,
                            {} if refusal else answers,
                            refusal,
                        )
