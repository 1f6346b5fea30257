"""What sorting by expert and summing must do, wherever they run: in the interpreter or on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moectl.kernels.choice import launch
from moectl.kernels.triton.kernel_family import ExpertOrder, KernelCall
from moectl.kernels.triton.marlin import list_items
from moectl.kernels.triton.sort_and_combine import (
    Split,
    combine,
    finish,
    records_and_reordered,
    records_of,
    sort_by_expert,
    token_tiles_of,
)

WAYS = {"few": 1 << 30, "some": 1 << 30, "many": 0}
"""Assignments listed in one launch; with "some", programs have an expert each, if there are several."""

ODD_SIZES = (
    (1, 1),
    (7, 40),
    (255, 600),
    (256, 33),
    (257, 9),
    (511, 3),
    (513, 127),
    (2048, 64),
    (2049, 256),
    (4099, 17),
)
"""Numbers of assignments, around what is read at once and what is few, and of experts."""

ROUTINGS = ("random", "skipped", "one expert", "none")


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists assignments in one launch, or in several; any other way stays as it is."""
    for limit in ("FEW", "MOST_READ") if way in WAYS else ():
        monkeypatch.setattr(launch, limit, WAYS[way])
    if way == "some":
        monkeypatch.setattr("moectl.kernels.triton.sort_and_combine.FEWEST", 1)


def ids_of(routing_name: str, assignments: int, experts: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(assignments)
    low, high = (-3, experts + 3) if routing_name == "skipped" else (0, experts)
    ids = torch.randint(low, high, (assignments,), dtype=torch.int32, generator=generator)
    constant = {"one expert": experts - 1, "none": -1}
    if routing_name in constant:
        ids.fill_(constant[routing_name])
    return ids.to(device)


def expected_order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Valid slots by expert, stable, and the offsets."""
    slots: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(ids.tolist()):
        if 0 <= expert < experts:
            slots[expert].append(slot)
    ends = torch.tensor([0, *(len(s) for s in slots)]).cumsum(0)
    return torch.tensor([s for some in slots for s in some], dtype=torch.int32), ends.int()


def sorts(
    way: str, name: str, assignments: int, experts: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every valid slot once, by expert and in order; what is written past them is nobody's."""
    take(way, monkeypatch)
    ids = ids_of(name, assignments, experts, device)
    slots, offsets = sort_by_expert(ids, experts)
    order, ends = expected_order(ids, experts)
    assert torch.equal(offsets.cpu(), ends)
    assert torch.equal(slots.cpu()[: len(order)], order)


def in_order(x: Tensor, columns: int) -> Tensor:
    """`x` with zeros up to `columns`; of 64 columns, place 16 c + 8 k + 2 j + b has 16 j + 2 c + 8 k + b."""
    wide = torch.zeros(len(x), columns, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    jkcb = wide.view(len(x), columns // 64, 4, 2, 4, 2)
    return jkcb.permute(0, 1, 4, 3, 2, 5).reshape(len(x), columns)


def plans(
    way: str,
    name: str,
    assignments: int,
    experts: int,
    tokens: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records of at most `tokens` assignments of one expert hold every valid slot once, in order."""
    take(way, monkeypatch)
    ids = ids_of(name, assignments, experts, device)
    given = given_order(ids, experts) if way == "given" else None
    x = torch.randn(3, 96, device=device).half()
    made, ordered = records_and_reordered(ids, experts, tokens, x, 128, given)
    assert torch.equal(made[:, :2], records_of(ids, experts, tokens, given)[:, :2])
    assert torch.equal(ordered.cpu(), in_order(x.cpu(), 128))
    records = made.tolist()
    used = [r for r in records if r[0] >= 0]
    assert all(r[:2] == [-1, 0] for r in records[len(used) :])  # kernels read both
    assert all(1 <= r[1] <= tokens and r[2] == 0 for r in used)
    assert all(one[0] < other[0] or one[1] == tokens for one, other in pairwise(used))
    order, ends = expected_order(ids, experts)
    assert [slot for r in used for slot in r[8 : 8 + r[1]]] == order.tolist()
    assert all(ends[r[0]] < ends[r[0] + 1] for r in used)
    assert [r[0] for r in used for _ in range(r[1])] == ids.cpu()[order.long()].tolist()


def given_order(ids: Tensor, experts: int) -> ExpertOrder:
    """`expected_order` as an order that is not made by the kernels; positions past the last are poison."""
    order, ends = expected_order(ids, experts)
    slots = torch.full_like(ids, 1 << 30)
    slots[: len(order)] = order.to(ids.device)
    return slots, ends.to(ids.device)


def tiles(
    way: str,
    name: str,
    assignments: int,
    experts: int,
    tokens: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles of each kind are those of the sorted assignments, split evenly, in units of 16, or filled; those
    of experts with more assignments come first."""
    take(way, monkeypatch)
    ids = ids_of(name, assignments, experts, device)
    order, ends = expected_order(ids, experts)
    given = given_order(ids, experts) if way == "given" else None
    empty = torch.empty(0)
    call = KernelCall(empty, ids, empty, empty, given)
    kinds: tuple[Split, ...] = ("evenly", "in units", "all but the last full")
    even, units, full = (token_tiles_of(call, experts, tokens, split) for split in kinds)
    for made in (even, units, full):
        assert torch.equal(made.offsets.cpu(), ends)
        assert torch.equal(made.slots.cpu()[: len(order)], order)
    expected, in_units, filled = [], [], []
    shares = list(enumerate(pairwise(ends.tolist())))
    for expert, (low, high) in sorted(shares, key=lambda share: share[1][0] - share[1][1]):
        parts = -(-(high - low) // tokens)
        part = -(-(high - low) // max(parts, 1))
        expected += [[expert, low + i * part, min(part, high - low - i * part), 0] for i in range(parts)]
        filled += [[expert, at, min(tokens, high - at), 0] for at in range(low, high, tokens)]
        least, wider = divmod(-(-(high - low) // 16), max(parts, 1))
        first = low
        for i in range(parts):
            width = least + (i < wider)
            in_units.append([expert, first, min(first + 16 * width, high), width])
            first += 16 * width
    for made, wanted in ((even, expected), (units, in_units), (full, filled)):
        assert made.count.tolist() == [len(wanted), 0, 0]
        assert made.tiles[: len(wanted)].tolist() == wanted and len(wanted) <= made.bound


def items(name: str, assignments: int, experts: int, tokens: int, device: str) -> None:
    """Blocks of at most `tokens` assignments of one expert cut up the order, and spare ones are empty."""
    ids = ids_of(name, assignments, experts, device)
    made = list_items(ids, experts, tokens)
    known = list(zip(*made["ITEMS"].tolist(), strict=True))
    _, ends = expected_order(ids, experts)
    cut = [
        (expert, first, end)
        for expert, (begin, end) in enumerate(pairwise(ends.tolist()))
        for first in range(begin, end, tokens)
    ]
    assert known == cut + [(experts, 0, 0)] * (made["bound"] - len(cut))


def sums(
    tokens: int,
    top_k: int,
    hidden: int,
    splits: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """The parts of valid slots, added in order and rounded once; those of skipped slots stay unread.

    Parts are in fp32, or with no `splits` in `dtype`.
    """
    experts = 8
    ids = ids_of("skipped", tokens * top_k, experts, device)
    valid = (ids >= 0) & (ids < experts)
    generator = torch.Generator().manual_seed(hidden)
    parts = torch.randn((splits or 1, tokens * top_k, hidden), generator=generator).to(device)
    parts = parts if splits else parts.to(dtype)
    parts[:, ~valid] = float("nan")
    y = torch.full((tokens, hidden), float("nan"), dtype=dtype, device=device)
    combine(parts if splits else parts[0], ids, y, experts)
    expected = torch.zeros(tokens, hidden, device=device)
    of_token = torch.nan_to_num(parts.float()).view(-1, tokens, top_k, hidden)
    for k in range(top_k):
        for part in of_token:
            expected += part[:, k]
    assert torch.equal(y, expected.to(dtype))


def zeroes_what_is_skipped(tokens: int, hidden: int, routing_name: str, device: str) -> None:
    """With one expert for each token, what the second GEMM wrote stays, and the other rows become zero."""
    experts = 8
    ids = ids_of(routing_name, tokens, experts, device)
    x = torch.full((tokens, hidden), float("nan"), device=device).bfloat16()
    call = KernelCall(x, ids, torch.ones(tokens, device=device), torch.full_like(x, float("nan")))
    parts = call.parts()
    assert parts is call.y
    valid = (ids >= 0) & (ids < experts)
    parts[valid] = torch.arange(tokens, device=device).bfloat16()[valid, None]
    finish(call, parts, experts)
    expected = torch.where(valid, torch.arange(tokens, device=device), 0).bfloat16()
    assert torch.equal(call.y, expected[:, None].expand(-1, hidden))
