# mypy: ignore-errors
"""Device code of the router: a program computes scores, choices, weights and factors of one token.

It is defined by `kernels.reference.route`, whose ids it reproduces exactly. A *place* is the position of an
expert in registers, with groups padded to powers of two; places are in the order of experts. Scores are
compared as integers with the same order (`_rank`); `_NAN` and `_TAKEN` are below every number.
"""

import triton
import triton.language as tl

from .sort_and_combine_kernels import _await_inputs

_LOWEST: tl.constexpr = tl.constexpr(-(2**31) + 0x7FFFFF)  # the rank of -inf
_NAN: tl.constexpr = tl.constexpr(-(2**31) + 1)
_TAKEN: tl.constexpr = tl.constexpr(-(2**31))
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _rank(x):
    """int32 in the order of the fp32 x, equal for both zeros; `_NAN` for NaN."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, _NAN, bits)


@triton.jit
def _value(rank):
    """The inverse of `_rank`; -inf for NaN and taken places."""
    rank = tl.maximum(rank, _LOWEST)
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _largest_first(rank, place, PLACES: tl.constexpr):
    """The largest rank, and the first place that has it."""
    best = tl.max(rank, 0)
    return best, tl.min(tl.where(rank == best, place, PLACES), 0)


@triton.jit
def _finite(x):
    """x with infinities replaced by the largest finite numbers, as the router uses logits; NaN stays NaN."""
    x = tl.where(x > _LARGEST, _LARGEST, x)
    return tl.where(x < -_LARGEST, -_LARGEST, x)


@triton.jit
def _score(x, top, total, SCORING: tl.constexpr):
    """Scores of the logits x; for softmax `total` is the sum of ``exp(x - top)``."""
    if SCORING == "softmax":
        y = tl.exp(x - top) / total
    elif SCORING == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(SCORING == "sqrtsoftplus")
        t = tl.exp(-tl.abs(x))
        u = 1.0 + t
        # log1p(t): the quotient corrects the rounding of u for small t.
        log = tl.where(u == 1.0, t, tl.log(u) * t / tl.where(u == 1.0, 1.0, u - 1.0))
        y = tl.sqrt(tl.where(x > 0, x, 0.0) + log)
        y = tl.where(x != x, x, y)
    return y


@triton.jit
def _kept(rank, KEPT: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    """`rank` ``[GROUPS, SIZE]``, lowered to at most `_LOWEST` outside the KEPT best groups.

    Groups are compared by their best score, or with PAIRS by the sum of their two best.
    """
    SIZE: tl.constexpr = rank.shape[1]
    group, member = tl.arange(0, GROUPS), tl.arange(0, SIZE)[None, :]
    best = tl.max(rank, 1)
    sums = _value(best)
    if PAIRS:
        first = tl.min(tl.where(rank == best[:, None], member, SIZE), 1)
        sums += _value(tl.max(tl.where(member == first[:, None], _TAKEN, rank), 1))
    there = best > _TAKEN
    left = tl.where(there, _rank(sums), _TAKEN)
    keep = tl.zeros((GROUPS,), dtype=tl.int32)
    for _ in range(KEPT):
        chosen = group == _largest_first(left, group, GROUPS)[1]
        keep = tl.where(chosen, 1, keep)
        left = tl.where(chosen, _TAKEN, left)
    return tl.where(keep[:, None] > 0, rank, tl.minimum(rank, _LOWEST))


@triton.jit
def _share(x, left, largest):
    """Sparsemixer's weight (fp64) of the expert whose logit is the `largest` of those `left`."""
    # A literal would be fp32, and quotients of 16-bit logits can equal 0.02 exactly.
    jitter = tl.full((), 0.02, dtype=tl.float64)
    far = (largest - x) / tl.maximum(tl.abs(x), largest) > jitter
    return 1.0 / tl.sum(tl.where(left & (far == 0), tl.exp(x - largest), 0.0), 0)


@triton.jit
def _chosen(
    x, rank, place, slot, K: tl.constexpr, SPARSE: tl.constexpr, SPAD: tl.constexpr, SIZE: tl.constexpr
):
    """Experts with the K largest `rank`, by slot; with SPARSE also their sparsemixer weights in fp64."""
    ids = tl.full(slot.shape, -1, dtype=tl.int32)
    weights = tl.zeros(slot.shape, dtype=tl.float64)
    for i in range(K):
        best, first = _largest_first(rank, place, place.shape[0])
        ids = tl.where(slot == i, first // SPAD * SIZE + first % SPAD, ids)
        if SPARSE:
            share = _share(x, rank > _NAN, _value(best).to(tl.float64))
            weights = tl.where(slot == i, share, weights)
        rank = tl.where(place == first, _TAKEN, rank)
    return ids, weights


@triton.jit
def _looked_up(TABLE, TOKENS, token, slot, live, vocabulary, E: tl.constexpr, K: tl.constexpr):
    """The ids in the token's row of TABLE ``[vocabulary, K]``; -1 if out of range."""
    id = tl.load(TOKENS + token).to(tl.int64)
    known = (id >= 0) & (id < vocabulary)
    ids = tl.load(TABLE + id * K + slot, mask=live & known, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit
def _weighed(y, shares, top, total, SCORING: tl.constexpr, AFTER: tl.constexpr):
    """fp64 weights of the chosen logits y, before renormalization; NaN for NaN."""
    if SCORING == "sparsemixer":
        weights = tl.where(y == y, shares, y)
    elif AFTER and SCORING == "softmax":
        most = tl.max(tl.where(y == y, y, -_LARGEST), 0)
        parts = tl.exp(y - most)
        weights = parts / tl.sum(tl.where(y == y, parts, 0.0), 0)
    else:
        weights = _score(y, top.to(tl.float64), total, SCORING)
    return weights


@triton.jit(do_not_specialize=["stride", "vocabulary"])
def _route_kernel(
    LOGITS, BIAS, FACTORS, TABLE, TOKENS, IDS, WEIGHTS, stride, vocabulary, scale, smallest_sum,
    E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GPAD: tl.constexpr, SPAD: tl.constexpr,
    K: tl.constexpr, KPAD: tl.constexpr, SCORING: tl.constexpr, AFTER: tl.constexpr,
    RENORMALIZE: tl.constexpr, BIASED: tl.constexpr, FACTOR: tl.constexpr, HASHED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """IDS and WEIGHTS ``[tokens, K]`` of LOGITS ``[tokens, E]``; one program per token.

    Groups of E // GROUPS experts are padded to SPAD places, and GROUPS to GPAD. Tensors that the routing does
    not use are not read.
    """
    PLACES: tl.constexpr = GPAD * SPAD
    SIZE: tl.constexpr = E // GROUPS
    _await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = LOGITS + token * stride
    place = tl.arange(0, PLACES)
    expert = place // SPAD * SIZE + place % SPAD
    there = (place % SPAD < SIZE) & (expert < E)
    x = _finite(tl.load(row + expert, mask=there, other=float("nan")).to(tl.float32))
    top = tl.max(tl.where(x == x, x, -_LARGEST), 0)
    total = tl.full((), 1.0, dtype=tl.float64)
    exact = x.to(tl.float64)
    if SCORING == "softmax" and not AFTER:
        parts = tl.exp(exact - top.to(tl.float64)) if BIASED else tl.exp(x - top)
        total = tl.sum(tl.where(x == x, parts, 0.0), 0).to(tl.float64)

    slot = tl.arange(0, KPAD)
    live = slot < K
    shares = tl.zeros((KPAD,), dtype=tl.float64)
    if HASHED:
        ids = _looked_up(TABLE, TOKENS, token, slot, live, vocabulary, E, K)
    else:
        choice = x
        if BIASED:
            bias = tl.load(BIAS + expert, mask=there, other=0.0).to(tl.float32)
            score = x if AFTER else _score(exact, top.to(tl.float64), total, SCORING).to(tl.float32)
            choice = score + bias
        rank = tl.where(there, _rank(choice), _TAKEN)
        if KEPT < GROUPS:
            rank = tl.reshape(
                _kept(tl.reshape(rank, (GPAD, SPAD)), KEPT, BIASED and SIZE > 1, GPAD), (PLACES,)
            )
        ids, shares = _chosen(exact, rank, place, slot, K, SCORING == "sparsemixer", SPAD, SIZE)

    chosen = live & (ids >= 0)
    y = _finite(tl.load(row + ids, mask=chosen, other=float("nan")).to(tl.float32)).to(tl.float64)
    weights = _weighed(y, shares, top, total, SCORING, AFTER)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(tl.where(y == y, weights, 0.0), 0), smallest_sum)
    weights = weights * scale
    if FACTOR:
        weights = weights * tl.load(FACTORS + ids, mask=chosen, other=0.0).to(tl.float64)
    weights = tl.where(chosen, weights, 0.0)
    tl.store(IDS + token * K + slot, ids, mask=live)
    tl.store(WEIGHTS + token * K + slot, weights.to(tl.float32), mask=live)
