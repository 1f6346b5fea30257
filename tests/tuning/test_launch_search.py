"""The search over launches with a clock and a device of the test's own: budget, resume, rejections."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moectl.cache.launches_file import LaunchAttempt, LaunchesStore
from moectl.environment import find_device
from moectl.errors import CheckFailed, Unavailable, UsageError
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_table import GpuModel
from moectl.kernels.choice.portable_launches import Tile
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.registry import runner_for
from moectl.kernels.triton.triton_runner import FAMILIES, predicted_for
from moectl.problem.moe_problem import Dims, Parallel
from moectl.problem.published_layers import MODELS
from moectl.tuning import gpu_bench
from moectl.tuning.launch_search import DeviceBroken, SearchPlan, SearchProgress, WrongResult, search
from moectl.tuning.tuned_layers import named_layers
from moectl.tuning.tuning_cases import TuningCase, by_expected_gain, candidates, promising
from support import python_forks
from support.runners import apply

QWEN = MODELS["qwen3-30b"]
H200 = find_device("h200")
LAUNCHES = [Launch("grouped", Tile(16, rows, 64, stages=4, warps=4)) for rows in (64, 128, 192, 256, 320)]
CURRENT = LAUNCHES[1]


@dataclass
class Fake:
    """A bench of stated times: each look costs a second of `now`, and is written down in `asked`."""

    times: dict[Launch, float]
    faults: dict[Launch, BaseException] = field(default_factory=dict)
    now: float = 0.0
    asked: list[tuple[str, Launch, int]] = field(default_factory=list)

    def candidates(self, cell: TuningCase) -> list[Launch]:
        return list(self.times)

    def current(self, cell: TuningCase) -> Launch:
        return CURRENT

    def error(self, cell: TuningCase, launch: Launch) -> float:
        self.now += 1.0
        self.asked.append(("error", launch, cell.tokens))
        if launch in self.faults:
            raise self.faults[launch]
        return 1e-3

    def time(self, cell: TuningCase, launch: Launch, repeats: int) -> float:
        self.asked.append((f"time {repeats}", launch, cell.tokens))
        return self.times[launch]


def _times() -> dict[Launch, float]:
    return {launch: 10.0 + place for place, launch in enumerate(LAUNCHES)}


def _cells(*tokens: int) -> list[TuningCase]:
    return [TuningCase("qwen", QWEN, count) for count in tokens]


def _run(bench: Fake, cells: list[TuningCase], budget: float = 1e9, **more: object):  # type: ignore[no-untyped-def]
    plan = SearchPlan(budget, lambda: bench.now, **more)  # type: ignore[arg-type]
    return search(cells, bench, lambda cell: LaunchesStore.of(cell.problem, H200), plan)


def test_the_fastest_right_launch_of_each_cell_is_kept() -> None:
    bench = Fake(_times())
    found = _run(bench, _cells(1, 16))
    assert found.done and [(cell.tokens, row.us, row.before_us) for cell, row in found.rows] == [
        (1, 10.0, 11.0),
        (16, 10.0, 11.0),
    ]
    row = LaunchesStore.of(QWEN, H200).row(16)
    assert row is not None and row.tile == asdict(LAUNCHES[0].tile) and (row.tried, row.rejected) == (5, 0)
    finals = [launch for what, launch, tokens in bench.asked if what == "time 11" and tokens == 16]
    assert finals == LAUNCHES[:3]
    # A second search measures nothing and gives the same rows.
    again = _run(repeated := Fake(_times()), _cells(1, 16))
    assert (
        not repeated.asked
        and not again.rows
        and [row for _, row in again.kept] == [row for _, row in found.rows]
    )


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (WrongResult("differs by 3e-1"), "differs by 3e-1"),
        (
            RuntimeError("out of resource: shared memory\nmore"),
            "RuntimeError: out of resource: shared memory",
        ),
    ],
)
def test_what_fails_or_is_wrong_gets_no_time(fault: Exception, why: str) -> None:
    bench, seen = Fake(_times(), {LAUNCHES[0]: fault}), list[SearchProgress]()
    found = _run(bench, _cells(16), report=seen.append)
    assert not [what for what, launch, _ in bench.asked if launch == LAUNCHES[0] and what != "error"]
    (_, row) = found.rows[0]
    assert row.tile == asdict(LAUNCHES[1].tile) and (row.tried, row.rejected) == (5, 1)
    assert [at.last.why for at in seen if at.last and at.last.why] == [why]


def test_a_search_without_any_right_launch_is_an_error_and_keeps_no_row() -> None:
    bench = Fake(_times(), dict.fromkeys(LAUNCHES, WrongResult("differs")))
    with pytest.raises(Unavailable, match="no launch of qwen M=16 gave a right result: differs"):
        _run(bench, _cells(16))
    assert LaunchesStore.of(QWEN, H200).row(16) is None


def test_the_budget_ends_the_search_between_launches_and_the_next_goes_on() -> None:
    first = Fake(_times())
    found = _run(first, _cells(1, 16, 64), budget=7)
    assert [cell.tokens for cell, _ in found.rows] == [1] and [c.tokens for c in found.left] == [16, 64]
    assert [what for what, _, tokens in first.asked if tokens == 64] == []
    store = LaunchesStore.of(QWEN, H200)
    assert store.row(16) is None and len(store.attempts(16)) == 2
    second = Fake(_times())
    found = _run(second, _cells(1, 16, 64))
    assert found.done and [cell.tokens for cell, _ in found.kept] == [1]
    assert [launch for what, launch, t in second.asked if what == "error" and t == 16] == [
        LAUNCHES[2],
        LAUNCHES[3],
        LAUNCHES[4],
    ]


def test_no_budget_measures_nothing() -> None:
    bench = Fake(_times())
    found = _run(bench, _cells(1), budget=0)
    assert not bench.asked and not found.rows and len(found.left) == 1


def test_an_interrupt_is_no_fault_of_the_launch() -> None:
    bench = Fake(_times(), {LAUNCHES[2]: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        _run(bench, _cells(16))
    kept = {tuple(a.tile.items()): a for a in LaunchesStore.of(QWEN, H200).attempts(16)}
    assert kept[tuple(asdict(LAUNCHES[2].tile).items())].begun == 0
    assert _run(Fake(_times()), _cells(16)).rows[0][1].rejected == 0


def test_a_launch_that_breaks_the_device_is_kept_as_failed() -> None:
    bench = Fake(_times(), {LAUNCHES[0]: DeviceBroken("the grouped kernels broke the device: illegal")})
    with pytest.raises(DeviceBroken):
        _run(bench, _cells(16))
    again = Fake(_times())
    (_, row) = _run(again, _cells(16)).rows[0]
    assert LAUNCHES[0] not in [launch for _, launch, _ in again.asked] and row.rejected == 1


def test_what_never_came_back_is_tried_last_and_not_a_third_time() -> None:
    store = LaunchesStore.of(QWEN, H200)
    store.note(16, LaunchAttempt("grouped", asdict(LAUNCHES[0].tile), begun=1))
    once = Fake(_times())
    _run(once, _cells(16))
    assert [launch for what, launch, _ in once.asked if what == "error"][-1] == LAUNCHES[0]
    store.forget(16)
    store.note(16, LaunchAttempt("grouped", asdict(LAUNCHES[0].tile), begun=2))
    twice = Fake(_times())
    (_, row) = _run(twice, _cells(16)).rows[0]
    assert LAUNCHES[0] not in [launch for _, launch, _ in twice.asked]
    assert row.rejected == 1 and row.tile == asdict(LAUNCHES[1].tile)


KILLED = """
import os, sys
from dataclasses import asdict
sys.path.insert(0, {tests!r})
from tuning.test_launch_search import Fake, _cells, _run, _times, LAUNCHES
class Dies(Fake):
    def time(self, cell, launch, repeats):
        if launch == LAUNCHES[3]:
            os.kill(os.getpid(), 9)
        return super().time(cell, launch, repeats)
_run(Dies(_times()), _cells(16))
"""


def test_a_search_that_is_killed_goes_on(user_cache: Path) -> None:
    root = Path(__file__).parents[2]
    ended = python_forks.run(
        ["-c", KILLED.format(tests=str(root / "tests"))],
        cwd=root,
        env={**os.environ, "MOECTL_CACHE": str(user_cache)},
    )
    assert ended.returncode == -9
    attempts = LaunchesStore.of(QWEN, H200).attempts(16)
    assert sum(a.us is not None for a in attempts) == 3 and len(attempts) == 4
    after = Fake(_times())
    assert _run(after, _cells(16)).done
    assert [launch for what, launch, _ in after.asked if what == "error"] == [LAUNCHES[4], LAUNCHES[3]]


def test_cells_that_ship_unmeasured_come_first() -> None:
    other = replace(QWEN, top_k=2, experts=16, local_experts=16)
    gpu = GpuModel((9, 0), 132)
    cells = [*_cells(64, 1), TuningCase("other", other, 64), TuningCase("other", other, 1)]
    names = [(cell.name, cell.tokens) for cell in by_expected_gain(cells, gpu)]
    assert {name for name, _ in names[:2]} == {"other"} and names[2:] == [("qwen", 1), ("qwen", 64)]
    # On a GPU of another kind nothing ships: fewer tokens come first.
    assert [cell.tokens for cell in by_expected_gain(_cells(64, 1, 8), GpuModel((8, 0), 108))] == [1, 8, 64]


def test_candidates_are_legal_and_of_families_for_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    device = torch.device("cuda")
    few, many = (candidates(cell, FAMILIES, device) for cell in _cells(1, 8192))
    assert {launch.family for launch in few} >= {"decode", "stream"}
    assert {launch.family for launch in many} == {"grouped", "prefill"}
    for launch in (*few, *many):
        assert not FAMILIES[launch.family].fits(QWEN, launch.tile)
    assert {launch.family for launch in candidates(_cells(1)[0], ["decode"], device)} == {"decode"}


def test_promising_launches_come_first_and_hopeless_ones_are_left_out() -> None:
    # Not at the top: a process that a test starts imports this module without the scripts' path.
    from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for

    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        (cell,) = _cells(64)
        every = candidates(cell, FAMILIES, device)
        found = promising(cell, every, device)
        times = [predicted_for(QWEN, 64, launch, device) for launch in found]
        known = [us for us in times if us is not None]
        assert known == sorted(known) and len(known) == len(found) > 5
        assert set(found) < set(every) and known[-1] <= 1.3 * known[0]
        left_out = [predicted_for(QWEN, 64, it, device) for it in every if it not in found]
        assert all(us is not None and us > 1.3 * known[0] for us in left_out)
        assert promising(cell, every, device, 3) == found[:3]
    # Where nothing was measured, all are tried, those first that are predicted to be fast.
    with compiling_for(OFFLINE_GPUS[80]):
        every = candidates(cell, FAMILIES, device)
        found = promising(cell, every, device)
        assert sorted(map(str, found)) == sorted(map(str, every))
        known = [us for it in found if (us := predicted_for(QWEN, 64, it, device))]
        assert known == sorted(known) and len(known) == len(found)


def test_layers_by_name_are_one_ranks_share_and_equal_ones_once() -> None:
    (layer,) = named_layers(["qwen3-30b", "qwen3-30b"], Parallel(2))
    assert layer.problem.dims.intermediate == 384
    (spread,) = named_layers(["qwen3-30b"], Parallel(4, ep=True))
    assert spread.problem.local_experts == 32
    with pytest.raises(UsageError, match="no built-in model is called"):
        named_layers(["gpt-5"], Parallel())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> gpu_bench.GpuBench:
    """The GPU's bench on the CPU, where plain torch stands for every kernel."""

    def run_with(layer: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor, launch: Launch) -> Tensor:
        return apply(runner_for("torch"), layer, x, ids, weights)

    monkeypatch.setattr(gpu_bench, "run_with", run_with)
    return gpu_bench.GpuBench(torch.device("cpu"))


SMALL = TuningCase("small", replace(QWEN, dims=Dims(256, 128), experts=6, local_experts=6, top_k=2), 5)


def _computing(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run_into(y: Tensor, layer: PreparedMoE, x: Tensor, ids: Tensor, w: Tensor, launch: Launch) -> Tensor:
        return y.copy_(change(gpu_bench.run_with(layer, x, ids, w, launch)))

    return run_into


def _one_token_wrong(y: Tensor) -> Tensor:
    return torch.cat([y[:-1], -y[-1:]])


WRONG = {
    "a token": _one_token_wrong,
    "everything a little": lambda y: y * 1.03,
    "infinity": lambda y: y + torch.tensor([0.0] * 255 + [float("inf")]).to(y.dtype),
    "zeros": torch.zeros_like,
}


def test_a_right_result_has_a_small_error_and_a_time(
    bench: gpu_bench.GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bench, "run_into", _computing(lambda y: y))
    assert bench.error(SMALL, CURRENT) == 0 and bench.time(SMALL, CURRENT, 1) > 0
    assert bench.inputs(SMALL) is bench.inputs(SMALL) and bench.layer(SMALL) is bench.layer(SMALL)
    assert len(bench.inputs(replace(SMALL, tokens=65)).sets) == 4


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_result_is_refused(
    bench: gpu_bench.GpuBench, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(gpu_bench, "run_into", _computing(WRONG[fault]))
    with pytest.raises(WrongResult, match="differs from the portable kernels"):
        bench.error(SMALL, CURRENT)


def test_what_a_kernel_leaves_unwritten_is_refused(
    bench: gpu_bench.GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_but_one(y: Tensor, layer: PreparedMoE, *rest: Any) -> Tensor:
        y[:, 1:] = gpu_bench.run_with(layer, *rest)[:, 1:]
        return y

    monkeypatch.setattr(gpu_bench, "run_into", all_but_one)
    with pytest.raises(WrongResult, match="nan"):
        bench.error(SMALL, CURRENT)


def test_portable_kernels_that_are_wrong_judge_nothing(
    bench: gpu_bench.GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_bench.run_with
    monkeypatch.setattr(gpu_bench, "run_with", lambda *given: 1.1 * right(*given))
    with pytest.raises(CheckFailed, match="the portable kernels are wrong for small M=5"):
        bench.error(SMALL, CURRENT)


def test_an_error_of_the_device_is_no_error_of_the_launch(
    bench: gpu_bench.GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(gpu_bench, "run_into", broken)
    with pytest.raises(DeviceBroken, match="the grouped kernels broke the device: CUDA error") as told:
        bench.error(SMALL, CURRENT)
    assert "Run the same command again" in told.value.hint
