"""What backends made of other libraries must do, and the layers they are tried on.

Not collected by itself: `test_interpreter` runs the parts that are moectl's own, `test_gpu_peers` all.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moectl.kernels.activation import activate as judge_activate
from moectl.kernels.external.gemm_glue import (
    activate,
    align_blocks,
    max_slots,
    sort_assignments,
    weighted_sum,
)
from moectl.kernels.layer_inputs import LayerInputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.runner import Runner
from moectl.layer.experts import ExpertLayer
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import (
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    MXFP8,
    NVFP4,
    Scheme,
    act_format,
    int_format,
)
from support.random_layers import GPT_OSS, KIMI, inputs_of, judged, random_layer, skipping
from support.runners import apply

MX = replace(GPT_OSS, dims=Dims(320, 192))
INT = replace(KIMI, dims=Dims(256, 128), experts=7, top_k=3, local_experts=7, routing=Routing())


def integers(
    bits: int, group: int, *, zero: bool = False, scales: str = "BF16", **changes: object
) -> MoEProblem:
    """A small layer of integer weights."""
    return replace(INT, scheme=Scheme(int_format(bits, group, scales, zero)), **changes)  # type: ignore[arg-type]


FORMATS: dict[str, MoEProblem] = {
    "mxfp4": MX,
    "mxfp4, silu, concatenated": replace(
        MX, activation=Activation("silu"), rows="concatenated", bias=False, top_k=3
    ),
    "int4": integers(4, 32),
    "int4, group 128, bias": integers(4, 128, bias=True, activation=SWIGLU_OAI, rows="interleaved"),
    "int4, channel, not gated": integers(4, FULL, activation=Activation("relu2", gated=False)),
    "int4, zero points": integers(4, 64, zero=True),
    "int4, fp16": integers(4, 32, scales="F16", dtype="fp16", activation=Activation("gelu_tanh")),
    "int8": integers(8, 128),
    "int8, zero points": integers(8, 32, zero=True),
    "int4, weight on the input": integers(4, 32, routing=Routing(weight_on_input=True)),
}
"""Layers that differ in all that the libraries tell apart."""

FLOATS: dict[str, MoEProblem] = {
    "nvfp4": replace(INT, scheme=Scheme(NVFP4)),
    "nvfp4, bias": replace(INT, scheme=Scheme(NVFP4), bias=True, dims=Dims(128, 192)),
    "mxfp8": replace(INT, scheme=Scheme(MXFP8)),
    "fp8 blocks": replace(INT, scheme=Scheme(FP8_BLOCK), dims=Dims(384, 256)),
    "fp8 channel": replace(INT, scheme=Scheme(FP8_CHANNEL)),
    "fp8 tensor": replace(INT, scheme=Scheme(FP8_TENSOR), activation=SWIGLU_OAI),
}
"""Layers that Marlin alone takes."""
FORMATS |= FLOATS

BLOCKS = replace(INT, scheme=Scheme(FP8_BLOCK, FP8_ACT_GROUP_128), dims=Dims(384, 256))
CHANNEL, TENSOR = (replace(INT, scheme=Scheme(it, FP8_ACT_TOKEN)) for it in (FP8_CHANNEL, FP8_TENSOR))
UNGATED = Activation("relu2", gated=False)
PLAIN: dict[str, MoEProblem] = {
    "bf16": replace(INT, scheme=Scheme(BF16)),
    "bf16, bias": replace(INT, scheme=Scheme(BF16), bias=True, activation=SWIGLU_OAI, rows="interleaved"),
    "bf16, not gated": replace(INT, scheme=Scheme(BF16), activation=UNGATED),
    "bf16, interleaved": replace(
        INT, scheme=Scheme(BF16), activation=replace(SWIGLU_OAI, limit=1.0), rows="interleaved"
    ),
    "bf16, fp16 model, odd sizes": replace(INT, scheme=Scheme(BF16), dtype="fp16", dims=Dims(200, 72)),
    "bf16, weight on the input": replace(INT, scheme=Scheme(BF16), routing=Routing(weight_on_input=True)),
    "fp8 blocks, fp8 tokens": BLOCKS,
    "fp8 blocks, fp8 tokens, bias": replace(BLOCKS, bias=True, activation=SWIGLU_OAI, rows="interleaved"),
    "fp8 channel, fp8 tokens": CHANNEL,
    "fp8 channel, fp8 tokens, not gated": replace(CHANNEL, activation=UNGATED, dims=Dims(208, 80)),
    "fp8 tensor, fp8 tokens": TENSOR,
    "fp8 tensor, one scale of tokens": replace(TENSOR, scheme=Scheme(FP8_TENSOR, FP8_ACT_TENSOR)),
    "fp8 tensor, static scale": replace(TENSOR, scheme=Scheme(FP8_TENSOR, FP8_ACT_TENSOR_STATIC)),
    "fp8 tensor, static scale, not gated": replace(
        TENSOR, scheme=Scheme(FP8_TENSOR, FP8_ACT_TENSOR_STATIC), activation=UNGATED
    ),
}
"""16-bit layers, and FP8 ones whose tokens are quantized, too."""
FORMATS |= PLAIN
INT8_TOKENS = {
    "int8, int8 tokens": replace(INT, scheme=Scheme(int_format(8, FULL), act_format("int8", (1, FULL)))),
    "int4, int8 tokens": replace(INT, scheme=Scheme(int_format(4, 128), act_format("int8", (1, FULL)))),
}
"""Integers with quantized tokens."""
FORMATS |= INT8_TOKENS
GROUPED = {
    name: PLAIN[name]
    for name in (
        *("bf16", "bf16, not gated", "bf16, interleaved"),
        *("fp8 blocks, fp8 tokens", "fp8 channel, fp8 tokens"),
    )
}
"""Those that grouped products take, which add no biases."""


def layer_for(problem: MoEProblem) -> ExpertLayer:
    """A random layer on the CPU; of integers and MXFP4 with scales that differ more."""
    if problem.scheme.weight.name not in ("mxfp4", "int4", "int8"):
        return RandomLayer(problem, torch.device("cpu")).experts
    return random_layer(problem)


def ids_of(kind: str, slots: int, experts: int) -> torch.Tensor:
    """Flat ids of a routing: ``uniform``, ``skipped``, ``one`` (all on the last expert) or ``none``."""
    generator = torch.Generator().manual_seed(slots)
    ids = torch.randint(0, experts, (slots,), generator=generator, dtype=torch.int32)
    if kind == "skipped":
        ids[::3], ids[1::5] = -1, experts + 2
    elif kind == "one":
        ids.fill_(experts - 1)
    elif kind == "none":
        ids.fill_(-1)
    return ids


def makes_blocks(kind: str, slots: int, experts: int, size: int, device: str) -> None:
    """Every valid slot once, in blocks of its expert in rising order, filled up; locks are zero."""
    ids = ids_of(kind, slots, experts)
    made = align_blocks(ids.to(device), experts, size, 300, overlap=slots % 2 == 1)
    total = int(made.total)
    assert total <= len(made.slots) == max_slots(slots, experts, size) and total % size == 0
    wanted_slots, wanted_experts = [], []
    for expert in range(experts):
        mine = torch.nonzero(ids == expert).flatten().tolist()
        padded = mine + [slots] * (-len(mine) % size)
        wanted_slots += padded
        wanted_experts += [expert] * (len(padded) // size)
    assert made.slots[:total].tolist() == wanted_slots
    assert made.experts[: total // size].tolist() == wanted_experts
    assert made.locks.tolist() == [0] * 300


def sorts_ragged(kind: str, slots: int, experts: int, device: str) -> None:
    """Slots and weights by expert, their sorted positions, and counts; -1 where there is nothing."""
    ids = ids_of(kind, slots, experts)
    weights = torch.rand(slots)
    made = sort_assignments(ids.to(device), weights.to(device), experts)
    order = [slot for expert in range(experts) for slot in torch.nonzero(ids == expert).flatten().tolist()]
    assert made.slots.tolist() == order + [-1] * (slots - len(order))
    assert made.counts.tolist() == [int((ids == expert).sum()) for expert in range(experts)]
    assert torch.equal(made.weights[: len(order)].cpu(), weights[order])
    place = {slot: at for at, slot in enumerate(order)}
    assert made.positions.tolist() == [place.get(slot, -1) for slot in range(slots)]


def activates(activation: Activation, rows: str, dtype: torch.dtype, device: str) -> None:
    """As plain torch does, rounded once."""
    problem = replace(INT, activation=activation, rows=rows)
    x = (4 * torch.randn(5, (2 if activation.gated else 1) * 1100)).to(dtype)
    y = torch.empty(5, 1100, dtype=dtype, device=device)
    activate(x.to(device), y, problem)
    wanted = judge_activate(x.double(), activation, rows).float()
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert torch.allclose(y.cpu().float(), wanted, rtol=step, atol=1e-6)


def sums(weigh: bool, tokens: int, device: str) -> None:
    """Rows of skipped assignments, which are NaN, are left out."""
    experts, top_k, hidden = 6, 3, 70
    ids = ids_of("skipped", tokens * top_k, experts)
    valid = (ids >= 0) & (ids < experts)
    parts = torch.randn(tokens * top_k, hidden + 10).bfloat16()
    parts[~valid] = float("nan")
    weights = torch.rand(tokens * top_k)
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    weighted_sum(parts.to(device), y, ids.to(device), experts, weights.to(device) if weigh else None)
    kept = torch.where(valid[:, None], parts[:, :hidden].float(), 0.0)
    kept = kept * weights[:, None] if weigh else kept
    wanted = kept.view(tokens, top_k, hidden).sum(1)
    assert torch.allclose(y.cpu().float(), wanted, rtol=2.0**-8, atol=1e-6)


def with_ids(inputs: LayerInputs, kind: str, experts: int) -> LayerInputs:
    """`inputs` as they are, with a part skipped, all on one expert, or no assignment at all."""
    if kind == "skipped":
        return skipping(inputs, 3)
    if kind == "one":
        return replace(inputs, ids=torch.full_like(inputs.ids, -1).index_fill(1, _first(inputs), experts - 1))
    return replace(inputs, ids=torch.full_like(inputs.ids, -1)) if kind == "none" else inputs


def _first(inputs: LayerInputs) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.long, device=inputs.ids.device)


KINDS = ("uniform", "skipped", "one", "none")


def agrees(runner: Runner, problem: MoEProblem, tokens: int, kind: str, device: str) -> float:
    """The result is within the tolerance, and the same again; its relative RMS error."""
    layer = layer_for(problem)
    prepared = layer.prepared(runner.name, device)
    return run_agrees(runner, layer, prepared, tokens, kind)


def run_agrees(runner: Runner, layer: object, prepared: PreparedMoE, tokens: int, kind: str) -> float:
    problem, device = prepared.problem, prepared.device.type
    inputs = with_ids(inputs_of(problem, tokens, device=device), kind, problem.local_experts)
    y = apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
    again = apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
    assert torch.equal(y.view(torch.int16), again.view(torch.int16)), "not repeatable"
    if kind == "none":
        assert not y.any()
        return 0.0
    result = judged(layer, prepared, y, inputs)  # type: ignore[arg-type]
    assert result.ok, (kind, tokens, result)
    return result.rms
