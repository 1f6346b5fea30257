"""How expert tensors are named and shaped: one table row per storage, one list of names per role.

The next storage or naming is a new row here; nothing else asks for a tensor's name or shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..schemes import FULL, Scheme


@dataclass(frozen=True, slots=True)
class Extent:
    """One axis of a shape: ``times * symbol / per``, rounded up; a plain number has no symbol."""

    symbol: str
    times: int = 1
    per: int | str = 1

    def __str__(self) -> str:
        """As `parse_shape` reads it."""
        if not self.symbol:
            return str(self.times)
        times = f"{self.times}*" if self.times != 1 else ""
        return f"{times}{self.symbol}{f'/{self.per}' if self.per != 1 else ''}"

    def value(self, sizes: Mapping[str, int]) -> int:
        """The axis's size, where `sizes` gives every symbol. KeyError for an unknown one."""
        if not self.symbol:
            return self.times
        per = sizes[self.per] if isinstance(self.per, str) else self.per
        if per == FULL:
            return 1
        return -(-sizes[self.symbol] * self.times // per)


_EXTENT = re.compile(r"(?:(?P<times>\d+)\*)?(?P<symbol>[a-z_]+)(?:/(?P<per>\w+))?|(?P<number>\d+)")


def parse_shape(text: str) -> tuple[Extent, ...]:
    """The axes that a shape such as ``"experts 2*intermediate hidden/32 16"`` spells.

    Raises ValueError when an axis is not ``[N*]symbol[/N or /symbol]`` or a number.
    """
    axes = []
    for word in text.split():
        match = _EXTENT.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no axis of a shape: expected [N*]symbol[/N], or a number")
        if match["number"]:
            axes.append(Extent("", int(match["number"])))
        else:
            per = match["per"] or "1"
            axes.append(Extent(match["symbol"], int(match["times"] or 1), int(per) if per.isdigit() else per))
    return tuple(axes)


@dataclass(frozen=True, slots=True)
class Stored:
    """One expert tensor: its role, the dtypes it may have and its shape."""

    role: str
    dtypes: tuple[str, ...]
    shape: tuple[Extent, ...]
    required: bool = True


@dataclass(frozen=True)
class Storage:
    """How one kind of checkpoint stores a layer's experts.

    Attributes:
        name: as `MoEProblem.storage`.
        weights: names of the weight formats that are stored this way.
        fused: one tensor holds all experts; otherwise each expert has its own.
        tensors: from a tensor's name after ``experts.`` or ``experts.{expert}.`` to what it is.
    """

    name: str
    weights: frozenset[str]
    fused: bool
    tensors: Mapping[str, Stored]

    def missing(self, leaves: frozenset[str]) -> list[str]:
        """Required tensors that `leaves` lacks."""
        return sorted(leaf for leaf, it in self.tensors.items() if it.required and leaf not in leaves)

    def unknown(self, leaves: frozenset[str]) -> list[str]:
        """Members of `leaves` that this storage has no place for."""
        return sorted(leaves - self.tensors.keys())


HEADER_DTYPES: Mapping[str, str] = {"BF16": "bf16", "F16": "fp16"}
"""`MoEProblem.dtype` by a 16-bit tensor's dtype."""

FLOATS = ("BF16", "F16", "F32")
INDICES = ("I32", "I64")

MATRICES: tuple[Mapping[str, str], ...] = (
    {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    {"w1": "w1", "w3": "w3", "w2": "w2"},
)
"""How checkpoints call the three matrices of one expert: gate, up and down."""

_SIDES: Mapping[str, Mapping[str, str]] = {
    "w1": {"n": "intermediate", "k": "hidden"},
    "w3": {"n": "intermediate", "k": "hidden"},
    "w2": {"n": "hidden", "k": "intermediate"},
}


@dataclass(frozen=True)
class _Suffix:
    """One tensor of a matrix ``[n, k]``: its shape names ``{n}`` and ``{k}``; the rest as in `Stored`."""

    role: str
    dtypes: tuple[str, ...]
    shape: str
    required: bool = True


def _per_expert(name: str, weights: set[str], suffixes: Mapping[str, _Suffix]) -> tuple[Storage, ...]:
    """One `Storage` per spelling of the matrices, each matrix with all of `suffixes`."""
    rows = []
    for names in MATRICES:
        tensors = {}
        for matrix, spelled in names.items():
            for suffix, it in suffixes.items():
                shape = parse_shape(it.shape.format(**_SIDES[matrix]))
                tensors[f"{spelled}.{suffix}"] = Stored(matrix + it.role, it.dtypes, shape, it.required)
        rows.append(Storage(name, frozenset(weights), False, tensors))
    return tuple(rows)


STORAGES: tuple[Storage, ...] = (
    Storage(
        "gpt_oss",
        frozenset({"mxfp4"}),
        True,
        {
            "gate_up_proj_blocks": Stored("w13", ("U8",), parse_shape("experts 2*intermediate hidden/32 16")),
            "gate_up_proj_scales": Stored(
                "w13_scale", ("U8", "F8_E8M0"), parse_shape("experts 2*intermediate hidden/32")
            ),
            "gate_up_proj_bias": Stored("w13_bias", FLOATS, parse_shape("experts 2*intermediate")),
            "down_proj_blocks": Stored("w2", ("U8",), parse_shape("experts hidden intermediate/32 16")),
            "down_proj_scales": Stored(
                "w2_scale", ("U8", "F8_E8M0"), parse_shape("experts hidden intermediate/32")
            ),
            "down_proj_bias": Stored("w2_bias", FLOATS, parse_shape("experts hidden")),
        },
    ),
    *_per_expert(
        "compressed-tensors",
        {"int4", "int8"},
        {
            "weight_packed": _Suffix("", ("I32",), "{n} {k}/pack"),
            "weight_scale": _Suffix("_scale", FLOATS, "{n} {k}/group"),
            "weight_shape": _Suffix("_shape", INDICES, "2"),
            "weight_zero_point": _Suffix("_zero", ("I32",), "{n}/pack {k}/group", required=False),
            "weight_g_idx": _Suffix("_order", INDICES, "{k}", required=False),
        },
    ),
    *_per_expert(
        "plain",
        {"bf16"},
        {
            "weight": _Suffix("", ("BF16", "F16"), "{n} {k}"),
            "bias": _Suffix("_bias", FLOATS, "{n}", required=False),
        },
    ),
)
"""Every storage whose tensors are understood."""


@dataclass(frozen=True)
class _Beside:
    """Names of the tensors beside the experts, relative to the module that holds them."""

    router: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "weight": ("gate.weight", "router.weight"),
            "bias": ("router.bias",),
            "correction_bias": ("gate.e_score_correction_bias", "e_score_correction_bias"),
        }
    )
    router_modules: tuple[str, ...] = ("gate", "router", "e_score_correction_bias")
    shared_modules: tuple[str, ...] = ("shared_experts", "shared_expert")
    shared_suffixes: Mapping[str, str] = field(
        default_factory=lambda: {
            "weight": "",
            "weight_packed": "",
            "weight_scale": "_scale",
            "weight_shape": "_shape",
            "weight_zero_point": "_zero",
            "bias": "_bias",
        }
    )


BESIDE = _Beside()
"""Router and shared experts. A tensor of these modules with another name is refused, not ignored."""

EXTRA_MODULES = ("mtp",)
"""Path components of layers that are not the main model's: multi-token prediction."""


def format_sizes(scheme: Scheme) -> dict[str, int]:
    """The symbols of shapes that the weight format gives.

    ``pack`` is weights in a 32-bit word, ``group`` weights per scale (`FULL`: one scale for the axis).
    """
    return {"pack": 32 // scheme.weight.bits, "group": scheme.weight.group or 1}
