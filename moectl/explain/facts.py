"""A problem's facts in words, with where each was read."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem import MoEProblem


def source_of(fact: str, sources: Mapping[str, str]) -> str:
    """Where a fact of `facts` was read, its parts' places included, each once."""
    parts = {"storage": ("storage", "rows")}.get(fact, (fact,))
    found = [place for key, place in sources.items() if key.split(".")[0] in parts]
    return ", ".join(dict.fromkeys(found))


def facts(problem: MoEProblem) -> Mapping[str, str]:
    """A problem's fields in words, by the names that `LayerGroup.sources` uses."""
    act, routing = problem.activation, problem.routing
    details = [
        f"{name} {value:g}" for name in ("alpha", "limit") if (value := getattr(act, name)) is not None
    ]
    order = f"{routing.scoring} {'of the chosen logits' if routing.after_topk else 'scores'}"
    steps = [
        order,
        "renormalized" if routing.renormalize else "not renormalized",
        *(["correction bias"] if routing.correction_bias else []),
        *(["router bias"] if routing.router_bias else []),
        *([f"groups {routing.groups}, best {routing.topk_groups}"] if routing.groups else []),
        *([f"scale {routing.scale:g}"] if routing.scale != 1 else []),
        *(["weights on the input"] if routing.weight_on_input else []),
    ]
    local = "" if problem.local_experts == problem.experts else f" ({problem.local_experts} on this rank)"
    return {
        "experts": f"{problem.experts}{local}",
        "top_k": str(problem.top_k),
        "hidden": str(problem.dims.hidden),
        "intermediate": f"{problem.dims.intermediate}{'' if problem.parallel.tp_size == 1 else ' per rank'}",
        "scheme": str(problem.scheme),
        "storage": f"{problem.storage}, rows {problem.rows}",
        "activation": ", ".join([act.name, "gated" if act.gated else "not gated", *details]),
        "routing": ", ".join(steps),
        "bias": "yes" if problem.bias else "no",
        "shared_experts": str(problem.shared_experts),
    }
