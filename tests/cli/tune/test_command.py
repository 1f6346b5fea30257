"""`moectl tune`: what it asks, keeps, shows and drops."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from moectl.cache import launches_file
from moectl.cache.launches_file import LaunchAttempt, LaunchesStore, LaunchRow
from moectl.cache.measurement_keys import built
from moectl.cli.tune.command import parse_budget
from moectl.environment import find_device
from moectl.errors import UsageError
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.portable_launches import Tile
from moectl.problem.published_layers import MODELS
from moectl.tuning import tune
from moectl.tuning.grouped_gemm import GemmConfig
from support.invoking import moectl
from support.kernelless import without_kernels

H200 = find_device("h200")
TILE = Tile(16, 128, 64, stages=4, warps=4)
ROW = LaunchRow(16, "grouped", asdict(TILE), 30.0, 40.0, 1e-3, 7, 2, "2026-11-21T00:00:00Z")


class Bench:
    """A device on which more rows are slower, and none above 128 are right."""

    def __init__(self, device, families):
        self.families = families

    def candidates(self, cell):
        return [Launch("grouped", replace(TILE, rows=rows)) for rows in (64, 128, 192, 256)]

    def current(self, cell):
        return Launch("grouped", TILE)

    def error(self, cell, launch):
        if launch.tile.rows > 128:
            raise RuntimeError("out of resources\nmore")
        return 1e-3

    def time(self, cell, launch, repeats):
        return cell.tokens + launch.tile.rows / 64


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(tune, "gpu_of", lambda device: H200)
    monkeypatch.setattr(tune, "GpuBench", Bench)


def test_what_is_found_is_shown_kept_and_not_measured_again(gpu, monkeypatch):
    done = moectl("tune", "--model", "qwen3-30b", "-m", "1,16", "--json")
    rows = {row["tokens"]: row for row in done.document["rows"]}
    assert {(r["state"], r["tile"]["rows"], r["tried"], r["rejected"]) for r in rows.values()} == {
        ("new", 64, 4, 2)
    }
    assert (rows[16]["us"], rows[16]["before_us"]) == (17.0, 18.0)
    assert done.document["done"] and done.document["device"]["name"] == "NVIDIA H200"
    assert "out of resources" in done.stderr and "rows=192" in done.stderr
    monkeypatch.setattr(Bench, "time", None)
    again = moectl("tune", "--model", "qwen3-30b", "-m", "1,16")
    assert "(cached)" in again.words and "6%" in again.words
    assert moectl("tune", "--model", "qwen3-30b", "-m", "1,16", "-q").stdout.splitlines() == [
        "qwen3-30b\t1\t2.0",
        "qwen3-30b\t16\t17.0",
    ]


class EngineBench(Bench):
    """The same for an engine's choices."""

    def candidates(self, cell):
        return [Launch("fused_moe", GemmConfig(16, n, 128, 1, 4, 3)) for n in (32, 64, 128)]

    def current(self, cell):
        return Launch("fused_moe", GemmConfig(*self.families(cell).default(cell.tokens, 128)))

    def error(self, cell, launch):
        return 1e-3

    def time(self, cell, launch, repeats):
        return cell.tokens + launch.tile.block_n / 64


@pytest.fixture
def engine(gpu, monkeypatch):
    monkeypatch.setattr(tune, "EngineBench", EngineBench)
    monkeypatch.setattr("moectl.environment.detect_device", lambda: H200)


def test_vllms_file_is_written_where_it_looks_for_it(engine, tmp_path):
    ask = ("tune", "Qwen/Qwen3-30B-A3B", "--offline", "--to", "vllm", tmp_path / "tuned")
    done = moectl(*ask, "-m", "1,16", "--json")
    place = tmp_path / "tuned" / "E=128,N=768,device_name=NVIDIA_H200.json"
    assert done.document["written"] == [str(place)] and "VLLM_TUNED_CONFIG_FOLDER" in done.stderr
    assert "vLLM is not installed here" in done.stderr
    found = json.loads(place.read_text())
    assert found.pop("triton_version") == built()["triton"]
    assert list(found) == ["1", "16"] and found["1"]["BLOCK_SIZE_N"] == 32
    # A later run adds what it finds, and a budget that is spent still writes what is known.
    place.unlink()
    moectl(*ask, "-m", "64", "--budget", "0s")
    assert "64" not in json.loads(place.read_text())
    # Launches of moectl's own kernels are another matter.
    assert not launches_file.KIND.files() and len(launches_file.ENGINE.files()) == 1
    assert "fused_moe block_m=16 block_n=32" in moectl("tune", "--list").words
    assert moectl("tune", "--clear", "--json").document["dropped"] == 1


def test_explain_finds_the_file_that_was_written(engine, tmp_path):
    moectl("tune", "deepseek-v3", "--tp", "2", "--offline", "-m", "1", "--to", "vllm", tmp_path)
    words = moectl(
        *("explain", "deepseek-v3", "--offline", "--gpu", "h200", "--tp", "2", "-v"),
        *("--env", f"VLLM_TUNED_CONFIG_FOLDER={tmp_path}"),
    ).words
    assert f"is used (found in {tmp_path})" in words


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("openai/gpt-oss-20b", "--to", "vllm", "x"), 1, "a tuned file would change nothing: triton"),
        (("Qwen/Qwen3-30B-A3B", "--to", "sglang", "x"), 2, "engine 'sglang' is not known"),
        (("--model", "qwen3-30b", "--to", "vllm", "x"), 2, "--to takes CKPT"),
    ],
)
def test_what_cannot_be_tuned_for_vllm(engine, arguments, code, said):
    assert said in moectl("tune", "--offline", *arguments, code=code).stderr


def test_what_no_gpu_would_change_is_said_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    asked = ("--offline", "--to", "vllm", tmp_path / "x")
    done = moectl("tune", "openai/gpt-oss-20b", *asked, code=1)
    assert "a tuned file would change nothing" in done.stderr
    said = moectl("tune", "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", *asked, code=1).stderr
    assert "moectl can tune nothing that vLLM would read for this layer, on any GPU" in said
    assert "On SM70, a tuned file would change nothing: no backend is chosen" in said
    assert "On SM75, SM80 and SM86, a tuned file would change nothing: marlin (MarlinExperts)" in said
    assert "On SM89, SM90, SM100 and 8 more, vLLM reads a tuned file, and moectl has no kernel of" in said
    assert "needs a CUDA GPU" in moectl("tune", "Qwen/Qwen3-30B-A3B", *asked, code=3).stderr


def test_again_measures_anew(gpu, monkeypatch):
    moectl("tune", "--model", "qwen3-30b", "-m", "1")
    monkeypatch.setattr(Bench, "time", lambda self, cell, launch, repeats: 5.0)
    assert moectl("tune", "--model", "qwen3-30b", "-m", "1", "-q").stdout.endswith("\t2.0\n")
    assert moectl("tune", "--model", "qwen3-30b", "-m", "1", "-q", "--again").stdout.endswith("\t5.0\n")


def test_a_budget_that_is_spent_leaves_cells_and_says_so(gpu):
    done = moectl("tune", "--model", "qwen3-30b,kimi-k2", "-m", "1,64", "--budget", "0s")
    assert "the budget is spent, 4 cases left; run the same command to continue" in done.stderr
    assert done.words.count("not done") == 4


def test_a_checkpoint_by_its_config_alone(gpu):
    done = moectl("tune", "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--offline", "--tp", "2", "-m", "8", "--json")
    assert [row["layer"] for row in done.document["rows"]] == ["Qwen3-30B-A3B-GPTQ-Int4"]
    (found,) = launches_file.load(launches_file.KIND.path(H200)).entries
    assert found.layer.intermediate == 384


def test_layers_that_the_kernels_do_not_run_are_refused(gpu, tmp_path):
    done = moectl("tune", without_kernels(tmp_path / "gelu"), "--offline", "-m", "8", code=1)
    assert "moectl's kernels cannot run these layers: for gated experts it has silu" in done.stderr


def test_the_list_tells_used_from_stale(monkeypatch):
    assert moectl("tune", "--list").words == "nothing is cached"
    store = LaunchesStore.of(MODELS["qwen3-30b"], H200)
    store.finish(ROW)
    store.note(64, LaunchAttempt("grouped", asdict(TILE), us=3.0, error=0.0))
    shown = moectl("tune", "--list").words
    assert "grouped tokens=16 rows=128" in shown and "1 tile tried, not done" in shown and "yes" in shown
    assert moectl("tune", "--list", "--stale").words == "nothing is cached"
    monkeypatch.setattr(launches_file, "built", lambda: {**built(), "kernels": "changed"})
    (entry,) = moectl("tune", "--list", "--stale", "--json").document["entries"]
    assert entry["stale"] == f"kernels {built()['kernels']}, now changed"
    assert moectl("tune", "--list", "-q").stdout.endswith("\t1\tstale\n")


def test_what_is_listed_can_be_dropped(monkeypatch):
    for name in ("qwen3-30b", "kimi-k2"):
        LaunchesStore.of(MODELS[name], H200).finish(ROW)
    assert "1 layer dropped" in moectl("tune", "--clear", "--model", "kimi-k2").words
    assert len(moectl("tune", "--list", "--json").document["entries"]) == 1
    assert moectl("tune", "--clear", "--stale", "--json").document["dropped"] == 0
    assert moectl("tune", "--clear", "--json").document["dropped"] == 1
    assert not launches_file.KIND.files()


def test_a_file_that_cannot_be_used_is_set_aside_or_refused_and_dropped(gpu):
    path = launches_file.KIND.path(H200)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert "is damaged and begun anew (it is not a moectl-launches file)" in moectl("tune", "--list").stderr
    assert path.with_name(f"{path.name}.damaged").read_text() == "{}" and not path.exists()
    path.write_text('{"format": "moectl-launches", "version": 9}')
    refused = moectl("tune", "--model", "qwen3-30b", "-m", "1", code=3).stderr
    assert "the cache cannot be used" in refused and f"Remove {path}" in refused
    moectl("tune", "--clear")
    assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    assert "tuning needs a CUDA GPU" in moectl("tune", "--model", "qwen3-30b", code=3).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "tune takes either CKPT or --model"),
        (("x", "--model", "qwen3-30b"), "tune takes either CKPT or --model"),
        (("--model", "qwen4"), "no built-in model is called 'qwen4'"),
        (("--model", "qwen3-30b", "--budget", "soon"), "--budget takes a time such as 90s, 10m or 1h30m"),
        (("--model", "qwen3-30b", "-m", "0"), "token counts must be"),
        (("--model", "qwen3-30b", "--families", "huge"), "family 'huge' is not known"),
        (("--model", "qwen3-30b", "--tp", "5"), "cannot be sliced"),
        (("--model", "qwen3-30b", "--stale"), "--stale needs --list or --clear"),
    ],
)
def test_wrong_usage(arguments, said):
    assert said in moectl("tune", *arguments, code=2).stderr


def test_budgets_are_times():
    assert [parse_budget(text) for text in ("90s", "10m", "1h30m", "25", "0.5m")] == [90, 600, 5400, 25, 30]
    for text in ("", "m", "10x", "-5s", "5m5"):
        with pytest.raises(UsageError):
            parse_budget(text)
