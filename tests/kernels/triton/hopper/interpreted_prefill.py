"""Token tiles of the prefill kernels under Triton's interpreter; run by `test_interpreter`."""

from __future__ import annotations

import pytest
import torch

from moectl.kernels.choice.prefill_launches import SHAPES, PrefillTile
from moectl.kernels.triton.hopper.prefill import split

POISON = -7


@pytest.mark.parametrize("units", SHAPES)
@pytest.mark.parametrize(
    "counts",
    [
        [0],
        [1],
        [16, 17, 0, 128, 129],
        [0, 0, 144, 145, 160, 161, 0],
        [255, 256, 257, 271, 1, 0, 3000],
    ],
)
def test_tiles_cover_every_position_once_and_are_as_wide_as_their_neighbours(
    counts: list[int], units: int
) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    # As if some assignments were skipped, so that the bound is not met.
    tiles, count, bound = split(offsets, sum(counts) + 5, len(counts), PrefillTile(units))
    assert len(tiles) == bound
    assert count[1:].tolist() == [0, 0]
    found = tiles[: count[0]].tolist()
    covered = []
    for expert, first, end, width in found:
        assert offsets[expert] <= first < end <= offsets[expert + 1]
        assert 16 * (width - 1) < end - first <= 16 * width
        assert width <= units
        covered += range(first, end)
    assert covered == list(range(sum(counts)))
    for expert, n in enumerate(counts):
        widths = [width for e, _, _, width in found if e == expert]
        assert len(widths) == -(-n // (16 * units))
        assert not widths or max(widths) - min(widths) <= 1
