"""How numbers are packed in stored tensors, for every packing of `moectl.checkpoint.tensors.stored_formats`.

A packing is a row of `PACKINGS`: the steps for each kind of tensor, for matrices whose reduction axis is last
unless the packing says otherwise, value steps, and the problems that it does not support. A kind is the
suffix that a stored role adds to its matrix: ``""`` (weights), ``scale``, ``zero``, ``global``, ``input``,
``bias``; tensors of other kinds have no weights, and their values are checked.

Steps unpack a checkpoint's tensors, experts first, to canonical roles; their inverse packs them. Words are
int32, little endian, with 32 / bits codes. Sizes must be whole words; checkpoints whose last word is partly
padding are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...errors import CheckpointError
from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor, torch
from ...problem.moe_problem import MoEProblem
from ..canonical import groups
from ..steps.transforms import DTYPES, Add, DtypeView, PackedCodes, Rearrange, Shape, Step, Xor
from ..steps.value_steps import ExactStep, Statistics, Tensors, ValueStep, named

_BYTES = DtypeView("I32", "U8")
_AWQ_COLUMNS = {"p": 2, "q": 4}
"""Nibble 4p + q of an AWQ word is column 2q + p of its eight."""

TRANSPOSED: tuple[Step, ...] = (Rearrange("e k n -> e n k"),)
"""``[e, k, n]`` with the reduction axis first, and scales ``[e, groups, n]``, as ``[e, n, k]``."""

WORDS_ALONG_K: tuple[Step, ...] = (_BYTES,)
"""Words ``[e, n, k / per word]``, first code in the low bits, as packed rows."""

WORDS_OF_K: tuple[Step, ...] = (Rearrange("e w n -> e n w"), _BYTES)
"""GPTQ ``qweight``: words ``[e, k / per word, n]``, each of consecutive k of one column, as packed rows."""


def zeros_along_n(bits: int) -> tuple[Step, ...]:
    """compressed-tensors zero points: words ``[e, n / per word, groups]`` to codes ``[e, n, groups]``."""
    return (Rearrange("e w g -> e g w"), *gptq_zeros(bits))


def gptq_zeros(bits: int, one_less: bool = False) -> tuple[Step, ...]:
    """GPTQ ``qzeros``: words ``[e, groups, n / per word]`` to codes ``[e, n, groups]``.

    `one_less`: zero points are stored minus one, as in the first version of the format.
    """
    shift = (Add(1),) if one_less else ()
    return (_BYTES, *_codes(bits), Rearrange("e g n -> e n g"), *shift)


def awq_weights() -> tuple[Step, ...]:
    """AWQ ``qweight``: words ``[e, k, n / 8]`` in AWQ's nibble order to packed rows ``[e, n, k / 2]``."""
    columns = Rearrange("e k (j p q) -> e (j q p) k", _AWQ_COLUMNS)
    return (_BYTES, PackedCodes(4, True), columns, PackedCodes(4, False))


def awq_zeros() -> tuple[Step, ...]:
    """AWQ ``qzeros``: words ``[e, groups, n / 8]`` in AWQ's nibble order to codes ``[e, n, groups]``."""
    return (_BYTES, PackedCodes(4, True), Rearrange("e g (j p q) -> e (j q p) g", _AWQ_COLUMNS))


def _codes(bits: int) -> tuple[Step, ...]:
    return () if bits == 8 else (PackedCodes(bits, True),)


@named("repeated")
@dataclass(frozen=True)
class Repeated(ExactStep):
    """One number per expert repeated as `times` rows of one: a scale that gate and up share."""

    times: int

    def __post_init__(self) -> None:
        if not 1 <= self.times <= 1 << 16:
            raise CheckpointError(f"{self}: a number is repeated 1 to 65536 times.")

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        if math.prod(shape[1:]) != 1:
            raise CheckpointError(f"{self}: needs one number per expert, got {list(shape)}.")
        return TensorType(dtype, (shape[0], self.times, 1))

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        return t.reshape(-1, 1, 1).expand(-1, self.times, 1)

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t[:, :1].reshape(shape)


@named("reciprocal")
@dataclass(frozen=True)
class Reciprocal(ExactStep):
    """Reciprocals of F32 divisors. They are rounded, so `undo` is approximate."""

    @property
    def exact(self) -> bool:
        return False

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        if dtype != "F32":
            raise CheckpointError(f"{self}: needs F32, got {dtype}.")
        return TensorType(dtype, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        if not bool((torch.isfinite(t) & (t > 0)).all()):
            raise CheckpointError(
                "a global scale that divides must be a positive number, got 0, a negative or no number.",
                hint="Fetch the checkpoint again; its weights would be infinite.",
            )
        return t.reciprocal()

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t.reciprocal().reshape(shape)


@named("rounded")
@dataclass(frozen=True)
class Rounded(ExactStep):
    """Floats of one width rounded to another; `undo` returns the rounded numbers."""

    source: str
    target: str

    def __post_init__(self) -> None:
        if not {self.source, self.target} <= {"BF16", "F16", "F32"}:
            raise CheckpointError(f"{self}: rounds between BF16, F16 and F32.")

    @property
    def exact(self) -> bool:
        return False

    def output_type(self, dtype: str, shape: Shape) -> TensorType:
        if dtype != self.source:
            raise CheckpointError(f"{self}: needs {self.source}, got {dtype}.")
        return TensorType(self.target, shape)

    def apply(self, t: Tensor, others: Tensors, statistics: Statistics) -> Tensor:
        rounded = t.to(DTYPES[self.target])
        if not bool(torch.isfinite(rounded).all()) and bool(torch.isfinite(t).all()):
            raise CheckpointError(
                f"a number of {self.source} is beyond {self.target}, the model's dtype.",
                hint="State the dtype that the tensors have in config.json.",
            )
        return rounded

    def undo(self, t: Tensor, dtype: str, shape: Shape, others: Tensors) -> Tensor:
        return t.to(DTYPES[self.source]).reshape(shape)


StepsOfRole = Mapping[str, tuple[Step, ...]]


@dataclass(frozen=True)
class Packing:
    """One row of `PACKINGS`.

    Attributes:
        steps: the steps by kind of tensor, from the bits of a weight and whether zero points are stored
            minus one.
        values: value steps by kind of tensor.
        whole_words: sizes must fill 32-bit words of codes.
        refuse: why a problem is not supported; empty if it is.
    """

    steps: Callable[[int, bool], StepsOfRole] = lambda bits, one_less: {}
    values: Mapping[str, tuple[ValueStep, ...]] = field(default_factory=dict)
    whole_words: bool = False
    refuse: Callable[[MoEProblem], str] = lambda problem: ""


def _words(bits: int, one_less: bool) -> StepsOfRole:
    return {"": WORDS_ALONG_K, "zero": zeros_along_n(bits)}


def _gptq(bits: int, one_less: bool) -> StepsOfRole:
    return {"": WORDS_OF_K, "scale": TRANSPOSED, "zero": gptq_zeros(bits, one_less)}


def _awq(bits: int, one_less: bool) -> StepsOfRole:
    return {"": awq_weights(), "scale": TRANSPOSED, "zero": awq_zeros()}


def _only_four_bits(problem: MoEProblem) -> str:
    bits = problem.scheme.weight.bits
    return "" if bits == 4 else f"AWQ defines an order of 4-bit codes in words, and none for {bits}-bit codes"


def _two_level(problem: MoEProblem) -> str:
    return (
        "int4 experts with a scale per channel below one for the whole matrix (Quark int4-fp8) are made for "
        "one kernel on AMD GPUs, and no canonical form holds both scales"
    )


PACKINGS: Mapping[str, Packing] = {
    "rows": Packing(),
    "words": Packing(_words, whole_words=True),
    "gptq": Packing(_gptq, whole_words=True),
    "awq": Packing(_awq, whole_words=True, refuse=_only_four_bits),
    "signed": Packing(lambda bits, one_less: {"": (Xor(0x80),)}),
    "divisors": Packing(values={"global": (Reciprocal(),), "input": (Reciprocal(),)}),
    "two_level": Packing(refuse=_two_level),
}
"""Every packing by its name in `StoredFormat.packing`."""


def _columns(stored: str, problem: MoEProblem) -> int:
    """Reduction columns of the matrix that a stored role belongs to."""
    return problem.dims.intermediate if stored.startswith("w2") else problem.dims.hidden


def _rows(stored: str, problem: MoEProblem) -> int:
    """Output rows of the matrix that a stored role belongs to."""
    if stored.startswith("w2"):
        return problem.dims.hidden
    return problem.dims.intermediate * (2 if stored.startswith("w13") and problem.activation.gated else 1)


def sizes_of(stored: str, problem: MoEProblem, shape: tuple[int, ...], one_less: bool) -> Tensor:
    """``[rows, columns]`` of the weights."""
    return torch.tensor((_rows(stored, problem), _columns(stored, problem)))


def order_of(stored: str, problem: MoEProblem, shape: tuple[int, ...], one_less: bool) -> Tensor:
    """The group of every column in natural order."""
    columns = _columns(stored, problem)
    return torch.arange(columns) // (columns // groups(problem.scheme.weight, columns))


def zeros_of(stored: str, problem: MoEProblem, shape: tuple[int, ...], one_less: bool) -> Tensor:
    """32-bit words of the middle code, or of the one below it if zero points are stored minus one."""
    bits = problem.scheme.weight.bits
    code = (1 << (bits - 1)) - one_less
    word = sum(code << shift for shift in range(0, 32, bits))
    return torch.full(shape, word - (1 << 32) if word >> 31 else word)


def no_bias(stored: str, problem: MoEProblem, shape: tuple[int, ...], one_less: bool) -> Tensor:
    """Zeros."""
    return torch.zeros(shape)


EXTRAS: Mapping[str, Callable[[str, MoEProblem, tuple[int, ...], bool], Tensor]] = {
    "shape": sizes_of,
    "order": order_of,
    "zero": zeros_of,
    "bias": no_bias,
}
"""The required values of one expert's tensor by kind, from its stored role, the problem, its shape and
whether zero points are stored minus one."""

_WRONG: Mapping[str, str] = {
    "shape": "says {got}, but its weight is {expected}",
    "order": "puts columns into groups out of their order (act order), which cannot be converted or run",
    "zero": "holds zero points other than the middle code, but the config says that codes are symmetric",
    "bias": "is not all zeros, but the experts have no biases as the config describes them",
}


def extra_values(stored: str, problem: MoEProblem, shape: tuple[int, ...], one_less: bool) -> Tensor:
    """The required values of one expert's tensor of role `stored` and `shape`."""
    return EXTRAS[stored.partition("_")[2]](stored, problem, shape, one_less)


def check_extra(stored: str, problem: MoEProblem, values: Tensor, one_less: bool) -> str:
    """What is wrong with one expert's `values`, a clause about the tensor; empty if they are correct.

    The order of columns is not checked if the config says that it has no effect.
    """
    kind = stored.partition("_")[2]
    if kind == "order" and problem.act_order == "weight":
        return ""
    expected = extra_values(stored, problem, tuple(values.shape), one_less)
    if torch.equal(values.to(expected.dtype), expected):
        return ""
    return _WRONG[kind].format(
        got=values.tolist() if kind == "shape" else "", expected=expected.tolist() if kind == "shape" else ""
    )
