"""Which launches a layer takes: those that were measured for it, and what else there is."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for
from devtools.inspection.published_kernels import MODELS, layer_without_weights

from moectl.bench.bench_targets import named_shares
from moectl.bench.settings import BenchSettings
from moectl.kernels.choice import launch_table
from moectl.kernels.choice.launch_table import (
    GpuModel,
    LayerLaunches,
    MeasuredLaunch,
    own_rows,
    tokens_per_expert,
)
from moectl.kernels.triton.expert_batches import one_each
from moectl.kernels.triton.marlin import tile_for
from moectl.kernels.triton.triton_runner import FAMILIES, choose_shipped, launch_of
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.problem.padding import pad
from moectl.problem.published_layers import model_problem
from moectl.problem.schemes import FULL, Scheme, int_format
from support.random_layers import GPT_OSS, KIMI

H200 = GpuModel((9, 0), 132)


def _entry(weight: str, hidden: int, experts: int, top_k: int, name: str) -> LayerLaunches:
    rows = tuple(MeasuredLaunch(tokens, f"{name} {tokens}", {}, 1.0) for tokens in (1, 16, 1024))
    return LayerLaunches(H200, weight, hidden, hidden, experts, top_k, rows)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = (
        _entry(str(GPT_OSS.scheme.weight), 2880, 128, 4, "gpt-oss"),
        _entry(str(KIMI.scheme.weight), 7168, 384, 8, "kimi"),
    )
    monkeypatch.setattr(launch_table, "entries", lambda: kept)


def test_rows_are_of_one_layer_on_one_model_of_gpu(measured: None) -> None:
    problem = replace(GPT_OSS, dims=Dims(2880, 2880), experts=128, local_experts=128, top_k=4)
    assert [row.family for row in own_rows(problem, H200)] == ["gpt-oss 1", "gpt-oss 16", "gpt-oss 1024"]
    for other in (
        replace(problem, dims=Dims(2880, 2944)),
        replace(problem, top_k=2),
        replace(problem, scheme=KIMI.scheme),
        replace(problem, local_experts=64),
        replace(problem, experts=64, local_experts=64),
    ):
        assert not own_rows(other, H200)
    assert not own_rows(problem, GpuModel((8, 0), 108)) and not own_rows(problem, GpuModel((9, 0), 78))


def test_rows_are_of_what_tokens_are_quantized_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights take other kernels with 16-bit tokens than with FP8 or INT8 ones."""
    entry = _entry("fp8 block 128x128", 2048, 128, 8, "quantized")
    kept = entry, replace(entry, act="fp8 dynamic", rows=entry.rows[:1])
    monkeypatch.setattr(launch_table, "entries", lambda: kept)
    for format, rows in (("fp8-block", 1), ("fp8-block-a16", 3), ("fp8-channel", 0)):
        problem = replace(model_problem("qwen3-30b", format), dims=Dims(2048, 2048))
        assert len(own_rows(problem, H200)) == rows


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(128, 4, 1), (8, 8, 5), (1, 1, 7), (384, 8, 65536)])
def test_active_experts_share_all_assignments(experts: int, top_k: int, tokens: int) -> None:
    problem = replace(KIMI, experts=experts, local_experts=experts, top_k=top_k)
    active = tokens * top_k / tokens_per_expert(problem, tokens)
    assert top_k * 0.999 <= active <= experts * 1.001


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_experts_of_a_rank_have_as_many_tokens_as_all_have(tokens: int) -> None:
    whole, here = KIMI, replace(KIMI, local_experts=KIMI.experts // 3)
    assert tokens_per_expert(whole, tokens) == tokens_per_expert(here, tokens)
    assert tile_for(here, tokens) == tile_for(whole, tokens)


def test_rows_of_a_batch_are_all_of_experts_that_are_here() -> None:
    one = one_each(replace(KIMI, local_experts=3))
    assert tokens_per_expert(one, 3 * 16) == pytest.approx(16)


DISPATCHED = next(
    share.problem
    for _, _, share in named_shares(BenchSettings(models=("deepseek-v3:fp8-block",), ep=8, dispatched=True))
)
"""32 of DeepSeek-V3's experts, of which a token that reaches them has one."""

OSS = layer_without_weights("openai/gpt-oss-120b").problem
QWEN = layer_without_weights("Qwen/Qwen3-30B-A3B-GPTQ-Int4").problem
NOT_MEASURED = {
    "mxfp4 in fp16": replace(OSS, dtype="fp16"),
    "bf16 scales in fp16": replace(QWEN, scheme=Scheme(int_format(4, 128, "BF16")), dtype="fp16"),
    "int8, fp16 scales": replace(QWEN, scheme=Scheme(int_format(8, 128, "F16"))),
}
"""Layers that `mid` and `prefill` do not take."""


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_kernels_of_few_tokens_are_not_taken_for_many(name: str) -> None:
    problem = NOT_MEASURED[name]
    with compiling_for(OFFLINE_GPUS[90]):
        few = choose_shipped(problem, 16, torch.device("cuda"))
        assert few.family in ("stream", "warpwise")
        full = math.ceil(8 * problem.experts / problem.top_k)  # the widest tiles have 8 tokens
        for tokens in (full, 512, 4096, 65_536):
            assert choose_shipped(problem, tokens, torch.device("cuda")).family == "grouped"


def test_programs_of_one_token_are_not_taken_where_experts_have_two() -> None:
    problem = replace(QWEN, scheme=Scheme(int_format(8, FULL)))
    with compiling_for(OFFLINE_GPUS[90]):
        found = [choose_shipped(problem, tokens, torch.device("cuda")).tile.tokens for tokens in (1, 16, 24)]
    assert found[0] == 1 and min(found[1:]) > 1


NVFP4_LAYERS = (("qwen3-235b", 1), ("deepseek-v3", 8))
"""(model, tensor parallel ranks) that were measured in NVFP4."""


LAYERS_IN_ROWS = (
    *(("qwen3-30b", "bf16", 1), ("mixtral-8x7b", "bf16", 1), ("qwen3.5-35b", "bf16", 1)),
    *(("qwen3-30b", "fp8-block", 1), ("qwen3-235b", "fp8-block", 1), ("deepseek-v3", "fp8-block", 8)),
    *(("qwen3-235b", "fp8-channel", 1), ("mixtral-8x7b", "fp8-channel", 1)),
)
"""(model, format, tensor parallel ranks) that were measured with weights in rows."""


def _stored(model: str, format: str, tp: int) -> MoEProblem:
    """One rank's layer of a published model, as the kernels get it."""
    return pad("moectl-mtile64", model_problem(model, format).on(Parallel(tp=tp)))


@pytest.mark.parametrize(("model", "tp"), NVFP4_LAYERS)
def test_nvfp4_layers_take_their_own_rows(model: str, tp: int) -> None:
    problem = _stored(model, "nvfp4", tp)
    own = next(entry for entry in launch_table.entries() if entry.is_of(problem))
    ratios = {}
    with compiling_for(OFFLINE_GPUS[90]):
        for row in own.rows:
            chosen = choose_shipped(problem, row.tokens, torch.device("cuda"))
            measured = {launch_of(it.family, it.tile): it.ratio for it in row.slower}
            ratios[row.tokens] = {**measured, launch_of(row.family, row.tile): 1.0}[chosen]
    assert {1, 4, 16, 64, 256, 1024, 4096, 8192} <= set(ratios)
    # Some take what shares binaries with the launches of other numbers of tokens, and is hardly slower.
    assert ratios[1] == 1 and max(ratios.values()) < 1.04


def test_tiles_of_few_tokens_are_not_taken_where_experts_fill_them() -> None:
    """32 experts of a rank have 8 tokens each, as many as the widest of `stream`'s tiles."""
    problem = pad("moectl-mtile64", model_problem("deepseek-v3", "nvfp4").on(Parallel(tp=8, ep=True)))
    with compiling_for(OFFLINE_GPUS[90]):
        found = {n: choose_shipped(problem, n, torch.device("cuda")).family for n in (16, 256)}
    assert found == {16: "stream", 256: "mid"}


def test_shipped_rows_are_launches_of_their_own_layers() -> None:
    """Each gives every field of a tile of kernels that exist, and those take the layer that was measured."""
    problems = [layer_without_weights(model).problem for model in MODELS]
    problems += [_stored(model, "nvfp4", tp) for model, tp in NVFP4_LAYERS]
    problems += [model_problem(model, format).on(Parallel(tp=tp)) for model, format, tp in LAYERS_IN_ROWS]
    problems.append(DISPATCHED)
    for entry in launch_table.entries():
        own = [problem for problem in problems if entry.is_of(problem)]
        assert own, f"no model has the layer of {entry}"
        for row in entry.rows:
            kernel_family = FAMILIES[row.family]
            assert set(row.tile) == {field.name for field in fields(kernel_family.tile)}, row
            for problem in own:
                assert not kernel_family.fits(problem, kernel_family.tile(**row.tile)), row
