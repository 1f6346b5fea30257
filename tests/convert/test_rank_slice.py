"""What a rank has of a layer, against lanes counted one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moectl.convert.canonical import canonical_shapes
from moectl.convert.layouts.registry import layout_named
from moectl.convert.rank_slice import RankSlice, SliceHashes, shard_of
from moectl.errors import NoBackend, UsageError
from moectl.problem.moe_problem import Activation, Dims, MoEProblem, Parallel, expert_range
from moectl.problem.rank_sizes import check_slices, slice_size
from moectl.problem.schemes import (
    BF16,
    FULL,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_ACT,
    Scheme,
    WeightFormat,
    int_format,
)
from moectl.torch_dtypes import TORCH_DTYPES

FP8_BLOCK = WeightFormat("fp8", 8, (128, 128), "F32")
FP8_CHANNEL = WeightFormat("fp8", 8, (1, FULL), "F32")
FP8_TENSOR = WeightFormat("fp8", 8, (FULL, FULL), "F32")
FORMATS = {
    "bf16": BF16,
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "int4": int_format(4, 32),
    "int4 zeros": int_format(4, 64, zero_point=True),
    "int8 channel": int_format(8, FULL),
    "fp8 block": FP8_BLOCK,
    "fp8 channel": FP8_CHANNEL,
    "fp8 tensor": FP8_TENSOR,
}


def layer(weight: WeightFormat, *, rows: str = "concatenated", **changes: object) -> MoEProblem:
    scheme = Scheme(weight, NVFP4_ACT) if weight.name == "nvfp4" else Scheme(weight)
    problem = MoEProblem(Dims(128, 512), 3, 2, scheme, rows=rows, bias=True)
    return replace(problem, **changes)  # type: ignore[arg-type]


def tensors(problem: MoEProblem, experts: int = 3) -> dict[str, Tensor]:
    """Canonical tensors of random bytes, of which none stand for a NaN."""
    generator = torch.Generator().manual_seed(7)
    made = {}
    for role, (dtype, shape) in canonical_shapes(problem, experts).items():
        kind = TORCH_DTYPES[dtype]
        data = torch.randint(
            0, 120, (math.prod(shape) * kind.itemsize,), dtype=torch.uint8, generator=generator
        )
        made[role] = data.view(kind).reshape(shape)
    return made


def lanes(problem: MoEProblem, role: str) -> tuple[int, list[int]] | None:
    """The axis of `role` along which lanes lie, and the first lane that each of its elements is of."""
    weight, inter = problem.scheme.weight, problem.dims.intermediate
    matrix, _, kind = role.partition("_")
    rows, columns = weight.block
    stacked = 2 if problem.activation.gated else 1
    if kind in ("global", "input") or role == "w2_bias":
        return None
    if matrix == "w2":
        step = columns if kind else max(1, 8 // weight.bits)
        return None if step == FULL else (2, list(range(0, inter, step)))
    step = rows if kind in ("scale", "zero") else 1
    if step == FULL:
        return None
    half = list(range(0, inter, step))
    if problem.rows == "interleaved" and step == 1:
        return 1, [lane for lane in half for _ in range(stacked)]
    return 1, half * stacked


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", ["concatenated", "interleaved"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_slice_has_the_lanes_of_its_rank(name: str, rows: str, gated: bool) -> None:
    problem = layer(FORMATS[name], rows=rows, activation=Activation("silu", gated))
    whole = tensors(problem)
    for rank in range(4):
        share = RankSlice(problem, shard_of(rank, tp_size=4))
        low, high = share.intermediate
        assert (low, high) == (128 * rank, 128 * rank + 128)
        cut = share.slice(whole)
        assert {role: (tuple(t.shape), t.dtype) for role, t in cut.items()} == {
            role: (shape, TORCH_DTYPES[dtype])
            for role, (dtype, shape) in canonical_shapes(share.problem, 3).items()
        }
        for role, t in whole.items():
            found = lanes(problem, role)
            expected = t
            if found:
                axis, of_lane = found
                kept = [i for i, lane in enumerate(of_lane) if low <= lane < high]
                expected = t.index_select(axis, torch.tensor(kept))
            elif role == "w2_bias" and rank:
                expected = torch.zeros_like(t)
            assert torch.equal(cut[role], expected), role
            assert cut[role].is_contiguous()


@pytest.mark.parametrize("rows", ["concatenated", "interleaved"])
@pytest.mark.parametrize("name", FORMATS)
def test_slices_of_all_ranks_are_the_layer(name: str, rows: str) -> None:
    problem = layer(FORMATS[name], rows=rows)
    whole = tensors(problem) | {"source.stored.w1_shape": torch.tensor([[512, 128]] * 3)}
    shares = [RankSlice(problem, shard_of(rank, tp_size=2)) for rank in range(2)]
    slices = [share.slice(whole) for share in shares]
    joined = shares[0].join(slices, list(canonical_shapes(problem, 3)))
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[role], t) for role, t in whole.items())


@pytest.mark.parametrize(
    ("tp", "sizes"),
    [(1, [2880]), (2, [1440, 1440]), (4, [736, 736, 736, 672]), (8, [384] * 7 + [192])],
)
def test_gpt_oss_deals_whole_blocks(tp: int, sizes: list[int]) -> None:
    problem = layer(MXFP4, rows="interleaved", dims=Dims(2880, 2880))
    shares = [RankSlice(problem, shard_of(rank, tp_size=tp)) for rank in range(tp)]
    assert [high - low for low, high in (share.intermediate for share in shares)] == sizes
    assert [share.intermediate[0] for share in shares] == [sum(sizes[:rank]) for rank in range(tp)]
    # Every rank is padded to the size of the first: they run the same kernels.
    pad = layout_named("marlin-mxfp4").pad
    assert {share.padded(pad).dims.padded_intermediate for share in shares} == {
        -(-sizes[0] // 128) * 128,
    }
    assert [share.padded(pad).dims.intermediate for share in shares] == sizes


@pytest.mark.parametrize(
    ("weight", "inter", "channels"),
    [
        (int_format(4, 128), 1408, [768, 640]),
        (int_format(4, 32), 2880, [736, 736, 704, 704]),
        (FP8_BLOCK, 1536, [256] * 4 + [128] * 4),
        (NVFP4, 768, [32] * 16 + [16] * 16),
        (BF16, 2880, [412] * 3 + [411] * 4),
        (int_format(4, FULL), 6, [4, 2]),
        (MXFP4, 2880, [192] * 10 + [160] * 6),
        (MXFP8, 96, [64, 32]),
    ],
)
def test_slices_are_whole_blocks(weight: WeightFormat, inter: int, channels: list[int]) -> None:
    tp = len(channels)
    whole = layer(weight, dims=Dims(256, inter))
    ranges = [RankSlice(whole, shard_of(rank, tp_size=tp)).intermediate for rank in range(tp)]
    assert [last - first for first, last in ranges] == channels and slice_size(whole, tp) == channels[0]
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])] and ranges[-1][
        1
    ] == inter
    check_slices(whole, tp, "moectl-mtile64")
    if (weight, inter) == (MXFP8, 96):  # as engines slice MX formats
        check_slices(whole, tp, "marlin-mxfp8")
        return
    with pytest.raises(UsageError, match=f"engines cut intermediate size {inter} for {tp} ") as refused:
        check_slices(whole, tp, "marlin-mxfp8")
    assert "--to moectl" in refused.value.hint


@pytest.mark.parametrize(
    ("weight", "inter", "tp", "words"),
    [
        (FP8_BLOCK, 1536, 13, "1536 has 12 blocks of 128 weights, fewer than 13"),
        (NVFP4, 768, 49, "768 has 48 blocks of 16 weights, fewer than 49"),
        (int_format(4, FULL), 6, 4, "6 has 3 blocks of 2 weights, fewer than 4"),
        (MXFP4, 64, 4, "64 has 2 blocks of 32 weights, fewer than 4"),
        (MXFP8, 96, 8, "96 has 3 blocks of 32 weights, fewer than 8"),
    ],
)
def test_more_ranks_than_blocks_are_refused(weight: WeightFormat, inter: int, tp: int, words: str) -> None:
    share = RankSlice(layer(weight, dims=Dims(256, inter)), shard_of(0, tp_size=tp))
    with pytest.raises(UsageError, match=words) as refused:
        assert share.intermediate
    assert "--tp-size" in refused.value.hint


def test_a_layout_refuses_a_slice_by_its_size() -> None:
    """1536 lanes are whole tiles of 256, half of them are not."""
    problem = layer(int_format(4, 32), dims=Dims(1024, 1280), bias=False)
    layout = layout_named("trtllm-mxint4")
    assert layout.recipe(RankSlice(problem).padded(layout.pad)).outputs
    share = RankSlice(problem, shard_of(0, tp_size=2))
    with pytest.raises(NoBackend, match="intermediate size must be a multiple of 256, got 640"):
        layout.recipe(share.padded(layout.pad))


@pytest.mark.parametrize("experts", [1, 7, 8, 128, 384])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_experts_are_dealt_in_runs(experts: int, ranks: int) -> None:
    problem = layer(BF16, experts=experts, local_experts=0, top_k=1)
    if ranks > experts:
        with pytest.raises(UsageError, match=f"{experts} experts cannot be spread over {ranks} ranks"):
            assert RankSlice(problem, shard_of(0, ep_size=ranks)).experts
        return
    runs = [RankSlice(problem, shard_of(rank, ep_size=ranks)).experts for rank in range(ranks)]
    assert runs == [expert_range(experts, ranks, rank) for rank in range(ranks)]
    counts = [last - first for first, last in runs]
    assert [first for first, _ in runs] == [sum(counts[:rank]) for rank in range(ranks)]
    assert sum(counts) == experts
    assert sorted(counts, reverse=True) == counts
    assert counts[0] - counts[-1] <= 1
    assert problem.on(Parallel(tp=ranks, ep=True)).local_experts == counts[0]


def test_ranks_that_slice_the_same_experts_are_neighbours() -> None:
    shards = [shard_of(rank, tp_size=2, ep_size=3) for rank in range(6)]
    assert [(s.ep_rank, s.tp_rank) for s in shards] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [s.rank for s in shards] == list(range(6))
    assert {s.ranks for s in shards} == {6}


@pytest.mark.parametrize(
    ("rank", "tp", "ep"), [(2, 2, 1), (-1, 1, 1), (0, 0, 1), (0, 1, -3), (0, 1 << 20, 1)]
)
def test_ranks_that_are_not(rank: int, tp: int, ep: int) -> None:
    with pytest.raises(UsageError):
        shard_of(rank, tp, ep)


@pytest.mark.parametrize("rows", ["concatenated", "interleaved"])
@pytest.mark.parametrize(
    "name", ["marlin-mxfp4", "trtllm-mxfp4", "triton-hopper", "cutlass-sm90", "moectl-mtile64"]
)
@pytest.mark.parametrize("rank", range(4))
def test_no_other_ranks_lane_is_reached_by_padding(name: str, rows: str, rank: int) -> None:
    """The other ranks' lanes are 0xFF, NaNs in scales and biases; padded lanes are zero in each half."""
    problem = layer(MXFP4, rows=rows, dims=Dims(192, 352))
    layout, share = layout_named(name), RankSlice(problem, shard_of(rank, tp_size=4))
    low, high = share.intermediate
    whole = tensors(problem)
    for role, t in whole.items():
        found = lanes(problem, role)
        if found:
            axis, of_lane = found
            other = [i for i, lane in enumerate(of_lane) if not low <= lane < high]
            t.view(torch.uint8).unflatten(-1, (t.shape[-1], -1)).index_fill_(axis, torch.tensor(other), 255)
    padded = share.padded(layout.pad)
    recipe = layout.recipe(padded)
    held = dict(recipe.store(share.slice(whole), {}))
    # The layer whose own sizes are the padded ones gives the padded lanes back.
    full = replace(padded, dims=Dims(padded.dims.padded_hidden, padded.dims.padded_intermediate))
    assert full.dims.intermediate > high - low
    lengthened = layout.recipe(full).restore(held, 3)
    for role, t in lengthened.items():
        found = lanes(full, role)
        own = dict(share.slice(whole))[role]
        expected = torch.zeros_like(t)
        if found:
            axis, of_lane = found
            index = torch.tensor([i for i, lane in enumerate(of_lane) if lane < high - low])
            across = own.shape[3 - axis] if t.ndim == 3 else 0
            part = torch.zeros_like(t.index_select(axis, index))
            (part.narrow(3 - axis, 0, across) if across else part).copy_(own)
            expected.index_copy_(axis, index, part)
        else:
            expected[:, : own.shape[1]] = own
        assert torch.equal(t.view(torch.uint8), expected.view(torch.uint8)), role


def test_slices_hash_alike_in_batches_of_any_size() -> None:
    whole = tensors(layer(MXFP4))
    once, pieces = SliceHashes(), SliceHashes()
    once.take(whole, 0)
    for first in (2, 0, 1):
        pieces.take({role: t[first : first + 1] for role, t in whole.items()}, first)
    assert once.result() == pieces.result()
    whole["w2"][1, 5, 3] ^= 1
    changed = SliceHashes()
    changed.take(whole, 0)
    assert [role for role in whole if changed.result()[role] != once.result()[role]] == ["w2"]


@pytest.mark.parametrize(("tp", "ep"), [(4, 1), (1, 3), (2, 3)])
def test_largest_scales_are_taken_of_what_a_rank_holds(tp: int, ep: int) -> None:
    """Marlin's NVFP4 scales are made larger by as much as the largest allows: ranks differ."""
    problem, layout = layer(NVFP4, bias=False), layout_named("marlin-nvfp4")
    whole, later = tensors(problem), 10 * torch.arange(3, dtype=torch.uint8).view(3, 1, 1)
    whole["w13_scale"][:] = later + 40 + torch.arange(512).div(64).byte().repeat(2).view(1, -1, 1)
    whole["w2_scale"][:] = later + 60 + torch.arange(32).div(4).byte()
    for rank in range(tp * ep):
        share = RankSlice(problem, shard_of(rank, tp, ep))
        (first, last), (_, high) = share.experts, share.intermediate
        held = share.slice({role: t[first:last] for role, t in whole.items()})
        recipe = layout.recipe(
            share.padded(layout.pad), share.shapes(canonical_shapes(problem, last - first))
        )
        largest = [10 * (last - 1) + start + (high - 1) // 64 for start in (40, 60)]
        numbers = torch.tensor(largest, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
        statistics = {
            str(statistic): float(value) for statistic, value in recipe.update_statistics(held, {}).items()
        }
        assert statistics == {"max_e4m3(w13_scale)": numbers[0], "max_e4m3(w2_scale)": numbers[1]}
