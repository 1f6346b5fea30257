"""Every cell of the grid has an answer, also those that nobody recorded."""

from typing import Any

from devtools.conformance import read_grid
from devtools.conformance.grid import decide
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.oracle import policy_named

GRID = read_grid()

POLICY = policy_named("vllm-0.33.0")


def fits(cell: dict[str, Any]) -> bool:
    """False where there are more ranks than experts to spread over them."""
    parallel = GRID.parallel[cell["parallel"]]
    ranks = parallel["tp"] * parallel["dp"] if parallel["ep"] else 1
    return bool(ranks <= GRID.models[cell["model"]]["E"])


CELLS = (
    st.sampled_from(sorted(GRID.schemes))
    .flatmap(
        lambda scheme: st.fixed_dictionaries(
            {
                "scheme": st.just(scheme),
                "model": st.sampled_from(GRID.schemes[scheme][1]),
                "device": st.sampled_from(sorted(GRID.devices)),
                "profile": st.sampled_from(sorted(GRID.profiles)),
                "parallel": st.sampled_from(sorted(GRID.parallel)),
                "forced": st.sampled_from([None, *POLICY.request_names(), "no such backend"]),
            }
        )
    )
    .filter(fits)
)


@settings(max_examples=300, deadline=None)
@given(CELLS)
def test_every_cell_has_an_answer(cell: dict[str, Any]) -> None:
    decision = decide(GRID, cell, POLICY)
    chosen, logical = decision.chosen, decision.problem.dims
    assert len(set(decision.order)) == len(decision.order)
    if chosen is None:
        # Either the engine fails, with its exception class, or it goes on with something else.
        assert decision.error
        assert bool(decision.error_kind) != bool(decision.stand_in)
        return
    assert chosen in decision.candidates
    assert chosen.usable
    assert chosen.dims.padded_hidden >= logical.hidden
    assert chosen.dims.padded_intermediate >= logical.intermediate
    if not chosen.assigned:
        before = decision.candidates[: decision.candidates.index(chosen)]
        assert all(candidate.failed for candidate in before)
    if cell["forced"] is None and not chosen.assigned:
        assert chosen.engine_name in decision.order
    assert decision.usable == (not decision.error and not decision.gates)


@settings(max_examples=100, deadline=None)
@given(CELLS)
def test_a_request_picks_among_the_candidates_of_its_name(cell: dict[str, Any]) -> None:
    asked = decide(GRID, cell, POLICY)
    free = decide(GRID, {**cell, "forced": None}, POLICY)
    if cell["forced"] is None or any("ignores the request" in note for note in asked.notes):
        assert (asked.chosen, asked.error) == (free.chosen, free.error)
        return
    # A backend that serves unasked-for serves on request too, unless the request changes the problem.
    if free.chosen is not None and asked.chosen is not None and asked.error == free.error == "":
        same = [c for c in asked.candidates if c.variant == free.chosen.variant]
        assert all(c.usable for c in same) or asked.problem.dims != free.problem.dims
