"""Quantized matrices other than the experts': recognized, and repacked into another container."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.config.quantization import zeros_less_one
from ...checkpoint.tensors.shapes import shape_at
from ...checkpoint.tensors.storage import PER_EXPERT, Arrangement, Storage, format_sizes
from ...checkpoint.tensors.stored_formats import FORMATS, SHOWN, StoredFormat
from ...dtypes import MODEL_DTYPES
from ...errors import UsageError
from ...files.tensor_table import TensorInfo, TensorType
from ...lazy_torch import Tensor
from ...problem.moe_problem import Activation, Dims, MoEProblem
from ...problem.portable_formats import PORTABLE
from ...problem.schemes import (
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_TENSOR,
    ActFormat,
    Scheme,
    WeightFormat,
)
from ..canonical import canonical_shapes
from ..sources import LayerMapping, MappedTensors, TensorMapping
from ..sources.map_layer import read_dtype, tensor_mapping
from ..sources.packings import check_extra
from ..steps.value_steps import Shapes
from .format_changes import Decoded, FormatChange, SameFormat
from .portable_writer import MatrixChange, PortableWriter
from .report_fragments import label_of
from .slots import Slot, container_format, slots

PLAIN = frozenset(("BF16", "F16", "F32"))
WEIGHTS = ("weight", "weight_packed", "qweight")
"""Suffixes of the tensors that hold a matrix's weights or codes."""

MATRIX = Arrangement(PER_EXPERT, {"w1": ""}, separator="")
"""A single matrix ``[intermediate, hidden]``; its tensors are named by their suffixes."""

STORED_MATRICES = tuple(MATRIX.of(form) for form in FORMATS)
"""Every way to store such a matrix."""

NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Linear:
    """One quantized matrix ``[n, k]``.

    Attributes:
        module: prefix of its tensors' names.
        storage, scheme: how it is stored, and its number formats.
        tensors: its tensors by suffix.
    """

    module: str
    storage: Storage
    scheme: Scheme
    n: int
    k: int
    tensors: Mapping[str, TensorInfo]

    @property
    def layer(self) -> int:
        """Number of the decoder layer in its name; -1 for none."""
        match = NUMBER.search(self.module)
        return int(match[1]) if match else -1

    def problem(self, dtype: str) -> MoEProblem:
        """The matrix as that of a layer with a single expert; `dtype` is the model's."""
        return MoEProblem(
            Dims(self.k, self.n),
            1,
            1,
            self.scheme,
            activation=Activation("silu", gated=False),
            storage=self.storage.format.storages[0],
            dtype=dtype,
        )


def quantized_linears(
    checkpoint: Checkpoint, consumed: Mapping[str, str], experts: tuple[MoEProblem, ...]
) -> tuple[Linear, ...]:
    """Every quantized matrix other than the converted experts', whose tensors are in `consumed`.

    Raises UsageError for a matrix in an unknown format.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name in checkpoint.tensors:
        module, _, suffix = name.rpartition(".")
        if name not in consumed and suffix != "bias":
            modules.setdefault(module, {})[suffix] = checkpoint.tensors[name]
    linears = []
    for module, tensors in sorted(modules.items()):
        codes = next((tensors[suffix] for suffix in WEIGHTS if suffix in tensors), None)
        if codes is None or codes.dtype in PLAIN:
            continue
        linear = _recognize(module, tensors, experts)
        if linear is None:
            raise UsageError(
                f"{module} is quantized in an unknown format ({', '.join(sorted(tensors))}).",
                hint="Convert with --experts-only, and add the other tensors yourself.",
            )
        linears.append(linear)
    return tuple(linears)


def _recognize(
    module: str, tensors: Mapping[str, TensorInfo], experts: tuple[MoEProblem, ...]
) -> Linear | None:
    """The matrix that `tensors` store: in the experts' format if it fits, else in any that does; or None."""
    storages, leaves = {problem.storage for problem in experts}, frozenset(tensors)
    for storage in sorted(STORED_MATRICES, key=lambda s: not storages & set(s.format.storages)):
        if storage.missing(leaves) or storage.unknown(leaves):
            continue
        for weight in _weights(storage.format, experts):
            sides = _sides(storage, weight, tensors)
            if sides is not None:
                scheme = Scheme(weight, _act(weight, tensors, experts))
                return Linear(module, storage, scheme, *sides, tensors)
    return None


def _weights(form: StoredFormat, experts: tuple[MoEProblem, ...]) -> Iterator[WeightFormat]:
    """Weight formats that `form` may hold: its own, or if that is open, the experts' and FP8 blocks."""
    if SHOWN not in form.weight.block:
        yield form.weight
        return
    for weight in (*(problem.scheme.weight for problem in experts), PORTABLE["fp8-block"].weight):
        if (weight.name, weight.bits) == (form.weight.name, form.weight.bits):
            yield weight


def _sides(
    storage: Storage, weight: WeightFormat, tensors: Mapping[str, TensorInfo]
) -> tuple[int, int] | None:
    """Rows and columns of the matrix; None if a tensor's shape or dtype contradicts the others."""
    sizes: dict[str, int] = format_sizes(Scheme(weight))
    codes, stored = next((leaf, tensor) for leaf, tensor in storage.tensors.items() if tensor.role == "w1")
    if len(stored.shape) != len(tensors[codes].shape):
        return None
    for axis, size in zip(stored.shape, tensors[codes].shape, strict=True):
        sizes[axis.symbol] = size * (sizes[axis.per] if isinstance(axis.per, str) else axis.per)
    for leaf, info in tensors.items():
        stored = storage.tensors[leaf]
        expected = [shape_at(shape, sizes) for shape in (stored.shape, *stored.others)]
        if info.dtype not in stored.dtypes or info.shape not in expected:
            return None
    return sizes["intermediate"], sizes["hidden"]


def _act(
    weight: WeightFormat, tensors: Mapping[str, TensorInfo], experts: tuple[MoEProblem, ...]
) -> ActFormat:
    """The activation format: that of experts with the same weight format, else the format's usual one."""
    for problem in experts:
        if problem.scheme.weight == weight:
            return problem.scheme.act
    if weight == FP8_TENSOR:
        return FP8_ACT_TENSOR_STATIC if "input_scale" in tensors else FP8_ACT_TENSOR
    return next((p.act for p in PORTABLE.values() if p.weight == weight), PORTABLE["bf16"].act)


@dataclass(frozen=True)
class LinearsMapping(LayerMapping):
    """Matrices outside the experts as a layer of one expert, in which each has its own roles.

    `problems` holds each matrix's problem by role.
    """

    problems: Mapping[str, MoEProblem] = None  # type: ignore[assignment]

    def check(self, mapping: TensorMapping, problem: MoEProblem, values: Tensor) -> str:
        role, _, kind = mapping.stored.partition("_")
        return check_extra(f"w1_{kind}", self.problems[role], values, self.zeros_less_one)


@dataclass(frozen=True)
class LinearsPlan:
    """Matrices of one decoder layer in one format, and how they are written."""

    map: LinearsMapping
    problem: MoEProblem
    writer: PortableWriter
    linears: tuple[Linear, ...]


def keeps_storage(linear: Linear, storage: str, checkpoint: Checkpoint) -> bool:
    """True if the matrix is already stored as `storage` stores it."""
    same_zeros = linear.storage.format.packing != "gptq" or zeros_less_one(checkpoint.config)
    return storage in linear.storage.format.storages and same_zeros and not _rescaled(linear)


def _rescaled(linear: Linear) -> bool:
    """True for FP8 whose scales are written as F32 instead of powers of two."""
    scales = [info.dtype for suffix, info in linear.tensors.items() if "scale" in suffix]
    return linear.scheme.weight.name == "fp8" and any(dtype not in PLAIN for dtype in scales)


def plan_linears(
    number: int,
    linears: tuple[Linear, ...],
    storage: str,
    checkpoint: Checkpoint,
    dtype: str,
    requantize: bool,
) -> LinearsPlan:
    """How `linears`, all of one format, are written in `storage`; `number` is that of the plan.

    `dtype` is the model's. Raises UsageError if the container cannot hold them.
    """
    mapped: list[MappedTensors] = []
    shapes: dict[str, TensorType] = {}
    new_shapes: dict[str, TensorType] = {}
    linear_slots: list[Slot] = []
    matrices: dict[str, MatrixChange] = {}
    problems: dict[str, MoEProblem] = {}
    less = linears[0].storage.format.packing == "gptq" and zeros_less_one(checkpoint.config)
    for i, linear in enumerate(linears):
        role = f"m{i}"
        problem = linear.problem(dtype)
        source, target, change = _change(linear, storage, problem, requantize)
        problems[role] = problem
        linear_shapes = _renamed(canonical_shapes(source, 1, _has_inputs(linear)), role)
        shapes |= linear_shapes
        mapped += _mapped(linear, source, role, linear_shapes, less)
        written = _renamed(
            canonical_shapes(target, 1, _has_inputs(linear) and target.scheme.weight.bits < 16), role
        )
        new_shapes |= written
        try:
            form = container_format(storage, target.scheme.weight)
        except UsageError as error:
            raise UsageError(
                f"{linear.module} is also quantized: {error.what}",
                hint="Choose --container compressed-tensors, or --experts-only.",
            ) from error
        linear_slots += slots(MATRIX.of(form), target, f"{linear.module}.", written, {"w1": (role, None)})
        matrices[role] = MatrixChange(change, 1, linear.n * linear.k, linear.module.rpartition(".")[2])
    layer = LinearsMapping(number, "", tuple(mapped), shapes, less, problems)
    writer = PortableWriter(new_shapes, tuple(linear_slots), matrices, {}, label_of(number))
    return LinearsPlan(layer, linears[0].problem(dtype), writer, linears)


def _has_inputs(linear: Linear) -> bool:
    return any(linear.storage.tensors[leaf].role == "w1_input" for leaf in linear.tensors)


def _change(
    linear: Linear, storage: str, problem: MoEProblem, requantize: bool
) -> tuple[MoEProblem, MoEProblem, FormatChange]:
    """The matrix as read, as written, and the change between them."""
    weight = linear.scheme.weight
    scale = next(
        (
            info.dtype
            for leaf, info in linear.tensors.items()
            if linear.storage.tensors[leaf].role == "w1_scale"
        ),
        "",
    )
    if scale in PLAIN or weight.name == "fp8":
        weight = replace(weight, scale_dtype="E8M0" if scale == "F8_E8M0" else scale)
    source = replace(problem, scheme=Scheme(weight, linear.scheme.act))
    if storage == "plain":
        bf16 = PORTABLE["bf16"].weight
        dtype = MODEL_DTYPES[problem.dtype]
        rounds = requantize or weight.name in ("fp8", "mxfp8")
        return source, replace(problem, scheme=Scheme(bf16)), Decoded(weight, dtype, rounds)
    target = (
        replace(weight, scale_dtype="F32")
        if weight.scale_dtype == "E8M0" and weight.name == "fp8"
        else weight
    )
    return source, replace(problem, scheme=Scheme(target, linear.scheme.act)), SameFormat(weight, target)


def _renamed(shapes: Shapes, role: str) -> dict[str, TensorType]:
    """The first matrix's roles under another name."""
    return {name.replace("w13", role, 1): kind for name, kind in shapes.items() if name.startswith("w13")}


def _mapped(
    linear: Linear, problem: MoEProblem, role: str, shapes: Shapes, less: bool
) -> Iterator[MappedTensors]:
    for leaf, info in linear.tensors.items():
        stored = linear.storage.tensors[leaf].role
        mapping = tensor_mapping(linear.storage, stored, read_dtype(info), info.shape, problem, less)
        name = mapping.role.replace("w13", role, 1)
        rows = shapes[name].shape[1] if name else 0
        mapping = replace(mapping, stored=stored.replace("w1", role, 1), role=name, rows=(0, rows))
        yield MappedTensors(mapping, (info,), True)
