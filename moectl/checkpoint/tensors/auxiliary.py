"""Names and shapes of a layer's auxiliary tensors: router, shared experts, latent projections."""

from __future__ import annotations

from collections.abc import Mapping

from ...dtypes import SHORT_NAMES
from ...errors import CheckpointError
from ...files.strict_json import FETCH_AGAIN, shown
from ...files.tensor_table import TensorInfo
from ...problem.moe_problem import MoEProblem
from ..checkpoint import ExpertNames
from ..config.declared_layers import DeclaredLayers
from .layer_index import RENAME, LayerTensors
from .storage import AUXILIARY, SPELLED, SUFFIX_ROLES, Storage

_GATE = "shared_expert_gate.weight"
"""The gate that scales the output of all shared experts."""

_MATRICES = {**SPELLED, "w1": "w1", "w3": "w3", "w2": "w2"}


def tensor_names(layer: LayerTensors, storage: Storage, correction: bool) -> ExpertNames:
    """Name templates of the layer's tensors by role, for experts stored as `storage`.

    `correction` tells whether ``gate.bias`` is the correction bias. Raises CheckpointError when a tensor of
    the router or the shared experts is not understood.
    """
    first = next(iter(layer.experts))
    prefix = layer.template(layer.stem) + ("" if first is None else "{expert}.")
    experts = {storage.tensors[leaf].role: prefix + leaf for leaf in layer.leaves}
    return ExpertNames(
        dict(sorted(experts.items())),
        _router_names(layer, correction),
        _shared_names(layer),
        latent=_latent_names(layer),
    )


def _router_names(layer: LayerTensors, correction: bool) -> dict[str, str]:
    roles_by_name = {suffix: role for role, names in AUXILIARY.router.items() for suffix in names}
    # DeepSeek-V4 stores its correction bias under the name that others use for the router's own bias.
    roles_by_name["gate.bias"] = "correction_bias" if correction else "bias"
    packed = any(suffix in AUXILIARY.router["packed"] for suffix in layer.auxiliary)
    roles: dict[str, str] = {}
    for suffix, info in layer.auxiliary.items():
        if suffix.split(".")[0] not in AUXILIARY.router_modules:
            continue
        role = roles_by_name.get(suffix)
        if role is None and packed:
            continue
        if role is None or role in roles:
            raise CheckpointError(
                f"{info.file}: router tensor {shown(info.name)} is not understood.", hint=RENAME
            )
        roles[role] = layer.template(info.name)
    return dict(sorted(roles.items()))


def _shared_names(layer: LayerTensors) -> dict[str, str]:
    roles: dict[str, str] = {}
    for name, info in layer.auxiliary.items():
        module, _, matrix_name = name.partition(".")
        if module not in AUXILIARY.shared_modules:
            continue
        if name == _GATE:
            roles["gate"] = layer.template(info.name)
            continue
        matrix, _, suffix = matrix_name.partition(".")
        if matrix not in _MATRICES or suffix not in SUFFIX_ROLES:
            raise CheckpointError(
                f"{info.file}: shared expert tensor {shown(info.name)} is not understood.", hint=RENAME
            )
        roles[_MATRICES[matrix] + SUFFIX_ROLES[suffix]] = layer.template(info.name)
    if "w1" not in roles and "w3" in roles:
        roles = {role.replace("w3", "w1"): name for role, name in roles.items()}
    return dict(sorted(roles.items()))


def _latent_names(layer: LayerTensors) -> dict[str, str]:
    roles_by_name = {name: role for role, names in AUXILIARY.latent.items() for name in names}
    return {
        roles_by_name[name]: layer.template(info.name)
        for name, info in layer.auxiliary.items()
        if name in roles_by_name
    }


def infos(layer: LayerTensors) -> dict[str, TensorInfo]:
    """The auxiliary tensors by name template."""
    return {layer.template(info.name): info for info in layer.auxiliary.values()}


NO_ROUTER = "no router's weight was found beside the experts; the config's sizes stand for it"
"""Note on layers whose router is missing or stored elsewhere."""


def check_router(layer: LayerTensors, names: ExpertNames, experts: int, top_k: int) -> TensorInfo | None:
    """The router's weight, or None; CheckpointError when one of the router's tensors has a wrong shape."""
    listed = infos(layer)
    shapes: Mapping[str, tuple[str, tuple[tuple[int | None, ...], ...]]] = {
        "weight": (f"[{experts}, hidden]", ((experts, None),)),
        "bias": (f"[{experts}]", ((experts,),)),
        "correction_bias": (f"[{experts}]", ((experts,), (1, experts))),
        "expert_scale": (f"[{experts}]", ((experts,),)),
        "hash": (f"[tokens, {top_k}]", ((None, top_k),)),
    }
    for role, template in names.router.items():
        info = listed[template]
        expected, allowed = shapes.get(role, ("", (info.shape,)))
        if not any(_fits(info.shape, shape) for shape in allowed):
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {expected}, got shape {list(info.shape)}.",
                hint=FETCH_AGAIN,
            )
    weight = names.router.get("weight", names.router.get("packed"))
    return None if weight is None else listed[weight]


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        b is None or a == b for a, b in zip(shape, expected, strict=True)
    )


def router_dtype(info: TensorInfo | None, problem: MoEProblem) -> str:
    """The router's dtype; the model's if the router is missing or packed."""
    return problem.dtype if info is None else SHORT_NAMES.get(info.dtype, problem.dtype)


def count_shared(layer: LayerTensors, names: ExpertNames, declared: DeclaredLayers, intermediate: int) -> int:
    """The number of shared experts: as declared if that matches the width of their matrix, else by the width.

    One matrix holds all shared experts. Without any of their tensors the declared number is used. Raises
    CheckpointError when only some of their tensors are listed.
    """
    matrix = next((role for role in ("w1", "w13") if role in names.shared), "")
    declared_count = declared.group.problem.shared_experts
    if not set(names.shared) - {"gate"}:
        return declared_count
    for role, word in ((matrix, "gate"), ("w2", "down")):
        if role not in names.shared:
            raise CheckpointError(
                f"layer {layer.index}: the shared experts have no {word} matrix.", hint=FETCH_AGAIN
            )
    width = _shared_width(layer, names, matrix) // (2 if matrix == "w13" else 1)
    if declared_count and (width in declared.shared_widths or width == 0 or width % intermediate):
        return declared_count
    return width // intermediate if width and width % intermediate == 0 else 1


def _shared_width(layer: LayerTensors, names: ExpertNames, matrix: str) -> int:
    """Rows of a matrix of the shared experts; 0 if the listed tensors do not show them.

    GPTQ and AWQ store the transposed matrix, AWQ packed along this axis, so the scales are used instead.
    """
    listed = infos(layer)
    if not names.shared[matrix].endswith(".qweight"):
        shape = listed[names.shared[matrix]].shape
        return shape[0] if shape else 0
    scale = names.shared.get(f"{matrix}_scale")
    return listed[scale].shape[-1] if scale and listed[scale].shape else 0


def shared_dtype(layer: LayerTensors, names: ExpertNames) -> str:
    """The safetensors dtype of the shared experts' weights; ``""`` when none are listed."""
    template = next((names.shared[role] for role in ("w1", "w13") if role in names.shared), None)
    return "" if template is None else infos(layer)[template].dtype
