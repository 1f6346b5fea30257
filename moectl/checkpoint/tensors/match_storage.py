"""Finds the storage of a layer's expert tensors: by names first, then by dtypes, then by shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import CheckpointError
from ...files.strict_json import FETCH_AGAIN, shown
from ...files.tensor_table import TensorInfo
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL, Scheme, WeightFormat
from ..config.layer_precision import mixed_matrices
from .layer_index import RENAME, LayerTensors
from .shapes import AxisSize, SymbolicShape, shape_at
from .storage import Storage, format_sizes, storages
from .stored_formats import SHOWN

CONFIG_HINT = "Check that config.json is the one that belongs to these files."

SIDES = (16, 32, 64, 128, 256, 512)
"""Block sides in use; of several that result in the same number of scales, the first is chosen."""

HeadersByName = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class StorageMatch:
    """The storage of a layer's experts, its sizes, and the weight format that its scales show."""

    storage: Storage
    sizes: Mapping[str, int]
    weight: WeightFormat

    def scheme(self, config_scheme: Scheme, declared: bool, tensors: HeadersByName) -> Scheme:
        """The full scheme, with the config's activation format if `declared`, else the storage's default."""
        form = self.storage.format
        if declared and config_scheme.weight.name == self.weight.name:
            return replace(config_scheme, weight=self.weight)
        scaled = any(self.storage.tensors[leaf].role.endswith("_input") for leaf in tensors)
        return Scheme(self.weight, form.static if scaled and form.static else form.act)


def match_storage(layer: LayerTensors, problem: MoEProblem, experts: int) -> StorageMatch:
    """The storage of a layer's expert tensors; of several that match, the one declared by the config.

    Args:
        layer: the tensors.
        problem: the config's declaration.
        experts: number of experts from the router or the config, for tensors whose shapes do not show it.

    Raises CheckpointError about the closest storage when none matches.
    """
    tensors = next(iter(layer.experts.values()))
    _refuse_mixed(layer.index, tensors)
    named = _named(layer, problem)
    wrong = {id(item): [leaf for leaf in tensors if not _typed(item, leaf, tensors)] for item in named}
    typed = [item for item in named if not wrong[id(item)]]
    if not typed:
        _refuse_lacking(layer, problem)
        nearest = min(named, key=lambda item: (not _is_declared(item, problem), len(wrong[id(item)])))
        raise _wrong_dtype(nearest, tensors)
    matches: list[StorageMatch] = []
    first_error: CheckpointError | None = None
    for storage in sorted(typed, key=lambda item: not _is_declared(item, problem)):
        try:
            matches.append(_solve(storage, tensors, problem.scheme.weight, experts))
        except CheckpointError as error:
            first_error = first_error or error
    if not matches:
        assert first_error is not None, "every storage with matching dtypes was tried"
        raise first_error
    exact = (
        match
        for match in matches
        if match.weight == problem.scheme.weight and _is_declared(match.storage, problem)
    )
    return next(exact, matches[0])


def _is_declared(storage: Storage, problem: MoEProblem) -> bool:
    return problem.storage in storage.format.storages and storage.weight.name == problem.scheme.weight.name


def _typed(storage: Storage, leaf: str, tensors: HeadersByName) -> bool:
    return tensors[leaf].dtype in storage.tensors[leaf].dtypes


def _named(layer: LayerTensors, problem: MoEProblem) -> list[Storage]:
    """The storages with these tensor names; CheckpointError when there are none."""
    leaves, fused = layer.leaves, None in layer.experts
    if fused and len(layer.experts) > 1:
        raise CheckpointError(
            f"layer {layer.index} mixes experts in one tensor with experts of their own, "
            f"under {layer.stem.rstrip('.')}.",
            hint="Remove those that do not belong to the model.",
        )
    shaped = [storage for storage in storages() if storage.fused == fused]
    named = [item for item in shaped if not item.missing(leaves) and not item.unknown(leaves)]
    if named:
        return named

    def nearness(storage: Storage) -> tuple[int, bool, int]:
        common = len(leaves & storage.tensors.keys())
        return common, _is_declared(storage, problem), -len(storage.missing(leaves))

    nearest = max(shaped, key=nearness)
    if not leaves & nearest.tensors.keys():
        raise CheckpointError(
            f"layer {layer.index}: {problem.storage} experts of {problem.scheme} are not understood, "
            f"with tensors {', '.join(map(shown, sorted(leaves)[:12]))}.",
            hint=RENAME,
        )
    missing, unknown = nearest.missing(leaves), nearest.unknown(leaves)
    parts = [f"lack {', '.join(missing)}"] if missing else []
    parts += [f"have {', '.join(map(shown, unknown[:8]))}, which is not understood"] if unknown else []
    raise CheckpointError(
        f"layer {layer.index}: the {nearest.name(problem.storage)} experts {' and '.join(parts)}.",
        hint=CONFIG_HINT,
    )


def _refuse_mixed(layer: int, tensors: HeadersByName) -> None:
    """CheckpointError when some of an expert's matrices are quantized, and others are not or differently."""
    stored = {
        matrix: (suffix, info.dtype)
        for leaf, info in tensors.items()
        for matrix, _, suffix in [leaf.rpartition(".")]
        if matrix and suffix in _WEIGHTS
    }
    if len(set(stored.values())) > 1:
        said = ", ".join(f"{matrix}.{suffix} {dtype}" for matrix, (suffix, dtype) in sorted(stored.items()))
        raise mixed_matrices(layer, said)


_WEIGHTS = ("weight", "weight_packed", "qweight")
"""Suffixes of the tensors that hold a matrix's codes."""


def _refuse_lacking(layer: LayerTensors, problem: MoEProblem) -> None:
    """CheckpointError when the dtypes match a storage with additional tensors, such as scales."""
    leaves = layer.leaves
    tensors = next(iter(layer.experts.values()))
    fitting = [
        item
        for item in storages()
        if item.fused == (None in layer.experts)
        and not item.unknown(leaves)
        and all(_typed(item, leaf, tensors) for leaf in tensors)
    ]
    declared = [item for item in fitting if _is_declared(item, problem)]
    blocks = (problem.scheme.weight.block, (SHOWN, SHOWN))
    declared.sort(key=lambda item: item.weight.block not in blocks)
    lacking = dict.fromkeys(item.missing(leaves)[0] for item in declared[:1] or fitting)
    if lacking:
        dtypes = sorted({info.dtype for info in tensors.values()})
        raise CheckpointError(
            f"layer {layer.index}: the {' and '.join(dtypes)} experts lack {' or '.join(lacking)}.",
            hint=FETCH_AGAIN,
        )


def _wrong_dtype(storage: Storage, tensors: HeadersByName) -> CheckpointError:
    for leaf, info in sorted(tensors.items()):
        allowed = storage.tensors[leaf].dtypes
        if not _typed(storage, leaf, tensors):
            return CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {' or '.join(allowed)}, got {info.dtype}.",
                hint=CONFIG_HINT,
            )
    raise AssertionError("a storage without a wrong dtype fits")


def _solve(storage: Storage, tensors: HeadersByName, declared: WeightFormat, experts: int) -> StorageMatch:
    """Solves all shapes for the sizes and the block; CheckpointError names a tensor that disagrees."""
    shapes = {leaf: _axes(storage, leaf, info) for leaf, info in tensors.items()}
    sizes = _plain_sizes(storage, tensors, shapes, experts)
    weight = _block_shown(storage, tensors, shapes, sizes, declared)
    sizes |= format_sizes(Scheme(weight))
    for leaf, info in tensors.items():
        expected = shape_at(shapes[leaf], sizes)
        if info.shape != expected:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {info.dtype} {list(expected)} like the "
                f"other expert tensors, got {info.dtype} {list(info.shape)}.",
                hint=FETCH_AGAIN,
            )
    return StorageMatch(storage, sizes, weight)


def _axes(storage: Storage, leaf: str, info: TensorInfo) -> SymbolicShape:
    """The symbolic shape of a tensor; of several with equal rank, one whose constant axes match."""
    stored = storage.tensors[leaf]
    same_rank = [shape for shape in (stored.shape, *stored.others) if len(shape) == len(info.shape)]
    if not same_rank:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} must have {len(stored.shape)} axes, "
            f"got shape {list(info.shape)}.",
            hint=CONFIG_HINT,
        )
    fitting = [
        shape
        for shape in same_rank
        if all(axis.symbol or axis.times == size for axis, size in zip(shape, info.shape, strict=True))
    ]
    return max(fitting or same_rank, key=lambda shape: sum(not axis.symbol for axis in shape))


def _plain_sizes(
    storage: Storage, tensors: HeadersByName, shapes: Mapping[str, SymbolicShape], experts: int
) -> dict[str, int]:
    """Sizes that are an axis of a shape, or a fixed multiple of one."""
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
    tensors: HeadersByName,
    shapes: Mapping[str, SymbolicShape],
    sizes: Mapping[str, int],
    declared: WeightFormat,
) -> WeightFormat:
    """The storage's weight format with the block and scale dtype found from the scales.

    The declared block is kept if it results in the same number of scales.
    """
    weight = storage.weight
    same_format = declared.name == weight.name
    sides = dict(zip(("rows", "group"), weight.block, strict=True))
    # Scales come first; zero points have the same number of groups.
    for leaf, info in sorted(tensors.items(), key=lambda item: storage.tensors[item[0]].role[2:] != "_scale"):
        role = storage.tensors[leaf].role
        if not role.endswith(("_scale", "_zero")):
            continue
        if role.endswith("_scale") and weight.scale_dtype != "E8M0":
            weight = replace(weight, scale_dtype="E8M0" if info.dtype == "F8_E8M0" else info.dtype)
        for axis, size in zip(shapes[leaf], info.shape, strict=True):
            if axis.per in sides and sides[str(axis.per)] == SHOWN and size:
                index = ("rows", "group").index(str(axis.per))
                sides[str(axis.per)] = _side(
                    axis, sizes, size, declared.block[index] if same_format else SHOWN
                )
    zeros = any(storage.tensors[leaf].role.endswith("_zero") for leaf in tensors)
    if same_format and storage.format.storages[0] in ("gptq", "awq"):
        zeros = declared.zero_point
    elif storage.format.storages[0] == "gptq":
        zeros = False
    if storage.weight.block == (0, 0):
        return weight
    return replace(weight, block=(sides["rows"], sides["group"]), zero_point=zeros)


def _side(axis: AxisSize, sizes: Mapping[str, int], scales: int, declared: int) -> int:
    """The block side along an axis, for the number of `scales` that its tensor has."""
    times = axis.times if isinstance(axis.times, int) else sizes[axis.times]
    length = sizes[axis.symbol] * times
    fitting = [side for side in (declared, *SIDES) if side > 0 and -(-length // side) == scales]
    if declared == FULL and scales == 1:
        return FULL
    if fitting:
        return fitting[0]
    return length // scales if length % scales == 0 and scales < length else -(-length // scales)
