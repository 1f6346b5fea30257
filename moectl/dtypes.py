"""Element types, with their names in safetensors, torch and configs. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: the safetensors name.
        bits: bits per element.
        torch: the name in ``torch``; empty if there is no such dtype.
        short: value of `MoEProblem.dtype` and `MoEProblem.router_dtype`; empty if neither can have it.
    """

    name: str
    bits: int
    torch: str = ""
    short: str = ""

    @property
    def config_names(self) -> tuple[str, ...]:
        """Its names in a Hugging Face ``config.json``: torch's, with and without ``torch.``."""
        return (self.torch, f"torch.{self.torch}") if self.torch else ()


DTYPES: Mapping[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("BOOL", 8, "bool"),
        DType("F4", 4),
        DType("F6_E2M3", 6),
        DType("F6_E3M2", 6),
        DType("U8", 8, "uint8"),
        DType("I8", 8, "int8"),
        DType("F8_E5M2", 8, "float8_e5m2"),
        DType("F8_E4M3", 8, "float8_e4m3fn"),
        DType("F8_E8M0", 8, "float8_e8m0fnu"),
        DType("F8_E4M3FNUZ", 8),
        DType("F8_E5M2FNUZ", 8),
        DType("I16", 16, "int16"),
        DType("U16", 16, "uint16"),
        DType("F16", 16, "float16", "fp16"),
        DType("BF16", 16, "bfloat16", "bf16"),
        DType("I32", 32, "int32"),
        DType("U32", 32, "uint32"),
        DType("F32", 32, "float32", "fp32"),
        DType("C64", 64),
        DType("F64", 64, "float64"),
        DType("I64", 64, "int64"),
        DType("U64", 64, "uint64"),
    )
}
"""Every safetensors dtype, in the order in which the safetensors library sorts tensors in a file."""

DTYPE_BITS: Mapping[str, int] = {name: dtype.bits for name, dtype in DTYPES.items()}
"""Bits per element of every safetensors dtype."""

SHORT_NAMES: Mapping[str, str] = {name: DTYPES[name].short for name in ("BF16", "F16", "F32")}
"""`MoEProblem.router_dtype` by safetensors dtype; the first two are also values of `MoEProblem.dtype`."""

MODEL_DTYPES: Mapping[str, str] = {SHORT_NAMES[name]: name for name in ("BF16", "F16")}
"""The safetensors dtype by `MoEProblem.dtype`."""

CONFIG_DTYPES: Mapping[str, str] = {
    spelling: short
    for prefixed in (False, True)
    for short, name in MODEL_DTYPES.items()
    for spelling in (DTYPES[name].config_names[prefixed],)
}
"""`MoEProblem.dtype` by the name in the config."""

WIDE_CONFIG_DTYPES = DTYPES["F32"].config_names
"""Names in the config of FP32, which engines round to 16 bits."""

ONE_BYTE = frozenset(name for name, dtype in DTYPES.items() if dtype.bits == 8 and name != "BOOL")
"""8-bit dtypes, whose tensors are read as bytes; their meaning follows from the tensor's role."""
