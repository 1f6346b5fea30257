"""`moectl explain` with what this user measured on the device."""

from dataclasses import asdict

from moectl.cache import backend_times_file
from moectl.cache.backend_times import BackendTime
from moectl.cache.launches_file import KIND, LaunchesStore, LaunchRow
from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device
from moectl.kernels.choice.portable_launches import Tile
from support.invoking import moectl

MODEL = "Qwen/Qwen3-30B-A3B-GPTQ-Int4"
ASKED = ("explain", MODEL, "--offline", "--gpu", "h200", "--packages", "none")
H200 = find_device("h200")


def keep():
    problem = open_checkpoint(MODEL, offline=True).groups[0].problem
    rows = [
        BackendTime("moectl", "stream 8x64", 1, "uniform", 12.5, 0.1, True, 2e-3),
        BackendTime("moectl_marlin", "", 1, "uniform", 10.0, 0.1, True, 2e-3),
    ]
    backend_times_file.save(H200, problem, rows, versions={}, source="moectl bench")
    tile = asdict(Tile(16, 128, 64, stages=4, warps=4))
    LaunchesStore.of(problem, H200).finish(
        LaunchRow(16, "grouped", tile, 30.0, 40.0, 1e-3, 7, 2, "2026-11-21T00:00:00Z")
    )


def test_the_own_policy_chooses_by_times_and_says_so():
    assert "highest priority; all checks pass" in moectl(*ASKED, "--policy", "moectl", "-v").words
    keep()
    words = moectl(*ASKED, "--policy", "moectl").words
    assert "backend moectl_marlin" in words
    assert "predicted moectl: " in words, "which kernels these are, as others are chosen"
    assert (
        "it is the fastest as measured on this device at M=1: moectl 1.25x its time (moectl bench in" in words
    )
    assert "measured on this device at" in moectl(*ASKED, "-v").words, "it is said beside vLLM's choice, too"
    assert "backend moectl" in moectl(*ASKED, "--policy", "moectl", "--no-measured").words
    assert "backend moectl" in moectl(*ASKED, "--policy", "moectl", "--tp", "2").words


def test_times_and_launches_are_shown_when_asked_for():
    without = moectl(*ASKED, "--measured").words
    assert "no backend times: moectl bench --save records them" in without
    assert "no kernel configs of the moectl backend: moectl tune finds them" in without
    keep()
    words = moectl(*ASKED, "--measured", "--md").words
    assert "| moectl_marlin | 1 | uniform | 10.0 | 0.1 | cold | 2.0e-03 |" in words
    assert "M=16 grouped 30.0 us (moectl tune, 2026-11-21T00:00:00Z)" in words
    path = backend_times_file.KIND.path(H200)
    assert words.count(str(path)) == 2 and f"times of moectl bench in {path}" in words
    brief = moectl(*ASKED, "--measured", "-q").stdout.splitlines()
    assert brief[1:] == [
        "0-47\tmeasured\tmoectl\t1\tuniform\t12.5",
        "0-47\tmeasured\tmoectl_marlin\t1\tuniform\t10.0",
    ]
    assert moectl(*ASKED, "-q").stdout.splitlines() == brief[:1]
    assert "stream 8x64" not in moectl(*ASKED).words
    (group,) = moectl(*ASKED, "--json").document["groups"]
    assert len(group["measured"]["rows"]) == 2 and group["measured"]["tuned"][0]["tokens"] == 16


def test_a_recorded_choice_is_made_again_without_the_cache(tmp_path, user_cache):
    keep()
    document = tmp_path / "a.json"
    document.write_text(moectl(*ASKED, "--policy", "moectl", "--json").stdout)
    for file in user_cache.rglob("*.json"):
        file.unlink()
    assert moectl("explain", "--replay", document, "-q").stdout.split()[-1] == "moectl_marlin"
    assert "vllm" not in moectl("explain", "--replay", document, "--measured", code=2).stdout


def test_a_damaged_cache_is_a_note():
    for kind in (KIND, backend_times_file.KIND):
        path = kind.path(H200)
        path.parent.mkdir(parents=True)
        path.write_text("{")
    done = moectl(*ASKED, "--policy", "moectl")
    assert done.stderr.count("is damaged and begun anew") == 2 and "backend moectl" in done.words
