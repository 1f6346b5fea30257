"""Facts about a problem in words, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..problem.moe_problem import MoEProblem, Routing

PARTS: Mapping[str, tuple[str, ...]] = {
    "storage": ("storage", "rows", "arrangement"),
    "hidden": ("hidden", "model_hidden"),
    "router": ("router_dtype",),
}
"""The fields behind a fact, if not the one of the same name."""


def source_of(fact: str, sources: Mapping[str, str]) -> str:
    """The sources of a fact of `facts`, each once."""
    fields = PARTS.get(fact, (fact,))
    named = [source for key, source in sources.items() if key.split(".")[0] in fields]
    return ", ".join(dict.fromkeys(named))


def facts(problem: MoEProblem, details: Mapping[str, str] = MappingProxyType({})) -> Mapping[str, str]:
    """A problem's fields in words, by the names that `LayerGroup.sources` uses.

    `details` are those of the layer group, as `LayerGroup.details`.
    """
    act, dims = problem.activation, problem.dims
    local = "" if problem.local_experts == problem.experts else f" ({problem.local_experts} on this rank)"
    both = f"{dims.hidden} of the experts, {problem.model_hidden} of the model"
    arrangement = details.get("arrangement", "")
    shared = details.get("shared_dtype", "") if problem.shared_experts else ""
    parameters = ("alpha", "limit", "beta", "linear_beta")
    numbers = [f"{name.replace('_', ' ')} {value:g}" for name in parameters if (value := getattr(act, name))]
    tokens = problem.scheme.act
    rounded = {"token_scales": "powers of two, rounded up"} if tokens.rounds_scales else {}
    return {
        "experts": f"{problem.experts}{local}",
        "top_k": str(problem.top_k),
        "hidden": str(dims.hidden) if dims.hidden == problem.model_hidden else both,
        "intermediate": f"{dims.intermediate}{'' if problem.parallel.tp_size == 1 else ' per rank'}",
        "scheme": str(problem.scheme),
        **rounded,
        "storage": ", ".join(filter(None, [problem.storage, arrangement, f"rows {problem.rows}"])),
        "activation": ", ".join([act.name, "gated" if act.gated else "not gated", *numbers]),
        "routing": ", ".join(_routing_steps(problem.routing)),
        "router": problem.router_dtype,
        "bias": "yes" if problem.bias else "no",
        "shared_experts": f"{problem.shared_experts}{f', stored as {shared}' if shared else ''}",
    }


def _routing_steps(routing: Routing) -> list[str]:
    """The steps from logits to top-k ids and weights."""
    ids = "ids by token from a table, weights from " if routing.hashed else ""
    steps = {
        f"{ids}{routing.scoring} {'of the chosen logits' if routing.after_topk else 'scores'}": True,
        "renormalized" if routing.renormalize else "not renormalized": True,
        "correction bias": routing.correction_bias,
        "router bias": routing.router_bias,
        f"groups {routing.groups}, best {routing.topk_groups}": bool(routing.groups),
        f"scale {routing.scale:g}": routing.scale != 1,
        "a factor for each expert": routing.expert_scale,
        "weights on the input": routing.weight_on_input,
    }
    return [step for step, applies in steps.items() if applies]
