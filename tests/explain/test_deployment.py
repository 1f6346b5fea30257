"""Bytes while loading: every layout that a backend names has a row, and rows count whole tensors."""

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.explain.assumed_machines import machine
from moectl.explain.deployment import memory_of
from moectl.oracle import policy_named, select
from moectl.oracle.engine import AS_LOADED, ASSUMED
from moectl.oracle.registry import ENGINES


def layouts(engine):
    routes = engine.policy.routes
    return {form.layout for route in routes for b in route.backends() for form in b.forms if form.layout}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_every_row_is_reached_by_its_own_name(engine):
    assert bool(engine.repacking) == bool(layouts(engine))
    for prefix, row in engine.repacking:
        assert engine.repacked(prefix) is row
    assert engine.repacked("") == AS_LOADED and engine.repacked("no such layout") == ASSUMED


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_rows_are_for_layouts_that_backends_name(engine):
    for prefix, _ in engine.repacking:
        assert any(layout.startswith(prefix) for layout in layouts(engine)), prefix


def test_every_layout_that_moectl_runs_has_a_row():
    engine = ENGINES["moectl"]
    assert all(engine.repacked(layout) is not ASSUMED for layout in layouts(engine))


@pytest.mark.parametrize(("gpu", "copies"), [("a100", (1, 1)), ("b200", (3, 1)), ("h200", (1, 1))])
def test_copies_of_the_two_matrices(gpu, copies):
    problem = open_checkpoint("openai/gpt-oss-120b", offline=True).groups[0].problem
    found = machine(gpu, None, {})
    decision = select(problem, found.device, found.packages, policy_named())
    memory = memory_of(decision)
    w13, w2 = decision.problem.matrix_bytes(padded=True)
    assert w13 > w2 > 0
    assert memory.padded == 128 * (w13 + w2)
    assert memory.repacking == 128 * (copies[0] * w13 + copies[1] * w2)
