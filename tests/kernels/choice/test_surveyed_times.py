"""Surveyed times, which correct what the model of time predicts of a layer's launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.environment.named_devices import find_device
from moectl.kernels.choice import surveyed_times
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_model import GpuRates
from moectl.kernels.choice.launch_plan import SIZES, TILE_FAMILIES, Plan, plan_with, planned
from moectl.kernels.choice.launch_table import GpuModel, own_rows
from moectl.kernels.choice.surveyed_times import (
    UNSEEN,
    Evidence,
    SurveyedLayer,
    corrected,
    evidence_of,
    key_of,
    surveyed,
)
from moectl.kernels.choice.tile_family import launch_of
from moectl.problem.moe_problem import Activation, MoEProblem
from moectl.problem.published_layers import model_problem
from support.launch_cases import H20, H100, H200, LAYER, ON_SM90, known_launches

POWERS = [1 << power for power in range(15)]


def _plan(problem: MoEProblem, rates: GpuRates, *surveys: SurveyedLayer) -> Plan:
    found = plan_with(problem, rates, ON_SM90, surveys)
    assert found is not None
    return found


def _survey(cells: Mapping[int, Mapping[Launch, float]], gpu: str = "NVIDIA H200") -> SurveyedLayer:
    """Times as if they had been surveyed."""
    return SurveyedLayer(
        gpu,
        {
            tokens: [(launch.family, asdict(launch.tile), us) for launch, us in cell.items()]
            for tokens, cell in cells.items()
        },
    )


def _taken_and_another(problem: MoEProblem, tokens: int) -> tuple[Launch, Launch]:
    """The launch that a plan by the model alone has at a number of tokens, and one that is in no plan."""
    plan = _plan(problem, H200)
    taken = plan.launch(tokens)
    others = (launch for launch, _ in known_launches(problem) if launch not in plan.launches)
    return taken, next(launch for launch in others if launch.family == taken.family)


@pytest.mark.parametrize("tokens", [64, 2048, 16384])
def test_a_launch_that_was_measured_to_be_much_faster_is_taken_there_alone(tokens: int) -> None:
    taken, other = _taken_and_another(LAYER, tokens)
    plan = _plan(LAYER, H200, _survey({tokens: {taken: 300.0, other: 30.0}}))
    assert plan.launch(tokens) == other
    assert plan.launch(1 if tokens > 1000 else 16384) == _plan(LAYER, H200).launch(
        1 if tokens > 1000 else 16384
    )
    confirmed = _plan(LAYER, H200, _survey({tokens: {taken: 30.0, other: 300.0}}))
    assert confirmed.launch(tokens) == taken


def test_times_count_on_gpus_of_the_model_that_was_measured_alone() -> None:
    taken, other = _taken_and_another(LAYER, 2048)
    survey = _survey({2048: {taken: 300.0, other: 30.0}})
    assert _plan(LAYER, H100, survey).launch(2048) == other, "as many multiprocessors"
    assert _plan(LAYER, H20, survey) == _plan(LAYER, H20)
    for capability in ((8, 0), (10, 0)):
        assert plan_with(LAYER, H200, capability, [survey]) == plan_with(LAYER, H200, capability, [])


def test_of_two_gpus_that_were_measured_the_one_with_the_nearest_bandwidth_counts() -> None:
    taken, other = _taken_and_another(LAYER, 2048)
    surveys = (
        _survey({2048: {taken: 300.0, other: 30.0}}, "NVIDIA H100 80GB HBM3"),
        _survey({2048: {taken: 30.0, other: 300.0}}),
    )
    for both in (surveys, surveys[::-1]):
        assert _plan(LAYER, H100, *both).launch(2048) == other
        assert _plan(LAYER, H200, *both).launch(2048) == taken
        assert _plan(LAYER, H200._replace(bandwidth=4.9e12), *both).launch(2048) == taken


def test_rows_of_a_layer_say_more_than_a_survey() -> None:
    problem = model_problem("kimi-k2")
    assert own_rows(problem, GpuModel(ON_SM90, 132))
    taken, other = _taken_and_another(problem, 2048)
    assert _plan(problem, H200, _survey({2048: {taken: 300.0, other: 30.0}})) == _plan(problem, H200)


def test_launches_that_are_unknown_or_of_another_format_are_left_out() -> None:
    taken, other = _taken_and_another(LAYER, 2048)
    rows_of_fp8 = next(launch for launch, _ in known_launches(model_problem("qwen3-30b", "fp8-block")))
    good = _survey({2048: {taken: 300.0, other: 30.0}})
    known = good.cells[2048]
    for extra in (
        ("none", {"rows": 4}, 1.0),
        (taken.family, {"rows": 4}, 1.0),
        (rows_of_fp8.family, asdict(rows_of_fp8.tile), 1.0),
    ):
        assert _plan(LAYER, H200, good._replace(cells={2048: [*known, extra]})) == _plan(LAYER, H200, good)


def test_one_launch_alone_and_times_of_no_known_size_say_nothing() -> None:
    us = [[10.0 * size for size in POWERS], [math.inf] * len(POWERS), [20.0 * size for size in POWERS]]
    assert evidence_of({64: {0: 700.0}}, us, POWERS) == []
    assert evidence_of({64: {0: 700.0, 1: 1.0}}, us, POWERS) == [], "no prediction of the other"
    assert len(evidence_of({64: {0: 700.0, 2: 1.0}}, us, POWERS)) == 1
    assert corrected(us, POWERS, []) == us
    taken, _ = _taken_and_another(LAYER, 64)
    assert _plan(LAYER, H200, _survey({64: {taken: 9999.0}})) == _plan(LAYER, H200)


def test_what_all_launches_of_a_cell_lack_changes_no_order() -> None:
    """Another clock makes all slower; the model's order among them stays, and so do most of its times."""
    us = [
        [10.0 * size for size in POWERS],
        [12.0 * size for size in POWERS],
        [11.0 * size for size in POWERS],
    ]
    (evidence,) = evidence_of({64: {0: 3 * 640.0, 1: 3 * 768.0}}, us, POWERS)
    assert evidence.errors[0] == pytest.approx(evidence.errors[1])
    assert 0 < evidence.errors[0] < math.log(3) / 2
    made = corrected(us, POWERS, [evidence])
    at = POWERS.index(64)
    assert made[0][at] < made[1][at]


def test_between_sizes_the_prediction_is_between_theirs() -> None:
    us = [[1.0, 4.0], [1.0, 1.0]]
    (evidence,) = evidence_of({8: {0: 2.0, 1: 1.0}}, us, [4, 16])
    assert evidence.errors[0] == pytest.approx(evidence.errors[1], abs=1e-9), "as predicted: half way, 2 us"
    (below,) = evidence_of({1: {0: 1.0, 1: 1.0}}, us, [4, 16])
    (above,) = evidence_of({99: {0: 4.0, 1: 1.0}}, us, [4, 16])
    assert [*below.errors.values(), *above.errors.values()] == pytest.approx([0] * 4)


def test_a_correction_fades_with_distance() -> None:
    us = [[100.0] * len(POWERS)]
    (made,) = corrected(us, POWERS, [Evidence(6, {0: math.log(2)})])
    factors = [us / 100 for us in made]
    at = POWERS.index(64)
    assert 1.7 < factors[at] < 2
    assert all(low < high for low, high in pairwise(factors[: at + 1]))
    assert all(low > high for low, high in pairwise(factors[at:]))
    assert factors[0] < 1.01 and factors[-1] < 1.01


def test_launches_that_nobody_measured_count_as_a_little_slower_where_others_were() -> None:
    us = [[100.0] * len(POWERS)] * 2
    seen, unseen = corrected(us, POWERS, [Evidence(6, {0: 0.0})])
    at = POWERS.index(64)
    assert 1.03 < unseen[at] / 100 < math.exp(UNSEEN) and max(unseen) == unseen[at]
    assert seen[at] < 101 and unseen[0] < 101


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_corrections_stay_within_what_was_measured(data: st.DataObject) -> None:
    errors = st.dictionaries(st.integers(0, 3), st.floats(-1, 1), min_size=1)
    evidence = [
        Evidence(tokens, each)
        for tokens, each in data.draw(st.lists(st.tuples(st.floats(0, 16), errors), max_size=6))
    ]
    us = [[1.0 + place + size for size in POWERS] for place in range(4)]
    for before, after in zip(us, corrected(us, POWERS, evidence), strict=True):
        assert all(abs(math.log(x / y)) <= 1 + UNSEEN for x, y in zip(after, before, strict=True))


def test_layers_are_told_apart_by_formats_and_sizes() -> None:
    layer = model_problem("qwen3.5-35b", "int4-g128")
    assert {it.gpu for it in surveyed(layer)} == {"NVIDIA H200"}
    others = (
        replace(layer, top_k=layer.top_k - 1),
        replace(layer, experts=layer.experts - 1, local_experts=layer.local_experts - 1),
        replace(layer, local_experts=layer.local_experts - 1),
    )
    assert all(key_of(other) != key_of(layer) and not [*surveyed(other)] for other in others)
    assert key_of(model_problem("qwen3.5-35b", "int4-g128-a8")) != key_of(layer)
    ungated = replace(layer, activation=Activation("relu2", gated=False))
    assert key_of(ungated) != key_of(layer) and not [*surveyed(ungated)]
    assert [*surveyed(replace(layer, bias=True, dtype="fp16"))], "what changes times little"


def test_the_shipped_file_has_launches_and_gpus_that_are_known() -> None:
    launches, layers = surveyed_times._file()
    assert all(launch_of(TILE_FAMILIES, family, tile) is not None for family, tile in launches)
    for item in (item for items in layers.values() for item in items):
        assert find_device(item["gpu"]).capability == 90
        for tokens, cell in item["times"].items():
            assert 1 <= int(tokens) <= SIZES[-1]
            assert all(us > 0 for _, us in cell) and len({number for number, _ in cell}) == len(cell)


def test_a_file_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveyed_times, "VERSION", 99)
    with pytest.raises(ValueError, match=r"surveyed\.json has version 1, expected 99"):
        surveyed_times._file.__wrapped__()


def test_plans_take_the_surveys_that_ship() -> None:
    layer = model_problem("qwen3.5-35b", "nvfp4")
    shipped = planned(layer, H200, ON_SM90)
    assert shipped == _plan(layer, H200, *surveyed(layer)) != _plan(layer, H200)
