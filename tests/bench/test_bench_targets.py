"""The layers of a bench that are one rank's share of a named one."""

from __future__ import annotations

import pytest
import torch

from moectl.bench.bench_targets import shard_label, sharded, targets_of
from moectl.bench.routings import routing_of
from moectl.bench.settings import BenchSettings
from moectl.checkpoint.source.named_layers import named_layer
from moectl.convert.rank_slice import RankShard
from moectl.errors import UsageError
from moectl.kernels.registry import runner_for
from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in
from moectl.layer.random_layer import RandomLayer
from support.bench_rows import settings_of


@pytest.mark.parametrize(("tp", "ep"), [(8, 1), (1, 8), (2, 4)])
def test_of_a_named_layer_the_first_rank_alone_is_drawn(tp, ep):
    settings = settings_of(models=("deepseek-v3", "deepseek-v3:nvfp4"), tp=tp, ep=ep)
    for target in targets_of(settings, None, torch.device("meta")):
        assert (target.model, target.parallel) == ("deepseek-v3", shard_label(RankShard(tp, 0, ep)))
        problem = target.problem
        assert (problem.experts, problem.local_experts, problem.top_k) == (256, 256 // ep, 8)
        assert problem.dims.intermediate == 2048 // tp
        # The same types as slices of whole layers have.
        whole = RandomLayer(named_layer("deepseek-v3")[1], torch.device("meta")).experts
        if target.problem.scheme == whole.problem.scheme:
            cut = sharded(whole, RankShard(tp, 0, ep))
            assert target.experts.recipe.shapes == cut.recipe.shapes
            assert target.experts.first_expert == cut.first_expert == 0


def test_dispatched_tokens_are_each_for_one_of_the_rank_s_experts():
    settings = settings_of(models=("deepseek-v3",), ep=8, dispatched=True)
    (target,) = targets_of(settings, None, torch.device("meta"))
    problem = target.problem
    assert (problem.experts, problem.local_experts, problem.top_k) == (32, 32, 1)
    assert target.parallel == "ep8 dispatched" and problem.dims.intermediate == 2048
    for routed in routing_of("uniform", target.experts, settings)(9, 2):
        ids = target.experts.local_ids(routed.ids)
        assert ids.shape == (9, 1) and int(ids.min()) >= 0 and routed.weights.tolist() == [[1.0]] * 9
    with pytest.raises(UsageError, match="--dispatched is about the tokens that reach one of several"):
        settings_of(models=("deepseek-v3",), dispatched=True)
    with pytest.raises(UsageError, match="--dispatched"):
        BenchSettings(checkpoint="x", ep=8, dispatched=True)


PEERS = {
    "bf16": ("torch_grouped", "triton", "deep_gemm", "batched_deep_gemm"),
    "fp8-block": ("triton", "deep_gemm", "batched_deep_gemm", "humming", "humming_grouped", "marlin"),
    "fp8-channel": ("torch_grouped", "triton", "cutlass", "humming", "humming_grouped", "marlin"),
    "nvfp4": ("humming", "humming_grouped", "marlin"),
}
"""Backends on SM90 that take layers of a format, besides moectl's own."""


@pytest.mark.parametrize(
    ("model", "tp", "ep"),
    [
        *(("qwen3-30b:bf16", 1, 1), ("qwen3-30b:fp8-block", 1, 1), ("qwen3.5-35b:bf16", 1, 1)),
        *((f"qwen3-235b:{name}", 1, 1) for name in ("fp8-block", "fp8-channel", "nvfp4")),
        *((f"mixtral-8x7b:{name}", 1, 1) for name in ("bf16", "fp8-channel")),
        *((f"deepseek-v3:{name}", *ranks) for name in ("fp8-block", "nvfp4") for ranks in ((8, 1), (1, 8))),
    ],
)
def test_published_layers_are_taken_by_the_backends_for_their_format(model, tp, ep):
    """On SM90; all that they may have against a layer is that their library is not here."""
    pytest.importorskip("triton")
    (target,) = targets_of(settings_of(models=(model,), tp=tp, ep=ep), None, torch.device("meta"))
    taken = PEERS[model.partition(":")[2]]
    with standing_in(OfflineGpu(90, 132, 227 << 10, "NVIDIA H200")):
        for backend in ("moectl", *{name for names in PEERS.values() for name in names}):
            why = runner_for(backend).refusal(target.problem, torch.device("cuda"))
            if backend == "moectl" or (backend in taken and backend == "torch_grouped"):
                assert not why, (backend, why)
            elif backend in taken:
                assert not why or "MOECTL_PEERS" in why or "cannot" in why, (backend, why)
            else:
                assert "it supports" in why, (backend, why)
