"""Groups of equal MoE layers: the config's declaration, corrected by the tensor headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...dtypes import SHORT_NAMES
from ...errors import CheckpointError
from ...files.strict_json import FETCH_AGAIN, shown
from ...files.tensor_table import TensorInfo
from ...problem.layer_ranges import layers_of
from ...problem.moe_problem import Activation, Dims, MoEProblem, Routing
from ..checkpoint import ExpertNames, LayerGroup
from ..config.declared_layers import DeclaredLayers, declared_layers
from ..config.user_assumptions import UserAssumptions
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
    assumptions: UserAssumptions = UserAssumptions(),
) -> tuple[LayerGroup, ...]:
    """The MoE layers of a checkpoint, grouped by equal problem, names and storage, in layer order.

    Args:
        config: the parsed object of config.json.
        tensors: every tensor by name; None when only the config is known. Headers override the config
            where they disagree, with a note.
        quantization: the quantization config when it is stored in a separate file, `quantization_file`.
        assumptions: activation and routing as the user states them; they override config and headers.

    Raises:
        CheckpointError: no MoE layer, an expert or tensor missing, a wrong dtype or shape, or a
            family, method or name that is not understood.

    Example:
        >>> config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8,
        ...           "num_experts_per_tok": 2, "hidden_size": 4096, "intermediate_size": 14336}
        >>> (group,) = layer_groups(config, None)
        >>> group.layers, str(group.problem.scheme)
        ((0, 1), 'bf16, a16 activations')
    """
    declared = declared_layers(config, quantization, quantization_file, assumptions)
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
        single = read_layer(layer, declared, assumptions)
        for index, group in enumerate(groups):
            read = (single.problem, single.names, single.declared)
            equal = (group.problem, group.names, group.declared) == read
            if equal and group.storage is single.storage:
                groups[index] = replace(group, layers=(*group.layers, layer.index))
                break
        else:
            groups.append(single)
    notes = declared.notes + _layer_notes(
        {layer.index for layer in layers}, set(declared.group.layers), extra
    )
    return tuple(replace(group, notes=group.notes + notes) for group in groups)


def _layer_notes(stored: set[int], declared: set[int], extra: set[str]) -> tuple[str, ...]:
    notes = []
    if more := stored - declared:
        have = "has" if len(more) == 1 else "have"
        notes.append(f"{layers_of(more)} {have} experts, which the config does not say")
    if fewer := declared - stored:
        have = "has" if len(fewer) == 1 else "have"
        notes.append(f"{layers_of(fewer)} {have} no experts, though the config says so")
    if extra:
        notes.append(f"skipped (not part of the main model): experts in {', '.join(sorted(extra))}")
    return tuple(notes)


def read_layer(
    layer: LayerTensors, declared: DeclaredLayers, assumptions: UserAssumptions = UserAssumptions()
) -> LayerGroup:
    """A group of this layer alone; headers override the config, with a note where they disagree.

    Raises CheckpointError when an expert or tensor is missing, or its dtype or shape does not match the
    other tensors.
    """
    config_problem, sources = declared.problem_of(layer.index, layer.modules())
    notes: list[str] = []
    match = match_storage(layer, config_problem, _router_experts(layer) or config_problem.experts)
    experts = _check_experts(layer, match.sizes["experts"], config_problem)
    names = tensor_names(layer, match.storage, _correction(layer, config_problem))
    router = check_router(layer, names, experts, config_problem.top_k)
    hidden = match.sizes["hidden"]
    model_hidden = router.shape[1] if router and "weight" in names.router else config_problem.model_hidden
    first = next(iter(layer.experts.values()))
    as_declared = match.storage.name(config_problem.storage) == config_problem.storage
    scheme = match.scheme(
        config_problem.scheme, as_declared and sources.get("scheme.act") != "assumed", first
    )
    problem = replace(
        config_problem,
        dims=Dims(hidden, match.sizes["intermediate"]),
        experts=experts,
        local_experts=experts,
        scheme=scheme,
        storage=match.storage.name(config_problem.storage),
        rows=config_problem.rows if "w13" in names.experts else "concatenated",
        act_order=config_problem.act_order if as_declared else "",
        activation=_activation(config_problem.activation, match),
        bias=_biased(config_problem, names),
        dtype=_model_dtype(config_problem, router, sources),
        routing=_routing(config_problem, names, assumptions),
        shared_experts=count_shared(layer, names, declared, match.sizes["intermediate"]),
        model_hidden=model_hidden,
    )
    problem = replace(problem, router_dtype=router_dtype(router, problem))
    if problem.top_k > experts:
        raise CheckpointError(
            f"layer {layer.index} has {experts} experts, fewer than top-k {problem.top_k}.", hint=CONFIG_HINT
        )
    _check_latent(layer, names, config_problem, problem)
    _compare(layer, names, config_problem, problem, sources, notes)
    if problem.scheme != config_problem.scheme:
        notes.append(f"the config says {config_problem.scheme}, the headers say {problem.scheme}")
    elif problem.storage != config_problem.storage:
        notes.append(f"the config says {config_problem.storage} storage, the headers say {problem.storage}")
    if router is None:
        notes.append(NO_ROUTER)
    return LayerGroup(
        (layer.index,),
        problem,
        names,
        sources,
        tuple(notes),
        shared_dtype(layer, names),
        match.storage,
        None if problem.scheme == config_problem.scheme else config_problem.scheme,
    )


def _router_experts(layer: LayerTensors) -> int | None:
    for rest in AUXILIARY.router["weight"]:
        if rest in layer.auxiliary and layer.auxiliary[rest].shape:
            return layer.auxiliary[rest].shape[0]
    return None


def _correction(layer: LayerTensors, config_problem: MoEProblem) -> bool:
    """True when a router bias with an ambiguous name is the correction bias."""
    return config_problem.routing.correction_bias or config_problem.routing.scoring not in (
        "softmax",
        "sparsemixer",
    )


def _check_experts(layer: LayerTensors, fused: int, config_problem: MoEProblem) -> int:
    """The number of experts; CheckpointError when an expert or one of its tensors is missing or differs.

    `fused` is the number of experts in one fused tensor.
    """
    if None in layer.experts:
        return fused
    present = set(range(layer.uniform or 0)) or {expert for expert in layer.experts if expert is not None}
    complete = present == set(range(config_problem.experts))
    expected = (
        len(present) if complete else max(_router_experts(layer) or config_problem.experts, max(present) + 1)
    )
    first = layer.experts[min(present)]
    leaves = layer.leaves
    for expert in range(expected):
        if expert not in present:
            raise CheckpointError(
                f"layer {layer.index}: expert {expert} is missing: "
                f"no tensor {layer.name(min(leaves), expert)}, "
                f"of {expected} experts {len(present)} are there.",
                hint=FETCH_AGAIN,
            )
        if layer.uniform is not None:
            continue
        tensors = layer.experts[expert]
        if len(tensors) != len(leaves):
            leaf = min(leaves - tensors.keys())
            raise CheckpointError(
                f"layer {layer.index}: expert {expert} has no tensor {layer.name(leaf, expert)}, "
                "which others have.",
                hint=FETCH_AGAIN,
            )
        for leaf, info in tensors.items():
            reference = first.get(leaf)
            if reference is not None and (info.shape != reference.shape or info.dtype != reference.dtype):
                raise CheckpointError(
                    f"{info.file}: tensor {shown(info.name)} must be {reference.dtype} "
                    f"{list(reference.shape)} like the other experts', got {info.dtype} {list(info.shape)}.",
                    hint=FETCH_AGAIN,
                )
    return len(present)


def _activation(config_problem: Activation, match: StorageMatch) -> Activation:
    return replace(config_problem, gated=match.storage.gated)


def _biased(config_problem: MoEProblem, names: ExpertNames) -> bool:
    """True when experts have biases; the all-zero biases that GPTQ stores for every matrix do not count."""
    return "w2_bias" in names.experts and (config_problem.storage != "gptq" or config_problem.bias)


def _routing(config_problem: MoEProblem, names: ExpertNames, assumptions: UserAssumptions) -> Routing:
    """The declared routing, updated from the router's tensors if any are listed.

    Fields that the user stated are kept.
    """
    if not names.router:
        return config_problem.routing
    in_headers: dict[str, Any] = {
        "router_bias": "bias" in names.router,
        "correction_bias": "correction_bias" in names.router,
        "hashed": "hash" in names.router,
        "expert_scale": "expert_scale" in names.router,
    }
    updates = {name: value for name, value in in_headers.items() if name not in assumptions.routing}
    return replace(config_problem.routing, **updates)


def _model_dtype(config_problem: MoEProblem, router: TensorInfo | None, sources: dict[str, str]) -> str:
    """The model's dtype; if the config does not state it, the router's, provided it has 16 bits."""
    router_dtype = SHORT_NAMES.get(router.dtype) if router else None
    if router is None or sources["dtype"] != "assumed" or router_dtype not in ("bf16", "fp16"):
        return config_problem.dtype
    sources["dtype"] = f"header:{router.name}"
    return router_dtype


def _check_latent(
    layer: LayerTensors, names: ExpertNames, config_problem: MoEProblem, problem: MoEProblem
) -> None:
    """CheckpointError unless the latent projections map between the model's hidden size and the experts'.

    Without projections the two sizes must be equal, unless the config states both.
    """
    shapes = {
        "in": (problem.dims.hidden, problem.model_hidden),
        "out": (problem.model_hidden, problem.dims.hidden),
    }
    same_size = not names.latent and config_problem.dims.hidden == config_problem.model_hidden
    if same_size and problem.dims.hidden != problem.model_hidden:
        w2 = names.experts["w2"].format(layer=layer.index, expert=0)
        raise CheckpointError(
            f"layer {layer.index}: the router takes {problem.model_hidden} features, the experts "
            f"{problem.dims.hidden} ({w2}), and nothing says that they have a hidden size of their own.",
            hint=FETCH_AGAIN,
        )
    for role, shape in shapes.items():
        template = names.latent.get(role)
        info = next((aux for aux in layer.auxiliary.values() if layer.template(aux.name) == template), None)
        if info is not None and info.dtype in SHORT_NAMES and info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} must be {list(shape)} between the model and its "
                f"experts, got shape {list(info.shape)}.",
                hint=FETCH_AGAIN,
            )


def _compare(
    layer: LayerTensors,
    names: ExpertNames,
    config_problem: MoEProblem,
    problem: MoEProblem,
    sources: dict[str, str],
    notes: list[str],
) -> None:
    """Records the deciding tensors in `sources`, and adds a note for each field that headers correct."""
    expert = {"layer": layer.index, "expert": 0}
    first = next(iter(names.experts.values())).format(**expert)
    w2 = names.experts["w2"].format(**expert)
    router = names.router.get("weight", names.router.get("packed", "")).format(**expert)

    def tensor(group: Mapping[str, str], *roles: str, default: str = router) -> str:
        return next((group[role].format(**expert) for role in roles if role in group), default)

    def routing(name: str, role: str) -> tuple[bool, bool, str]:
        return (
            getattr(config_problem.routing, name),
            getattr(problem.routing, name),
            tensor(names.router, role),
        )

    fields: dict[str, tuple[object, object, str]] = {
        "experts": (config_problem.experts, problem.experts, first),
        "hidden": (config_problem.dims.hidden, problem.dims.hidden, w2),
        "model_hidden": (config_problem.model_hidden, problem.model_hidden, router),
        "intermediate": (config_problem.dims.intermediate, problem.dims.intermediate, first),
        "bias": (config_problem.bias, problem.bias, tensor(names.experts, "w2_bias", default=w2)),
        "shared_experts": (
            config_problem.shared_experts,
            problem.shared_experts,
            tensor(names.shared, "w1", "w13"),
        ),
        "activation.gated": (config_problem.activation.gated, problem.activation.gated, first),
        "routing.router_bias": routing("router_bias", "bias"),
        "routing.correction_bias": routing("correction_bias", "correction_bias"),
        "routing.hashed": routing("hashed", "hash"),
        "routing.expert_scale": routing("expert_scale", "expert_scale"),
    }
    for name, (config, header, tensor_name) in fields.items():
        origin = sources.get(name, "config")
        if header is True and origin.startswith(("family:", "config:no ")):
            sources[name] = f"header:{tensor_name}"
        if config != header:
            if origin.startswith("config") and not origin.startswith("config:no"):
                notes.append(f"{name}: the config says {config}, the headers say {header}")
            sources[name] = f"header:{tensor_name}"
    sources["storage"] = sources["arrangement"] = f"header:{first}"
    if router:
        sources["router_dtype"] = f"header:{router}"
    if sources.pop("scheme.act", "") and problem.scheme.act == config_problem.scheme.act:
        sources["scheme.act"] = "assumed"
    if not problem.scheme.act.rounds_scales:
        sources.pop("token_scales", "")
    if problem.scheme != config_problem.scheme:
        sources["scheme"] = f"header:{first}"
