"""Portable formats: their weight formats, containers, and the programs that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import UsageError
from .layouts import LayoutReader
from .schemes import (
    A16,
    BF16,
    FP8_BLOCK,
    FP8_CHANNEL,
    FULL,
    MXFP4,
    NVFP4,
    ActFormat,
    WeightFormat,
    act_format,
    int_format,
)

COMPRESSED, GPTQ, NATIVE = "compressed-tensors", "gptq", "native"
CONTAINERS = (COMPRESSED, GPTQ, NATIVE)
"""Conventions for a format's tensors and config, the default first."""


@dataclass(frozen=True, slots=True)
class PortableFormat:
    """A weight format that engines load from ordinary checkpoints.

    Attributes:
        weight: the format that weights are quantized to; an exact repack may keep a finer one.
        act: activation format, if the source does not state one.
        containers: `MoEProblem.storage` of the output and its readers, by container name.
    """

    weight: WeightFormat
    act: ActFormat
    containers: Mapping[str, tuple[str, tuple[LayoutReader, ...]]]

    @property
    def has_scale_rules(self) -> bool:
        """True when block scales are powers of two, for which several rules are in use."""
        return self.weight.number.byte_scale == "E8M0"

    @property
    def readers(self) -> tuple[LayoutReader, ...]:
        """All readers of any container."""
        return tuple(dict.fromkeys(r for _, readers in self.containers.values() for r in readers))


def _vllm(method: str) -> LayoutReader:
    return LayoutReader("vLLM", (method,))


_CT = (_vllm("compressed-tensors"), LayoutReader("compressed-tensors", ("decompress",)))
_CT_TRANSFORMERS = (*_CT, LayoutReader("transformers", ("CompressedTensorsConfig(dequantize=True)",)))
_GPTQ = ("gptq", (_vllm("gptq"), LayoutReader("GPTQModel", ("load",))))

PORTABLE: Mapping[str, PortableFormat] = {
    "mxfp4": PortableFormat(
        MXFP4,
        A16,
        {
            COMPRESSED: (COMPRESSED, _CT_TRANSFORMERS),
            NATIVE: ("mxfp4", (_vllm("mxfp4"), LayoutReader("transformers", ("Mxfp4Config (gpt-oss)",)))),
        },
    ),
    "int4-g32": PortableFormat(
        int_format(4, 32), A16, {COMPRESSED: (COMPRESSED, _CT_TRANSFORMERS), GPTQ: _GPTQ}
    ),
    "int4-g128": PortableFormat(
        int_format(4, 128), A16, {COMPRESSED: (COMPRESSED, _CT_TRANSFORMERS), GPTQ: _GPTQ}
    ),
    "int8": PortableFormat(
        int_format(8, FULL), A16, {COMPRESSED: (COMPRESSED, _CT_TRANSFORMERS), GPTQ: _GPTQ}
    ),
    "nvfp4": PortableFormat(
        NVFP4,
        A16,
        {
            COMPRESSED: (COMPRESSED, _CT),
            NATIVE: ("modelopt", (_vllm("modelopt"), LayoutReader("TensorRT-LLM", ("modelopt",)))),
        },
    ),
    "fp8-block": PortableFormat(
        FP8_BLOCK,
        act_format("fp8", (1, 128)),
        {
            COMPRESSED: (COMPRESSED, _CT),
            NATIVE: ("fp8", (_vllm("fp8"), LayoutReader("transformers", ("FineGrainedFP8Config",)))),
        },
    ),
    "fp8-channel": PortableFormat(
        FP8_CHANNEL,
        act_format("fp8", (1, FULL)),
        {COMPRESSED: (COMPRESSED, _CT_TRANSFORMERS)},
    ),
    "bf16": PortableFormat(
        BF16,
        A16,
        {NATIVE: ("plain", (_vllm("unquantized"), LayoutReader("transformers", ("from_pretrained",))))},
    ),
}
"""The closed list of portable formats of ``moectl convert --to``."""


TRANSFORMERS_PER_EXPERT = frozenset(
    (
        "afmoe",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "beam",
        "cohere2_moe",
        "deepseek_ocr2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "dots3_note",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm5_next",
        "glm5_next_text",
        "glm_moe_dsa",
        "hunyuan_v1_moe",
        "hy_v3",
        "jamba",
        "kimi_k25",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lfm2_moe",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl",
        "mistral_large4",
        "mistral_large4_text",
        "mixtral",
        "nemotron_h",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe",
        "qwen3_omni_moe_text",
        "qwen3_omni_moe_thinker",
        "qwen4_exp",
        "qwen4_exp_text",
        "solar_open",
    )
)
"""Model types for which transformers 5.23 merges tensors of single experts on loading."""

GPT_OSS_FORMATS = frozenset((("mxfp4", NATIVE), ("bf16", NATIVE)))
"""Formats and containers in which engines load gpt-oss: its own blocks, and fused 16-bit tensors."""

ENGINES = frozenset(("vLLM", "transformers", "TensorRT-LLM", "GPTQModel"))
"""Readers that build the model; the others only read tensors."""


TRANSFORMERS_FUSED = frozenset(
    (
        "dbrx",
        "gemma4",
        "gemma4_text",
        "gpt_oss",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "llama4",
        "llama4_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "step3p7",
    )
)
"""Model types whose 16-bit experts transformers 5.23 loads from tensors of all experts."""


def readers_of(
    name: str, container: str, model_types: frozenset[str], *, fused: bool
) -> tuple[LayoutReader, ...]:
    """Who loads a model with its experts in format `name` and this `container`.

    `model_types` are those of its config and of the text model in it; `fused` says whether one tensor holds
    all experts in the output.

    Example:
        >>> gpt_oss = frozenset(("gpt_oss",))
        >>> [str(reader) for reader in readers_of("nvfp4", "compressed-tensors", gpt_oss, fused=False)]
        ['compressed-tensors decompress']
    """
    if "gpt_oss" in model_types:
        left_out = frozenset[str]() if (name, container) in GPT_OSS_FORMATS else ENGINES
    elif fused:
        left_out = _without_transformers(name == "bf16" and model_types <= TRANSFORMERS_FUSED)
    else:
        # transformers reads MXFP4's native container of gpt-oss alone.
        known = model_types <= TRANSFORMERS_PER_EXPERT
        left_out = _without_transformers(known and (name, container) != ("mxfp4", NATIVE))
    readers = PORTABLE[name].containers[container][1]
    return tuple(reader for reader in readers if reader.engine not in left_out)


def _without_transformers(loads: bool) -> frozenset[str]:
    return frozenset[str]() if loads else frozenset(("transformers",))


def container_of(name: str, container: str | None, model_types: frozenset[str] = frozenset()) -> str:
    """The requested `container` of format `name`; for None the first that an engine loads this model from.

    Without such a one, the format's first. Raises UsageError if the requested one is not available.

    Example:
        >>> container_of("mxfp4", None), container_of("mxfp4", None, frozenset(("gpt_oss",)))
        ('compressed-tensors', 'native')
    """
    offered = PORTABLE[name].containers
    if container is None:
        loaded = (each for each in offered if is_loaded(readers_of(name, each, model_types, fused=False)))
        return next(loaded, next(iter(offered)))
    if container not in offered:
        raise UsageError(
            f"{name} is not written in a {container} container.", hint=f"Choose {' or '.join(offered)}."
        )
    return container


def is_loaded(readers: Iterable[LayoutReader]) -> bool:
    """Whether one of `readers` builds the model, and does not only read its tensors."""
    return any(reader.engine in ENGINES for reader in readers)
