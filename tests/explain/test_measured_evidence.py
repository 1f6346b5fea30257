"""Times that were measured on a device choose among backends that can serve, and are said to."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moectl.cache import backend_times_file
from moectl.cache.backend_times import BackendTime, MeasuredTimes
from moectl.convert.rank_slice import RankShard, RankSlice
from moectl.environment import find_device
from moectl.errors import UsageError
from moectl.explain.fallback import fallback_of
from moectl.explain.measured_evidence import cached
from moectl.oracle.machine_packages import packages_from
from moectl.oracle.registry import policy_named
from moectl.oracle.select import select
from moectl.oracle.selection_inputs import replay_inputs
from moectl.problem.moe_problem import Parallel
from moectl.problem.published_layers import MODELS
from moectl.run.run_machine import RunMachine, choose_backends

KIMI = MODELS["kimi-k2"]
H200 = find_device("h200")
OWN = policy_named("moectl")
BARE = packages_from("none")


def timed(backend, tokens, us):
    return BackendTime(
        backend, "", tokens, "uniform", us, 1.0, True, 2e-3, "moectl bench", "2026-11-21T21:00:00Z"
    )


FASTER_MARLIN = MeasuredTimes(
    (timed("moectl", 1, 60.0), timed("moectl_marlin", 1, 50.0), timed("torch", 1, 900.0))
)


def decided(measured=MeasuredTimes(), policy=OWN, **more):
    return select(KIMI, H200, BARE, policy, measured=measured, **more)


def test_the_fastest_is_chosen_and_the_order_stays():
    plain, found = decided(), decided(FASTER_MARLIN)
    assert plain.chosen.backend.name == "moectl" and plain.ranking is None
    assert found.chosen.backend.name == "moectl_marlin"
    assert [c.rank for c in found.candidates] == [c.rank for c in plain.candidates]
    assert found.ranking.factors == (
        ("moectl_marlin", 1.0),
        ("moectl", pytest.approx(1.2)),
        ("torch", pytest.approx(18.0)),
    )
    assert [c.backend.name for c in found.best_first][:2] == ["moectl_marlin", "moectl"]
    assert fallback_of(found, OWN) is None


def test_what_cannot_serve_is_not_chosen_however_fast():
    small = replace(KIMI, scheme=MODELS["gpt-oss-20b"].scheme)
    found = select(small, H200, BARE, OWN, measured=FASTER_MARLIN)
    assert found.chosen.backend.name == "moectl" and found.ranking.best == "moectl"


def test_a_request_and_another_engines_policy_are_not_overruled():
    assert decided(FASTER_MARLIN, only="moectl").chosen.backend.name == "moectl"
    vllm, stored = policy_named("vllm-0.33.0"), replace(KIMI, storage="compressed-tensors")
    with_times = select(stored, H200, packages_from("full"), vllm, measured=FASTER_MARLIN)
    assert with_times.chosen == select(stored, H200, packages_from("full"), vllm).chosen
    assert with_times.ranking is None


@given(
    st.lists(st.tuples(st.sampled_from(["moectl", "moectl_marlin"]), st.integers(1, 64), st.floats(1, 1e4)))
)
def test_the_choice_follows_from_the_times_alone(rows):
    times = MeasuredTimes(tuple(timed(*row) for row in rows))
    assert decided(times) == decided(times)
    assert decided(times).chosen.backend.name in ("moectl", "moectl_marlin")


def test_a_recorded_decision_holds_its_times():
    document = json.loads(json.dumps(decided(FASTER_MARLIN).to_json()))
    assert document["ranking"]["tokens"] == [1] and replay_inputs(document).measured == FASTER_MARLIN
    del document["inputs"]["measured"]
    assert replay_inputs(document).measured == MeasuredTimes()
    for bad in ({"rows": 1}, [{"backend": "moectl"}], [{**FASTER_MARLIN.to_json()[0], "us": "1"}], [1]):
        document["inputs"]["measured"] = bad
        with pytest.raises(UsageError, match=r"inputs\.measured"):
            replay_inputs(document)


def keep(*rows):
    backend_times_file.save(H200, KIMI, rows, versions={}, source="moectl bench")


def test_run_takes_what_was_measured_here_and_says_why():
    machine = RunMachine(torch.device("cpu"), H200, BARE)
    choice = choose_backends(KIMI, machine)
    assert choice.names[0] == "moectl" and choice.by_measurement == ""
    keep(*FASTER_MARLIN.rows)
    choice = choose_backends(KIMI, machine)
    assert choice.names[:2] == ("moectl_marlin", "moectl")
    assert choice.by_measurement.startswith("moectl_marlin: it is the fastest as measured")
    # Weights that lie in a backend's layout go first: nothing is laid out anew.
    choice = choose_backends(KIMI, machine, (), "moectl-mtile64")
    assert choice.names[0] == "moectl" and choice.by_measurement == ""
    assert choose_backends(KIMI, machine, ["torch"]).names == ("torch",)


def test_evidence_is_of_the_layer_on_the_device():
    keep(*FASTER_MARLIN.rows)
    assert len(cached(H200, KIMI, BARE).measured.rows) == 3
    assert not cached(find_device("h100"), KIMI, BARE).measured.rows
    assert not cached(H200, replace(KIMI, top_k=4), BARE).measured.rows


def test_evidence_of_a_rank_is_of_the_slice_that_it_holds():
    whole = MODELS["gpt-oss-120b"]
    held = RankSlice(whole, RankShard(4)).problem
    backend_times_file.save(H200, held, FASTER_MARLIN.rows, versions={}, source="moectl bench")
    assert len(cached(H200, whole.on(Parallel(tp=4)), BARE).measured.rows) == 3
    assert not cached(H200, whole.on(Parallel(tp=16)), BARE).measured.rows, "which cannot be sliced"
