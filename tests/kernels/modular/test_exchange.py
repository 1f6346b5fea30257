"""Two and four ranks on a CPU (gloo) against one rank; batches by expert; exchanges by themselves."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.execute.rank_plans import convert_ranks, plan_ranks
from moectl.convert.layouts.registry import layout_for
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.kernels.modular.batching import batches_of
from moectl.kernels.modular.exchange import SingleRankExchange
from support.rank_cases import CASES, run_rank
from support.sampling import every_nth
from support.stream_checkpoints import nvfp4_checkpoint

SIZES = every_nth((4, 2), 2)


@pytest.fixture(scope="module", params=SIZES)
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_gpt_oss: Path
) -> list[dict[str, str]]:
    """What every rank reports of each case: nothing, or what is wrong."""
    # Ranks are forks of a process that has imported what they run: each would spend seconds on it.
    multiprocessing.set_forkserver_preload([run_rank.__module__])
    size, folder = request.param, tmp_path_factory.mktemp(f"ranks{request.param}")
    (folder / "checkpoint").symlink_to(tiny_gpt_oss)
    convert_for(size, tiny_gpt_oss, folder / "converted")
    convert_for(size, nvfp4_checkpoint(folder / "nvfp4"), folder / "nvfp4-converted", "trtllm")
    mp.start_processes(run_rank, (size, str(folder)), nprocs=size, start_method="forkserver")
    return [_outcome(folder, rank) for rank in range(size)]


def convert_for(size: int, source: Path, out: Path, target: str = "moectl") -> None:
    """A checkpoint's experts spread over `size` ranks, each rank's in a folder of its own."""
    checkpoint = open_checkpoint(source)
    layout = layout_for(target, checkpoint.groups[0].problem.scheme.weight)
    plans = plan_ranks(out, 1, size, None, lambda shard: plan_conversion(checkpoint, layout, shard=shard))
    convert_ranks(plans, lambda item, progress: convert(item.plan, item.folder, progress=progress))


def _outcome(folder: Path, rank: int) -> dict[str, str]:
    outcome: dict[str, str] = json.loads((folder / f"rank{rank}.json").read_text())
    return outcome


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_rank_does(outcomes: list[dict[str, str]], case: str) -> None:
    assert [outcome[case] for outcome in outcomes] == [""] * len(outcomes)


@pytest.mark.parametrize("experts", [1, 3, 7])
@pytest.mark.parametrize("tokens", [1, 6])
def test_batches_hold_every_assignment_once_in_order(tokens: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(tokens + experts)
    chosen = torch.rand(tokens, 8, generator=generator).argsort(1)[:, :3] - 1
    ids = torch.where(chosen < experts, chosen, -1).to(torch.int32)
    x = torch.arange(1.0, tokens + 1)[:, None].expand(tokens, 5).contiguous()
    batches = batches_of(ids, experts, tokens)
    spread = batches.scatter(x)
    assert spread.shape == (experts, tokens, 5)
    for expert in range(experts):
        wanted = [t for t in range(tokens) if expert in ids[t].tolist()]
        assert batches.counts[expert] == len(wanted)
        assert spread[expert, : len(wanted), 0].tolist() == [t + 1 for t in wanted]
    for choice in range(3):
        back = batches.rows_of_choice(spread, choice)
        known = ids[:, choice] >= 0
        assert torch.equal(back[known], x[known])


def test_factors_multiply_tokens_on_the_way_to_each_expert() -> None:
    ids = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
    x = torch.tensor([[2.0], [10.0]], dtype=torch.bfloat16)
    batches = batches_of(ids, 2, 2)
    assert batches.expected == -(-ids.numel() // 2)
    assert batches_of(ids, 2, 2, of=ids.numel()).expected == 1
    spread = batches.scatter(x, torch.tensor([[3.0, 0.5], [2.0, 7.0]]))
    assert spread[0, 0].item() == 6 and spread[1].flatten().tolist() == [1, 20]


def test_one_rank_alone_moves_nothing() -> None:
    exchange, x = SingleRankExchange(), torch.ones(3, 2)
    assert exchange.rows_to_send(3, x.device) == 3
    assert exchange.gather(x, 3, 0) is x and exchange.combine(x, 3) is x
