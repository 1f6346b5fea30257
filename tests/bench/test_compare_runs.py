"""Two runs compared: verdicts that noise does not make, and what is said of runs that differ."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from moectl.bench.bench_rows import NOISY_SPREAD
from moectl.bench.compare_runs import VERDICTS, compare, judge
from moectl.bench.read_rows import BenchRows, read_rows
from moectl.bench.row_tables import as_csv, document
from support.bench_rows import FAILED, MACHINE, ROWS, row_of, run, settings_of, timed, write


def test_a_spread_of_the_threshold_is_what_its_reason_says():
    low = timed(100.0, 100 * NOISY_SPREAD / 2, rounds=11)
    errors = [judge(low, timed(ratio, ratio * NOISY_SPREAD / 2, rounds=11)).word for ratio in (116.5, 117.5)]
    assert errors == ["same", "slower"]


def runs(before, after):
    return BenchRows(MACHINE, tuple(before)), BenchRows(MACHINE, tuple(after))


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (timed(100, 1), timed(110, 1), "slower"),
        (timed(110, 1), timed(100, 1), "faster"),
        (timed(100, 6), timed(110, 6), "same"),  # quartiles overlap
        (timed(100, 0.1), timed(101, 0.1), "same"),  # too little to matter
        (timed(100, 1), FAILED, "failing"),
        (FAILED, timed(100, 1), "fixed"),
        (FAILED, FAILED, "untimed"),
        (timed(100, 1), None, "missing"),
        (FAILED, None, "removed"),
        (None, timed(100, 1), "new"),
        (timed(100, 0, rounds=1), timed(103, 0, rounds=1), "unknown"),
        (timed(100, 1), timed(300, 0, rounds=2), "unknown"),
        (timed(100, 1), replace(timed(300, 1), q1_us=None, q3_us=None), "unknown"),
        (timed(100, 1, rounds=3), timed(300, 1, rounds=3), "slower"),
    ],
)
def test_verdicts(before, after, word):
    verdict = judge(before, after)
    assert verdict.word == word and word in VERDICTS
    assert (verdict.ratio is not None) == bool(before and after and before.timed and after.timed)


def test_noise_makes_no_verdict_and_a_change_does():
    """Rounds of the same distribution are level, though their medians differ; 10% more is slower."""
    generator = random.Random(5)

    def measured(tokens, factor):
        us = sorted(generator.gauss(100, 3) * factor for _ in range(11))
        return row_of(tokens=tokens, median_us=us[5], q1_us=us[2], q3_us=us[8])

    before = [measured(i, 1.0) for i in range(1, 201)]
    same = compare(*runs(before, [measured(i, 1.0) for i in range(1, 201)]))
    assert same.counts["same"] == 200, same.counts
    worse = compare(*runs(before, [measured(i, 1.10) for i in range(1, 201)]))
    assert worse.counts["slower"] >= 150 and worse.counts["faster"] == 0 and worse.regressed
    better = compare(*runs(before, [measured(i, 0.90) for i in range(1, 201)]))
    assert better.counts["faster"] >= 150 and not better.regressed


def run_of(rows, *backends):
    return BenchRows(MACHINE | {"settings": settings_of(backends=backends).to_json()}, tuple(rows))


@pytest.mark.parametrize(
    ("backends", "word"),
    [((), "missing"), (("moectl", "torch"), "missing"), (("moectl",), "removed")],
)
def test_a_cell_that_is_not_there_is_a_regression_where_it_was_asked_for(backends, word):
    common = timed(100, 1, backend="moectl")
    found = compare(run_of([timed(100, 1), common]), run_of([common], *backends))
    assert found.counts == {word: 1, "same": 1} and found.regressed == (word == "missing")
    unsaid = compare(*runs([timed(100, 1), common], [common]))
    assert unsaid.counts["missing"] == 1 and unsaid.regressed


def test_runs_without_a_common_cell_fail():
    row = timed(100, 1)
    for after in ((), (replace(row, backend="moectl"),)):
        found = compare(run_of([row]), run_of(after, "moectl"))
        assert found.regressed and found.notes == ("the runs have no case in common: nothing was compared",)


def test_rows_that_do_not_tell_their_noise_are_noted():
    found = compare(*runs([timed(100, 0, rounds=1)], [timed(103, 0, rounds=1)]))
    assert not found.regressed and "1 of 1 cases have fewer than 3 rounds" in found.notes[0]


def test_the_same_run_from_other_files_is_not_another(tmp_path):
    about = run().to_json()
    (tmp_path / "a.csv").write_text(as_csv(about, ROWS))
    (tmp_path / "a.json").write_text(json.dumps(document(about, ROWS)))
    table, plain = (read_rows(tmp_path / f"a.{kind}") for kind in ("csv", "json"))
    for pair in ((table, plain), (plain, table)):
        notes = compare(*pair).notes
        assert not any("version" in note for note in notes), notes
    newer = replace(plain, about=about | {"versions": MACHINE["versions"] | {"torch": "2.12"}})
    assert "version of torch differs: A 2.11, B 2.12" in compare(table, newer).notes


def test_a_last_line_that_was_cut_off_is_noted(tmp_path):
    path = tmp_path / "rows.jsonl"
    write(path, ROWS[0])
    assert read_rows(path).notes == ()
    path.write_text(path.read_text() + '{"kind": "row", "mod')
    found = read_rows(path)
    assert found.rows == ROWS[:1] and "is incomplete" in found.notes[0]
    assert any(note.startswith("B: the last line") for note in compare(found, found).notes)


def test_runs_that_differ_are_said_to():
    before, after = runs([timed(100, 1)], [timed(100, 1, caches="warm", throttled="power cap")])
    notes = compare(before, replace(after, about=MACHINE | {"device": "a GPU"})).notes
    assert notes == (
        "device differs: A a CPU, B a GPU",
        "caches differ: A cold, B warm",
        "B: clocks throttled in 1 of 1 cases (power cap)",
    )
