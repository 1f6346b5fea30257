"""The batched form on a GPU: every family of kernels, the runner's own choice, and inside a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.registry import runner_for
from moectl.kernels.triton.expert_batches import one_each
from moectl.kernels.triton.marlin import TILES
from moectl.kernels.triton.triton_runner import FAMILIES, is_runnable, run_batch_with
from moectl.problem.moe_problem import Dims
from moectl.problem.padding import pad
from moectl.problem.schemes import BF16, FP8_ACT_GROUP_128, FP8_BLOCK, Scheme
from support import batch_cases as cases
from support import kernel_cases
from support.random_layers import GPT_OSS, KIMI, QWEN, layer_among_others

pytestmark = pytest.mark.gpu

BF16_LAYER = replace(KIMI, scheme=Scheme(BF16))
FP8_LAYER = replace(KIMI, scheme=Scheme(FP8_BLOCK, FP8_ACT_GROUP_128), dims=Dims(384, 256))

LAUNCHES = [
    ("mxfp4", kernel_cases.LAUNCHES["decode 16x64x128 split 4"]),
    ("int4", kernel_cases.LAUNCHES["grouped 64x128x64 tails"]),
    *(("mxfp4", Launch("stream", FAMILIES["stream"].candidates(GPT_OSS)[i])) for i in (0, 4, 8)),
    *(("int4", Launch("stream", FAMILIES["stream"].candidates(KIMI)[i])) for i in (2, 7)),
    *(("int4", Launch("warpwise", FAMILIES["warpwise"].candidates(KIMI)[i])) for i in (0, 2, 3)),
    *(("mxfp4", Launch("mid", FAMILIES["mid"].candidates(GPT_OSS)[i])) for i in (0, 3)),
    ("int4", Launch("mid", FAMILIES["mid"].candidates(KIMI)[-1])),
    *(("mxfp4", Launch("prefill", tile)) for tile in FAMILIES["prefill"].candidates(GPT_OSS)[-1:]),
    *(("int4", Launch("prefill", tile)) for tile in FAMILIES["prefill"].candidates(KIMI)[:1]),
    *(("bf16", Launch("tma", FAMILIES["tma"].candidates(BF16_LAYER)[i])) for i in (0, -1)),
    *(("fp8", Launch("tma", FAMILIES["tma"].candidates(FP8_LAYER)[i])) for i in (0, -1)),
]
"""Of every family one launch for each way in which it plans."""

PROBLEMS = {"mxfp4": GPT_OSS, "int4": KIMI, "bf16": BF16_LAYER, "fp8": FP8_LAYER}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cases.poison_new_memory(monkeypatch)


def test_every_family_is_here() -> None:
    assert {launch.family for _, launch in LAUNCHES} == set(FAMILIES)


@pytest.mark.parametrize(("weight", "launch"), LAUNCHES, ids=str)
def test_agrees(weight: str, launch: Launch) -> None:
    problem = PROBLEMS[weight]
    if not is_runnable(launch, problem, torch.device("cuda")):
        pytest.skip(f"the {launch.family} kernels do not run on this GPU")
    for name in cases.COUNTS:
        # Decode is for up to 256 assignments.
        for most in (1, 21) if launch.family == "decode" else (1, 37, 150):
            cases.agrees(problem, launch, name, most, "cuda")


@pytest.mark.parametrize("name", cases.COUNTS)
def test_marlin_agrees(name: str) -> None:
    for _, _, tile in TILES:
        cases.agrees(QWEN, tile, name, 37, "cuda")


WIDE = replace(KIMI, dims=Dims(7168, 64), experts=40, local_experts=40)
ROWS = 8192
"""Of each expert of a batch of 2.3 * 10^9 numbers."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "decode"])
def test_rows_beyond_32_bits(family: str) -> None:
    """Decode is for few assignments; a sum in fp32 of all families takes another 9 GB."""
    wide = replace(WIDE, scheme=Scheme(BF16)) if family == "tma" else pad("moectl-mtile64", WIDE)
    kernel_family, batch = FAMILIES[family], one_each(wide)
    if not kernel_family.runs_on(torch.device("cuda")):
        pytest.skip(f"the {family} kernels do not run on this GPU")
    planned = [
        it
        for it in kernel_family.candidates(batch)
        if getattr(it, "planned", 1) and not kernel_family.fits(batch, it)
    ]
    layer, prepared = cases.layer_for(replace(WIDE, scheme=wide.scheme), "cuda")
    counts = torch.zeros(WIDE.experts, dtype=torch.int32)
    counts[[0, 36, 37, 39]] = torch.tensor([3, 1, 21, 5], dtype=torch.int32)
    x = torch.empty(WIDE.experts, ROWS, WIDE.dims.hidden, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[:, :21].normal_()
    y = run_batch_with(prepared, x, counts.cuda(), Launch(family, planned[0]))
    # Of the large tensors only rows that may be tokens are looked at.
    cases.held(layer, prepared, x[:, :21], counts, y[:, :21])


@pytest.mark.parametrize("expected", [None, 1, 20])
@pytest.mark.parametrize("most", [0, 1, 16, 200])
@pytest.mark.parametrize("weight", PROBLEMS)
def test_the_runner_chooses_by_the_size_of_the_batch(weight: str, most: int, expected: int | None) -> None:
    cases.agrees(PROBLEMS[weight], None, "uneven", most, "cuda", expected)


@pytest.mark.parametrize(("experts", "most"), [(1, 1), (7, 300), (384, 64), (1024, 5)])
def test_lists_rows(experts: int, most: int) -> None:
    for name in cases.COUNTS:
        cases.lists_rows(name, experts, most, "cuda")


def test_a_captured_call_follows_the_counts() -> None:
    layer, prepared = layer_among_others(KIMI, "cuda")
    batched, experts, most = runner_for("moectl").batched, KIMI.experts, 16
    assert batched is not None
    full = torch.full((experts,), most, dtype=torch.int32)
    x, counts = cases.batch_of(KIMI, full, most, "cuda"), full.cuda()
    batched(prepared, x, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = batched(prepared, x, counts)
    for name in cases.COUNTS:
        now = cases.counts_of(name, experts, most)
        counts.copy_(now)
        x.copy_(cases.batch_of(KIMI, now, most, "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        cases.held(layer, prepared, x, now, y)
