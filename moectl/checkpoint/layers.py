"""Groups of equal MoE layers, from a config and, where there are any, checked tensor headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import CheckpointError
from ..problem import Dims, MoEProblem
from ..schemes import BF16, FULL, Scheme
from .declared import Declared, declared_layers
from .found import RENAME, FoundLayer, find_layers, tensor_names
from .model import ExpertNames, LayerGroup, TensorInfo
from .storage import BESIDE, HEADER_DTYPES, STORAGES, Storage, format_sizes
from .strict_json import FETCH_AGAIN, shown

_CONFIG = "Check that config.json is the one that belongs to these files."


def layer_groups(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo] | None,
    *,
    quantization: Mapping[str, Any] | None = None,
    quantization_file: str = "",
) -> tuple[LayerGroup, ...]:
    """The MoE layers of a checkpoint, grouped by equal problem and names, in layer order.

    Args:
        config: config.json's object.
        tensors: every tensor by name; None when only the config is known. Headers win over the
            config where they disagree, with a note.
        quantization: the quantization config, where it stands in a file of its own, `quantization_file`.

    Raises:
        CheckpointError: no MoE layer, an expert or tensor missing, a wrong dtype or shape, or a
            family, method or name that is not understood.
    """
    declared = declared_layers(config, quantization, quantization_file)
    if tensors is None:
        return (declared.group,)
    layers, extra = find_layers(tensors, declared.layers)
    if not layers:
        raise CheckpointError(
            "the tensors hold no Mixture-of-Experts layer.",
            reason="Expected names such as model.layers.0.mlp.experts.gate_up_proj_blocks.",
            hint="Give the checkpoint of a Mixture-of-Experts model.",
        )
    groups: list[LayerGroup] = []
    for layer in layers:
        found = _read_layer(layer, declared)
        for at, group in enumerate(groups):
            if (group.problem, group.names) == (found.problem, found.names):
                groups[at] = replace(group, layers=(*group.layers, layer.index))
                break
        else:
            groups.append(found)
    notes = _layer_notes({layer.index for layer in layers}, set(declared.group.layers), extra)
    return tuple(replace(group, notes=group.notes + notes) for group in groups)


def _layer_notes(found: set[int], declared: set[int], extra: set[str]) -> tuple[str, ...]:
    notes = []
    if found - declared:
        notes.append(f"layers {ranges(found - declared)} have experts, which the config does not say")
    if declared - found:
        notes.append(f"layers {ranges(declared - found)} have no experts, though the config says so")
    if extra:
        notes.append(f"not read, as they are not the main model's: experts of {', '.join(sorted(extra))}")
    return tuple(notes)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in short, sorted: ``0-2, 5`` for {0, 1, 2, 5}."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


def _read_layer(layer: FoundLayer, declared: Declared) -> LayerGroup:
    """The group of this layer alone."""
    problem, notes, sources = declared.group.problem, [], dict(declared.group.sources)
    storage = _storage_of(layer, problem)
    scheme = problem.scheme
    if storage.name != problem.storage:
        scheme = Scheme(BF16)
        notes.append(f"the config says {problem.scheme}, the headers say {scheme}")
    experts = _count_experts(layer, storage, problem.experts)
    sizes = {**_solve(layer, storage), "experts": experts}
    scheme = _fit_group(layer, storage, scheme, sizes, notes)
    sizes |= format_sizes(scheme)
    _check_tensors(layer, storage, sizes)
    names = tensor_names(layer, storage)
    _check_router(layer, names, experts)
    found = replace(
        problem,
        dims=Dims(sizes["hidden"], sizes["intermediate"]),
        experts=experts,
        local_experts=experts,
        scheme=scheme,
        storage=storage.name,
        act_order=problem.act_order if storage.name == problem.storage else "",
        bias="w2_bias" in names.experts,
        dtype=_model_dtype(layer, names, problem, sources),
        routing=replace(
            problem.routing,
            router_bias="bias" in names.router,
            correction_bias="correction_bias" in names.router,
        ),
        shared_experts=_count_shared(layer, names, problem, sizes["intermediate"]),
    )
    if found.top_k > experts:
        raise CheckpointError(
            f"layer {layer.index} has {experts} experts, fewer than top-k {found.top_k}.", hint=_CONFIG
        )
    _compare(layer, names, problem, found, sources, notes)
    return LayerGroup((layer.index,), found, names, sources, tuple(notes))


def _storage_of(layer: FoundLayer, problem: MoEProblem) -> Storage:
    """The storage whose tensors these are: the declared one if it fits, else plain weights."""
    leaves, fused = layer.leaves, None in layer.experts
    if fused and len(layer.experts) > 1:
        raise CheckpointError(
            f"layer {layer.index} mixes experts in one tensor with experts of their own, "
            f"under {layer.block}experts.",
            hint="Remove those that do not belong to the model.",
        )
    shaped = [storage for storage in STORAGES if storage.fused == fused]
    fitting = [it for it in shaped if not it.missing(leaves) and not it.unknown(leaves)]
    for storage in fitting:
        if storage.name == problem.storage and problem.scheme.weight.name in storage.weights:
            return storage
    for storage in fitting:
        if BF16.name in storage.weights:
            return storage
    known = {leaf for storage in shaped for leaf in storage.tensors}
    nearest = max(
        (it for it in shaped if it.name == problem.storage),
        key=lambda it: len(leaves & it.tensors.keys()),
        default=None,
    )
    if nearest is None:
        raise CheckpointError(
            f"layer {layer.index}: {problem.storage} experts of {problem.scheme} are not understood yet, "
            f"with tensors {', '.join(sorted(leaves)[:12])}.",
            reason=f"Known leaves are {', '.join(sorted(known)[:24])}." if known else "",
            hint=RENAME,
        )
    lacking, strange = nearest.missing(leaves), nearest.unknown(leaves)
    parts = [f"lack {', '.join(lacking)}"] if lacking else []
    parts += [f"have {', '.join(map(shown, strange[:8]))}, which is not understood"] if strange else []
    parts = parts or [f"do not store {problem.scheme.weight}"]
    raise CheckpointError(
        f"layer {layer.index}: the {nearest.name} experts {' and '.join(parts)}.", hint=_CONFIG
    )


def _count_experts(layer: FoundLayer, storage: Storage, declared: int) -> int:
    """The number of experts; CheckpointError when one of them, or one of its tensors, is missing."""
    leaves = layer.leaves
    if storage.fused:
        info = layer.experts[None][min(leaves)]
        return info.shape[0] if info.shape else 0
    present = {expert for expert in layer.experts if expert is not None}
    wanted = _router_experts(layer) or declared
    for expert in range(max(wanted, max(present) + 1)):
        if expert not in present:
            raise CheckpointError(
                f"layer {layer.index}: expert {expert} is missing: "
                f"no tensor {layer.name(min(leaves), expert)}, "
                f"of {max(wanted, max(present) + 1)} experts {len(present)} are there.",
                hint=FETCH_AGAIN,
            )
        tensors = layer.experts[expert]
        for leaf in sorted(leaves):
            if leaf not in tensors:
                raise CheckpointError(
                    f"layer {layer.index}: expert {expert} has no tensor {layer.name(leaf, expert)}, "
                    "which others have.",
                    hint=FETCH_AGAIN,
                )
    return len(present)


def _router_experts(layer: FoundLayer) -> int | None:
    for rest in BESIDE.router["weight"]:
        if rest in layer.beside and layer.beside[rest].shape:
            return layer.beside[rest].shape[0]
    return None


def _solve(layer: FoundLayer, storage: Storage) -> dict[str, int]:
    """Sizes that stand in a shape as they are, or times a number: hidden and intermediate."""
    tensors = next(iter(layer.experts.values()))
    sizes: dict[str, int] = {}
    for leaf, info in tensors.items():
        axes = storage.tensors[leaf].shape
        if len(axes) != len(info.shape):
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must have {len(axes)} axes, "
                f"got shape {list(info.shape)}.",
                hint=_CONFIG,
            )
        for axis, size in zip(axes, info.shape, strict=True):
            if axis.per == 1 and axis.symbol and size % axis.times == 0:
                sizes.setdefault(axis.symbol, size // axis.times)
    missing = {"hidden", "intermediate"} - {name for name, size in sizes.items() if size > 0}
    if missing:
        info = next(iter(tensors.values()))
        raise CheckpointError(
            f"{info.file}: the sizes of tensor {shown(info.name)} and its layer make no expert: "
            f"no {' or '.join(sorted(missing))} size.",
            hint=FETCH_AGAIN,
        )
    return sizes


def _fit_group(
    layer: FoundLayer, storage: Storage, scheme: Scheme, sizes: Mapping[str, int], notes: list[str]
) -> Scheme:
    """`scheme` with the group size and scale dtype that the scales' header shows."""
    tensors = next(iter(layer.experts.values()))
    for leaf, info in tensors.items():
        axis = storage.tensors[leaf].shape[-1]
        if axis.per != "group" or not info.shape or not info.shape[-1]:
            continue
        weight, length, groups = scheme.weight, sizes[axis.symbol], info.shape[-1]
        group = FULL if groups == 1 and weight.group == FULL else -(-length // groups)
        if weight.group != FULL and -(-length // weight.group) == groups:
            group = weight.group
        if group != weight.group:
            fitted = replace(weight, block=(1, group))
            notes.append(f"the config says {weight}, the headers say {fitted}")
            weight = fitted
        if storage.tensors[leaf].role.endswith("_scale"):
            weight = replace(weight, scale_dtype=info.dtype)
        return replace(scheme, weight=weight)
    return scheme


def _check_tensors(layer: FoundLayer, storage: Storage, sizes: Mapping[str, int]) -> None:
    """CheckpointError unless every expert tensor has its dtype and shape, and all experts the same."""
    first = next(iter(layer.experts.values()))
    expected = {
        leaf: (tuple(axis.value(sizes) for axis in storage.tensors[leaf].shape), first[leaf].dtype)
        for leaf in first
    }
    for leaf, info in first.items():
        allowed = storage.tensors[leaf].dtypes
        if info.dtype not in allowed:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {' or '.join(allowed)}, got {info.dtype}.",
                hint=_CONFIG,
            )
    for tensors in layer.experts.values():
        for leaf, info in tensors.items():
            shape, dtype = expected[leaf]
            if info.shape != shape or info.dtype != dtype:
                raise CheckpointError(
                    f"{info.file}: tensor {shown(info.name)} must be {dtype} {list(shape)} beside the other "
                    f"expert tensors, got {info.dtype} {list(info.shape)}.",
                    hint=FETCH_AGAIN,
                )


def _check_router(layer: FoundLayer, names: ExpertNames, experts: int) -> None:
    if "weight" not in names.router:
        raise CheckpointError(
            f"layer {layer.index} has experts but no router: no tensor "
            f"{' or '.join(layer.block + rest for rest in BESIDE.router['weight'])}.",
            hint=FETCH_AGAIN,
        )
    for role, template in names.router.items():
        info = layer.tensor(template)
        axes = 2 if role == "weight" else 1
        if len(info.shape) != axes or info.shape[0] != experts:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must have {axes} axes, "
                f"the first of {experts} experts, "
                f"got shape {list(info.shape)}.",
                hint=FETCH_AGAIN,
            )


def _model_dtype(layer: FoundLayer, names: ExpertNames, problem: MoEProblem, sources: dict[str, str]) -> str:
    """The model's dtype; where the config does not say it, the router's, which is never quantized."""
    info = layer.tensor(names.router["weight"])
    if sources["dtype"] != "assumed" or info.dtype not in HEADER_DTYPES:
        return problem.dtype
    sources["dtype"] = f"header:{info.name}"
    return HEADER_DTYPES[info.dtype]


def _count_shared(layer: FoundLayer, names: ExpertNames, problem: MoEProblem, intermediate: int) -> int:
    """Shared experts: their one matrix is as wide as all of them together."""
    if not names.shared:
        return 0
    if "w1" not in names.shared:
        raise CheckpointError(
            f"layer {layer.index}: the shared experts have no gate matrix.", hint=FETCH_AGAIN
        )
    info = layer.tensor(names.shared["w1"])
    width = info.shape[0] if info.shape else 0
    if width == 0 or width % intermediate:
        return problem.shared_experts or 1
    return width // intermediate


def _compare(
    layer: FoundLayer,
    names: ExpertNames,
    said: MoEProblem,
    found: MoEProblem,
    sources: dict[str, str],
    notes: list[str],
) -> None:
    """Where headers decide, name the tensor as the source; where they disagree, say so in a note."""
    expert = {"layer": layer.index, "expert": 0}
    first = next(iter(names.experts.values())).format(**expert)
    w2 = names.experts["w2"].format(**expert)
    router = names.router["weight"].format(**expert)
    facts = {
        "experts": (said.experts, found.experts, first),
        "hidden": (said.dims.hidden, found.dims.hidden, w2),
        "intermediate": (said.dims.intermediate, found.dims.intermediate, first),
        "bias": (said.bias, found.bias, names.experts.get("w2_bias", w2).format(**expert)),
        "shared_experts": (
            said.shared_experts,
            found.shared_experts,
            names.shared.get("w1", router).format(**expert),
        ),
        "routing.router_bias": (
            said.routing.router_bias,
            found.routing.router_bias,
            names.router.get("bias", router).format(**expert),
        ),
        "routing.correction_bias": (
            said.routing.correction_bias,
            found.routing.correction_bias,
            names.router.get("correction_bias", router).format(**expert),
        ),
    }
    for name, (config, header, tensor) in facts.items():
        if config != header:
            origin = sources.get(name, "config")
            if origin.startswith("config"):
                notes.append(f"{name}: the config says {config}, the headers say {header}")
            sources[name] = f"header:{tensor}"
    sources["storage"] = f"header:{first}"
    if found.scheme != said.scheme:
        sources["scheme"] = f"header:{first}"
