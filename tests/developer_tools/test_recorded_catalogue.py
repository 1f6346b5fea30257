"""Questions about many checkpoints in one recording, and random cells."""

from typing import Any

import pytest
from devtools.conformance.grid import CELL
from devtools.recording import random_cells
from devtools.recording.catalogue import CatalogueQuestions

from moectl.checkpoint import open_checkpoint
from moectl.oracle import engine_named
from moectl.problem.moe_problem import Parallel

GPT = "openai/gpt-oss-20b"


@pytest.fixture
def questions() -> CatalogueQuestions:
    asked = CatalogueQuestions(engine_named("vllm"))
    checkpoint = open_checkpoint(GPT, offline=True)
    for gpu in ("h100", "b200"):
        for tp in (1, 8):
            asked.add(checkpoint, gpu, Parallel(tp=tp))
    return asked


def answer(decision: Any) -> dict[str, Any]:
    """What an engine that decides as moectl does would answer."""
    chosen, dims = decision.chosen, decision.problem.dims
    return {
        "selected": chosen.engine_name,
        "experts_cls": chosen.variant.experts,
        "monolithic": chosen.variant.monolithic,
        "padded": {"hidden": dims.padded_hidden, "intermediate_per_partition": dims.padded_intermediate},
        "error": None,
        "gates": [],
        "rejected": [],
        "priority": list(decision.order),
        "forced": None,
    }


def test_tables_have_each_row_once_and_cells_name_them(questions: CatalogueQuestions) -> None:
    tables = questions.tables
    assert [len(tables[name]) for name in ("MODELS", "DEVICES", "PARALLEL", "SCHEMES")] == [1, 2, 2, 1]
    assert len(questions.cells()) == 4 and all(tuple(cell) == CELL for cell in questions.cells().values())


def test_what_cannot_be_asked_is_counted_with_its_reason() -> None:
    asked = CatalogueQuestions(engine_named("vllm"))
    for name in ("moonshotai/Kimi-K3", "RedHatAI/Qwen3-Coder-Next-NVFP4"):
        asked.add(open_checkpoint(name, offline=True), "b200", Parallel())
    reasons = list(asked.left_out)
    assert not asked.asked and "chooses quantization methods itself" in reasons[0]
    assert "config" in reasons[1] and "declares nvfp4 group 16, a16 activations; the tensors" in reasons[1]


def test_a_difference_is_found_in_its_cell_alone(questions: CatalogueQuestions) -> None:
    rows = {questions.content(each.cell): answer(each.decision) for each in questions.asked}
    assert not any(found for _, _, found in questions.compared(rows))
    first = questions.asked[0]
    rows[questions.content(first.cell)]["selected"] = "ANOTHER"
    differ = [(each.name, found) for each, _, found in questions.compared(rows) if found]
    assert [name for name, _ in differ] == [first.name] and differ[0][1][0].field == "selected"


def test_random_cells_are_the_same_for_a_seed_and_name_rows_of_their_grid() -> None:
    grid, cells = random_cells(3, 300)
    assert (grid, cells) == random_cells(3, 300) and cells != random_cells(4, 300)[1]
    tables = {"scheme": "SCHEMES", "device": "DEVICES", "profile": "PROFILES", "parallel": "PARALLEL"}
    assert all(cell[name] in grid[table] for cell in cells for name, table in tables.items())
    assert {"marlin", None} <= {cell["forced"] for cell in cells}
    for cell in cells:
        parallel, model = grid["PARALLEL"][cell["parallel"]], grid["MODELS"][cell["model"]]
        assert parallel["ep"] or model["inter"] % (parallel["tp"] * parallel["dp"]) == 0
