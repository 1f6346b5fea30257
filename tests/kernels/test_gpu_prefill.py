"""The prefill kernels on a GPU: token tiles of every width, full and not, of several formats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.kernels.triton.hopper.prefill import PREFILL_REGIME, PROMISING, UNIT, PrefillTile
from moectl.kernels.triton.launch import Launch
from moectl.kernels.triton.runner import REGIMES
from moectl.problem import Dims
from moectl.schemes import Scheme, int_format

from . import kernel_cases as cases
from .layers import GPT_OSS, KIMI, QWEN, inputs_of, judged, random_layer

pytestmark = pytest.mark.gpu

INT8 = Scheme(int_format(8, 32, zero_point=True))
LAYERS = {
    "mxfp4": replace(GPT_OSS, dims=Dims(352, 160)),
    "int4 group 32": replace(KIMI, dims=Dims(320, 192)),
    "int4 group 128 fp16": replace(QWEN, dtype="fp16", scheme=Scheme(int_format(4, 128, "F16"))),
    "int8 with zero points and a bias": replace(KIMI, scheme=INT8, bias=True),
}


def tokens_by_expert(most: int) -> list[int]:
    """Every width up to `most` units: full, one token less, one token in the last unit; and several tiles."""
    short = (0, 1, UNIT - 1)
    counts = [UNIT * units - less for units in range(1, most + 1) for less in short]
    return [0, *counts, UNIT * most + 1, 3 * UNIT * most - 7]


@pytest.mark.parametrize("tile", PROMISING, ids=lambda tile: f"{tile.units} units")
@pytest.mark.parametrize("name", LAYERS)
def test_tiles_of_every_width(name: str, tile: PrefillTile, monkeypatch: pytest.MonkeyPatch) -> None:
    if not REGIMES["prefill"].runs_on(torch.device("cuda")):
        pytest.skip("the prefill kernels are for SM90")
    counts = tokens_by_expert(tile.units)
    problem = replace(LAYERS[name], experts=len(counts), local_experts=len(counts), top_k=1)
    assert not PREFILL_REGIME.fits(problem, tile)
    cases.poison_new_memory(monkeypatch)
    layer = random_layer(problem)
    prepared = layer.prepared("triton", "cuda")
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=generator)].int()[:, None]
    inputs = replace(inputs_of(problem, len(ids), device="cuda"), ids=ids.cuda())
    y = cases._run(prepared, inputs, Launch("prefill", tile))
    result = judged(layer, prepared, y, inputs)
    assert result.ok, result
