"""Small random layers of the two model families, for the tests of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moectl.convert.recipe import Output, Recipe
from moectl.experts import CANONICAL, ExpertLayer
from moectl.kernels.inputs import Inputs, make_inputs
from moectl.kernels.prepared import PreparedMoE
from moectl.kernels.reference import moe_reference
from moectl.kernels.tolerance import CheckResult, check, tolerance_for
from moectl.problem import SILU, SWIGLU_OAI, Dims, MoEProblem, Routing
from moectl.schemes import MXFP4, Scheme, int_format

GPT_OSS = MoEProblem(
    Dims(192, 96),
    experts=6,
    top_k=4,
    scheme=Scheme(MXFP4),
    activation=SWIGLU_OAI,
    routing=Routing(after_topk=True, router_bias=True),
    storage="gpt_oss",
    rows="interleaved",
    bias=True,
)
KIMI = MoEProblem(
    Dims(192, 64),
    experts=9,
    top_k=4,
    scheme=Scheme(int_format(4, 32)),
    activation=SILU,
    routing=Routing("sigmoid", correction_bias=True, scale=2.827),
    storage="compressed-tensors",
)
QWEN = replace(
    KIMI, dims=Dims(128, 128), scheme=Scheme(int_format(4, 128)), routing=Routing(), experts=5, top_k=2
)
GROUP_64 = replace(QWEN, scheme=Scheme(int_format(4, 64)))
FAMILIES = {"gpt-oss": GPT_OSS, "kimi": KIMI, "qwen": QWEN, "group 64": GROUP_64}

E8M0_ONE = 127


def canonical_roles(problem: MoEProblem, seed: int = 0) -> dict[str, Tensor]:
    """Random codes, and scales that keep activations near one."""
    generator = torch.Generator().manual_seed(seed)
    weight, dims, experts = problem.scheme.weight, problem.dims, problem.local_experts
    roles = {}
    for role, n, k in (
        ("w13", 2 * dims.intermediate, dims.hidden),
        ("w2", dims.hidden, dims.intermediate),
    ):
        groups = -(-k // weight.group)
        roles[role] = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=generator)
        if weight.name == "mxfp4":
            exponents = torch.randint(E8M0_ONE - 8, E8M0_ONE - 2, (experts, n, groups), generator=generator)
            roles[f"{role}_scale"] = exponents.to(torch.uint8)
        else:
            scale = torch.rand(experts, n, groups, generator=generator) + 0.5
            roles[f"{role}_scale"] = (scale * 0.25 / k**0.5).bfloat16()
        if problem.bias:
            roles[f"{role}_bias"] = (torch.randn(experts, n, generator=generator) * 0.3).bfloat16()
    return roles


SPELLED = {torch.uint8: "U8", torch.bfloat16: "BF16"}


def layer_of(problem: MoEProblem, roles: Mapping[str, Tensor]) -> ExpertLayer:
    """A layer that holds `roles` in memory."""
    shapes = {role: (tuple(t.shape), SPELLED[t.dtype]) for role, t in roles.items()}
    return ExpertLayer(
        problem,
        0,
        CANONICAL,
        Recipe(shapes, {role: Output(role) for role in shapes}),
        lambda ids: {role: t[torch.as_tensor(ids)] for role, t in roles.items()},
        lambda device: {role: t.to(device) for role, t in roles.items()},
        None,
    )


def random_layer(problem: MoEProblem, seed: int = 0) -> ExpertLayer:
    return layer_of(problem, canonical_roles(problem, seed))


def judged(layer: ExpertLayer, prepared: PreparedMoE, y: Tensor, inputs: Inputs) -> CheckResult:
    """`y` against the fp64 reference, computed where the layer's own storage is."""
    place = layer.canonical([0])["w13"].device
    x, ids, weights = (t.to(place) for t in (inputs.x, inputs.ids, inputs.weights))
    expected = moe_reference(x, ids, weights, layer.reference, layer.problem, dtype=torch.float64)
    return check(y, expected, tolerance_for(prepared.problem))


def inputs_of(
    problem: MoEProblem, tokens: int, *, distribution: str = "uniform", device: str = "cpu"
) -> Inputs:
    return make_inputs(problem, tokens, seed=tokens + 1, distribution=distribution, device=device)


def skipping(inputs: Inputs, every: int) -> Inputs:
    """`inputs` with each `every`-th assignment skipped, and all of the first token's."""
    ids = inputs.ids.clone()
    ids.view(-1)[::every] = -1
    ids[:1] = -1
    return replace(inputs, ids=ids)
