"""Groups of equal MoE layers: what the config declares, corrected by what the tensors' headers show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...dtypes import SHORT_NAMES
from ...errors import CheckpointError
from ...files.strict_json import FETCH_AGAIN, shown
from ...files.tensor_table import TensorInfo
from ...problem.layer_ranges import ranges
from ...problem.moe_problem import Activation, Dims, MoEProblem, Routing
from ..checkpoint import ExpertNames, LayerGroup
from ..config.declared_layers import Declared, declared_layers
from ..config.user_assumptions import Stated
from .auxiliary import NO_ROUTER, check_router, count_shared, router_dtype, shared_dtype, tensor_names
from .layer_index import LayerTensors, index_layers
from .match_storage import CONFIG_HINT, StorageMatch, match_storage
from .storage import AUXILIARY


def layer_groups(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo] | None,
    *,
    quantization: Mapping[str, Any] | None = None,
    quantization_file: str = "",
    stated: Stated = Stated(),
) -> tuple[LayerGroup, ...]:
    """The MoE layers of a checkpoint, grouped by equal problem, names and storage, in layer order.

    Args:
        config: config.json's object.
        tensors: every tensor by name; None when only the config is known. Headers win over the
            config where they disagree, with a note.
        quantization: the quantization config, where it stands in a file of its own, `quantization_file`.
        stated: what the user states of activation and routing, before everything else.

    Raises:
        CheckpointError: no MoE layer, an expert or tensor missing, a wrong dtype or shape, or a
            family, method or name that is not understood.
    """
    declared = declared_layers(config, quantization, quantization_file, stated)
    if tensors is None:
        return declared.groups()
    layers, extra = index_layers(tensors, declared.layers)
    if not layers:
        raise CheckpointError(
            "the tensors hold no Mixture-of-Experts layer.",
            reason="Expected names such as model.layers.0.mlp.experts.gate_up_proj_blocks.",
            hint="Give the checkpoint of a Mixture-of-Experts model.",
        )
    groups: list[LayerGroup] = []
    for layer in layers:
        found = read_layer(layer, declared, stated)
        for at, group in enumerate(groups):
            same = (group.problem, group.names) == (found.problem, found.names)
            if same and group.storage is found.storage:
                groups[at] = replace(group, layers=(*group.layers, layer.index))
                break
        else:
            groups.append(found)
    notes = declared.notes + _layer_notes(
        {layer.index for layer in layers}, set(declared.group.layers), extra
    )
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


def read_layer(layer: LayerTensors, declared: Declared, stated: Stated = Stated()) -> LayerGroup:
    """The group of this layer alone; headers win over the config, with a note where they disagree.

    Raises CheckpointError when an expert or tensor is missing, or has another dtype or shape than the
    others ask for.
    """
    said, sources = declared.at(layer.index, layer.modules())
    notes: list[str] = []
    match = match_storage(layer, said, _router_experts(layer) or said.experts)
    experts = _check_experts(layer, match.sizes["experts"], said)
    names = tensor_names(layer, match.storage, _correction(layer, said))
    router = check_router(layer, names, experts, said.top_k)
    hidden = match.sizes["hidden"]
    model_hidden = router.shape[1] if router and "weight" in names.router else said.model_hidden
    first = next(iter(layer.experts.values()))
    as_said = match.storage.name(said.storage) == said.storage
    scheme = match.scheme(said.scheme, as_said and sources.get("scheme.act") != "assumed", first)
    found = replace(
        said,
        dims=Dims(hidden, match.sizes["intermediate"]),
        experts=experts,
        local_experts=experts,
        scheme=scheme,
        storage=match.storage.name(said.storage),
        rows=said.rows if "w13" in names.experts else "concatenated",
        act_order=said.act_order if as_said else "",
        activation=_activation(said.activation, match),
        bias=_biased(said, names),
        dtype=_model_dtype(said, router, sources),
        routing=_routing(said, names, stated),
        shared_experts=count_shared(layer, names, declared, match.sizes["intermediate"]),
        model_hidden=model_hidden,
    )
    found = replace(found, router_dtype=router_dtype(router, found))
    if found.top_k > experts:
        raise CheckpointError(
            f"layer {layer.index} has {experts} experts, fewer than top-k {found.top_k}.", hint=CONFIG_HINT
        )
    _check_latent(layer, names, said, found)
    _compare(layer, names, said, found, sources, notes)
    if found.scheme != said.scheme:
        notes.append(f"the config says {said.scheme}, the headers say {found.scheme}")
    elif found.storage != said.storage:
        notes.append(f"the config says {said.storage} storage, the headers say {found.storage}")
    if router is None:
        notes.append(NO_ROUTER)
    return LayerGroup(
        (layer.index,), found, names, sources, tuple(notes), shared_dtype(layer, names), match.storage
    )


def _router_experts(layer: LayerTensors) -> int | None:
    for rest in AUXILIARY.router["weight"]:
        if rest in layer.auxiliary and layer.auxiliary[rest].shape:
            return layer.auxiliary[rest].shape[0]
    return None


def _correction(layer: LayerTensors, said: MoEProblem) -> bool:
    """True when a bias called as either kind may be is the correction bias."""
    return said.routing.correction_bias or said.routing.scoring not in ("softmax", "sparsemixer")


def _check_experts(layer: LayerTensors, fused: int, said: MoEProblem) -> int:
    """The number of experts; CheckpointError when one of them, or one of its tensors, is missing or odd."""
    if None in layer.experts:
        return fused
    present = set(range(layer.uniform or 0)) or {expert for expert in layer.experts if expert is not None}
    all_said = present == set(range(said.experts))
    wanted = len(present) if all_said else max(_router_experts(layer) or said.experts, max(present) + 1)
    first = layer.experts[min(present)]
    leaves = layer.leaves
    for expert in range(wanted):
        if expert not in present:
            raise CheckpointError(
                f"layer {layer.index}: expert {expert} is missing: "
                f"no tensor {layer.name(min(leaves), expert)}, "
                f"of {wanted} experts {len(present)} are there.",
                hint=FETCH_AGAIN,
            )
        tensors = first if layer.uniform else layer.experts[expert]
        if len(tensors) != len(leaves):
            leaf = min(leaves - tensors.keys())
            raise CheckpointError(
                f"layer {layer.index}: expert {expert} has no tensor {layer.name(leaf, expert)}, "
                "which others have.",
                hint=FETCH_AGAIN,
            )
        for leaf, info in tensors.items():
            model = first.get(leaf)
            if model is not None and (info.shape != model.shape or info.dtype != model.dtype):
                raise CheckpointError(
                    f"{info.file}: tensor {shown(info.name)} must be {model.dtype} {list(model.shape)} "
                    f"beside the other experts', got {info.dtype} {list(info.shape)}.",
                    hint=FETCH_AGAIN,
                )
    return len(present)


def _activation(said: Activation, match: StorageMatch) -> Activation:
    return replace(said, gated=match.storage.gated)


def _biased(said: MoEProblem, names: ExpertNames) -> bool:
    """True when experts have biases; the zeros that GPTQ stores for every matrix are none."""
    return "w2_bias" in names.experts and (said.storage != "gptq" or said.bias)


def _routing(said: MoEProblem, names: ExpertNames, stated: Stated) -> Routing:
    """The declared routing with what the router's tensors show; all of it where none is listed.

    What was stated stays.
    """
    if not names.router:
        return said.routing
    shown_by: dict[str, Any] = {
        "router_bias": "bias" in names.router,
        "correction_bias": "correction_bias" in names.router,
        "hashed": "hash" in names.router,
        "expert_scale": "expert_scale" in names.router,
    }
    return replace(
        said.routing, **{name: value for name, value in shown_by.items() if name not in stated.routing}
    )


def _model_dtype(said: MoEProblem, router: TensorInfo | None, sources: dict[str, str]) -> str:
    """The model's dtype; where the config does not say it, the router's, if that has 16 bits."""
    found = SHORT_NAMES.get(router.dtype) if router else None
    if router is None or sources["dtype"] != "assumed" or found not in ("bf16", "fp16"):
        return said.dtype
    sources["dtype"] = f"header:{router.name}"
    return found


def _check_latent(layer: LayerTensors, names: ExpertNames, said: MoEProblem, found: MoEProblem) -> None:
    """CheckpointError unless the projections lead from the model's hidden size to the experts'.

    Without projections the two are the same, unless the config says otherwise.
    """
    wanted = {
        "in": (found.dims.hidden, found.model_hidden),
        "out": (found.model_hidden, found.dims.hidden),
    }
    plain = not names.latent and said.dims.hidden == said.model_hidden
    if plain and found.dims.hidden != found.model_hidden:
        w2 = names.experts["w2"].format(layer=layer.index, expert=0)
        raise CheckpointError(
            f"layer {layer.index}: the router takes {found.model_hidden} features, the experts "
            f"{found.dims.hidden} ({w2}), and nothing says that they have a hidden size of their own.",
            hint=FETCH_AGAIN,
        )
    for role, shape in wanted.items():
        template = names.latent.get(role)
        info = next((it for it in layer.auxiliary.values() if layer.template(it.name) == template), None)
        if info is not None and info.dtype in SHORT_NAMES and info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {list(shape)} between the model and its "
                f"experts, got shape {list(info.shape)}.",
                hint=FETCH_AGAIN,
            )


def _compare(
    layer: LayerTensors,
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
    router = names.router.get("weight", names.router.get("packed", "")).format(**expert)

    def tensor(group: Mapping[str, str], *roles: str, default: str = router) -> str:
        return next((group[role].format(**expert) for role in roles if role in group), default)

    def routing(name: str, role: str) -> tuple[bool, bool, str]:
        return getattr(said.routing, name), getattr(found.routing, name), tensor(names.router, role)

    facts: dict[str, tuple[object, object, str]] = {
        "experts": (said.experts, found.experts, first),
        "hidden": (said.dims.hidden, found.dims.hidden, w2),
        "model_hidden": (said.model_hidden, found.model_hidden, router),
        "intermediate": (said.dims.intermediate, found.dims.intermediate, first),
        "bias": (said.bias, found.bias, tensor(names.experts, "w2_bias", default=w2)),
        "shared_experts": (
            said.shared_experts,
            found.shared_experts,
            tensor(names.shared, "w1", "w13"),
        ),
        "activation.gated": (said.activation.gated, found.activation.gated, first),
        "routing.router_bias": routing("router_bias", "bias"),
        "routing.correction_bias": routing("correction_bias", "correction_bias"),
        "routing.hashed": routing("hashed", "hash"),
        "routing.expert_scale": routing("expert_scale", "expert_scale"),
    }
    for name, (config, header, where) in facts.items():
        origin = sources.get(name, "config")
        if header is True and origin.startswith(("family:", "config:no ")):
            sources[name] = f"header:{where}"
        if config != header:
            if origin.startswith("config") and not origin.startswith("config:no"):
                notes.append(f"{name}: the config says {config}, the headers say {header}")
            sources[name] = f"header:{where}"
    sources["storage"] = sources["arrangement"] = f"header:{first}"
    if router:
        sources["router_dtype"] = f"header:{router}"
    if sources.pop("scheme.act", "") and found.scheme.act == said.scheme.act:
        sources["scheme.act"] = "assumed"
    if found.scheme != said.scheme:
        sources["scheme"] = f"header:{first}"
