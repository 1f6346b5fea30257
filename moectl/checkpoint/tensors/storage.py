"""Names and shapes of expert tensors: arrangements, and storages, each a format in an arrangement.

A format lists the tensors of one matrix ``[n, k]``; an arrangement names a layer's matrices and gives the
axes of their tensors. Both are rows of tables, the only source of tensor names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ...problem.schemes import MXFP4, Scheme, WeightFormat
from .shapes import AxisSize, SymbolicShape, parse_shape, shape_at
from .stored_formats import E8M0, FLOATS, FORMATS, StoredFormat, Suffix

PER_EXPERT = "per_expert"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One expert tensor: its role, the allowed dtypes, its usual shape and `others` that are accepted."""

    role: str
    dtypes: tuple[str, ...]
    shape: SymbolicShape
    required: bool = True
    others: tuple[SymbolicShape, ...] = ()

    def shape_of(self, size: tuple[int, ...], sizes: Mapping[str, int]) -> SymbolicShape:
        """The first allowed symbolic shape that equals `size` when `sizes` replaces its symbols.

        LookupError when there is none.
        """
        for shape in (self.shape, *self.others):
            if shape_at(shape, sizes) == size:
                return shape
        raise LookupError(f"{self.role} has no shape {list(size)}")


@dataclass(frozen=True)
class Storage:
    """How one kind of checkpoint stores a layer's experts.

    Attributes:
        format: how each matrix is stored.
        arrangement: names of the matrices and axes of their tensors.
        tensors: by leaf: the name after the expert's number, or after the experts' module.
    """

    format: StoredFormat
    arrangement: Arrangement
    tensors: Mapping[str, StoredTensor]

    @property
    def fused(self) -> bool:
        """True when one tensor holds all experts."""
        return self.arrangement.fused

    @property
    def weight(self) -> WeightFormat:
        return self.format.weight

    def name(self, declared: str) -> str:
        """`MoEProblem.storage`: the declared one if it can have this format, else the format's usual one."""
        return declared if declared in self.format.storages else self.format.storages[0]

    @property
    def gated(self) -> bool:
        """True when experts have a gate projection."""
        return any(stored.role in ("w13", "w3") for stored in self.tensors.values())

    def of_role(self, role: str) -> StoredTensor:
        """The tensor with a role; LookupError when there is none."""
        for stored in self.tensors.values():
            if stored.role == role:
                return stored
        raise LookupError(f"{self.arrangement.name} {self.weight} experts have no {role}")

    def missing(self, leaves: frozenset[str]) -> list[str]:
        """Required tensors that are not in `leaves`."""
        return sorted(leaf for leaf, stored in self.tensors.items() if stored.required and leaf not in leaves)

    def unknown(self, leaves: frozenset[str]) -> list[str]:
        """Members of `leaves` that this storage does not have."""
        return sorted(leaves - self.tensors.keys())


_GATE_UP = AxisSize("intermediate", 2)
_INTERMEDIATE, _HIDDEN = AxisSize("intermediate"), AxisSize("hidden")
_MATRIX: Mapping[str, Mapping[str, AxisSize]] = {
    "w1": {"n": _INTERMEDIATE, "k": _HIDDEN},
    "w3": {"n": _INTERMEDIATE, "k": _HIDDEN},
    "w13": {"n": _GATE_UP, "k": _HIDDEN},
    "w2": {"n": _HIDDEN, "k": _INTERMEDIATE},
}
"""Rows and columns of each matrix."""


@dataclass(frozen=True)
class Arrangement:
    """Names of a layer's matrices, and the axes of their tensors.

    Attributes:
        name: ``per_expert``; ``fused`` with all experts in one tensor, rows first; ``fused_transposed``;
            ``fused_apart`` with separate gate and up tensors; ``fused_blocks`` (gpt-oss); ``flat`` with
            experts and rows in one axis (DBRX).
        matrices: name of the matrix by role.
        separator: between a matrix's name and the suffix: ``.`` or ``_``; with ``_`` the weight itself
            has no suffix.
        short: suffixes are written without ``weight_``.
        outer: leading axes, before those of one expert's matrix.
        transposed: the axes of the matrix are reversed.
    """

    name: str
    matrices: Mapping[str, str]
    separator: str = "."
    short: bool = False
    outer: SymbolicShape = ()
    transposed: bool = False

    @property
    def fused(self) -> bool:
        """True when one tensor holds all experts."""
        return self.name != PER_EXPERT

    def leaf(self, matrix: str, suffix: str) -> str:
        """The tensor's name after the expert's number, or after the experts' module."""
        if self.separator == "_" and suffix == "weight":
            return matrix
        return matrix + self.separator + (suffix.removeprefix("weight_") if self.short else suffix)

    def shape(self, role: str, suffix: SymbolicShape) -> SymbolicShape:
        """The shape of a suffix of the matrix `role` in this arrangement."""
        axes = [_of_matrix(role, axis) for axis in suffix]
        return (*self.outer, *(reversed(axes) if self.transposed else axes))

    def stored(self, role: str, suffix: Suffix) -> StoredTensor:
        """The tensor for one suffix of one matrix."""
        shapes = [self.shape(role, shape) for shape in suffix.shapes]
        if self.outer and suffix.scalar:
            shapes += map(parse_shape, ("", "1", "experts 1", "experts 1 1"))
            shapes += [parse_shape("experts 2")] if role == "w13" else []
        first, *others = dict.fromkeys(shapes)
        return StoredTensor(role + suffix.role, suffix.dtypes, first, suffix.required, tuple(others))

    def of(self, form: StoredFormat) -> Storage:
        """The storage of `form` in this arrangement."""
        tensors = {
            self.leaf(spelled, name): self.stored(role, suffix)
            for role, spelled in self.matrices.items()
            for name, suffix in form.suffixes.items()
        }
        return Storage(form, self, tensors)


def _of_matrix(role: str, axis: AxisSize) -> AxisSize:
    """An axis of a suffix's shape, with ``n`` and ``k`` replaced by the rows and columns of a matrix."""
    if axis.symbol not in ("n", "k"):
        return axis
    side = _MATRIX[role][axis.symbol]
    return AxisSize(side.symbol, side.times, axis.per)


_GATE_AND_UP = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_UNGATED = {"w1": "up_proj", "w2": "down_proj"}
_TOGETHER = {"w13": "gate_up_proj", "w2": "down_proj"}
_EXPERTS = parse_shape("experts")

PROJECTIONS = Arrangement(PER_EXPERT, _GATE_AND_UP)
"""Separate matrices for each gated expert, with the names that most models use."""

UNGATED_PROJECTIONS = Arrangement(PER_EXPERT, _UNGATED)
"""The same for experts without a gate."""

FUSED_TRANSPOSED = Arrangement("fused_transposed", _TOGETHER, "_", outer=_EXPERTS, transposed=True)
"""All experts in one tensor, as in BF16 checkpoints of gpt-oss."""

FUSED_APART = Arrangement("fused_apart", _GATE_AND_UP, outer=_EXPERTS)
"""All experts in one tensor for each of gate, up and down, as in Step-3."""

ARRANGEMENTS: tuple[Arrangement, ...] = (
    PROJECTIONS,
    Arrangement(PER_EXPERT, {"w1": "w1", "w3": "w3", "w2": "w2"}),
    UNGATED_PROJECTIONS,
    Arrangement(PER_EXPERT, _TOGETHER),
    Arrangement("fused", _TOGETHER, "_", outer=_EXPERTS),
    Arrangement("fused", _TOGETHER, "_", short=True, outer=_EXPERTS),
    Arrangement("fused", _TOGETHER, outer=_EXPERTS),
    Arrangement("fused", {"w13": "input_linear", "w2": "output_linear"}, outer=_EXPERTS),
    FUSED_TRANSPOSED,
    Arrangement("fused_transposed", _TOGETHER, "_", short=True, outer=_EXPERTS, transposed=True),
    FUSED_APART,
    Arrangement("fused_apart", _GATE_AND_UP, "_", outer=_EXPERTS),
    Arrangement("fused_apart", _UNGATED, outer=_EXPERTS),
    Arrangement("fused_apart", _UNGATED, "_", outer=_EXPERTS),
)
"""Every arrangement except those of gpt-oss and DBRX, whose tensors are listed one by one."""

SPELLED: Mapping[str, str] = {
    name: role for arrangement in reversed(ARRANGEMENTS) for role, name in arrangement.matrices.items()
}
"""Role by matrix name, for all arrangements; ``up_proj`` has the role it has in gated experts."""


def _listed(
    form: StoredFormat, arrangement: Arrangement, tensors: Mapping[str, tuple[str, tuple[str, ...], str]]
) -> Storage:
    """The storage whose `tensors` are (role, dtypes, shape) by name."""
    stored = {
        leaf: StoredTensor(role, dtypes, parse_shape(text)) for leaf, (role, dtypes, text) in tensors.items()
    }
    return Storage(form, arrangement, stored)


GPT_OSS = _listed(
    StoredFormat(("gpt_oss",), MXFP4, {}),
    Arrangement("fused_blocks", _TOGETHER, "_", short=True, outer=_EXPERTS),
    {
        "gate_up_proj_blocks": ("w13", ("U8",), "experts 2*intermediate hidden/32 16"),
        "gate_up_proj_scales": ("w13_scale", E8M0, "experts 2*intermediate hidden/32"),
        "gate_up_proj_bias": ("w13_bias", FLOATS, "experts 2*intermediate"),
        "down_proj_blocks": ("w2", ("U8",), "experts hidden intermediate/32 16"),
        "down_proj_scales": ("w2_scale", E8M0, "experts hidden intermediate/32"),
        "down_proj_bias": ("w2_bias", FLOATS, "experts hidden"),
    },
)
"""The MXFP4 blocks of gpt-oss, all experts in one tensor."""

_FLAT = "experts*intermediate hidden"
_DBRX = _listed(
    next(form for form in FORMATS if form.weight.name == "bf16"),
    Arrangement("flat", {"w1": "mlp.w1", "w3": "mlp.v1", "w2": "mlp.w2"}),
    {name: (role, FLOATS, _FLAT) for name, role in (("mlp.w1", "w1"), ("mlp.v1", "w3"), ("mlp.w2", "w2"))},
)


@cache
def storages() -> tuple[Storage, ...]:
    """Every known storage; if several match, the config decides, else the first."""
    made = (arrangement.of(form) for form in FORMATS for arrangement in ARRANGEMENTS)
    return (GPT_OSS, _DBRX, *made)


@dataclass(frozen=True)
class AuxiliaryNames:
    """Names of auxiliary tensors, relative to the module that holds the experts or to the layer.

    Attributes:
        router: names by role; ``hash`` is the table of expert ids by token id.
        router_modules, shared_modules: first components of these names; a tensor in such a module with an
            unknown name is rejected, not ignored.
        latent: names of the projections into and out of the experts' latent space.
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
"""Role suffix by tensor name suffix, for all formats."""

EXTRA_MODULES = frozenset(("mtp", "talker", "visual", "vision_tower", "vision_model", "draft", "eagle"))
"""Path components of layers outside the main model: multi-token prediction, speech, vision."""


def format_sizes(scheme: Scheme) -> dict[str, int]:
    """The shape symbols that the weight format defines.

    ``pack`` is the number of weights in a 32-bit word; ``group`` and ``rows`` are the number of weights per
    scale along k and n (`FULL`: one scale for the whole axis).
    """
    weight = scheme.weight
    return {"pack": 32 // weight.bits, "group": weight.group or 1, "rows": weight.block[0] or 1}
