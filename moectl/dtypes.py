"""Element types, each with every spelling that files, configs and libraries have for it: needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: as safetensors headers spell it.
        bits: of one element.
        torch: the attribute of ``torch`` with the same bytes; empty where there is none.
        short: as `MoEProblem.dtype` and `MoEProblem.router_dtype` spell it; empty for what neither can be.
    """

    name: str
    bits: int
    torch: str = ""
    short: str = ""

    @property
    def config_names(self) -> tuple[str, ...]:
        """How a Hugging Face ``config.json`` spells it, with torch's name alone or after ``torch.``."""
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
"""Every safetensors dtype, in the order in which its own library sorts them: files are written in it."""

DTYPE_BITS: Mapping[str, int] = {name: dtype.bits for name, dtype in DTYPES.items()}
"""Bits per element of every safetensors dtype."""

SHORT_NAMES: Mapping[str, str] = {name: DTYPES[name].short for name in ("BF16", "F16", "F32")}
"""`MoEProblem.router_dtype` by a tensor's dtype; the first two may be the model's."""

MODEL_DTYPES: Mapping[str, str] = {SHORT_NAMES[name]: name for name in ("BF16", "F16")}
"""The safetensors dtype of a model's 16-bit numbers, by `MoEProblem.dtype`."""

CONFIG_DTYPES: Mapping[str, str] = {
    spelling: short
    for prefixed in (False, True)
    for short, name in MODEL_DTYPES.items()
    for spelling in (DTYPES[name].config_names[prefixed],)
}
"""`MoEProblem.dtype` by the config's spelling."""

WIDE_CONFIG_DTYPES = DTYPES["F32"].config_names
"""The config's spellings of a dtype that models are stored in and that engines round to 16 bits."""

ONE_BYTE = frozenset(name for name, dtype in DTYPES.items() if dtype.bits == 8 and name != "BOOL")
"""Dtypes whose tensors are read as bytes: what a tensor is for, not its dtype, says what they mean."""
