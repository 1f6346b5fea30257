"""The steps around a layer's GEMMs: lists of assignments by expert, and the sum of a token's expert outputs.

Grids depend on sizes only, nothing is copied from the GPU, and sums have a fixed order. For all numbers of
tokens a layer has one compiled form of the lists and two of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from ..choice.launch import list_launches, token_tiles
from . import sort_and_combine_kernels as kernels
from .kernel_family import ExpertOrder, KernelCall

INTERPRETED = not isinstance(kernels._combine_kernel, triton.runtime.JITFunction)
"""True under ``TRITON_INTERPRET=1``: for tests, kernels run on the CPU, slowly."""

FEWEST, MINE = 256, 4
"""Assignments up to which a program has a number of them instead of an expert, and that number.

With a program for each of 128 experts, layers whose first GEMM starts beside the lists took up to 30% longer:
presumably its programs go to the multiprocessors that have room, and those that list take it from them.
"""

CHUNK = 512
"""Assignments that an expert's program reads at once."""

BLOCK = 128
"""Assignments per block; they are ranked by comparing all pairs."""

EXPERTS_AT_ONCE, BLOCKS_AT_ONCE = 8, 256
"""Columns and rows of the counts that one program adds up at a time."""

ROWS = 256
"""Rows of a batch that one program lists."""

PAIRS = 512
"""Pairs of columns of a token that one program reorders."""


def launch_options() -> dict[str, Any]:
    """Launch arguments of a kernel with a `PDL` parameter (programmatic dependent launch, from Hopper on)."""
    if not INTERPRETED:
        target = triton.runtime.driver.active.get_current_target()
        if target.backend == "cuda" and target.arch >= 90:
            return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@dataclass(frozen=True)
class TokenTiles:
    """A call's assignments sorted by expert, and split into tiles of one expert each.

    Attributes:
        slots: the sorted assignments; only those of experts are written.
        offsets: ``[experts + 1]``, the first position of each expert in `slots`.
        tiles: ``[bound, 4]`` int32, expert by expert, those with more tokens first. Split evenly, or with all
            but the last of an expert full: expert, first position, tokens, 0. In units of 16 tokens: expert,
            first position, end, units; those of an expert differ by one at most.
        count: the number of tiles, and two zeros, from which the GEMMs may count tiles that programs take.
    """

    slots: Tensor
    offsets: Tensor
    tiles: Tensor
    count: Tensor

    @property
    def bound(self) -> int:
        """Upper bound on the number of tiles, which depends on sizes only."""
        return len(self.tiles)


Split = Literal["evenly", "in units", "all but the last full"]
"""How an expert's tokens are split into tiles; see `TokenTiles`."""

_TILES: dict[Split, Any] = {
    "evenly": kernels.EVEN_TILES,
    "in units": kernels.UNIT_TILES,
    "all but the last full": kernels.FULL_TILES,
}


def token_tiles_of(call: KernelCall, experts: int, tokens: int, split: Split = "evenly") -> TokenTiles:
    """Lists the tiles of a call, of up to `tokens` tokens each; for tiles in units a multiple of 16."""
    slots, offsets = call.order or _new_order(call.ids, experts)
    bound = token_tiles(call.assignments, experts, tokens)
    # The counters' 16 bytes come first, so that the tiles are aligned.
    lists = call.ids.new_empty(4 + 4 * bound + _scratch(call.assignments, experts))
    count, tiles = lists[:3], lists[4 : 4 + 4 * bound].view(bound, 4)
    wanted = _Wanted(_TILES[split], tokens, bound, tiles, count)
    _list(call.ids, slots, offsets, experts, wanted, lists[4 + 4 * bound :], call.order)
    return TokenTiles(slots, offsets, tiles, count)


def records_of(ids: Tensor, experts: int, tokens: int, order: ExpertOrder | None = None) -> Tensor:
    """Records ``[records, 8 + tokens]`` int32 of the assignments `ids`, each up to `tokens` of one expert.

    A record is (expert, assignments, 0, 5 unused, slots), in the order of experts, and slots ascend; unused
    records have expert -1 and no assignments.

    Args:
        tokens: a power of two.
        order: the sorted assignments, if they are known.
    """
    return _records(ids, experts, tokens, order, None)


def records_and_reordered(
    ids: Tensor, experts: int, tokens: int, x: Tensor, columns: int, order: ExpertOrder | None = None
) -> tuple[Tensor, Tensor]:
    """`records_of`, and 16-bit `x` padded to `columns` columns in the order of the kernels' `_order`.

    `x` and `columns` are whole pairs of columns.
    """
    out = x.new_empty(len(x), columns)
    return _records(ids, experts, tokens, order, (x, out)), out


def _records(
    ids: Tensor, experts: int, tokens: int, order: ExpertOrder | None, reorder: tuple[Tensor, Tensor] | None
) -> Tensor:
    bound, words = token_tiles(ids.numel(), experts, tokens), 8 + tokens
    size = triton.cdiv(bound * words, 4) * 4  # what follows is aligned
    lists = ids.new_empty(size + _scratch(ids.numel(), experts))
    records = lists[: bound * words].view(bound, words)
    wanted = _Wanted(kernels.RECORDS, tokens, bound, records, records)
    # The slots are in the records.
    _list(ids, records, order[1] if order else records, experts, wanted, lists[size:], order, reorder)
    return records


def sort_by_expert(ids: Tensor, experts: int) -> ExpertOrder:
    """Slots ``[T]`` stably sorted by expert, and the offset of each expert's first slot, ``[experts + 1]``.

    One launch for few assignments, three for more.

    Args:
        ids: ``[T]`` int32, flat; ids outside ``[0, experts)`` are skipped, so that only the first
            ``offsets[experts]`` slots are written.
    """
    slots, offsets = _new_order(ids, experts)
    scratch = ids.new_empty(_scratch(ids.numel(), experts))
    _list(ids, slots, offsets, experts, _Wanted(kernels.NOTHING, 1, 0, slots, slots), scratch)
    return slots, offsets


def order_of(call: KernelCall, experts: int) -> ExpertOrder:
    """The call's `order` if it has one; otherwise its assignments are sorted."""
    return call.order or sort_by_expert(call.ids, experts)


def _new_order(ids: Tensor, experts: int) -> ExpertOrder:
    return ids.new_empty(ids.numel()), ids.new_empty(experts + 1)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is cut from the order: the kernels' KIND, most tokens of a tile, and where tiles and COUNT go."""

    kind: Any
    tokens: int
    bound: int
    tiles: Tensor
    count: Tensor


def _scratch(assignments: int, experts: int) -> int:
    """Words of the counts by block and expert.

    They are part of the allocation that holds the lists: what runs beside the last launch must not get them.
    """
    return 4 if list_launches(assignments, experts) == 1 else (triton.cdiv(assignments, BLOCK) + 1) * experts


def _list(
    ids: Tensor,
    listed: Tensor,
    offsets: Tensor,
    experts: int,
    wanted: _Wanted,
    scratch: Tensor,
    order: ExpertOrder | None = None,
    reorder: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launches what lists `ids`; see `sort_and_combine_kernels._list_kernel`."""
    t = ids.numel()
    blocks = triton.cdiv(t, BLOCK)
    jobs = [(kernels.GIVEN if order else kernels.FEW, experts)]
    if order is None and list_launches(t, experts) > 1:
        jobs = [
            (kernels.COUNTED, blocks),
            (kernels.PLACED, triton.cdiv(experts, EXPERTS_AT_ONCE)),
            (kernels.SCATTERED, blocks + experts),
        ]
    elif order is None and t <= FEWEST:
        jobs = [(kernels.FEWEST, triton.cdiv(t, MINE) + 1)]
    x, out, pieces = ids, ids, 0
    if reorder is not None:
        x, out = (tensor.view(torch.int32) for tensor in reorder)
        pieces = len(x) * triton.cdiv(out.shape[1], PAIRS)
    for number, (job, lists) in enumerate(jobs, 1):
        last = pieces if number == len(jobs) else 0
        kernels._list_kernel[(lists + last,)](
            order[0] if order else ids,
            scratch,
            listed,
            offsets,
            wanted.tiles,
            wanted.count,
            x,
            out,
            t,
            job.value,
            blocks,
            lists,
            wanted.kind.value,
            wanted.tokens,
            wanted.tokens.bit_length() - 1,
            wanted.bound,
            out.shape[-1],
            x.shape[-1],
            E=experts,
            EPAD=max(16, triton.next_power_of_2(experts)),
            MOST=FEWEST,
            MINE=MINE,
            CHUNK=CHUNK,
            BT=BLOCK,
            BE=EXPERTS_AT_ONCE,
            BB=BLOCKS_AT_ONCE,
            BK=PAIRS,
            num_warps=4,
            **launch_options(),
        )


def order_of_counts(counts: Tensor, most: int) -> tuple[Tensor, Tensor, ExpertOrder]:
    """Ids and weights ``[experts * most]`` of a batch, and its `KernelCall.order`, in one launch.

    Row ``e * most + i`` of the batch is a token of expert e if ``i < counts[e]``; other rows have id -1.
    `counts` are integers ``[experts]``, clamped to ``[0, most]``. Weights are 1.
    """
    experts = len(counts)
    ids = counts.new_empty(experts * most, dtype=torch.int32)
    weights = counts.new_empty(experts * most, dtype=torch.float32)
    slots, offsets = torch.empty_like(ids), ids.new_empty(experts + 1)
    kernels._batch_kernel[(experts, triton.cdiv(most, ROWS))](
        counts.contiguous(),
        ids,
        weights,
        slots,
        offsets,
        most,
        E=experts,
        EPAD=max(16, triton.next_power_of_2(experts)),
        ROWS=ROWS,
        **launch_options(),
    )
    return ids, weights, (slots, offsets)


COLUMNS = 256
"""Columns that a program of the sum, which is one warp, adds up at a time."""

PROGRAMS, FEW_PARTS = 1 << 15, 4
"""Programs of the sum from which on each takes several blocks of columns in turn, and the parts of a token up
to which that begins with a quarter of them: starting a program takes longer than adding few parts."""

TOKENS = 8
"""Tokens of a program that zeroes rows. With a program for each token and `COLUMNS`, of which most have
nothing to do, 2048 tokens took 40 us longer."""


def finish(call: KernelCall, parts: Tensor, experts: int) -> None:
    """`combine`, unless `parts` is already the output: rows of tokens without an expert are zeroed then."""
    if parts is not call.y:
        combine(parts, call.ids, call.y, experts)
    elif call.order is None:
        _combine(parts, call.ids, call.y, experts, kernels.IN_PLACE)


def combine(parts: Tensor, ids: Tensor, y: Tensor, experts: int) -> None:
    """Writes `y` ``[tokens, hidden]``: the sum of each token's parts over its choices, then over K splits.

    Args:
        parts: ``[splits, T, hidden]`` fp32, or ``[T, hidden]`` in the dtype of `y`; only slots of valid ids
            are read.
        ids: ``[T]`` int32, flat, top-k per token.
    """
    _combine(parts, ids, y, experts, kernels.IN_FP32 if parts.dtype == torch.float32 else kernels.IN_16_BITS)


def _combine(parts: Tensor, ids: Tensor, y: Tensor, experts: int, form: Any) -> None:
    tokens, hidden = y.shape
    top_k = ids.numel() // tokens
    splits = parts.numel() // (ids.numel() * hidden)
    most = PROGRAMS if top_k * splits > FEW_PARTS else PROGRAMS // 4
    shared = min(triton.cdiv(hidden, COLUMNS), triton.cdiv(most, tokens))
    grid = (triton.cdiv(tokens, TOKENS), 1) if form is kernels.IN_PLACE else (tokens, shared)
    kernels._combine_kernel[grid](
        parts.view(y.dtype),
        y,
        ids,
        ids.numel(),
        hidden,
        form.value,
        splits,
        E=experts,
        TOP_K=top_k,
        AT_ONCE=8 if top_k <= 4 else 16,
        BH=COLUMNS,
        ROWS=TOKENS,
        WHOLE=form is kernels.IN_FP32 and splits == 1,
        INTERP=INTERPRETED,
        num_warps=1,
        **launch_options(),
    )
