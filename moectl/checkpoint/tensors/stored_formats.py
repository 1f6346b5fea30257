"""Number formats as checkpoints store them: the tensors of one matrix, their dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...problem.schemes import (
    A16,
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    NVFP4_ACT,
    ActFormat,
    WeightFormat,
    int_format,
)
from .shapes import SymbolicShape, parse_shape

FLOATS = ("BF16", "F16", "F32")
INDICES = ("I32", "I64")
E8M0 = ("U8", "F8_E8M0")
FP8 = ("F8_E4M3",)


@dataclass(frozen=True)
class Suffix:
    """One tensor of a matrix ``[n, k]``.

    Attributes:
        role: suffix of the matrix's role, such as ``_scale``.
        dtypes: allowed safetensors dtypes.
        shapes: allowed shapes in the symbols ``n`` and ``k``, the usual one first.
        required: False for tensors that some checkpoints leave out.
    """

    role: str
    dtypes: tuple[str, ...]
    shapes: tuple[SymbolicShape, ...]
    required: bool = True

    @property
    def scalar(self) -> bool:
        """True for a single number per matrix."""
        return () in self.shapes


@dataclass(frozen=True)
class StoredFormat:
    """One way to store a matrix.

    Attributes:
        storages: values of `MoEProblem.storage` that use it, the usual one first.
        weight: the weight format; a `SHOWN` side of its block is found from the shapes of the scales.
        suffixes: the tensors by name suffix.
        act: default activation format if no config states it.
        static: the same for checkpoints with activation scales.
        packing: layout of the numbers in the tensors: ``rows`` (codes or floats row by row), ``words``
            (32-bit words along a row), ``gptq``, ``awq``, ``signed`` (two's complement bytes), ``divisors``
            (rows, with global scales that divide), ``two_level``.
    """

    storages: tuple[str, ...]
    weight: WeightFormat
    suffixes: Mapping[str, Suffix]
    act: ActFormat = A16
    static: ActFormat | None = None
    packing: str = "rows"

    def stores(self, weight: WeightFormat) -> bool:
        """True when this format can store `weight`; any block size matches a `SHOWN` side."""
        sides = zip(self.weight.block, weight.block, strict=True)
        return (self.weight.name, self.weight.bits) == (weight.name, weight.bits) and all(
            own in (SHOWN, other) for own, other in sides
        )


SHOWN = -2
"""Placeholder for a side of a format's block that is found from the shapes of the scales."""


def _one(role: str, dtypes: tuple[str, ...], shape: str, required: bool = True) -> Suffix:
    return Suffix(role, dtypes, (parse_shape(shape),), required)


def _number(role: str, required: bool = True) -> Suffix:
    """One number per matrix, stored with shape [] or [1]."""
    return Suffix(role, FLOATS, (parse_shape(""), parse_shape("1")), required)


_BIAS = _one("_bias", FLOATS, "n", required=False)
_INPUT = _number("_input", required=False)
_INT8_ACT = ActFormat("int8", 8, (1, FULL))


def _int(bits: int) -> WeightFormat:
    return int_format(bits, SHOWN)


def _packed(bits: int) -> StoredFormat:
    return StoredFormat(
        ("compressed-tensors",),
        _int(bits),
        {
            "weight_packed": _one("", ("I32",), "n k/pack"),
            "weight_scale": _one("_scale", FLOATS, "n k/group"),
            "weight_shape": _one("_shape", INDICES, "2"),
            "weight_zero_point": _one("_zero", ("I32",), "n/pack k/group", required=False),
            "weight_g_idx": _one("_order", INDICES, "k", required=False),
            "bias": _BIAS,
        },
        packing="words",
    )


def _gptq(bits: int) -> StoredFormat:
    return StoredFormat(
        ("gptq",),
        _int(bits),
        {
            "qweight": _one("", ("I32",), "k/pack n"),
            "qzeros": _one("_zero", ("I32",), "k/group n/pack", required=False),
            "scales": _one("_scale", FLOATS, "k/group n"),
            "g_idx": _one("_order", INDICES, "k", required=False),
            "bias": _BIAS,
        },
        packing="gptq",
    )


def _awq(bits: int) -> StoredFormat:
    return StoredFormat(
        ("awq",),
        int_format(bits, SHOWN, zero_point=True),
        {
            "qweight": _one("", ("I32",), "k n/pack"),
            "qzeros": _one("_zero", ("I32",), "k/group n/pack", required=False),
            "scales": _one("_scale", FLOATS, "k/group n"),
            "bias": _BIAS,
        },
        packing="awq",
    )


def _fp8_block(scale: str, storages: tuple[str, ...]) -> StoredFormat:
    return StoredFormat(
        storages,
        WeightFormat("fp8", 8, (SHOWN, SHOWN), "F32"),
        {
            "weight": _one("", FP8, "n k"),
            scale: _one("_scale", ("F8_E8M0", *FLOATS), "n/rows k/group"),
            "bias": _BIAS,
        },
        FP8_ACT_GROUP_128,
    )


def _mxfp8(scale: str, storages: tuple[str, ...]) -> StoredFormat:
    return StoredFormat(
        storages,
        MXFP8,
        {
            "weight": _one("", FP8, "n k"),
            scale: _one("_scale", E8M0, "n k/32"),
            "bias": _BIAS,
        },
        MXFP8_ACT,
    )


def _mxfp4(weight: str, scale: str, storages: tuple[str, ...], dtype: str = "U8") -> StoredFormat:
    return StoredFormat(
        storages,
        MXFP4,
        {
            weight: _one("", (dtype,), "n k/2"),
            scale: _one("_scale", E8M0, "n k/32"),
            "bias": _BIAS,
            "input_scale": _INPUT,
        },
    )


def _nvfp4(weight: str, second: str, inputs: str, storage: str, packing: str = "rows") -> StoredFormat:
    return StoredFormat(
        (storage,),
        NVFP4,
        {
            weight: _one("", ("U8",), "n k/2"),
            "weight_scale": _one("_scale", FP8, "n k/16"),
            second: _number("_global"),
            inputs: _number("_input", required=False),
            "pre_quant_scale": _one("_prequant", FLOATS, "k", required=False),
            "bias": _BIAS,
        },
        static=NVFP4_ACT,
        packing=packing,
    )


_DENSE8 = ("compressed-tensors", "fp8", "modelopt", "quark")

FORMATS: tuple[StoredFormat, ...] = (
    _packed(4),
    _packed(8),
    StoredFormat(("plain",), BF16, {"weight": _one("", FLOATS, "n k"), "bias": _BIAS}),
    _mxfp8("weight_scale_inv", ("fp8",)),
    _mxfp8("weight_scale", ("modelopt", "compressed-tensors", "quark", "fp8")),
    StoredFormat(
        ("fp8", "modelopt", "compressed-tensors", "quark"),
        FP8_TENSOR,
        {
            "weight": _one("", FP8, "n k"),
            "weight_scale": _number("_scale"),
            "input_scale": _INPUT,
            "bias": _BIAS,
        },
        FP8_ACT_TENSOR,
        FP8_ACT_TENSOR_STATIC,
    ),
    StoredFormat(
        _DENSE8,
        WeightFormat("fp8", 8, (1, FULL), "F32"),
        {
            "weight": _one("", FP8, "n k"),
            "weight_scale": Suffix("_scale", FLOATS, (parse_shape("n 1"), parse_shape("n"))),
            "input_scale": _INPUT,
            "bias": _BIAS,
        },
        FP8_ACT_TOKEN,
    ),
    _fp8_block("weight_scale_inv", ("fp8",)),
    _fp8_block("weight_scale", ("compressed-tensors", "fp8", "modelopt", "quark")),
    _fp8_block("scale", ("fp8",)),
    _nvfp4("weight", "weight_scale_2", "input_scale", "modelopt"),
    _nvfp4("weight_packed", "weight_global_scale", "input_global_scale", "compressed-tensors", "divisors"),
    _mxfp4("weight", "weight_scale", ("quark", "modelopt", "mxfp4")),
    _mxfp4("weight_packed", "weight_scale", ("compressed-tensors",)),
    # DeepSeek-V4 stores packed pairs as signed bytes.
    _mxfp4("weight", "scale", ("mxfp4",), "I8"),
    StoredFormat(
        ("compressed-tensors", "quark"),
        int_format(8, FULL),
        {
            "weight": _one("", ("I8",), "n k"),
            "weight_scale": Suffix("_scale", FLOATS, (parse_shape("n 1"), parse_shape("n"))),
            "input_scale": _INPUT,
            "bias": _BIAS,
        },
        _INT8_ACT,
        packing="signed",
    ),
    StoredFormat(
        ("quark",),
        int_format(4, FULL),
        {
            "weight": _one("", ("I32", "U32"), "n k/8"),
            "weight_scale": _number("_global"),
            "weight_scale_2": Suffix("_scale", FLOATS, (parse_shape("n"), parse_shape("n 1"))),
            "input_scale": _INPUT,
            "bias": _BIAS,
        },
        FP8_ACT_TENSOR,
        FP8_ACT_TENSOR_STATIC,
        "two_level",
    ),
    _gptq(4),
    _gptq(8),
    _awq(4),
    _awq(8),
)
"""Every format; if several match the tensors, the config decides, else the first."""


def format_in(container: str, weight: WeightFormat) -> StoredFormat | None:
    """The format of `weight` where `MoEProblem.storage` is `container`; None if unsupported."""
    return next((form for form in FORMATS if container in form.storages and form.stores(weight)), None)
