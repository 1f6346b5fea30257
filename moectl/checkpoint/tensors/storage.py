"""How expert tensors are named and shaped: formats, arrangements, and every storage of the two together.

A format says which tensors a matrix ``[n, k]`` has; an arrangement how a layer's matrices are spelled and
laid out. The next of either is a new row; nothing else asks for a tensor's name or shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...schemes import FULL, Scheme, WeightFormat
from .stored_formats import FORMATS, GPT_OSS, SHOWN, Format, Suffix


@dataclass(frozen=True, slots=True)
class Extent:
    """One axis of a shape: ``times * symbol / per``, rounded up; a plain number has no symbol."""

    symbol: str
    times: int | str = 1
    per: int | str = 1

    def __str__(self) -> str:
        """As `parse_shape` reads it."""
        if not self.symbol:
            return str(self.times)
        times = f"{self.times}*" if self.times != 1 else ""
        return f"{times}{self.symbol}{f'/{self.per}' if self.per != 1 else ''}"

    def value(self, sizes: Mapping[str, int]) -> int:
        """The axis's size, where `sizes` gives every symbol. KeyError for an unknown one."""
        times = sizes[self.times] if isinstance(self.times, str) else self.times
        if not self.symbol:
            return times
        per = sizes[self.per] if isinstance(self.per, str) else self.per
        if per == FULL:
            return 1
        return -(-sizes[self.symbol] * times // per)


Shape = tuple[Extent, ...]

_EXTENT = re.compile(r"(?:(?P<times>\w+)\*)?(?P<symbol>[a-z_]+)(?:/(?P<per>\w+))?|(?P<number>\d+)")


def parse_shape(text: str) -> Shape:
    """The axes that a shape such as ``"experts 2*intermediate hidden/32 16"`` spells.

    Raises ValueError when an axis is not ``[N or symbol*]symbol[/N or /symbol]`` or a number.
    """
    axes = []
    for word in text.split():
        match = _EXTENT.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no axis of a shape: expected [N*]symbol[/N], or a number")
        if match["number"]:
            axes.append(Extent("", int(match["number"])))
        else:
            axes.append(Extent(match["symbol"], _number(match["times"]), _number(match["per"])))
    return tuple(axes)


def _number(text: str | None) -> int | str:
    return int(text or 1) if not text or text.isdigit() else text


@dataclass(frozen=True, slots=True)
class Stored:
    """One expert tensor: its role, the dtypes it may have, its shape and others that it may have instead."""

    role: str
    dtypes: tuple[str, ...]
    shape: Shape
    required: bool = True
    others: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Storage:
    """How one kind of checkpoint stores a layer's experts.

    Attributes:
        format: how each matrix is stored.
        arrangement: ``per_expert``; ``fused`` with all experts in one tensor, rows first;
            ``fused_transposed``; ``fused_apart`` with gate and up in tensors of their own;
            ``fused_blocks`` (gpt-oss); ``flat`` with experts and rows in one axis.
        tensors: from a tensor's name after its expert, or after the module of all, to what it is.
    """

    format: Format
    arrangement: str
    tensors: Mapping[str, Stored]

    @property
    def fused(self) -> bool:
        """True when one tensor holds all experts."""
        return self.arrangement != PER_EXPERT

    @property
    def weight(self) -> WeightFormat:
        return self.format.weight

    def name(self, declared: str) -> str:
        """`MoEProblem.storage`: the declared one where its checkpoints have this format, else the usual."""
        return declared if declared in self.format.storages else self.format.storages[0]

    @property
    def gated(self) -> bool:
        """True when experts have a gate beside the matrix that it multiplies."""
        return any(stored.role in ("w13", "w3") for stored in self.tensors.values())

    def missing(self, leaves: frozenset[str]) -> list[str]:
        """Required tensors that `leaves` lacks."""
        return sorted(leaf for leaf, it in self.tensors.items() if it.required and leaf not in leaves)

    def unknown(self, leaves: frozenset[str]) -> list[str]:
        """Members of `leaves` that this storage has no place for."""
        return sorted(leaves - self.tensors.keys())


PER_EXPERT = "per_expert"

HEADER_DTYPES: Mapping[str, str] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
"""`MoEProblem.router_dtype` by a tensor's dtype; the first two may be the model's."""

_N = {"w1": "intermediate", "w3": "intermediate", "w13": "2*intermediate", "w2": "hidden"}
_K = {"w1": "hidden", "w3": "hidden", "w13": "hidden", "w2": "intermediate"}


@dataclass(frozen=True)
class Arrangement:
    """How a layer's matrices are spelled and laid out.

    Attributes:
        name: as `Storage.arrangement`.
        matrices: the name of each role's matrix.
        joint: what stands between a matrix's name and the suffix: ``.`` or ``_``; with ``_`` the
            weight itself has no suffix.
        short: suffixes lose their ``weight_``.
        outer: axes before those of one expert's matrix.
        transposed: axes of the matrix in reverse order.
        only: formats that are stored so; empty for all.
    """

    name: str
    matrices: Mapping[str, str]
    joint: str = "."
    short: bool = False
    outer: str = ""
    transposed: bool = False
    only: tuple[str, ...] = ()

    def leaf(self, matrix: str, suffix: str) -> str:
        """The tensor's name after its expert, or after the module of all experts."""
        if self.joint == "_" and suffix == "weight":
            return matrix
        return matrix + self.joint + (suffix.removeprefix("weight_") if self.short else suffix)

    def shape(self, role: str, text: str) -> str:
        """The shape that a suffix's `text` is in this arrangement."""
        axes = text.format(n=_N[role], k=_K[role]).split()
        return " ".join((self.outer, *(reversed(axes) if self.transposed else axes))).strip()

    def stored(self, role: str, suffix: Suffix) -> Stored:
        """What one suffix of one matrix is."""
        shapes = [self.shape(role, text) for text in suffix.shapes]
        if self.outer and suffix.scalar:
            shapes += ["", "1", "experts 1", "experts 1 1"] + (["experts 2"] if role == "w13" else [])
        first, *others = dict.fromkeys(shapes)
        parsed = tuple(map(parse_shape, others))
        return Stored(role + suffix.role, suffix.dtypes, parse_shape(first), suffix.required, parsed)

    def of(self, form: Format) -> Storage:
        """The storage of `form` in this arrangement."""
        tensors = {
            self.leaf(spelled, name): self.stored(role, suffix)
            for role, spelled in self.matrices.items()
            for name, suffix in form.suffixes.items()
        }
        return Storage(form, self.name, tensors)


_PROJ = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_UNGATED = {"w1": "up_proj", "w2": "down_proj"}
_TOGETHER = {"w13": "gate_up_proj", "w2": "down_proj"}

ARRANGEMENTS: tuple[Arrangement, ...] = (
    Arrangement(PER_EXPERT, _PROJ),
    Arrangement(PER_EXPERT, {"w1": "w1", "w3": "w3", "w2": "w2"}),
    Arrangement(PER_EXPERT, _UNGATED),
    Arrangement(PER_EXPERT, _TOGETHER),
    Arrangement("fused", _TOGETHER, "_", outer="experts"),
    Arrangement("fused", _TOGETHER, "_", short=True, outer="experts"),
    Arrangement("fused", _TOGETHER, outer="experts"),
    Arrangement("fused", {"w13": "input_linear", "w2": "output_linear"}, outer="experts"),
    Arrangement("fused_transposed", _TOGETHER, "_", outer="experts", transposed=True),
    Arrangement("fused_transposed", _TOGETHER, "_", short=True, outer="experts", transposed=True),
    Arrangement("fused_apart", _PROJ, outer="experts"),
    Arrangement("fused_apart", _PROJ, "_", outer="experts"),
    Arrangement("fused_apart", _UNGATED, outer="experts"),
    Arrangement("fused_apart", _UNGATED, "_", outer="experts"),
)
"""Every arrangement but gpt-oss' and DBRX's, which have shapes of their own."""

SPELLED: Mapping[str, str] = {
    name: role for it in reversed(ARRANGEMENTS) for role, name in it.matrices.items()
}
"""The role of a matrix by its name, whatever the arrangement; `up_proj` is the gated experts' one."""


def _storages() -> Iterator[Storage]:
    blocks = {
        leaf: Stored(stored[0], stored[1], parse_shape(stored[2])) for leaf, stored in GPT_OSS.tensors.items()
    }
    yield Storage(GPT_OSS.format, "fused_blocks", blocks)
    flat = parse_shape("experts*intermediate hidden")
    plain = next(form for form in FORMATS if form.weight.name == "bf16")
    names = {"w1": "mlp.w1", "w3": "mlp.v1", "w2": "mlp.w2"}
    dtypes = plain.suffixes["weight"].dtypes
    yield Storage(plain, "flat", {name: Stored(role, dtypes, flat) for role, name in names.items()})
    for form in FORMATS:
        for arrangement in ARRANGEMENTS:
            yield arrangement.of(form)


STORAGES: tuple[Storage, ...] = tuple(_storages())
"""Every storage whose tensors are understood; of several that fit, the first, unless the config says."""


def find_storage(
    declared: str,
    arrangement: str,
    templates: Mapping[str, str],
    dtypes: Mapping[str, str],
    weight: WeightFormat,
) -> Storage | None:
    """The storage of experts whose tensors are named by `templates` and have `dtypes`, both by role.

    A role without a dtype may have any. `declared` is `MoEProblem.storage`, `weight` the format that
    their scales show. None when no storage has them all.
    """

    def has(storage: Storage, role: str) -> bool:
        for leaf, stored in storage.tensors.items():
            if stored.role == role and templates[role].endswith("." + leaf):
                return dtypes.get(role) in (None, *stored.dtypes)
        return False

    def as_shown(storage: Storage) -> bool:
        own = storage.weight
        sides = zip(own.block, weight.block, strict=True)
        return (own.name, own.bits) == (weight.name, weight.bits) and all(a in (b, SHOWN) for a, b in sides)

    for storage in STORAGES:
        said = storage.arrangement == arrangement and declared in storage.format.storages
        if said and as_shown(storage) and all(has(storage, role) for role in templates):
            return storage
    return None


@dataclass(frozen=True)
class AuxiliaryNames:
    """Names of auxiliary tensors, relative to the module that holds the experts, or to the layer.

    Attributes:
        router: names of each role of the router; ``hash`` is the table of expert ids by token id.
        router_modules, shared_modules, latent_modules: what these names begin with; a tensor of them
            with another name is refused, not ignored.
        latent: names of the projections into and out of the experts' own space.
    """

    router: Mapping[str, tuple[str, ...]]
    router_modules: tuple[str, ...]
    shared_modules: tuple[str, ...]
    latent: Mapping[str, tuple[str, ...]]

    @property
    def modules(self) -> frozenset[str]:
        latent = (name.split(".")[0] for names in self.latent.values() for name in names)
        return frozenset((*self.router_modules, *self.shared_modules, *latent))


AUXILIARY = AuxiliaryNames(
    router={
        "weight": (
            "gate.weight",
            "router.weight",
            "router.layer.weight",
            "router.proj.weight",
            "router.gate.weight",
            "router.classifier.weight",
            "gate.wg.weight",
        ),
        "packed": ("gate.qweight", "gate.weight_packed", "router.weight_packed"),
        "bias": ("router.bias", "gate.bias", "router.layer.bias", "router.proj.bias"),
        "correction_bias": (
            "gate.e_score_correction_bias",
            "e_score_correction_bias",
            "moe_statics.e_score_correction_bias",
            "router.e_score_correction_bias",
            "router_bias",
            "gate.expert_bias",
            "expert_bias",
            "gate.correction_bias",
            "experts.e_score_correction_bias",
        ),
        "hash": ("gate.tid2eid",),
        "expert_scale": ("router.per_expert_scale",),
        "input_scale": ("router.scale",),
    },
    router_modules=(
        "gate",
        "router",
        "e_score_correction_bias",
        "moe_statics",
        "router_bias",
        "expert_bias",
        "experts",
    ),
    shared_modules=("shared_experts", "shared_expert", "share_expert", "shared_mlp", "shared_expert_gate"),
    latent={
        "in": ("routed_expert_down_proj.weight", "fc1_latent_proj.weight"),
        "norm": ("routed_expert_norm.weight",),
        "out": ("routed_expert_up_proj.weight", "fc2_latent_proj.weight"),
    },
)
"""Router, shared experts and latent projections."""

SUFFIX_ROLES: Mapping[str, str] = {
    name: suffix.role for form in reversed(FORMATS) for name, suffix in form.suffixes.items()
}
"""What a suffix adds to a matrix's role, whatever the format."""

EXTRA_MODULES = frozenset(("mtp", "talker", "visual", "vision_tower", "vision_model", "draft", "eagle"))
"""Path components of layers that are not the main model's: multi-token prediction, speech, vision."""


def format_sizes(scheme: Scheme) -> dict[str, int]:
    """The symbols of shapes that the weight format gives.

    ``pack`` is weights in a 32-bit word, ``group`` and ``rows`` weights along either axis per scale
    (`FULL`: one scale for the axis).
    """
    weight = scheme.weight
    return {"pack": 32 // weight.bits, "group": weight.group or 1, "rows": weight.block[0] or 1}
