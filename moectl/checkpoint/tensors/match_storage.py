"""Which storage a layer's expert tensors are: by names first, then by dtypes, then by shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import CheckpointError
from ...files.strict_json import FETCH_AGAIN, shown
from ...files.tensor_table import TensorInfo
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, Scheme, WeightFormat
from .layer_index import RENAME, LayerTensors
from .shapes import AxisSize, SymbolicShape, shape_at
from .storage import STORAGES, Storage, format_sizes
from .stored_formats import SHOWN

CONFIG_HINT = "Check that config.json is the one that belongs to these files."

SIDES = (16, 32, 64, 128, 256, 512)
"""Block sides in use; of several that give as many scales, the first of these is meant."""

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class StorageMatch:
    """The storage of a layer's experts, its sizes, and the weight format that its scales show."""

    storage: Storage
    sizes: Mapping[str, int]
    weight: WeightFormat

    def scheme(self, said: Scheme, declared: bool, tensors: Tensors) -> Scheme:
        """The scheme: activations as the config declares them, else as the format has them."""
        form = self.storage.format
        if declared and said.weight.name == self.weight.name:
            return replace(said, weight=self.weight)
        scaled = any(self.storage.tensors[leaf].role.endswith("_input") for leaf in tensors)
        return Scheme(self.weight, form.static if scaled and form.static else form.act)


def match_storage(layer: LayerTensors, problem: MoEProblem, experts: int) -> StorageMatch:
    """The storage that a layer's tensors are, `problem` being what the config declares of it.

    `experts` is their number as the router or the config says, for tensors that do not show it.
    Raises CheckpointError, about the storage that comes nearest, when none fits.
    """
    tensors = next(iter(layer.experts.values()))
    named = _named(layer, problem)
    wrong = {id(it): [leaf for leaf in tensors if not _typed(it, leaf, tensors)] for it in named}
    typed = [it for it in named if not wrong[id(it)]]
    if not typed:
        _refuse_lacking(layer, problem)
        nearest = min(named, key=lambda it: (not _as_said(it, problem), len(wrong[id(it)])))
        raise _wrong_dtype(nearest, tensors)
    found: list[StorageMatch] = []
    why: CheckpointError | None = None
    for storage in sorted(typed, key=lambda it: not _as_said(it, problem)):
        try:
            found.append(_solve(storage, tensors, problem.scheme.weight, experts))
        except CheckpointError as error:
            why = why or error
    if not found:
        assert why is not None, "every storage with the right dtypes was tried"
        raise why
    exact = (it for it in found if it.weight == problem.scheme.weight and _as_said(it.storage, problem))
    return next(exact, found[0])


def _as_said(storage: Storage, problem: MoEProblem) -> bool:
    return problem.storage in storage.format.storages and storage.weight.name == problem.scheme.weight.name


def _typed(storage: Storage, leaf: str, tensors: Tensors) -> bool:
    return tensors[leaf].dtype in storage.tensors[leaf].dtypes


def _named(layer: LayerTensors, problem: MoEProblem) -> list[Storage]:
    """The storages whose tensors have these names; CheckpointError when there is none."""
    leaves, fused = layer.leaves, None in layer.experts
    if fused and len(layer.experts) > 1:
        raise CheckpointError(
            f"layer {layer.index} mixes experts in one tensor with experts of their own, "
            f"under {layer.stem.rstrip('.')}.",
            hint="Remove those that do not belong to the model.",
        )
    shaped = [storage for storage in STORAGES if storage.fused == fused]
    named = [it for it in shaped if not it.missing(leaves) and not it.unknown(leaves)]
    if named:
        return named

    def nearness(storage: Storage) -> tuple[int, bool, int]:
        common = len(leaves & storage.tensors.keys())
        return common, _as_said(storage, problem), -len(storage.missing(leaves))

    nearest = max(shaped, key=nearness)
    if not leaves & nearest.tensors.keys():
        raise CheckpointError(
            f"layer {layer.index}: {problem.storage} experts of {problem.scheme} are not understood, "
            f"with tensors {', '.join(map(shown, sorted(leaves)[:12]))}.",
            hint=RENAME,
        )
    lacking, strange = nearest.missing(leaves), nearest.unknown(leaves)
    parts = [f"lack {', '.join(lacking)}"] if lacking else []
    parts += [f"have {', '.join(map(shown, strange[:8]))}, which is not understood"] if strange else []
    raise CheckpointError(
        f"layer {layer.index}: the {nearest.name(problem.storage)} experts {' and '.join(parts)}.",
        hint=CONFIG_HINT,
    )


def _refuse_lacking(layer: LayerTensors, problem: MoEProblem) -> None:
    """CheckpointError when the dtypes are those of a storage that has more tensors, such as scales."""
    leaves = layer.leaves
    tensors = next(iter(layer.experts.values()))
    fitting = [
        it
        for it in STORAGES
        if it.fused == (None in layer.experts)
        and not it.unknown(leaves)
        and all(_typed(it, leaf, tensors) for leaf in tensors)
    ]
    said = [it for it in fitting if _as_said(it, problem)]
    blocks = (problem.scheme.weight.block, (SHOWN, SHOWN))
    said.sort(key=lambda it: it.weight.block not in blocks)
    lacking = dict.fromkeys(it.missing(leaves)[0] for it in said[:1] or fitting)
    if lacking:
        dtypes = sorted({info.dtype for info in tensors.values()})
        raise CheckpointError(
            f"layer {layer.index}: the {' and '.join(dtypes)} experts lack {' or '.join(lacking)}.",
            hint=FETCH_AGAIN,
        )


def _wrong_dtype(storage: Storage, tensors: Tensors) -> CheckpointError:
    for leaf, info in sorted(tensors.items()):
        allowed = storage.tensors[leaf].dtypes
        if not _typed(storage, leaf, tensors):
            return CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {' or '.join(allowed)}, got {info.dtype}.",
                hint=CONFIG_HINT,
            )
    raise AssertionError("a storage without a wrong dtype fits")


def _solve(storage: Storage, tensors: Tensors, said: WeightFormat, experts: int) -> StorageMatch:
    """The sizes and block that all tensors' shapes agree on; CheckpointError names one that does not."""
    shapes = {leaf: _axes(storage, leaf, info) for leaf, info in tensors.items()}
    sizes = _plain_sizes(storage, tensors, shapes, experts)
    weight = _block_shown(storage, tensors, shapes, sizes, said)
    sizes |= format_sizes(Scheme(weight))
    for leaf, info in tensors.items():
        wanted = shape_at(shapes[leaf], sizes)
        if info.shape != wanted:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {info.dtype} {list(wanted)} beside the "
                f"other expert tensors, got {info.dtype} {list(info.shape)}.",
                hint=FETCH_AGAIN,
            )
    return StorageMatch(storage, sizes, weight)


def _axes(storage: Storage, leaf: str, info: TensorInfo) -> SymbolicShape:
    """The axes that a tensor's shape is to be read by; of several of one length, those whose numbers fit."""
    stored = storage.tensors[leaf]
    same = [shape for shape in (stored.shape, *stored.others) if len(shape) == len(info.shape)]
    if not same:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} must have {len(stored.shape)} axes, "
            f"got shape {list(info.shape)}.",
            hint=CONFIG_HINT,
        )
    fitting = [
        shape
        for shape in same
        if all(axis.symbol or axis.times == size for axis, size in zip(shape, info.shape, strict=True))
    ]
    return max(fitting or same, key=lambda shape: sum(not axis.symbol for axis in shape))


def _plain_sizes(
    storage: Storage, tensors: Tensors, shapes: Mapping[str, SymbolicShape], experts: int
) -> dict[str, int]:
    """Sizes that stand in a shape as they are, or times a number."""
    sizes: dict[str, int] = {}
    for leaf, info in tensors.items():
        for axis, size in zip(shapes[leaf], info.shape, strict=True):
            if axis.per != 1 or not axis.symbol:
                continue
            times = experts if axis.times == "experts" else axis.times
            if isinstance(times, int) and times and size % times == 0:
                sizes.setdefault(axis.symbol, size // times)
    sizes.setdefault("experts", experts)
    missing = {"hidden", "intermediate"} - {name for name, size in sizes.items() if size > 0}
    if missing:
        info = next(iter(tensors.values()))
        raise CheckpointError(
            f"{info.file}: the sizes of tensor {shown(info.name)} and its layer make no expert: "
            f"no {' or '.join(sorted(missing))} size.",
            hint=FETCH_AGAIN,
        )
    return sizes


def _block_shown(
    storage: Storage,
    tensors: Tensors,
    shapes: Mapping[str, SymbolicShape],
    sizes: Mapping[str, int],
    said: WeightFormat,
) -> WeightFormat:
    """The storage's weight format with the block and scale dtype that the scales show.

    The declared block stays where it gives as many scales.
    """
    weight = storage.weight
    same = said.name == weight.name
    sides = dict(zip(("rows", "group"), weight.block, strict=True))
    # Zero points have as many groups as scales, which say it first.
    for leaf, info in sorted(tensors.items(), key=lambda item: storage.tensors[item[0]].role[2:] != "_scale"):
        role = storage.tensors[leaf].role
        if not role.endswith(("_scale", "_zero")):
            continue
        if role.endswith("_scale") and weight.scale_dtype != "E8M0":
            weight = replace(weight, scale_dtype="E8M0" if info.dtype == "F8_E8M0" else info.dtype)
        for axis, size in zip(shapes[leaf], info.shape, strict=True):
            if axis.per in sides and sides[str(axis.per)] == SHOWN and size:
                index = ("rows", "group").index(str(axis.per))
                sides[str(axis.per)] = _side(axis, sizes, size, said.block[index] if same else SHOWN)
    zeros = any(storage.tensors[leaf].role.endswith("_zero") for leaf in tensors)
    if same and storage.format.storages[0] in ("gptq", "awq"):
        zeros = said.zero_point
    elif storage.format.storages[0] == "gptq":
        zeros = False
    if storage.weight.block == (0, 0):
        return weight
    return replace(weight, block=(sides["rows"], sides["group"]), zero_point=zeros)


def _side(axis: AxisSize, sizes: Mapping[str, int], scales: int, said: int) -> int:
    """How many weights along an axis share each of so many scales."""
    times = axis.times if isinstance(axis.times, int) else sizes[axis.times]
    length = sizes[axis.symbol] * times
    fitting = [side for side in (said, *SIDES) if side > 0 and -(-length // side) == scales]
    if said == FULL and scales == 1:
        return FULL
    if fitting:
        return fitting[0]
    return length // scales if length % scales == 0 and scales < length else -(-length // scales)
