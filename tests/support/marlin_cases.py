"""What the moectl_marlin kernels must do, wherever they run: in the interpreter or on a GPU.

Not collected by itself: `test_interpreter` and `test_gpu_marlin` run these cases.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moectl.kernels.layer_inputs import LayerInputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.marlin import TILES as TILES_IN_USE
from moectl.kernels.triton.marlin import MarlinTile, run_with
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import FULL, Scheme, int_format
from support.random_layers import KIMI, canonical_roles, inputs_of, judged, layer_of, random_layer, skipping

SMALL = replace(KIMI, dims=Dims(128, 64), experts=5, top_k=2, routing=Routing())


def of(group: int, *, zero: bool = False, scales: str = "BF16", **changes: object) -> MoEProblem:
    """A small int4 layer with scales of `group`."""
    scheme = Scheme(int_format(4, group, scales, zero))
    return replace(SMALL, scheme=scheme, **changes)  # type: ignore[arg-type]


FORMATS = {
    "group 32": of(32, dims=Dims(256, 96)),
    "group 64, clamped": of(64, dims=Dims(384, 192), activation=Activation("silu", limit=0.5)),
    "group 64, SiTU": of(64, activation=Activation("situ", beta=4.0, linear_beta=25.0)),
    "group 128, gelu": of(128, dims=Dims(256, 128), activation=Activation("gelu_tanh")),
    "channel, not gated": of(
        FULL, dims=Dims(128, 192), activation=Activation("relu2", gated=False), bias=True
    ),
    "group 32, zero points": of(32, zero=True, dims=Dims(384, 64), activation=SWIGLU_OAI, bias=True),
    "channel, zero points": of(FULL, zero=True),
    "fp16": of(32, scales="F16", dtype="fp16", bias=True),
    "fp16, zero points, interleaved": of(
        32, zero=True, scales="F16", dtype="fp16", rows="interleaved", bias=True, dims=Dims(128, 96)
    ),
    "one group": of(128, dims=Dims(128, 128), routing=Routing(weight_on_input=True)),
    "top-k 5": of(32, top_k=5),
}
"""Layers that differ in all that the kernels tell apart; sizes that fill no tile are padded."""

TILES = {
    "few": TILES_IN_USE[0][2],
    "4 tiles in a program": TILES_IN_USE[1][2],
    "deep": MarlinTile(tokens=8, depth=8, warps1=4, warps2=4, rows2=1),
    "16 tokens": MarlinTile(tokens=16, depth=2, warps1=4, warps2=2, rows2=1),
}


def run(prepared: PreparedMoE, inputs: LayerInputs, tile: MarlinTile) -> torch.Tensor:
    """The result of a run; on a GPU a second one must give the same bits."""
    first = run_with(prepared, inputs.x, inputs.ids, inputs.weights, tile)
    if prepared.device.type == "cuda":
        second = run_with(prepared, inputs.x, inputs.ids, inputs.weights, tile)
        assert torch.equal(first.view(torch.int16), second.view(torch.int16)), "not repeatable"
    return first


def agrees(problem: MoEProblem, tile: MarlinTile, tokens: int, device: str, *, skip: int = 0) -> None:
    """The result is within the tolerance; of `skip` > 0, each skip-th assignment has no expert."""
    layer = random_layer(problem)
    prepared = layer.prepared("moectl_marlin", device)
    inputs = inputs_of(problem, tokens, device=device)
    inputs = skipping(inputs, skip) if skip else inputs
    y = run(prepared, inputs, tile)
    assert not skip or not y[0].any()
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result


def crowds(tile: MarlinTile, device: str) -> None:
    """All tokens on one expert, the others empty."""
    problem = of(32, top_k=1)
    layer = random_layer(problem)
    prepared = layer.prepared("moectl_marlin", device)
    inputs = inputs_of(problem, 21, device=device)
    inputs = replace(inputs, ids=torch.full_like(inputs.ids, 3))
    result = judged(layer, prepared, run(prepared, inputs, tile), inputs)
    assert result.ok, result


def every_code_is_right(zero: bool, device: str) -> None:
    """A token that is one-hot brings out a column of the weights, every code of it, bit for bit.

    The first matrix turns token j into the j-th unit vector: relu squared of an identity. The second
    has random codes, whose values times a power of two are exact in bf16.
    """
    problem = of(
        32, zero=zero, dims=Dims(128, 128), experts=1, local_experts=1, top_k=1,
        activation=Activation("relu2", gated=False),
    )  # fmt: skip
    roles = canonical_roles(problem)
    eye = torch.full((128, 128), 8, dtype=torch.uint8) + torch.eye(128, dtype=torch.uint8)
    roles["w13"][0] = eye[:, 0::2] | eye[:, 1::2] << 4
    for role, t in roles.items():
        if role.endswith("_scale"):
            t.copy_(2.0 ** torch.randint(-3, 4, t.shape) if role.startswith("w2") else torch.ones(()))
        elif role == "w13_zero":
            t.fill_(8)
    layer = layer_of(problem, roles)
    prepared = layer.prepared("moectl_marlin", device)
    x = torch.eye(128, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(128, 1, dtype=torch.int32, device=device)
    y = run_with(
        prepared,
        x,
        ids,
        ids.float() + 1,
        MarlinTile(tokens=32, depth=2, warps1=4, warps2=4, rows2=2),
    )
    assert torch.equal(y.float().cpu(), layer.reference(0).w2.T.contiguous())
