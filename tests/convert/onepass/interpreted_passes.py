"""The GPU's pass on the CPU, in Triton's interpreter; `test_passes` runs this in a process of its own."""

from __future__ import annotations

import pytest

from moectl.convert.layouts.registry import layout_named
from moectl.convert.onepass import cuda_pass
from moectl.convert.recipe.chain import Chain
from moectl.convert.steps.transforms import Add, Bits, DtypeView, Flip, PackedCodes, Pad, Rearrange, Xor
from support.layout_cases import canonical_tensors, problem_for, random_bytes

from .test_passes import check_both_ways

REVERSED = Bits(tuple(reversed(range(32))))


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("marlin-mxfp4", "mxfp4 group 32"),
        ("trtllm-mxfp4", "mxfp4 group 32"),
        ("trtllm-mxint4", "int4 group 32"),
        ("triton-hopper", "mxfp4 group 32"),
        ("moectl-mtile64", "int4 group 32 with zero points"),
        ("moectl-mtile64", "int8 group 32 with zero points"),
    ],
)
def test_layouts(name, weight):
    layout = layout_named(name)
    stored = next(it for it in layout.weights if str(it) == weight)
    problem = problem_for(layout, stored, "interleaved", 96, 96, experts=1)
    tensors = canonical_tensors(problem)
    for role, chain in layout.chains(problem).items():
        check_both_ways(chain, tensors[role], needed=True, run=cuda_pass.run)


@pytest.mark.parametrize(
    ("steps", "shape"),
    [
        (
            (Pad(1, 9, 127), Pad(2, 16, 127), Xor(0x5A), Rearrange("e n (a b) -> e a n b", {"b": 8})),
            (2, 7, 13),
        ),
        ((Pad(1, 9, 3), Add(6), Rearrange("e n (a b) -> e a n b", {"b": 8})), (3, 7, 16)),
        (
            (PackedCodes(2, True), Rearrange("e n (k a) -> e (n a) k", {"a": 4}), PackedCodes(2, False)),
            (1, 5, 12),
        ),
        ((Rearrange("e n k -> e k n"),), (2, 131, 45)),
        ((Flip(1), Flip(2), DtypeView("U8", "I32"), REVERSED), (2, 6, 24)),
    ],
)
def test_single_steps(steps, shape):
    assert check_both_ways(Chain(steps), random_bytes(shape, "U8"), needed=True, run=cuda_pass.run) == 2
