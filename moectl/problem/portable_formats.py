"""Portable formats: their weight formats, containers, and the programs that read them."""

from __future__ import annotations

from collections.abc import Mapping
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


def container_of(name: str, container: str | None) -> str:
    """The requested `container` of format `name`, or its default; UsageError if it is not available."""
    offered = PORTABLE[name].containers
    chosen = container or next(iter(offered))
    if chosen not in offered:
        raise UsageError(
            f"{name} is not written in a {chosen} container.", hint=f"Choose {' or '.join(offered)}."
        )
    return chosen
