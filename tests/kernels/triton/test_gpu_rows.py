"""Layers in rows, and tokens quantized for them, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.portable_launches import FP8_GROUPED, GROUPED_TILES, ROWS_DECODE
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.triton.triton_runner import run_with
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from moectl.problem.schemes import FP8_ACT_GROUP_128, FP8_ACT_TOKEN, ActFormat
from support import row_cases as cases
from support.kernel_cases import poison_new_memory
from support.random_layers import inputs_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


CASES = [*(replace(case, dtype="bf16") for case in cases.CASES), *cases.CASES[::4]]
"""All with bf16 tokens, some with fp16."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype} {case}")
def test_agrees_with_the_same_rounding(case: cases.RowCase) -> None:
    cases.agrees(case, "cuda")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("launch", ["decode 16x128x64", "grouped 64x128x64 tails"])
@pytest.mark.parametrize(
    "scheme", ["plain", "block", "block, UE8M0 tokens", "channel and token", "tensor, 16-bit tokens"]
)
def test_what_is_not_finite_stays_in_its_row(scheme: str, launch: str, value: float) -> None:
    cases.stays_in_its_row(scheme, launch, value, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [128, 384, 1536, 4096, 5120, 7168])
@pytest.mark.parametrize(
    "form", [FP8_ACT_GROUP_128, FP8_ACT_TOKEN, cases.UE8M0_TOKENS], ids=["block", "token", "UE8M0"]
)
def test_tokens_are_quantized_bit_for_bit(form: ActFormat, columns: int, dtype: torch.dtype) -> None:
    cases.quantizes_bit_for_bit(form, columns, dtype, "cuda")


@cases.each_kind_of_live_rows
def test_rows_that_live_are_quantized_bit_for_bit(form: ActFormat, kind: str, columns: int) -> None:
    cases.quantizes_rows_that_live(form, kind, columns, "cuda")


@pytest.mark.parametrize("scale", cases.GIVEN_SCALES)
def test_static_scales_bit_for_bit(scale: float) -> None:
    cases.quantizes_by_a_static_scale(scale, "cuda")


@pytest.mark.parametrize("kind", ["all", "sorted", "slots"])
def test_one_scale_of_all_tokens_is_of_those_that_live(kind: str) -> None:
    cases.one_scale_of_those_that_live(kind, "cuda")


WIDE = Dims(2048, 768)


def wide(scheme: str) -> MoEProblem:
    return MoEProblem(WIDE, 16, 4, cases.SCHEMES[scheme], SILU)


@pytest.mark.parametrize("scheme", ["plain", "block", "block, 16-bit tokens", "channel and token"])
def test_every_tile_of_the_table(scheme: str) -> None:
    """At the sizes of a published layer, with tokens for whole tiles and for their tails."""
    problem = wide(scheme)
    layer = cases.layer_of(problem, "cuda")
    prepared = layer.prepared("moectl", "cuda")
    decode = [(tokens, Launch("decode", tile)) for tile in ROWS_DECODE for tokens in (2, 8, 64)]
    grouped = [(600, Launch("grouped", tile)) for tile in GROUPED_TILES.candidates(problem)]
    for tokens, launch in (*decode, *grouped):
        inputs = inputs_of(problem, tokens, device="cuda")
        y = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        result = check(y, cases.expected_of(layer, inputs), cases.tight(problem))
        assert result.ok, (launch, result)


def test_batches_are_computed_in_place() -> None:
    problem = wide("block")
    layer = cases.layer_of(problem, "cuda")
    prepared = layer.prepared("moectl", "cuda")
    batched = runner_for("moectl").in_form(ActivationFormat.BATCHED)
    assert batched is not None
    counts = torch.tensor([7, 0, 33, *[1] * 13], dtype=torch.int32, device="cuda")
    x = torch.randn(16, 40, WIDE.hidden, device="cuda").bfloat16()
    y = batched(prepared, x, counts)
    for expert in (0, 2, 5):
        n = int(counts[expert])
        ids = torch.full((n, 1), expert, dtype=torch.int32, device="cuda")
        one = replace(prepared, problem=replace(problem, top_k=1), derived={})
        weights = torch.ones(n, 1, device="cuda")
        alone = run_with(one, x[expert, :n], ids, weights, Launch("grouped", FP8_GROUPED[0]))
        result = check(y[expert, :n], alone, cases.tight(problem))
        assert result.ok, result


@pytest.mark.parametrize("scheme", ["plain", "block", "tensor, dynamic"])
def test_a_captured_call_takes_other_routings(scheme: str) -> None:
    problem = wide(scheme)
    prepared = cases.layer_of(problem, "cuda").prepared("moectl", "cuda")
    runner = runner_for("moectl")
    assert runner.compute is not None
    inputs = inputs_of(problem, 48, device="cuda")
    x, ids, weights = inputs.x.clone(), inputs.ids.clone(), inputs.weights.clone()
    runner.compute(prepared, x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = runner.compute(prepared, x, ids, weights)
    for turn in range(3):
        other = inputs_of(problem, 48 + turn, device="cuda")
        x.copy_(other.x[:48])
        ids.copy_(other.ids[:48])
        if turn == 2:
            ids.fill_(-1)
            ids[:, 0] = 3
        graph.replay()
        eager = runner.compute(prepared, x, ids, weights)
        assert torch.equal(y.view(torch.int16), eager.view(torch.int16))


def test_sums_of_fp8_products_lose_nothing_over_many_columns() -> None:
    """Long sums with codes of very different sizes: as near as sums of the same codes in fp64.

    Where one of the largest numbers of `h` takes the next code, an element moves by more than `tight` allows:
    by 0.137 in one draw of tokens. Sums in too few bits would move all of them.
    """
    torch.manual_seed(0)
    problem = MoEProblem(Dims(16384, 256), 2, 1, cases.SCHEMES["block"], SILU)
    layer = cases.layer_of(problem, "cuda")
    prepared = layer.prepared("moectl", "cuda")
    inputs = inputs_of(problem, 32, device="cuda")
    x = inputs.x * torch.exp2(torch.randint(-6, 7, inputs.x.shape, device="cuda").float()).bfloat16()
    spread = replace(inputs, x=x / 16)
    y = run_with(prepared, spread.x, spread.ids, spread.weights, Launch("grouped", FP8_GROUPED[-1]))
    result = check(y, cases.expected_of(layer, spread), replace(cases.tight(problem), max=0.35))
    assert result.ok, result
    assert result.rms < tolerance_for(problem, "fp8").rms / 5
