"""Named-axis rearrangements against arithmetic on single positions, and the patterns that are refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.convert.steps.rearrange import Pattern
from moectl.errors import CheckpointError


@st.composite
def rearrangements(draw):
    """A pattern with 2 to 7 names, their sizes, and some of them given."""
    names = [f"x{i}" for i in range(draw(st.integers(2, 7)))]
    sizes = {name: draw(st.integers(1, 4)) for name in names}
    sides = []
    for order in (names, draw(st.permutations(names))):
        cuts = sorted({0, len(names), *draw(st.lists(st.integers(1, len(names) - 1), max_size=4))})
        sides.append([list(order[a:b]) for a, b in pairwise(cuts)])
    text = " -> ".join(
        " ".join(
            axis[0] if len(axis) == 1 and draw(st.booleans()) else f"({' '.join(axis)})" for axis in side
        )
        for side in sides
    )
    open_names = [draw(st.sampled_from(axis)) for axis in sides[0] if draw(st.booleans())]
    return text, sizes, {name: size for name, size in sizes.items() if name not in open_names}, sides


@settings(max_examples=150, deadline=None)
@given(rearrangements(), st.randoms(use_true_random=False))
def test_every_element_goes_where_its_name_says(case, random):
    text, sizes, known, (left, right) = case
    shape = [math.prod(sizes[name] for name in axis) for axis in left]
    t = torch.arange(math.prod(shape)).reshape(shape)
    pattern = Pattern.parse(text)
    assert pattern.sizes(shape, known) == sizes
    out = pattern.apply(t, sizes)
    assert tuple(out.shape) == pattern.shape(sizes)
    for _ in range(8):
        at = {name: random.randrange(size) for name, size in sizes.items()}
        assert out[_position(right, at, sizes)] == t[_position(left, at, sizes)]
    assert torch.equal(pattern.reverse.apply(out, sizes), t)


def _position(side, at, sizes):
    position = []
    for axis in side:
        index = 0
        for name in axis:
            index = index * sizes[name] + at[name]
        position.append(index)
    return tuple(position)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e n", "not of the form"),
        ("e n -> n e -> e n", "not of the form"),
        ("e n -> e m", "same axes once"),
        ("e n n -> e n", "same axes once"),
        ("e (n -> e n", "open parenthesis"),
        ("e n) -> e n", "wrong place"),
        ("e ((n)) -> e n", "wrong place"),
        ("e () n -> e n", "wrong place"),
        ("e N -> e N", "wrong place"),
        ("e n; -> e n", "wrong place"),
        (" -> ", "open parenthesis or no axes"),
        ("e " + "n" * 500 + " -> e", "not of the form"),
        (" ".join(f"x{i}" for i in range(40)) + " -> " + " ".join(f"x{i}" for i in range(40)), "40 names"),
    ],
)
def test_bad_patterns_are_refused(text, message):
    with pytest.raises(CheckpointError, match=message):
        Pattern.parse(text)


@pytest.mark.parametrize(
    ("shape", "known", "message"),
    [
        ((2, 12), {"a": 5}, "multiple of 5, got 12"),
        ((2, 12), {}, "leaves the sizes of n, a open"),
        ((2, 12), {"n": 2, "a": 5}, "of 10, got 12"),
        ((2, 12, 3), {"a": 2}, "needs 2 axes"),
        ((2, 12), {"a": 0}, "got 12"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape, known, message):
    with pytest.raises(CheckpointError, match=message):
        Pattern.parse("e (n a) -> e (a n)").sizes(shape, known)
