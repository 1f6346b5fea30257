"""vLLM's routers before moectl's experts, against moectl's own reference, as one JSON object.

For each way of routing: the largest difference of the weights that each token gives to each expert, and the
relative error of the experts' output.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch

EXPERTS, TOP_K, TOKENS = 16, 4, 32

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax, renormalized": ({}, {}),
    "softmax": ({"renormalize": False}, {"renormalize": False}),
    "softmax over the selected": ({"after_topk": True}, {}),
    "softmax, scaled": (
        {"renormalize": False, "scale": 16.0, "groups": 1, "topk_groups": 1},
        {"renormalize": False},
    ),
    "softmax in groups": (
        {"renormalize": False, "groups": 4, "topk_groups": 2, "scale": 16.0},
        {"renormalize": False},
    ),
    "sigmoid with a bias in groups, scaled": (
        {"scoring": "sigmoid", "correction_bias": True, "groups": 4, "topk_groups": 2, "scale": 2.5},
        {},
    ),
    "sigmoid with a bias, scaled": (
        {"scoring": "sigmoid", "correction_bias": True, "groups": 1, "topk_groups": 1, "scale": 2.5},
        {},
    ),
    "one expert": ({"renormalize": False}, {"renormalize": False, "top_k": 1}),
}
"""By name: moectl's `Routing`, and what of vLLM's router does not follow from it."""


def compared(routing: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    from moectl.integrations.vllm.v0_33.experts import VllmExperts
    from moectl.kernels import reference
    from moectl.kernels.modular.fused_moe_kernel import layer_kernel
    from moectl.layer.random_layer import RandomLayer, tokens_of
    from moectl.problem.moe_problem import Dims, MoEProblem, Routing
    from moectl.problem.schemes import MXFP4, Scheme

    top_k = theirs.get("top_k", TOP_K)
    problem = MoEProblem(Dims(128, 64), EXPERTS, top_k, Scheme(MXFP4), routing=Routing(**routing))
    layer = RandomLayer(problem, torch.device("cpu"))
    kernel = layer_kernel(layer.experts.prepared("torch", "cpu"))
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    bias = torch.randn(EXPERTS, generator=generator) * 0.3 if problem.routing.correction_bias else None
    x = tokens_of(problem, TOKENS, torch.device("cpu"))
    router = create_fused_moe_router(
        global_num_experts=EXPERTS,
        use_grouped_topk=problem.routing.groups is not None,
        num_expert_group=problem.routing.groups,
        topk_group=problem.routing.topk_groups,
        scoring_func=problem.routing.scoring,
        routed_scaling_factor=problem.routing.scale,
        e_score_correction_bias=bias,
        **{"top_k": top_k, "renormalize": True} | theirs,
    )
    weights, ids = router.select_experts(x, logits)
    wanted_ids, wanted_weights = reference.route(logits, problem, bias)
    dense = [torch.zeros(TOKENS, EXPERTS) for _ in range(2)]
    for table, columns, values in zip(dense, (ids, wanted_ids), (weights, wanted_weights), strict=True):
        table.scatter_(1, columns.long(), values.float())
    y = torch.empty_like(x)
    VllmExperts.apply(SimpleNamespace(kernel=kernel, load=None), y, x, None, None, weights, ids)
    expert = layer.experts.reference
    wanted = reference.moe_reference(x, wanted_ids, wanted_weights, expert, problem)
    error = (y.float() - wanted).norm() / wanted.norm()
    return float((dense[0] - dense[1]).abs().max()), float(error)


if __name__ == "__main__":
    print(json.dumps({name: compared(*way) for name, way in WAYS.items()}))
