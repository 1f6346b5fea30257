"""What ranks with a GPU each run together, through NCCL, against one rank that has the whole layer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from moectl.convert.rank_slice import RankShard, RankSlice
from moectl.environment.named_devices import find_device
from moectl.kernels.layer_inputs import LayerInputs, make_inputs
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel
from moectl.kernels.reference import moe_reference
from moectl.kernels.tolerance import check, tolerance_for
from moectl.layer.build_kernel import build_kernel
from moectl.layer.experts import ExpertLayer
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from support.random_layers import GPT_OSS, KIMI, canonical_roles, layer_of
from support.rank_cases import decision_for

LAYERS: dict[str, MoEProblem] = {
    "gpt-oss": replace(GPT_OSS, dims=Dims(2880, 1440), experts=8, local_experts=8),
    "kimi": replace(KIMI, dims=Dims(2048, 1024), experts=16, local_experts=16),
}
UNEVEN = ((7, 300), (300, 0), (1, 1))
"""Tokens of each rank, in calls one after the other."""
MOST = 300


@dataclass(frozen=True)
class GpuRank:
    """One rank, its GPU, and a layer that all share."""

    rank: int
    size: int
    name: str

    def whole(self) -> ExpertLayer:
        roles = {role: t.cuda() for role, t in canonical_roles(LAYERS[self.name]).items()}
        return layer_of(LAYERS[self.name], roles)

    def kernel(self, most: int | None) -> FusedMoEKernel:
        problem = LAYERS[self.name]
        share = RankSlice(problem, RankShard(1, 0, self.size, self.rank))
        first, last = share.experts
        roles = {role: t[first:last].cuda() for role, t in canonical_roles(problem).items()}
        part = replace(layer_of(share.problem, roles), rank_slice=share).prepared("moectl", "cuda")
        capability = torch.cuda.get_device_capability()
        decision = decision_for(
            problem, Parallel(dp=self.size, ep=True), find_device(f"sm{capability[0]}{capability[1]}")
        )
        assert decision.chosen is not None and decision.chosen.backend.runner == "moectl"
        return build_kernel(decision, part, group=dist.group.WORLD, most_tokens=most)

    def inputs(self, tokens: Sequence[int], seed: int, distribution: str = "uniform") -> LayerInputs:
        return make_inputs(
            LAYERS[self.name], tokens[self.rank], 10 * seed + self.rank, distribution, device="cuda"
        )


def wrong(layer: ExpertLayer, y: torch.Tensor, inputs: LayerInputs) -> str:
    expected = moe_reference(inputs.x, inputs.ids, inputs.weights, layer.reference, layer.problem)
    result = check(y, expected, tolerance_for(layer.problem))
    return "" if result.ok else f"{len(y)} tokens: max {result.max:.2e} rms {result.rms:.2e}"


def in_turn(here: GpuRank, most: int | None) -> str:
    """Calls with other numbers of tokens each, as they come."""
    layer, kernel, found = here.whole(), here.kernel(most), []
    for seed, tokens in enumerate(UNEVEN):
        for distribution in ("uniform", "hot:1:0.9"):
            inputs = here.inputs(tokens, seed, distribution)
            found.append(wrong(layer, kernel.run(inputs), inputs))
    return "; ".join(filter(None, found))


def within_its_memory(here: GpuRank) -> str:
    """What calls take at most, the exchange included, against what the kernel says."""
    kernel, found = here.kernel(MOST), []
    for seed, tokens in enumerate(UNEVEN):
        inputs = here.inputs(tokens, seed)
        size = kernel.run(inputs).nbytes
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        kernel.run(inputs)
        torch.cuda.synchronize()
        took = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - size
        said = kernel.workspace(MOST)
        assert said is not None
        found.append("" if took <= said else f"{tokens}: took {took}, said {said}")
    return "; ".join(filter(None, found))


def captured(here: GpuRank) -> str:
    """One call in a CUDA graph, replayed with new tokens."""
    layer, kernel, found = here.whole(), here.kernel(MOST), []
    assert kernel.capturable
    for seed, tokens in enumerate(UNEVEN):
        inputs = here.inputs(tokens, seed)
        for _ in range(2):
            kernel.run(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = kernel.run(inputs)
        for again in range(2):
            other = here.inputs(tokens, 100 + 10 * seed + again)
            pairs = ((inputs.x, other.x), (inputs.ids, other.ids), (inputs.weights, other.weights))
            for place, new in pairs:
                place.copy_(new)
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            found.append(wrong(layer, y, other))
        del graph
    return "; ".join(filter(None, found))


CASES: dict[str, Callable[[GpuRank], str]] = {
    "sizes asked": lambda here: in_turn(here, None),
    "sizes bounded": lambda here: in_turn(here, MOST),
    "memory": within_its_memory,
    "captured": captured,
}


def run_rank(rank: int, size: int, folder: str) -> None:
    """All cases on one rank, its results in a file of its own."""
    place, begin = Path(folder), time.perf_counter()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{place}/meeting",
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank),
    )
    found = {}
    for name in LAYERS:
        for case, run in CASES.items():
            found[f"{name}, {case}"] = run(GpuRank(rank, size, name))
            if rank == 0:
                print(f"{name}, {case}: {time.perf_counter() - begin:.1f} s", flush=True)
    (place / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
