"""`scripts/plant_faults` finds what it replaces, and the tests that should notice."""

from __future__ import annotations

from pathlib import Path

from support.scripts import SCRIPTS, loaded


def test_every_fault_can_be_planted() -> None:
    script = loaded("plant_faults")
    places, problems = script.files_with(SCRIPTS.parent, script.FAULTS)
    assert not problems
    assert len(script.FAULTS) >= 30 and set(places) == {fault.name for fault in script.FAULTS}


def test_a_fault_without_a_place_or_a_test_is_named(tmp_path: Path) -> None:
    script = loaded("plant_faults")
    (tmp_path / "moectl").mkdir()
    (tmp_path / "moectl" / "twice.py").write_text("x = 1\nx = 1\n")
    faults = [
        script.Fault("gone", "y = 1", "y = 2", ()),
        script.Fault("twice", "x = 1", "x = 2", ("test_x.py",)),
    ]
    places, problems = script.files_with(tmp_path, faults)
    assert not places
    assert problems == [
        "gone: 'y = 1' is 0 times in moectl/, not once",
        "twice: 'x = 1' is 2 times in moectl/, not once",
        "twice: there is no tests/test_x.py",
    ]
