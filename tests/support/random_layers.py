"""Small random layers of the two model families, for the tests of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moectl.convert.recipe.recipe import Recipe, StoredOutput
from moectl.files.tensor_table import TensorType
from moectl.kernels.layer_inputs import LayerInputs, make_inputs
from moectl.kernels.prepared_layer import CANONICAL, PreparedMoE
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import CheckResult, check, tolerance_for
from moectl.layer.experts import ExpertLayer
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Dims, MoEProblem, Routing
from moectl.problem.padding import pad
from moectl.problem.schemes import FULL, MXFP4, Scheme, int_format

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

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = {"BF16": torch.bfloat16, "F16": torch.float16}

E4M3_ONE = 0x38
E8M0_ONE = 127


def canonical_roles(problem: MoEProblem, seed: int = 0) -> dict[str, Tensor]:
    """Random codes, and scales that keep activations near one."""
    generator = torch.Generator().manual_seed(seed)
    weight, dims, experts = problem.scheme.weight, problem.dims, problem.local_experts
    dtype = DTYPES[problem.dtype]
    roles = {}
    for role, n, k in (
        ("w13", (2 if problem.activation.gated else 1) * dims.intermediate, dims.hidden),
        ("w2", dims.hidden, dims.intermediate),
    ):
        groups = 1 if weight.group == FULL else -(-k // weight.group)
        columns = k * weight.bits // 8
        roles[role] = torch.randint(0, 256, (experts, n, columns), dtype=torch.uint8, generator=generator)
        if weight.number.scale == "F8_E4M3":
            # Every scale, and global ones, gate's unlike up's, that keep activations near one.
            scales = torch.randint(0, 127, (experts, n, groups), dtype=torch.uint8, generator=generator)
            roles[f"{role}_scale"] = scales
            halves = 2 if role == "w13" and problem.activation.gated else 1
            factors = torch.rand(experts, halves, 1, generator=generator) + 0.5
            roles[f"{role}_global"] = factors * (2.0**-8 / k**0.5)
        elif weight.number.scale == "E8M0":
            if weight.bits == 8:
                nan = (roles[role] & 0x7F) == 0x7F
                roles[role] -= nan.to(torch.uint8)
            one = E8M0_ONE - (7 if weight.bits == 8 else 0)  # larger codes, smaller scales
            exponents = torch.randint(one - 8, one - 2, (experts, n, groups), generator=generator)
            roles[f"{role}_scale"] = exponents.to(torch.uint8)
        else:
            spread = 2.0 ** (2 - weight.bits) / k**0.5
            scale = (torch.rand(experts, n, groups, generator=generator) + 0.5) * spread
            roles[f"{role}_scale"] = scale.to(SCALES[weight.scale_dtype])
        if weight.zero_point:
            # Codes of zero all over the range, the ends included; more often near its middle.
            most = 2**weight.bits - 1
            share = torch.rand(experts, n, groups, generator=generator) * 1.2 - 0.1
            zero = torch.randint(3 * most // 8, 5 * most // 8, (experts, n, groups), generator=generator)
            zero = torch.where(share < 0, 0, torch.where(share > 1, most, zero))
            roles[f"{role}_zero"] = zero.to(torch.uint8)
        if problem.bias:
            roles[f"{role}_bias"] = (torch.randn(experts, n, generator=generator) * 0.3).to(dtype)
    return roles


SPELLED = {torch.float32: "F32", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float16: "F16"}


def layer_of(problem: MoEProblem, roles: Mapping[str, Tensor]) -> ExpertLayer:
    """A layer that holds `roles` in memory."""
    shapes = {role: TensorType(SPELLED[t.dtype], tuple(t.shape)) for role, t in roles.items()}
    return ExpertLayer(
        problem,
        0,
        CANONICAL,
        Recipe(shapes, {role: StoredOutput(role) for role in shapes}),
        lambda ids, device=None: {
            role: t[torch.as_tensor(ids)].to(device or t.device) for role, t in roles.items()
        },
        lambda device: {role: t.to(device) for role, t in roles.items()},
        None,
    )


def random_layer(problem: MoEProblem, seed: int = 0) -> ExpertLayer:
    return layer_of(problem, canonical_roles(problem, seed))


def cut_to(problem: MoEProblem, roles: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The lanes of `problem`'s logical sizes of roles that have its padded ones."""
    dims, weight = problem.dims, problem.scheme.weight
    halves = 2 if problem.activation.gated else 1
    made = {}
    for role, t in roles.items():
        first = role.startswith("w13")
        n, k = (dims.intermediate, dims.hidden) if first else (dims.hidden, dims.intermediate)
        if first and problem.rows == "concatenated":
            t = t.unflatten(1, (halves, -1))[:, :, :n].flatten(1, 2)
        else:
            t = t[:, : (halves if first else 1) * n]
        if role in ("w13", "w2"):
            t = t[:, :, : k * weight.bits // 8]
        elif not role.endswith("_bias") and weight.group != FULL:
            t = t[:, :, : -(-k // weight.group)]
        made[role] = t.contiguous()
    return made


def layer_among_others(problem: MoEProblem, device: str) -> tuple[ExpertLayer, PreparedMoE]:
    """A random layer, and its weights for the kernels with other numbers in all padded lanes."""
    padded = pad("moectl-mtile64", problem)
    full = replace(problem, dims=Dims(padded.dims.padded_hidden, padded.dims.padded_intermediate))
    roles = canonical_roles(full)
    prepared = layer_of(full, roles).prepared("moectl", device)
    return layer_of(problem, cut_to(padded, roles)), replace(prepared, problem=padded, derived={})


def judged(layer: ExpertLayer, prepared: PreparedMoE, y: Tensor, inputs: LayerInputs) -> CheckResult:
    """`y` against the fp64 reference, computed where the layer's own storage is."""
    place = layer.canonical([0])["w13"].device
    x, ids, weights = (t.to(place) for t in (inputs.x, inputs.ids, inputs.weights))
    expected = moe_reference(x, ids, weights, layer.reference, layer.problem, dtype=torch.float64)
    accumulation = runner_for(prepared.backend).accumulation_of(prepared.problem)
    return check(y, expected, tolerance_for(prepared.problem, accumulation))


def inputs_of(
    problem: MoEProblem, tokens: int, *, distribution: str = "uniform", device: str = "cpu"
) -> LayerInputs:
    return make_inputs(problem, tokens, seed=tokens + 1, distribution=distribution, device=device)


def beyond(inputs: LayerInputs, experts: int) -> tuple[LayerInputs, LayerInputs]:
    """`inputs` with ids that no expert has, and the same with such assignments skipped."""
    ids, skipped = inputs.ids.clone(), inputs.ids.clone()
    for first, odd in ((0, experts), (1, 1_000_000), (2, -1), (3, -77)):
        ids.view(-1)[first::7], skipped.view(-1)[first::7] = odd, -1
    return replace(inputs, ids=ids), replace(inputs, ids=skipped)


def skipping(inputs: LayerInputs, every: int) -> LayerInputs:
    """`inputs` with each `every`-th assignment skipped, and all of the first token's."""
    ids = inputs.ids.clone()
    ids.view(-1)[::every] = -1
    ids[:1] = -1
    return replace(inputs, ids=ids)
