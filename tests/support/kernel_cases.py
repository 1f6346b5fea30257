"""What the Triton kernels must do, wherever they run: in the interpreter or on a GPU.

Not collected by itself: `test_interpreter` and `test_gpu` run these cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from moectl.convert.rank_slice import RankSlice, shard_of
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.portable_launches import Tile
from moectl.kernels.layer_inputs import LayerInputs
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.kernels.triton.kernel_family import CODE_BASES
from moectl.kernels.triton.triton_runner import run_with
from moectl.problem.moe_problem import Activation, Dims, MoEProblem
from moectl.problem.schemes import MXFP8, Scheme, WeightFormat
from support.kernel_grid import Case
from support.random_layers import (
    DTYPES,
    E4M3_ONE,
    E8M0_ONE,
    FAMILIES,
    GPT_OSS,
    KIMI,
    QWEN,
    beyond,
    canonical_roles,
    inputs_of,
    judged,
    layer_among_others,
    layer_of,
    random_layer,
    skipping,
)
from support.runners import apply

LAUNCHES = {
    "decode 16x64x128 split 4": Launch("decode", Tile(16, 64, 128, stages=3, warps=4, split=4)),
    "decode 16x128x64": Launch("decode", Tile(16, 128, 64, stages=3, warps=4)),
    "grouped 16x64x64": Launch("grouped", Tile(16, 64, 64, stages=3, warps=4)),
    "grouped 64x128x64 tails": Launch("grouped", Tile(64, 128, 64, stages=3, warps=8, tails=2)),
    "grouped 32x64x128 mma.sync": Launch("grouped", Tile(32, 64, 128, stages=2, warps=2, tails=1)),
}
"""The last has too few warps for wgmma, so that Hopper runs what older GPUs do."""


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes uninitialized memory hold NaN (or an impossible index), so that reading it shows."""

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *a, **k: filled(new_empty(t, *a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: filled(empty_like(*a, **k)))


def _run(prepared: PreparedMoE, inputs: LayerInputs, launch: Launch) -> torch.Tensor:
    """The result of a run; on a GPU a second one must give the same bits."""
    first = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
    if prepared.device.type == "cuda":
        second = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        assert torch.equal(first.view(torch.int16), second.view(torch.int16)), "not repeatable"
    return first


def agrees(family: str | MoEProblem, launch: Launch, tokens: int, device: str) -> None:
    """The result is within the tolerance, and the same bits the second time."""
    problem = FAMILIES[family] if isinstance(family, str) else family
    layer = random_layer(problem)
    prepared = layer.prepared("moectl", device)
    inputs = inputs_of(problem, tokens, device=device)
    y = _run(prepared, inputs, launch)
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result


def agrees_in(case: Case, launch: Launch, device: str) -> None:
    """A layer of the grid is within the tolerance, whatever is in padded lanes and unused memory."""
    problem = case.problem
    layer, prepared = layer_among_others(problem, device)
    asked = known = inputs_of(problem, case.tokens, device=device)
    if case.routing == "skipping":
        asked = known = skipping(asked, every=3)
    elif case.routing == "beyond":
        asked, known = beyond(asked, problem.experts)
    elif case.routing == "crowded":
        ids = torch.full_like(asked.ids, -1)
        ids[:, 0] = problem.experts - 1
        asked = known = replace(asked, ids=ids)
    result = judged(layer, prepared, _run(prepared, asked, launch), known)
    assert result.ok, result


def probe(weight: WeightFormat, floats: tuple[str, str]) -> MoEProblem:
    """The layer of `decodes_exactly`: one expert, squares between two square matrices."""
    size = max(64, weight.group)
    return Case(
        weight, floats, Activation("relu2", gated=False), (size, size), (1, 1),
        False, False, "concatenated", 1, "uniform", 0,
    ).problem  # fmt: skip


SUMS_WITH_SURPLUS = frozenset({"warpwise", "stream"})
"""Families that add up ``(base + code) * token`` and take ``(base + zero) * sum(tokens)`` off the sum."""

INT8_OF_BF16 = -128
"""Base of 8-bit codes among bf16 tokens: they are two's complement, and no surplus without zero points."""


def surplus(family: str, problem: MoEProblem) -> int:
    """How many times too large the sums of a family can be before it takes the surplus off; 0 for not."""
    weight = problem.scheme.weight
    if family not in SUMS_WITH_SURPLUS or weight.number.byte_scale:
        return 0
    base = INT8_OF_BF16 if (weight.bits, problem.dtype) == (8, "bf16") else CODE_BASES[problem.dtype]
    zero = 2**weight.bits - 1 if weight.zero_point else 2 ** (weight.bits - 1)
    return abs(base + zero)


CUT = 2.0**-23
"""Of a sum, what is lost when a matrix instruction adds 16 columns to it: it cuts off, and does not round."""


def nearly(y: torch.Tensor, expected: torch.Tensor, surplus: int) -> bool:
    """Whether `y` is `expected` but for its last bit and what is lost of sums with a surplus.

    Row t of `expected` is what the second product takes and, its matrix being the identity, gives: all of
    its numbers stand in each of its sums, `surplus` times too large, and every 16 columns `CUT` of them is
    lost. In the difference that is left of a small number it is more than its last bit.
    """
    step = 2.0**-7 if y.dtype == torch.bfloat16 else 2.0**-10
    expected = expected.double()
    lost = CUT * (expected.shape[1] // 16)
    sums = lost * surplus * expected.abs().sum(1, keepdim=True)
    return bool(((y.double() - expected).abs() <= step * expected.abs() + sums).all())


def decodes_exactly(weight: WeightFormat, floats: tuple[str, str], launch: Launch, device: str) -> None:
    """One-hot tokens give the decoded weights themselves, of both matrices, rounded once.

    With one matrix the identity and squares of positive numbers between, column k of the other is what
    token k gives: of w2 as it is, of w13 the squares of positive numbers, for -k those of negative ones.
    """
    base = probe(weight, floats)
    size = base.dims.hidden
    roles = canonical_roles(base)
    one = torch.eye(size, dtype=DTYPES[base.dtype])
    for probed, signs in (("w2", (1,)), ("w13", (1, -1))):
        layer = layer_of(base, {**roles, **_identity(base, roles, "w13" if probed == "w2" else "w2")})
        prepared = layer.prepared("moectl", device)
        decoded = getattr(layer.reference(0), probed).double().T
        for sign in signs:
            x = (sign * one).to(device)
            ids = torch.zeros(size, 1, dtype=torch.int32, device=device)
            y = run_with(prepared, x, ids, torch.ones_like(ids).float(), launch).cpu()
            if probed == "w2":
                assert torch.equal(y, decoded.to(y.dtype))
                continue
            # A kernel that scales weights rounds them, one that scales sums does not.
            squares = [
                (t * sign).relu().square().to(y.dtype) for t in (decoded.to(y.dtype).float(), decoded.float())
            ]
            exact = any(torch.equal(y, square) for square in squares)
            # One-hot tokens leave no surplus to round in the first product, but the second takes squares.
            times = surplus(launch.family, base)
            assert exact or (times and nearly(y, squares[1], times))


def _identity(problem: MoEProblem, roles: Mapping[str, torch.Tensor], role: str) -> dict[str, torch.Tensor]:
    """Codes and scales of the identity matrix for `role`, whose zero points are as they are in `roles`."""
    weight, size = problem.scheme.weight, problem.dims.hidden
    scale = roles[f"{role}_scale"]
    zero = torch.full(scale.shape, 2 ** (weight.bits - 1), dtype=torch.uint8)
    if weight.number.byte_scale:
        zero.zero_()
    if weight.zero_point:
        zero = roles[f"{role}_zero"].clamp(max=2**weight.bits - 2)
    codes = zero.repeat_interleave(size // zero.shape[2], 2)
    one = {"E2M1": 2, "E4M3": E4M3_ONE}.get(weight.number.grid.name, 1)
    codes += torch.eye(size, dtype=torch.uint8) * one
    packed = codes if weight.bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4
    ones = torch.full_like(scale, {"E8M0": E8M0_ONE, "F8_E4M3": E4M3_ONE}.get(weight.number.byte_scale, 1))
    made = {role: packed, f"{role}_scale": ones}
    if weight.number.global_scale:
        made[f"{role}_global"] = torch.ones_like(roles[f"{role}_global"])
    return made | ({f"{role}_zero": zero} if weight.zero_point else {})


def skips(launch: Launch, device: str) -> None:
    """Skipped assignments add nothing, and a token without any gets zeros."""
    layer = random_layer(GPT_OSS)
    prepared = layer.prepared("moectl", device)
    inputs = skipping(inputs_of(GPT_OSS, 11, device=device), every=3)
    y = _run(prepared, inputs, launch)
    assert not y[0].any()
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result


def crowds(launch: Launch, device: str) -> None:
    """All tokens on one expert, the others empty."""
    problem = replace(KIMI, top_k=1)
    layer = random_layer(problem)
    prepared = layer.prepared("moectl", device)
    inputs = inputs_of(problem, 21, device=device)
    inputs = replace(inputs, ids=torch.full_like(inputs.ids, 7))
    y = _run(prepared, inputs, launch)
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result


def weighs_the_input(launch: Launch, device: str) -> None:
    """Router weights on the input instead of the output."""
    problem = replace(GPT_OSS, routing=replace(GPT_OSS.routing, weight_on_input=True))
    agrees(problem, launch, 5, device)


def one_rank(launch: Launch, device: str) -> None:
    """The rank with the last lanes, fewer than the others have and padded to theirs, and the last experts."""
    whole = replace(GPT_OSS, dims=Dims(96, 352))
    share = RankSlice(whole, shard_of(7, tp_size=4, ep_size=2))
    assert share.intermediate == (288, 352)
    (first, last), roles = share.experts, canonical_roles(whole)
    held = share.slice({role: t[first:last] for role, t in roles.items()})
    layer = replace(layer_of(share.problem, held), rank_slice=share)
    prepared = layer.prepared("moectl", device)
    assert prepared.weights["w2"].shape[2] == 2  # tiles of 64 for 96 lanes
    inputs = inputs_of(whole, 9, device=device)
    inputs = replace(inputs, ids=prepared.local_ids(inputs.ids))
    assert (inputs.ids >= 0).any()
    assert (inputs.ids < 0).any()
    y = _run(prepared, inputs, launch)
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result


ODD_SIZES = {
    "gpt-oss": replace(GPT_OSS, dims=Dims(96, 32)),
    "kimi": replace(KIMI, dims=Dims(160, 96)),
    "qwen": replace(QWEN, dims=Dims(384, 128)),
}
"""Sizes that fill no tile: rows, columns and halves are padded to 64, scale groups to 128."""


ONE_EXPERT = replace(GPT_OSS, dims=Dims(256, 64), experts=1, local_experts=1, top_k=1)
"""The layer of `every_scale_is_right`."""


def every_scale_is_right(launch: Launch, device: str) -> None:
    """Every E2M1 code at every E8M0 scale that is finite in bf16 comes out as the codec says.

    Row r of the second matrix has scale byte r and code j in column j; the first matrix turns token j,
    which is one-hot, into a multiple of the j-th unit vector, a large one for small scales (so that
    results are normal numbers) and a small one for large scales.
    """
    problem = ONE_EXPERT
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.arange(256).clamp(max=254)
    for first_scale, weight, rows in ((127, 2.0**10, slice(0, 128)), (119, 2.0**-10, slice(128, 255))):
        roles = {role: torch.zeros_like(t) for role, t in canonical_roles(problem).items()}
        first = torch.zeros(128, 256, dtype=torch.uint8)
        first[2 * codes.int(), codes.int()], first[2 * codes.int() + 1, codes.int()] = 7, 5
        roles["w13"][0] = first[:, 0::2] | first[:, 1::2] << 4
        roles["w13_scale"].fill_(first_scale)
        second = torch.zeros(256, 64, dtype=torch.uint8)
        second[:, :16] = torch.where((scales[:, None] > 252) & (codes & 7 > 3), 0, codes)
        roles["w2"][0] = second[:, 0::2] | second[:, 1::2] << 4
        roles["w2_scale"][0] = scales[:, None].to(torch.uint8)
        layer = layer_of(problem, roles)
        prepared = layer.prepared("moectl", device)
        x = torch.eye(16, 256, dtype=torch.bfloat16)
        ids, weights = torch.zeros(16, 1, dtype=torch.int32), torch.full((16, 1), weight)
        y = run_with(prepared, x.to(device), ids.to(device), weights.to(device), launch)
        expected = moe_reference(x, ids, weights, layer.reference, problem, dtype=torch.float64)[:, rows]
        assert torch.isfinite(expected).all() and int((expected == 0).sum()) < expected.numel() // 4
        torch.testing.assert_close(y.cpu().double()[:, rows], expected, rtol=0.015, atol=0.0)


def nan_codes_stay_nan(launch: Launch, device: str, dtype: str = "bf16") -> None:
    """A NaN code in one matrix of one expert makes NaN of the tokens that it has, and of no others."""
    problem = replace(KIMI, scheme=Scheme(MXFP8), dims=Dims(96, 64), dtype=dtype)
    for role in ("w13", "w2"):
        roles = canonical_roles(problem)
        roles[role][1, 3, 5] = 0xFF
        layer = layer_of(problem, roles)
        prepared = layer.prepared("moectl", device)
        inputs = inputs_of(problem, 9, device=device)
        ids = torch.arange(9, dtype=torch.int32)[:, None] % 3 + torch.arange(problem.top_k, dtype=torch.int32)
        inputs = replace(inputs, ids=ids.to(device))
        y = _run(prepared, inputs, launch).cpu()
        expected = moe_reference(
            *(t.cpu() for t in (inputs.x, inputs.ids, inputs.weights)), layer.reference, problem
        )
        assert torch.equal(y.isnan(), expected.isnan())
        assert y.isnan().any() and not y.isnan().all()


def no_tokens_and_the_table(device: str) -> None:
    """No tokens give no rows, and the runner's own choice of launch agrees too."""
    layer = random_layer(KIMI)
    prepared = layer.prepared("moectl", device)
    for tokens in (0, 2):
        inputs = inputs_of(KIMI, tokens, device=device)
        y = apply(runner_for("moectl"), prepared, inputs.x, inputs.ids, inputs.weights)
        assert y.shape == inputs.x.shape and judged(layer, prepared, y, inputs).ok
