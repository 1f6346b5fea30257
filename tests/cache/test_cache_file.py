"""What is kept of measurements: keys, whole files, and files that are not moectl's."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moectl.cache import backend_times_file, cache_file, launches_file, measurement_keys
from moectl.cache.backend_times import BackendTime, MeasuredTimes
from moectl.cache.launches_file import LaunchAttempt, LaunchesStore, LaunchRow, rows_of
from moectl.cache.measurement_keys import built, kernel_hash, layer_key
from moectl.environment import find_device
from moectl.errors import Unavailable, UsageError
from moectl.files.records import to_json
from moectl.problem.moe_problem import Dims
from moectl.problem.published_layers import MODELS
from moectl.problem.schemes import Scheme, int_format

H200 = find_device("h200")
QWEN = MODELS["qwen3-30b"]
ROW = LaunchRow(16, "grouped", {"tokens": 16}, 30.0, 40.0, 1e-3, 7, 2, "2026-11-21T00:00:00Z")
TIMED = BackendTime("moectl", "decode", 16, "uniform", 30.0, 1.0, True, 2e-3)


def test_the_folder_is_the_platforms_unless_it_is_named(tmp_path: Path) -> None:
    assert cache_file.cache_folder({"MOECTL_CACHE": str(tmp_path), "HOME": "/nowhere"}) == tmp_path
    assert cache_file.cache_folder({"HOME": "/h", "XDG_CACHE_HOME": "/x"}) in (
        Path("/x/moectl"),
        Path("/h/Library/Caches/moectl"),
    )
    assert "moectl" in str(cache_file.cache_folder({"HOME": "/h"}))


@pytest.mark.parametrize(
    "other",
    [
        replace(QWEN, dims=Dims(2048, 384)),
        replace(QWEN, top_k=4),
        replace(QWEN, local_experts=64),
        replace(QWEN, dtype="fp16"),
        replace(QWEN, bias=True),
        replace(QWEN, scheme=Scheme(int_format(4, 32))),
        replace(QWEN, scheme=Scheme(int_format(4, 128, "F16"))),
        replace(QWEN, scheme=Scheme(int_format(4, 128, zero_point=True))),
        replace(QWEN, activation=MODELS["gpt-oss-20b"].activation),
    ],
)
def test_what_decides_a_layers_time_is_in_its_key(other: object) -> None:
    assert layer_key(other) != layer_key(QWEN)  # type: ignore[arg-type]


def test_what_does_not_decide_is_not() -> None:
    assert layer_key(replace(QWEN, storage="gptq", shared_experts=1, model_type="qwen3_moe")) == layer_key(
        QWEN
    )


def test_the_hash_changes_with_any_kernel_and_with_nothing_else(tmp_path: Path) -> None:
    files = ("triton/a.py", "triton/hopper/b.py", "choice/tma_launches.py", "choice/launch_plan.py")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    found = [kernel_hash(tmp_path / "triton")]
    for name in files:
        (tmp_path / name).write_text("x = 2\n")
        found.append(kernel_hash(tmp_path / "triton"))
    assert len(set(found)) == 4 and found[-1] == found[-2]
    assert set(built()) == {"moectl", "torch", "triton", "kernels"} and all(built().values())


def test_a_row_is_found_for_its_own_key_alone(user_cache: Path) -> None:
    LaunchesStore.of(QWEN, H200).finish(ROW)
    assert rows_of(QWEN, H200) == ((ROW,), "")
    assert rows_of(replace(QWEN, top_k=4), H200) == ((), "")
    assert rows_of(QWEN, find_device("h100")) == ((), "")
    assert [path.name for path in launches_file.KIND.files()] == ["NVIDIA-H200-sm90-132.json"]


def test_rows_of_other_kernels_or_versions_do_not_count(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LaunchesStore.of(QWEN, H200)
    store.finish(ROW)
    for name in built():
        other = {**built(), name: "other"}
        with monkeypatch.context() as changed:
            changed.setattr(launches_file, "built", lambda other=other: other)
            assert rows_of(QWEN, H200) == ((), "")
            (entry,) = launches_file.load(store.path).entries
            assert entry.stale == f"{name} {built()[name]}, now other"
    # What holds again is used again: nothing was lost.
    assert rows_of(QWEN, H200)[0] == (ROW,)


def test_attempts_are_kept_until_the_row_is_there(user_cache: Path) -> None:
    store = LaunchesStore.of(QWEN, H200)
    store.note(16, LaunchAttempt("mid", {"tokens": 16}))
    store.note(16, LaunchAttempt("mid", {"tokens": 32}, us=3.0, error=0.0))
    store.note(16, LaunchAttempt("mid", {"tokens": 16}, why="wrong", begun=1))
    assert {attempt.why or attempt.us for attempt in LaunchesStore.of(QWEN, H200).attempts(16)} == {
        3.0,
        "wrong",
    }
    store.finish(ROW)
    assert store.attempts(16) == () and store.row(16) == ROW
    store.finish(replace(ROW, tokens=8))
    store.finish(replace(ROW, us=20.0))
    assert [(row.tokens, row.us) for row in store.entry().rows] == [(8, 30.0), (16, 20.0)]
    store.forget(16)
    assert [row.tokens for row in store.entry().rows] == [8]


def test_many_writers_lose_nothing(user_cache: Path) -> None:
    def write(tokens: int) -> None:
        LaunchesStore.of(QWEN, H200).finish(replace(ROW, tokens=tokens))

    threads = [threading.Thread(target=write, args=(tokens,)) for tokens in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row.tokens for row in rows_of(QWEN, H200)[0]] == list(range(1, 13))
    assert not list(user_cache.rglob("*.partial"))


HEAD = json.dumps({"format": "moectl-launches", "version": 2, "device": to_json(cache_file.device_key(H200))})
FOREIGN = {
    "a newer version": ('{"format": "moectl-launches", "version": 9}', "has version 9, this moectl reads"),
    "another device's": (
        '{"format": "moectl-launches", "version": 2, "device": {"name": "x", "arch": "sm90", "sms": 1}, '
        '"entries": []}',
        "belongs to another device",
    ),
}

DAMAGED = {
    "no JSON": ("{", "it is not valid JSON at line 1"),
    "a list": ("[]", "it must be a JSON object, got a list"),
    "another program's": ('{"format": "other", "version": 1}', "it is not a moectl-launches file"),
    "without a device": ('{"format": "moectl-launches", "version": 2}', "device must be an object"),
    "without entries": (HEAD[:-1] + "}", "it has no list of entries"),
    "with an entry that is none": (
        HEAD[:-1] + ', "entries": [7]}',
        "entries[0] must be an object, got the number 7",
    ),
    "with what is no number": (HEAD[:-1] + ', "entries": [NaN]}', "entries[0] must be a finite number"),
    "nested deeply": (HEAD[:-1] + ', "entries": ' + "[" * 4000 + "]" * 4000 + "}", "nested too deeply"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_named_and_set_aside_by_whoever_reads_or_writes(
    user_cache: Path, case: str
) -> None:
    path = launches_file.KIND.path(H200)
    path.parent.mkdir(parents=True)
    text, said = DAMAGED[case]
    aside = path.with_name(path.name + ".damaged")

    path.write_text(text)
    with pytest.warns(cache_file.CacheWarning, match="is damaged and begun anew") as named:
        assert rows_of(QWEN, H200) == ((), "")
    assert said in str(named[0].message) and str(path) in str(named[0].message)
    assert aside.read_text() == text and not path.exists()
    assert rows_of(QWEN, H200) == ((), "")

    path.write_text(text)
    with pytest.warns(cache_file.CacheWarning, match="is damaged and begun anew"):
        store = LaunchesStore.of(QWEN, H200)
    path.write_text(text)
    with pytest.warns(cache_file.CacheWarning, match="is damaged and begun anew"):
        cache_file.change(path, launches_file.KIND, cache_file.device_key(H200), lambda entries: entries)
    store.finish(ROW)
    assert rows_of(QWEN, H200) == ((ROW,), "") and aside.read_text() == text


def test_a_damaged_file_that_cannot_be_set_aside_is_ignored(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = launches_file.KIND.path(H200)
    path.parent.mkdir(parents=True)
    path.write_text("{")

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    rows, note = rows_of(QWEN, H200)
    assert rows == () and f"{path} is ignored: it is not valid JSON" in note and path.exists()


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_ignored_by_readers_and_refused_by_writers(user_cache: Path, case: str) -> None:
    path = launches_file.KIND.path(H200)
    path.parent.mkdir(parents=True)
    text, said = FOREIGN[case]
    path.write_text(text)
    before = path.read_text()
    rows, note = rows_of(QWEN, H200)
    assert rows == () and said in note and str(path) in note
    with pytest.raises(Unavailable, match="the cache cannot be used") as refused:
        LaunchesStore.of(QWEN, H200)
    assert f"Remove {path}" in refused.value.hint
    with pytest.raises(Unavailable, match="the cache cannot be written"):
        cache_file.change(path, launches_file.KIND, cache_file.device_key(H200), lambda entries: entries)
    assert path.read_text() == before


@pytest.mark.parametrize("kind", launches_file.KINDS)
def test_a_file_with_the_rows_of_version_1_is_reported_once_as_an_old_version(
    user_cache: Path, kind: cache_file.CacheFileKind
) -> None:
    """Version 1 stored the kernel family under the key "regime"; such rows are not called damaged."""
    store = LaunchesStore.of(QWEN, H200, kind)
    store.finish(ROW)
    store.note(64, LaunchAttempt("grouped", {"tokens": 16}))
    document = json.loads(store.path.read_text())
    assert document["version"] == 2
    (entry,) = document["entries"]
    for row in (*entry["rows"], *entry["unfinished"]["64"]):
        row["regime"] = row.pop("family")
    store.path.write_text(json.dumps({**document, "version": 1}))
    file = launches_file.load(store.path, H200, kind)
    assert file.entries == ()
    assert file.note == f"{store.path} is ignored: it has version 1, this moectl reads version 2"
    with pytest.raises(Unavailable, match="it has version 1, this moectl reads version 2") as refused:
        LaunchesStore.of(QWEN, H200, kind)
    assert f"Remove {store.path}" in refused.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"us": "fast"},
        {"us": -1.0},
        {"tokens": 0},
        {"tile": {"tokens": "16; rm"}},
        {"tile": [1]},
        {"family": 7},
        {"more": 1},
        {"us": 10**400},
        {"tokens": True},
        {"tokens": 16.0},
        {"tried": -1},
        {"tokens": 1 << 64},
    ],
)
def test_a_file_with_a_damaged_entry_is_set_aside(user_cache: Path, change: dict[str, object]) -> None:
    store = LaunchesStore.of(QWEN, H200)
    store.finish(ROW)
    document = json.loads(store.path.read_text())
    document["entries"][0]["rows"][0] |= change
    store.path.write_text(json.dumps(document))
    with pytest.warns(cache_file.CacheWarning, match=r"begun anew \(.*entries\[0\]\.rows\[0\]"):
        assert rows_of(QWEN, H200) == ((), "")


def test_a_folder_that_cannot_be_written_is_said(user_cache: Path) -> None:
    user_cache.mkdir(parents=True, exist_ok=True)
    (user_cache / "launches").write_text("in the way")
    with pytest.raises(Unavailable, match="cannot write"):
        LaunchesStore.of(QWEN, H200).finish(ROW)


def test_entries_are_dropped_one_by_one_or_with_their_file(user_cache: Path) -> None:
    other = replace(QWEN, top_k=4)
    path = LaunchesStore.of(QWEN, H200).path
    for problem in (QWEN, other):
        LaunchesStore.of(problem, H200).finish(ROW)
    assert launches_file.clear(path, lambda entry: entry.layer == layer_key(other)) == 1
    assert rows_of(QWEN, H200)[0] == (ROW,) and rows_of(other, H200)[0] == ()
    assert launches_file.clear(path, lambda entry: True) == 1 and not path.exists()
    path.write_text("{")
    with pytest.warns(cache_file.CacheWarning, match="is damaged"):
        assert launches_file.clear(path, lambda entry: True) == 0 and not path.exists()


def test_a_row_that_is_kept_while_others_are_dropped_stays(user_cache: Path) -> None:
    store, later = LaunchesStore.of(QWEN, H200), LaunchesStore.of(replace(QWEN, top_k=4), H200)
    store.finish(ROW)

    def drop(entry: launches_file.CachedLayer) -> bool:
        if later.row(ROW.tokens) is None:  # another process, after the file was looked at
            later.finish(ROW)
        return entry.layer == store.layer

    assert launches_file.clear(store.path, drop) == 1
    assert store.row(ROW.tokens) is None and later.row(ROW.tokens) == ROW


def test_measurements_are_kept_by_cell(user_cache: Path) -> None:
    def keep(*rows: BackendTime) -> None:
        backend_times_file.save(H200, QWEN, rows, versions={"torch": "2"}, source="moectl bench")

    keep(TIMED, replace(TIMED, tokens=1), replace(TIMED, backend="triton_marlin"))  # its former name
    keep(replace(TIMED, us=25.0), replace(TIMED, backend="torch", us=90.0))
    rows = backend_times_file.known(H200, QWEN).measured.rows
    assert sorted((r.backend, r.tokens, r.us) for r in rows) == [
        ("moectl", 1, 30.0),
        ("moectl", 16, 25.0),
        ("moectl_marlin", 16, 30.0),
        ("torch", 16, 90.0),
    ]
    assert {row.source for row in rows} == {f"moectl bench in {backend_times_file.KIND.path(H200)}"} and all(
        row.when for row in rows
    )
    assert backend_times_file.known(H200, replace(QWEN, top_k=4)).measured == MeasuredTimes()


def test_measurements_of_other_software_are_not_used_and_said(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_times_file.save(H200, QWEN, [TIMED], versions={}, source="moectl bench")
    monkeypatch.setattr(backend_times_file, "built", lambda: {**measurement_keys.built(), "triton": "9"})
    found = backend_times_file.known(H200, QWEN)
    assert found.measured == MeasuredTimes() and "triton changed" in found.notes[0]


def test_another_version_of_a_package_makes_times_old() -> None:
    backend_times_file.save(
        H200, QWEN, [TIMED], versions={"humming": "0.1.19", "vllm": ""}, source="moectl bench"
    )
    for now in ({}, {"humming": "0.1.19"}, {"humming": ""}, {"vllm": "0.33.0"}, {"flashinfer": "1"}):
        assert backend_times_file.known(H200, QWEN, now).measured.rows
    found = backend_times_file.known(H200, QWEN, {"humming": "0.1.20"})
    assert not found.measured.rows and "humming changed" in found.notes[0]


def test_times_of_an_older_package_do_not_become_the_newer_ones() -> None:
    """Saving one backend's times leaves those of another with the versions that they were taken with."""
    old, new = {"MOECTL_PEERS/humming": "0.1.19"}, {"MOECTL_PEERS/humming": "0.1.20"}
    both = [TIMED, replace(TIMED, backend="humming")]
    backend_times_file.save(H200, QWEN, both, versions=old, source="moectl bench")
    backend_times_file.save(H200, QWEN, [TIMED], versions=new, source="moectl bench")
    found = backend_times_file.known(H200, QWEN, new)
    assert [row.backend for row in found.measured.rows] == ["moectl"]
    assert "MOECTL_PEERS/humming changed" in found.notes[0]
    assert [row.backend for row in backend_times_file.known(H200, QWEN, old).measured.rows] == ["humming"]
    # A cell is kept once, whatever the versions.
    backend_times_file.save(H200, QWEN, both, versions=new, source="moectl bench")
    assert len(backend_times_file.known(H200, QWEN).measured.rows) == 2
    assert not backend_times_file.known(H200, QWEN, old).measured.rows


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300])
def test_what_is_no_time_is_not_kept(user_cache: Path, us: float) -> None:
    with pytest.raises(UsageError, match="is no measurement"):
        backend_times_file.save(H200, QWEN, [replace(TIMED, us=us)], versions={}, source="x")
    assert not user_cache.exists()


@pytest.mark.parametrize("name, us", [("us", 1e-300), ("us", 1e300), ("us", 9e-4), ("spread_us", 1e300)])
def test_a_file_with_a_time_that_no_call_takes_is_set_aside(user_cache: Path, name: str, us: float) -> None:
    rows = [TIMED, replace(TIMED, backend="torch")]
    path = backend_times_file.save(H200, QWEN, rows, versions={}, source="moectl bench")
    document = json.loads(path.read_text())
    document["entries"][0]["rows"][1][name] = us
    path.write_text(json.dumps(document))
    with pytest.warns(cache_file.CacheWarning, match=rf"rows\[1\]\.{name} must be from "):
        assert backend_times_file.known(H200, QWEN).measured == MeasuredTimes()
    assert path.with_name(path.name + ".damaged").exists() and not path.exists()
    backend_times_file.save(H200, QWEN, rows, versions={}, source="moectl bench")
    assert len(backend_times_file.known(H200, QWEN).measured.rows) == 2


@pytest.mark.parametrize("text", ["{", '{"format": "x"}'])
def test_a_damaged_file_of_measurements_is_a_note(user_cache: Path, text: str) -> None:
    path = backend_times_file.KIND.path(H200)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(cache_file.CacheWarning, match="is damaged"):
        assert backend_times_file.known(H200, QWEN).measured == MeasuredTimes()


def test_backends_are_ranked_where_all_were_measured() -> None:
    rows = [
        replace(TIMED, tokens=1, us=10.0),
        replace(TIMED, tokens=64, us=40.0, when="2026-11-21T21:30:00Z", source="s"),
        replace(TIMED, tokens=1024, us=100.0),
        replace(TIMED, backend="marlin", tokens=1, us=8.0),
        replace(TIMED, backend="marlin", tokens=64, us=100.0, when="2026-11-21T21:00:00Z", source="s"),
    ]
    ranking = MeasuredTimes(tuple(rows)).ranking(["marlin", "moectl", "torch"])
    assert ranking is not None and ranking.best == "moectl" and ranking.tokens == (1, 64)
    assert dict(ranking.factors)["marlin"] == pytest.approx((8 / 10 * 100 / 40) ** 0.5)
    assert str(ranking) == (
        "it is the fastest as measured on this device at M=1, 64: marlin 1.41x its time "
        "(s, several runs from 2026-11-21T21:00:00Z to 2026-11-21T21:30:00Z)"
    )


def test_each_pair_is_compared_where_both_were_measured() -> None:
    """One that was measured at other numbers of tokens does not undo what the others tell."""
    triton = [replace(TIMED, tokens=m, us=10.0) for m in (1, 8)]
    marlin = [replace(TIMED, backend="marlin", tokens=m, us=8.0) for m in (1, 8)]
    order = ["torch", "moectl", "marlin"]
    alone = MeasuredTimes((*triton, *marlin, replace(TIMED, backend="torch", tokens=7, us=1.0))).ranking(
        order
    )
    assert alone is not None and alone.tokens == (1, 8)
    assert alone.factors == (("marlin", 1.0), ("moectl", pytest.approx(1.25)))
    some = MeasuredTimes((*triton, *marlin, replace(TIMED, backend="torch", tokens=8, us=80.0))).ranking(
        order
    )
    assert some is not None and dict(some.factors)["torch"] == pytest.approx(10)
    assert "moectl 1.25x, torch 10.00x (at M=8 alone) its time" in str(some)


def test_the_order_decides_within_the_spread() -> None:
    first, second = replace(TIMED, us=100.0), replace(TIMED, backend="marlin", us=99.0)
    torch = replace(TIMED, backend="torch", us=900.0)
    order = ["moectl", "marlin", "torch"]

    def best(spread: float) -> str:
        times = (replace(first, spread_us=spread), replace(second, spread_us=spread), torch)
        found = MeasuredTimes(times).ranking(order)
        assert found is not None
        return found.best

    assert best(0.1) == "marlin" and best(10.0) == "moectl"
    noisy = tuple(replace(row, spread_us=90.0) for row in (first, second))
    assert MeasuredTimes(noisy).ranking(order) is None
    level = MeasuredTimes((*(replace(row, spread_us=10.0) for row in (first, second)), torch)).ranking(order)
    assert level is not None and level.level == ("marlin",)
    assert "first in the order of the fastest" in str(level)
    assert "marlin 0.99x (within the spread), torch 9.00x its time" in str(level)


@pytest.mark.parametrize(
    ("changes", "compared"),
    [
        ({"when": "2026-11-21T21:59:00Z"}, True),
        ({"when": "2026-11-21T22:01:00Z"}, False),
        ({"when": "yesterday"}, False),
        ({"software": "0123abcd"}, False),
    ],
)
def test_runs_are_mixed_within_the_hour_and_of_one_software_alone(
    changes: dict[str, Any], compared: bool
) -> None:
    one = replace(TIMED, us=10.0, when="2026-11-21T21:00:00Z")
    found = MeasuredTimes((one, replace(one, backend="marlin", us=90.0, **changes))).ranking(
        ["marlin", "moectl"]
    )
    assert (found is not None) is compared
    assert found is None or "several runs from" in str(found)


def test_times_that_cannot_be_compared_rank_nothing() -> None:
    warm = replace(TIMED, backend="torch", cold=False)
    skewed = replace(TIMED, backend="torch", routing="zipf:1.2")
    assert MeasuredTimes((TIMED,)).ranking(["moectl", "torch"]) is None
    assert MeasuredTimes((TIMED, warm)).ranking(["moectl", "torch"]) is None
    assert MeasuredTimes((TIMED, skewed)).ranking(["moectl", "torch"]) is None
    both = MeasuredTimes((TIMED, replace(TIMED, backend="torch")))
    assert both.ranking(["torch", "moectl"]) is None, "the order decides between equals"
    assert both.ranking(["moectl"]) is None
