"""One pass does what the steps do one after another: same bytes, forth and back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.convert import cpu_pass, passes
from moectl.convert.chain import Chain
from moectl.convert.compose import STEPS_AS_VIEWS, compose
from moectl.convert.layouts.words import E2M1_SHIFTED, NIBBLES_APART
from moectl.convert.transforms import (
    STEPS,
    Add,
    Bits,
    Codes,
    Flip,
    Pad,
    Rearrange,
    View,
    Widen,
    Xor,
    dtype_name,
)
from moectl.errors import CheckpointError

from .layers import EVERY_LAYOUT, as_bytes, canonical_tensors, problem_for, random_bytes, same


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Memory of the shape of `like` that holds none of its bytes."""
    return as_bytes(like).clone().bitwise_xor_(0xFF).view(like.dtype).reshape(like.shape)


def check_both_ways(chain: Chain, t: torch.Tensor, *, needed: bool) -> int:
    """How many of the two directions compose; each then gives the bytes of the steps."""
    shape, dtype = tuple(t.shape), dtype_name(t.dtype)
    stored = chain.apply(t)
    done = 0
    for back, source, wanted in ((False, t, stored), (True, stored, chain.undo(stored, shape, dtype))):
        program = compose(chain.steps, (1, *shape[1:]), dtype, back=back)
        assert program is not None or not needed
        if program is not None:
            made = poisoned(wanted)
            cpu_pass.run(program, source, made)
            assert same(made, wanted)
            done += 1
    return done


@pytest.mark.parametrize(("layout", "weight", "rows"), EVERY_LAYOUT)
@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 96), (96, 352)])
def test_every_layout_is_one_pass_each_way(layout, weight, rows, hidden, intermediate):
    problem = problem_for(layout, weight, rows, hidden, intermediate)
    tensors = canonical_tensors(problem)
    for role, chain in layout.chains(problem).items():
        if chain.steps:
            check_both_ways(chain, tensors[role], needed=True)


@st.composite
def chains(draw):
    """A chain of a few steps, with a shape and dtype that it takes."""
    e, n, k = draw(st.integers(1, 3)), draw(st.integers(1, 12)), 4 * draw(st.integers(1, 12))
    start, dtype = (e, n, k), draw(st.sampled_from(("U8", "U8", "U8", "I32", "BF16")))
    made: list[object] = []
    shape, kind = start, dtype
    for _ in range(draw(st.integers(1, 6))):
        step = draw(_step(shape, kind))
        try:
            after = step.shape(shape, kind)
        except CheckpointError:
            continue
        if math.prod(after[0]) < 20_000:
            made.append(step)
            shape, kind = after
    return Chain(tuple(made)), start, dtype


def _step(shape, kind):
    axis = st.integers(1, len(shape) - 1)
    last = shape[-1]
    names = [f"a{i}" for i in range(len(shape) - 2)]
    head = " ".join(("e", *names))
    divisors = [i for i in (2, 3, 4, 8) if last % i == 0] or [1]
    rearranged = st.builds(
        lambda d, right: Rearrange(f"{head} (x y) -> {right}", {"y": d}),
        st.sampled_from(divisors),
        st.sampled_from(
            (
                f"{head} (y x)",
                f"e y {' '.join(names)} x".replace("  ", " "),
                f"e (x {' '.join(names)}) y".replace(" )", ")"),
                f"{head} x y",
                f"e ({' '.join((*names, 'x', 'y'))})",
            )
        ),
    )
    return st.one_of(
        rearranged,
        st.builds(
            lambda a, more, fill: Pad(a, shape[a] + more, fill), axis, st.integers(0, 9), st.integers(0, 255)
        ),
        st.builds(lambda a, more: Pad(a, shape[a] + more), axis, st.integers(0, 9)),
        st.builds(Flip, axis),
        st.builds(Codes, st.sampled_from((1, 2, 4)), st.just(True)),
        st.builds(Xor, st.integers(0, 255)),
        st.sampled_from((E2M1_SHIFTED, NIBBLES_APART)),
        st.permutations(range(32)).map(lambda order: Bits(tuple(order))),
        st.builds(View, st.just(kind), st.sampled_from(("U8", "I32", "I16", "BF16"))),
        st.builds(Add, st.integers(0, 255)),
        st.just(Widen("BF16")),
    )


def test_random_chains():
    composed = []

    @settings(max_examples=250, deadline=None)
    @given(chains(), st.integers(0, 1 << 30))
    def both_ways(case, seed):
        chain, shape, dtype = case
        composed.append(check_both_ways(chain, random_bytes(shape, dtype, seed), needed=False))

    both_ways()
    assert composed.count(2) > len(composed) // 2  # or it would have shown little


def test_codes_taken_apart_and_put_back():
    chain = Chain((Codes(4, True), Rearrange("e n (k a) -> e (n a) k", {"a": 2}), Codes(4, False), Xor(0x88)))
    assert check_both_ways(chain, random_bytes((3, 5, 24), "U8"), needed=True) == 2


@pytest.mark.parametrize("fill", [0, 127])
def test_padding_of_both_axes_inside_a_word(fill):
    steps = (Pad(1, 9, fill), Pad(2, 16, fill), Xor(0x5A), Rearrange("e n (a b) -> e a n b", {"b": 8}))
    assert check_both_ways(Chain(steps), random_bytes((2, 7, 13), "U8"), needed=True) == 2


def test_bytes_that_are_added_to():
    steps = (Pad(1, 9, 3), Add(6), Rearrange("e n (a b) -> e a n b", {"b": 8}), View("U8", "I32"))
    assert check_both_ways(Chain(steps), random_bytes((2, 7, 16), "U8"), needed=True) == 2
    assert check_both_ways(Chain((Add(6), Xor(1))), random_bytes((2, 7, 16), "U8"), needed=False) == 1


def test_a_long_prime_axis_is_cut_into_tiles():
    chain = Chain((Rearrange("e n k -> e k n"),))
    assert check_both_ways(chain, random_bytes((1, 1009, 12), "U8"), needed=True) == 2


def test_every_step_that_moves_bits_has_a_row():
    assert set(STEPS_AS_VIEWS) == set(STEPS.values())


def test_steps_that_compute_values_do_not_compose():
    assert compose((Widen("F16"),), (1, 4), "F16") is None


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_take_the_one_pass(threads, monkeypatch):
    chain = Chain((Pad(1, 80), Rearrange("e (n a) k -> e n (k a)", {"a": 16})))
    t = random_bytes((5, 77, 36), "U8")
    slow = chain.apply(t)
    ran = []
    monkeypatch.setattr(passes, "SMALLEST", 1)
    monkeypatch.setattr(cpu_pass, "thread_count", lambda: threads)
    monkeypatch.setattr(Chain, "_blocks", lambda *_: ran.append("steps"))
    assert same(chain.apply(t), slow)
    assert same(chain.undo(slow, tuple(t.shape), "U8"), t)
    out = torch.full_like(slow, 1)
    assert chain.apply(t, out) is out
    assert same(out, slow)
    assert not ran


def test_tensors_with_gaps_go_step_by_step(monkeypatch):
    monkeypatch.setattr(passes, "SMALLEST", 1)
    chain = Chain((Xor(1),))
    t = random_bytes((2, 6, 8), "U8")
    assert same(chain.apply(t[:, ::2]), t[:, ::2] ^ 1)


def test_without_numba_the_steps_run(monkeypatch):
    monkeypatch.setattr(passes, "SMALLEST", 1)
    monkeypatch.setattr(passes, "EXECUTORS", {"cpu": passes.Executor("cpu_pass", "no_such_compiler")})
    passes.load.cache_clear()
    try:
        t = random_bytes((2, 6, 8), "U8")
        assert same(Chain((Xor(1),)).apply(t), t ^ 1)
        assert passes.fast_path().startswith("cpu: step by step, because no_such_compiler cannot be imported")
    finally:
        passes.load.cache_clear()


def test_the_fast_path_is_named():
    assert passes.fast_path().startswith("cpu: in one pass, compiled by numba ")
