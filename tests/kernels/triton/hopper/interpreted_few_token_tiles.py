"""Token tiles of few assignments under Triton's interpreter; run by `test_interpreter`."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.choice.launch import token_tiles
from moectl.kernels.triton.hopper.few_token_tiles import few_tiles
from moectl.kernels.triton.sort_and_combine import sort_by_expert

CASES = {
    "one token": [5, 0, 3],
    "one expert": [2] * 70,
    "some skipped": [4, -1, 4, 9, 4, 0, -7, 0, 4, 1_000_000, 4, 4, 1, 4, 4, 4, 0],
    "nothing": [-1, -1],
    "all sizes": [e for e in range(9) for _ in range(3 * e)],
}


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("name", CASES)
def test_tiles_are_those_of_the_sorted_assignments_split_evenly(name: str, tokens: int) -> None:
    ids = torch.tensor(CASES[name], dtype=torch.int32)[torch.randperm(len(CASES[name]))].contiguous()
    experts = 9
    slots, offsets = sort_by_expert(ids, experts)
    bound = token_tiles(len(ids), experts, tokens)
    made, tiles, counts = few_tiles(ids, experts, tokens, bound)
    valid = int(offsets[experts])
    assert counts[1] == valid and torch.equal(made[:valid], slots[:valid])
    expected = []
    for expert in range(experts):
        low, high = int(offsets[expert]), int(offsets[expert + 1])
        parts = -(-(high - low) // tokens)
        part = -(-(high - low) // max(parts, 1))
        expected += [[expert, low + i * part, min(part, high - low - i * part)] for i in range(parts)]
    assert counts[0] == len(expected) <= bound
    assert tiles[: len(expected), :3].tolist() == expected
