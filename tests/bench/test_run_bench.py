"""What is measured: right results alone, in turns, cold, and with what they cost."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from moectl.bench.bench_cases import BenchCase, make_case, plan_cases, sample_tokens
from moectl.bench.bench_targets import BenchTarget, shard_label, sharded, targets_of
from moectl.bench.journal import RowJournal, RunHeader
from moectl.bench.routings import routing_of, warm_share
from moectl.bench.run_bench import Bench
from moectl.bench.run_metadata import versions_of
from moectl.cache.measurement_keys import kernel_hash
from moectl.checkpoint import open_checkpoint
from moectl.convert.rank_slice import RankShard, shard_of
from moectl.errors import NoBackend, Unavailable, UsageError
from moectl.kernels.layer_inputs import make_inputs
from moectl.kernels.modular.fused_moe_kernel import kernel_of
from moectl.kernels.reference import moe_reference, route
from moectl.kernels.registry import runner_for
from moectl.kernels.timing import interleaved
from moectl.kernels.timing.interleaved import TimedCalls, quartiles, time_interleaved
from moectl.layer.experts import ExpertLayer, layout_recipe
from moectl.layer.prepare import checkpoint_layer
from moectl.problem.moe_problem import Routing
from moectl.run import BackendChoice, this_machine
from support.bench_rows import RATES, settings_of
from support.random_layers import GPT_OSS, KIMI, canonical_roles, layer_of, random_layer
from support.stream_checkpoints import nvfp4_checkpoint

pytestmark = pytest.mark.usefixtures("quick_machine")

CPU = torch.device("cpu")


def test_rows_have_times_that_follow_from_their_work(bench_of):
    rows = list(bench_of().measured())
    assert [(row.tokens, row.checked_tokens) for row in rows] == [(1, 1), (40, 32)]
    for row in rows:
        assert row.ok and not row.reason and row.rounds == 3 and row.calls == 1
        assert row.fastest_us <= row.q1_us <= row.median_us <= row.q3_us
        seconds = row.median_us * 1e-6
        assert math.isclose(row.gb_per_s, row.bytes / seconds / 1e9)
        assert math.isclose(row.tflop_per_s, row.flops / seconds / 1e12)
        assert math.isclose(row.floor_percent, 100 * row.floor_us / row.median_us)
        assert math.isclose(row.floor_us, 1e6 * max(row.bytes / 1e10, row.flops / 1e11))
        assert row.costs.repack_s > 0 and row.costs.load_s > 0 and row.costs.peak_bytes is None
        assert row.costs.first_s >= row.costs.repack_s and row.costs.held_bytes is None
        assert row.costs.weight_bytes > 0
        assert row.sm_mhz is None and row.caches == "warm"


def test_a_wrong_result_has_no_time_and_the_others_go_on(bench_of, add_runner):
    torch_runner = runner_for("torch")
    add_runner("wrong", compute=lambda *a: torch_runner.compute(*a) * 1.05)
    add_runner("late", compute=_with_last_row(float("nan")))
    add_runner("broken", compute=_raising)
    rows = {(r.backend, r.tokens): r for r in bench_of(("wrong", "late", "broken", "torch")).measured()}
    assert len(rows) == 8
    wrong, late, broken = (rows[name, 40] for name in ("wrong", "late", "broken"))
    assert wrong.failed and broken.failed and not rows["torch", 1].failed
    assert wrong.ok is False and not wrong.timed and wrong.reason.startswith("wrong result")
    assert 0.04 < wrong.error_rms < 0.06
    assert late.ok is False and not late.timed and "token 39" in late.reason
    assert broken.ok is None and broken.reason == "RuntimeError: the kernel is not there"
    assert rows["torch", 40].timed and rows["torch", 1].timed


@pytest.mark.parametrize("value", [float("nan"), 3.0])
def test_every_call_is_checked_and_not_the_last_alone(bench_of, add_runner, value):
    """Each has a routing and a copy of the weights of its own, that may be the wrong ones."""
    calls = []

    def second_is_wrong(*arguments):
        y = runner_for("torch").compute(*arguments)
        calls.append(1)
        return y * value if len(calls) == 2 else y

    add_runner("second", compute=second_is_wrong)
    (row,) = bench_of(("second",), tokens=(40,), warm=False).measured()
    assert row.ok is False and not row.timed and "of call 1 is off" in row.reason
    (right,) = bench_of(("torch",), tokens=(40,), warm=False).measured()
    assert right.timed and right.checked_tokens == 33


@pytest.mark.parametrize(("tokens", "calls"), [(1, 16), (2, 16), (40, 3), (64, 16), (4096, 4), (5, 1)])
def test_checked_tokens_are_spread_over_calls_and_along_the_batch(tokens, calls):
    found = sample_tokens(tokens, calls)
    assert len(found) == calls and all(len(some) for some in found)
    every = torch.cat(found)
    assert int(every.min()) == 0 and int(every.max()) == tokens - 1
    assert min(tokens * calls, 32) // 2 <= len(every) <= 36


def _with_last_row(value):
    def compute(*arguments):
        y = runner_for("torch").compute(*arguments)
        y[-1, -1] = value
        return y

    return compute


def _raising(*arguments):
    raise RuntimeError("the kernel is not there\nmore about it")


def test_a_backend_that_fails_while_it_is_timed_or_prepared_is_a_row(bench_of, add_runner):
    calls = []

    def tires(*arguments):
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("tired")
        return runner_for("torch").compute(*arguments)

    def unready(prepared):
        raise OSError("no such library")

    add_runner("tires", compute=tires)
    add_runner("unready", ready=unready)
    rows = {r.backend: r for r in bench_of(("tires", "unready", "torch"), tokens=(3,)).measured()}
    assert rows["tires"].reason == "ValueError: tired" and not rows["tires"].timed
    assert rows["unready"].reason == "not prepared: OSError: no such library"
    assert rows["torch"].timed


def test_a_result_that_goes_wrong_while_it_is_timed_has_no_time(bench_of, add_runner):
    """A graph's buffers are what is timed: they are looked at again after the rounds."""
    kept = []

    def scribbles(*arguments):
        y = runner_for("torch").compute(*arguments)
        for earlier in kept:
            earlier.zero_()
        kept.append(y)
        return y

    add_runner("scribbles", compute=scribbles)
    (row,) = bench_of(("scribbles",), tokens=(3,)).measured()
    assert row.ok is False and not row.timed


def test_costs_are_of_a_preparation_that_compiles_nothing(bench_of, add_runner):
    """The first one waits for a compiler; what an engine pays at every start comes without."""
    made = []

    def ready(prepared):
        made.append(prepared)
        time.sleep(0.5 if len(made) == 1 else 0.05)

    add_runner("slow", ready=ready)
    (row,) = bench_of(("slow",), tokens=(3,)).measured()
    assert len(made) == 2 and row.timed
    assert 0.05 <= row.costs.repack_s < 0.5 <= row.costs.first_s


def test_the_tactic_is_the_one_that_the_runner_tells(bench_of, add_runner):
    add_runner("telling", tactic=lambda prepared, tokens: f"tile {tokens} of {prepared.problem.experts}")
    rows = list(bench_of(("telling", "torch")).measured())
    assert [row.tactic for row in rows] == ["tile 1 of 6", "", "tile 40 of 6", ""]


def test_monolithic_backends_route_by_themselves(bench_of, add_runner):
    def monolithic(prepared, x, logits, bias):
        ids, weights = route(logits, prepared.problem, bias)
        return runner_for("torch").compute(prepared, x, ids, weights)

    add_runner("alone", compute=None, monolithic=monolithic)
    for problem in (GPT_OSS, KIMI):
        rows = list(bench_of(("alone",), random_layer(problem)).measured())
        assert all(row.timed for row in rows), rows


def test_done_cells_are_left_out(bench_of):
    first = list(bench_of().measured())
    again = list(bench_of().measured(frozenset({first[0].key})))
    assert [row.key for row in again] == [first[1].key]
    bench = bench_of()
    assert bench.pending() == 2
    assert bench.pending({row.key for row in bench.measured() if row.tokens == 1}) == 1


def refuse_all(problem, machine, names, stored):
    errors = {"a": NoBackend("a wants biases"), "b": Unavailable("b is not here")}
    return BackendChoice((), {name: errors[name] for name in names})


def test_backends_that_cannot_serve_are_rows_or_errors(monkeypatch):
    def choose(problem, machine, names, stored):
        refused = {}
        if "picky" in names and problem == KIMI:
            refused["picky"] = NoBackend("the picky backend wants biases", hint="none")
        if "absent" in names:
            refused["absent"] = Unavailable("there is no such GPU")
        return BackendChoice(("torch",) if set(names) - set(refused) else (), refused)

    monkeypatch.setattr("moectl.bench.run_bench.choose_backends", choose)
    targets = tuple(BenchTarget(name, "-", "1", random_layer(p)) for name, p in (("a", GPT_OSS), ("b", KIMI)))
    machine = this_machine("cpu")

    def bench(names):
        return Bench(settings_of(backends=names, tokens=(2,)), machine, targets, RATES)

    rows = list(bench(("torch", "picky")).measured())
    assert [(row.model, row.backend, row.timed) for row in rows] == [
        ("a", "torch", True),
        ("b", "picky", False),
        ("b", "torch", True),
    ]
    assert rows[1].reason == "the picky backend wants biases" and rows[1].refused and not rows[1].failed
    rows = list(bench(("torch", "absent")).measured())
    assert [(row.backend, row.refused, row.reason) for row in rows if row.model == "a"] == [
        ("absent", True, "there is no such GPU"),
        ("torch", False, ""),
    ]
    with pytest.raises(Unavailable, match="no such GPU"):
        bench(("absent",))
    monkeypatch.setattr("moectl.bench.run_bench.choose_backends", refuse_all)
    with pytest.raises(
        Unavailable, match=r"none of the requested backends .*: a wants biases; b is not here"
    ):
        bench(("a", "b"))


def test_layers_that_do_not_fit_together_come_one_after_the_other(bench_of, add_runner, monkeypatch):
    add_runner("second")
    said = []
    monkeypatch.setattr("moectl.bench.prepare_layer.MemoryLeft.fits", lambda *_: False)
    rows = list(bench_of(("torch", "second"), says=said.append).measured())
    assert [(r.backend, r.tokens) for r in rows] == [
        ("torch", 1),
        ("torch", 40),
        ("second", 1),
        ("second", 40),
    ]
    assert all(row.timed for row in rows)
    assert said == ["tiny: not enough memory for all backends at once; second will run after the others"]


def test_rows_say_which_libraries_and_which_kernels(tmp_path, monkeypatch):
    """Unpacked libraries among them: other ones, or other kernels of moectl's own, are another run."""
    (tmp_path / "humming").mkdir()
    (tmp_path / "humming" / "layer.py").write_text("")
    metadata = tmp_path / "humming_kernels-0.1.19.dist-info"
    metadata.mkdir()
    (tmp_path / "moe_C.so.xz").write_bytes(b"a build")
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    found = versions_of(this_machine("cpu"))
    assert found["MOECTL_PEERS/humming"] == "0.1.19" and found["kernels"] == kernel_hash()
    assert found["MOECTL_PEERS/vllm"].startswith("sha256:")
    metadata.rename(tmp_path / "humming_kernels-0.1.20.dist-info")
    run = RunHeader(settings_of().to_json(), {"device": "a CPU", "versions": found})
    with RowJournal.open(tmp_path / "rows.jsonl") as journal:
        journal.begin(run)
    others = {
        "version of MOECTL_PEERS/humming is 0.1.20, was 0.1.19": versions_of(this_machine("cpu")),
        "hash of moectl's kernels is 0123456789abcdef, was": found | {"kernels": "0123456789abcdef"},
    }
    with RowJournal.open(tmp_path / "rows.jsonl", resume=True) as journal:
        for said, changed in others.items():
            with pytest.raises(UsageError, match=said):
                journal.begin(RunHeader(run.settings, {**run.machine, "versions": changed}))


def test_turns_are_taken_round_robin_and_the_slow_get_fewer():
    order = []
    made = {
        name: TimedCalls(lambda name=name: order.append(name), 1, "clock", [], seconds)
        for name, seconds in (("a", 1e-3), ("b", 1e-3), ("slow", interleaved.MOST_SECONDS / 4))
    }
    failed = time_interleaved(made, CPU, 8, cold=False)
    assert not failed and [len(made[name].seconds) for name in made] == [8, 8, 4]
    assert order.count("slow") == 4
    # Nobody waits for another to end: in eight rounds of the two fast ones each comes once in every pair.
    fast = [name for name in order if name != "slow"]
    assert all({*fast[i : i + 2]} == {"a", "b"} for i in range(0, 16, 2))


@pytest.mark.parametrize("count", range(8))
def test_everyone_comes_behind_every_other_as_often(count):
    orders = interleaved.balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    others = [(a, b) for a in range(count) for b in range(count) if a != b]
    assert set(followed) == set(others) and len(set(followed.values())) <= 1
    if count:
        assert {order[0] for order in orders} == set(range(count))


def test_what_raises_ends_its_own_turns_alone():
    def fail():
        raise RuntimeError("no")

    made = {
        "bad": TimedCalls(fail, 1, "clock", [], 1e-3),
        "good": TimedCalls(lambda: None, 1, "clock", [], 1e-3),
    }
    failed = time_interleaved(made, CPU, 5, cold=False)
    assert list(failed) == ["bad"] and len(made["good"].seconds) == 5 and not made["bad"].seconds


def test_quartiles_are_those_of_the_rounds():
    found = quartiles([5e-6, 1e-6, 2e-6, 3e-6, 4e-6])
    assert (found.median, found.q1, found.q3, found.fastest, found.rounds) == pytest.approx((3, 2, 4, 1, 5))
    assert quartiles([2e-6]).q1 == pytest.approx(2)


def test_the_share_that_a_cache_still_holds():
    sets = [[0, 1], [0, 2], [3, 4], [0, 5]]
    assert warm_share(sets, 1, 10, 0) == 0.0
    assert warm_share(sets, 1, 10, 1000) == 2 / 8  # expert 0, twice
    assert warm_share(sets, 1, 10, 30) == 1 / 8  # the last call's 0 was pushed out by 2, 3, 4
    assert warm_share(sets, 2, 10, 1000) == 1 / 8  # calls 1 and 3 share a copy, and expert 0
    assert warm_share(sets, 4, 10, 1000) == 0.0


def test_copies_of_small_layers_keep_calls_cold(monkeypatch):
    target = BenchTarget("tiny", "-", "1", random_layer(GPT_OSS))
    expert = GPT_OSS.expert_bytes()
    settings = settings_of(warm=False, tokens=(1, 64, 65))
    sets = {"uniform": routing_of("uniform", target.experts, settings)}
    cuda = torch.device("cuda")

    def planned(cache, room=math.inf):
        monkeypatch.setattr("moectl.bench.bench_cases.last_level_cache", lambda device: cache)
        return plan_cases(target, sets, settings, cuda, min(room, 1 << 60))

    # A cache that holds no expert: copies all the same, as real caches keep things by chance.
    small = planned(expert // 2)
    assert [(c.calls, c.copies, c.warm_share) for c in small] == [(16, 2, 0), (16, 2, 0), (4, 2, 0)]
    assert "16 calls on 2 copies" in small[0].caches(settings, cuda)
    large = planned(1000 * target.nbytes)
    assert [(c.calls, c.copies, c.warm_share) for c in large] == [(16, 16, 0), (16, 16, 0), (4, 16, 0)]
    # Without memory for copies, calls that the cache would serve are timed alone.
    cramped = planned(1000 * target.nbytes, room=target.nbytes)
    assert {(c.calls, c.copies) for c in cramped} == {(1, 1)}
    assert cramped[0].caches(settings, cuda) == "cold: one call, flushed before it"
    assert [c.calls for c in planned(expert // 2, room=target.nbytes)] == [16, 16, 4]
    warm = plan_cases(target, sets, replace(settings, warm=True), cuda, math.inf)
    assert {c.caches(replace(settings, warm=True), cuda) for c in warm} == {"warm"}


def test_warm_calls_have_the_same_inputs_and_cold_ones_do_not():
    target = BenchTarget("tiny", "-", "1", random_layer(GPT_OSS))
    sets = routing_of("uniform", target.experts, settings_of())
    warm = make_case(target, BenchCase("uniform", 5, 3), sets, settings_of(), CPU)
    assert len(warm.inputs) == 3 and len({id(one) for one in warm.inputs}) == 1
    cold = make_case(target, BenchCase("uniform", 5, 3), sets, settings_of(warm=False), CPU)
    assert len({tuple(one.ids.flatten().tolist()) for one in cold.inputs}) == 3
    assert 0 < cold.work.experts <= GPT_OSS.experts


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (3, 1), (3, 4)])
@pytest.mark.parametrize(
    "problem", [GPT_OSS, replace(KIMI, dims=replace(KIMI.dims, intermediate=96, padded_intermediate=96))]
)
def test_ranks_add_up_to_the_layer(problem, tp, ep):
    layer = random_layer(problem)
    inputs = make_inputs(problem, 9)
    whole = moe_reference(inputs.x, inputs.ids, inputs.weights, layer.reference, problem)
    total = torch.zeros_like(whole)
    for rank in range(tp * ep):
        part = sharded(layer, shard_of(rank, tp, ep))
        prepared = part.prepared("torch", "cpu")
        ids = prepared.local_ids(inputs.ids)
        total += kernel_of(prepared).apply(inputs.x, ids, inputs.weights).float()
    assert float((total - whole).norm() / whole.norm()) < 0.02


def test_a_share_is_repacked_with_the_input_scale_of_the_whole_layer(tmp_path):
    layer = checkpoint_layer(open_checkpoint(nvfp4_checkpoint(tmp_path / "nvfp4")))
    largest = layer.canonical(range(8))["w13_input"].max()
    for rank in range(2):
        part = sharded(layer, shard_of(rank, 1, 2))
        assert part.canonical(range(4))["w13_input"].max() == (largest if rank == 0 else largest / 16)
        recipe = layout_recipe("trtllm-nvfp4", part.rank_slice, part.recipe.shapes)
        assert part.repack(recipe, torch.device("cpu"))["w13_input"].tolist() == [float(largest)] * 4


def test_the_first_rank_is_what_a_shared_layer_is_timed_as(bench_of):
    layer = random_layer(GPT_OSS)
    part = sharded(layer, RankShard(tp_size=3, ep_size=2))
    assert part.problem.local_experts == 3 and part.problem.dims.intermediate == 32
    rows = list(bench_of(layer=part).measured())
    assert all(row.timed for row in rows) and rows[0].experts <= 3
    assert shard_label(RankShard(tp_size=3, ep_size=2)) == "tp3 ep2" and shard_label(RankShard()) == "1"


def test_a_layer_that_cannot_be_cut_is_refused():
    settings = settings_of(models=("gpt-oss-20b",), tp=91)
    with pytest.raises(UsageError, match="tensor-parallel"):
        targets_of(settings, None, CPU)
    with pytest.raises(UsageError, match="no built-in model is called"):
        targets_of(settings_of(models=("gpt-5",)), None, CPU)


def test_a_router_chooses_on_a_given_input(tmp_path, bench_of):
    from safetensors.torch import save_file

    from moectl.kernels.prepared_layer import Router

    problem = replace(GPT_OSS, routing=Routing())
    layer = layer_of(problem, canonical_roles(problem))
    weight = torch.zeros(problem.experts, problem.dims.hidden)
    weight[:, : problem.experts] = torch.eye(problem.experts)
    layer: ExpertLayer = replace(layer, router=Router(weight))
    x = torch.zeros(6, problem.dims.hidden)
    x[:, :2] = torch.tensor([5.0, 9.0])
    save_file({"x": x}, tmp_path / "x.safetensors")
    settings = settings_of(routings=("router",), input=str(tmp_path / "x.safetensors"))
    (routed,) = routing_of("router", layer, settings)(3, 1)
    assert routed.ids[:, :2].tolist() == [[1, 0]] * 3 and torch.equal(routed.x, x[:3])
    rows = list(bench_of(layer=layer, routings=("router",), input=settings.input, tokens=(3,)).measured())
    assert rows[0].timed and rows[0].experts == 4
    with pytest.raises(UsageError, match="has 6 tokens, and 40 were requested"):
        bench_of(layer=layer, routings=("router",), input=settings.input, tokens=(40,))
    with pytest.raises(UsageError, match="has no router"):
        bench_of(routings=("router",))


def test_what_is_worked_on_is_told_before(bench_of, add_runner):
    """Whoever watches a process that dies knows which rows it was at: of a cell, a check, a preparation."""
    told = []
    add_runner("other")
    bench = replace(bench_of(("torch", "other")), on_start=lambda rows: told.append(rows))
    cells = {(row.backend, row.tokens) for row in bench.measured()}
    first, second, *rest = [[(row.backend, row.tokens) for row in rows] for rows in told]
    assert {*first, *second} == cells and {name for name, _ in first} == {"torch"}
    assert rest[:4] == [
        [("torch", 1), ("other", 1)],
        [("torch", 1)],
        [("other", 1)],
        [("torch", 1), ("other", 1)],
    ]
