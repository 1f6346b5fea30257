"""`moectl run`: several backends, stress, whole checkpoints, files, fallback, exit codes."""

import json
import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from moectl.cli.run.text import first_words, warm_words
from moectl.run.stress_cases import CASES
from support.fake_backends import offer, right
from support.invoking import moectl


def louder(prepared, x, ids, weights):
    return 1.1 * right(prepared, x, ids, weights)


def breaks(prepared, x, ids, weights):
    raise RuntimeError("out of luck")


def loses_the_last_of_three(prepared, x, ids, weights):
    y = right(prepared, x, ids, weights)
    if len(y) == 3:
        y[-1] = 0
    return y


CPU = ("--device", "cpu")


def test_all_backends_are_compared(tiny_gpt_oss, monkeypatch, tmp_path):
    offer(monkeypatch, "twin", right)
    file = tmp_path / "y.safetensors"
    done = moectl("run", tiny_gpt_oss, *CPU, "--backend", "all", "--tokens", 3, "--output", file, "--json")
    found = done.document
    names = [it["backend"] for it in found["backends"]]
    assert found["ok"] and names[0] == "twin" and "torch" in names
    assert found["computed"] == "the routed experts" and found["routed_by"] == "router"
    for it in found["backends"]:
        assert it["cosine"] > 0.9999 and 0 < it["rel_l2"] < 0.01 and it["max_abs"] > 0
        assert len(it["worst_tokens"]) == 3 and it["check"]["ok"] and it["error"] is None
        assert it["weight_bytes"] and it["peak_bytes"] and it["median_us"] > 0 and it["prepare_seconds"] > 0
    pairs = {tuple(it["backends"]): it["rel_l2"] for it in found["pairs"]}
    assert len(pairs) == len(names) * (len(names) - 1) / 2 and pairs["twin", "torch"] == 0.0
    assert "SM80" in found["left_out"]["moectl"]
    written = load_file(file)
    assert set(written) == {"ids", "weights", "x", *(f"y.{name}" for name in names)}
    assert torch.equal(written["y.torch"], written["y.twin"])
    text = moectl("run", tiny_gpt_oss, *CPU, "--backend", "torch,twin", "--tokens", 3).stdout
    assert "| twin" in text and "| A" in text and "check     passed" in text
    brief = moectl("run", tiny_gpt_oss, *CPU, "--backend", "twin,torch", "-q").stdout
    assert [line.split()[:2] for line in brief.splitlines()] == [["twin", "ok"], ["torch", "ok"]]


def test_one_that_is_too_far_off_or_fails_ends_with_1(tiny_gpt_oss, monkeypatch):
    offer(monkeypatch, "louder", louder)
    offer(monkeypatch, "breaks", breaks)
    backends = ("--backend", "breaks,louder,torch")
    done = moectl("run", tiny_gpt_oss, *CPU, *backends, code=1)
    assert "the breaks backend failed on layer 0: RuntimeError: out of luck" in done.stdout
    assert "FAILED 1.0e-01" in done.stdout and "check     FAILED" in done.stdout
    found = moectl("run", tiny_gpt_oss, *CPU, *backends, "--json", code=1).document
    assert {it["backend"]: it["ok"] for it in found["backends"]} == {
        "breaks": False,
        "louder": False,
        "torch": True,
    }
    assert found["backends"][0]["error"]["what"].endswith("out of luck")
    brief = moectl("run", tiny_gpt_oss, *CPU, *backends, "-q", code=1).stdout.splitlines()
    assert brief[0] == "breaks\tfailed -" and brief[1].startswith("louder\tfailed 0.1")


def test_one_that_cannot_serve_is_refused_beside_others(tiny_gpt_oss, tiny_kimi):
    asked = (*CPU, "--tokens", 3, "--backend")
    done = moectl("run", tiny_gpt_oss, *asked, "moectl,torch,emulation")
    assert "| moectl    | refused" in done.stdout and "SM80" in done.stdout
    assert "check     passed" in done.stdout
    found = moectl("run", tiny_gpt_oss, *asked, "torch,moectl", "--json").document
    assert found["ok"] and [(it["backend"], it["ok"]) for it in found["backends"]] == [
        ("torch", True),
        ("moectl", False),
    ]
    assert found["backends"][1]["refused"] and "SM80" in found["backends"][1]["error"]["what"]
    brief = moectl("run", tiny_kimi, *asked, "torch,moectl", "--layers", "all", "-q").stdout
    assert [line.split()[:3] for line in brief.splitlines()][1] == ["1", "moectl", "refused"]
    for none in ("moectl", "moectl,humming"):
        assert "SM80" in moectl("run", tiny_gpt_oss, *asked, none, code=3).stderr
    assert moectl("run", tiny_kimi, *asked, "moectl,humming", "--layers", "all", code=3)


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("text", [",", " , ", "torch,"])
def test_no_name_of_a_backend_is_not_all_of_them(tiny_gpt_oss, command, text):
    done = moectl(command, tiny_gpt_oss, *CPU, "--backend", text, code=2)
    assert f"one of {text!r} is empty" in done.stderr


def test_a_converted_folder_is_not_told_what_it_says(tiny_gpt_oss, tmp_path):
    out = tmp_path / "out"
    moectl("convert", tiny_gpt_oss, out, "--to", "marlin")
    done = moectl("run", out, *CPU, "--routing", "sigmoid", "--activation", "silu", code=2)
    assert "whose manifest settles --activation and --routing" in done.stderr
    assert (
        "manifest settles --activation" in moectl("bench", out, *CPU, "--activation", "silu", code=2).stderr
    )


def test_a_config_alone_has_nothing_to_run(tiny_gpt_oss):
    for command in ("run", "bench"):
        assert "is a config alone" in moectl(command, tiny_gpt_oss / "config.json", *CPU, code=2).stderr


def test_stress_is_a_table_by_backend_and_case(tiny_gpt_oss, monkeypatch):
    offer(monkeypatch, "loses", loses_the_last_of_three)
    done = moectl("run", tiny_gpt_oss, *CPU, "--backend", "loses,torch", "--stress", code=1)
    assert "| stress" in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| 3 tokens"))
    assert [cell.split()[0] for cell in row.split("|")[3:5]] == ["FAILED", "ok"]
    assert "loses failed '3 tokens': RMS" in done.stdout and "worst token 2" in done.stdout


def test_stress_in_json_names_every_case(tiny_kimi):
    found = moectl("run", tiny_kimi, *CPU, "--backend", "torch", "--stress", "--json").document
    assert found["backend"] == "torch" and found["ok"]
    assert [it["case"] for it in found["stress"]] == [case.name for case in CASES]
    assert all(it["ok"] and it["check"]["rms"] < 0.008 for it in found["stress"])
    assert found["computed"] == "the routed experts, without 1 shared expert"


def test_a_fallback_is_an_option_and_is_told(tiny_gpt_oss, monkeypatch):
    offer(monkeypatch, "breaks", breaks)
    done = moectl("run", tiny_gpt_oss, *CPU, code=1)
    assert "the breaks backend failed on layer 0: RuntimeError: out of luck" in done.stderr
    assert "--allow-fallback" in done.stderr
    done = moectl("run", tiny_gpt_oss, *CPU, "--allow-fallback")
    assert (
        "breaks was tried the breaks backend failed on layer 0" in done.words and "tried" not in done.stderr
    )
    assert "backend   " in done.stdout
    done = moectl("run", tiny_gpt_oss, *CPU, "--allow-fallback", "--layers", "0")
    assert "layer 0: breaks was tried: the breaks backend failed on layer 0: RuntimeError" in done.stderr
    found = moectl("run", tiny_gpt_oss, *CPU, "--allow-fallback", "--backend", "moectl", "--json").document
    assert [it["backend"] for it in found["tried"]] == ["moectl", "breaks"] and found["ok"]
    assert "several" in moectl("run", tiny_gpt_oss, "--allow-fallback", "--backend", "all", code=2).stderr


def test_all_layers_with_the_worst_of_them(tiny_kimi, monkeypatch, tmp_path):
    def bad_second(prepared, x, ids, weights):
        y = right(prepared, x, ids, weights)
        calls.append(len(x))
        return y if len(calls) <= 7 else 2 * y

    calls = []
    offer(monkeypatch, "tired", bad_second)
    file = tmp_path / "y.safetensors"
    options = (*CPU, "--layers", "all", "--tokens", 4, "--backend", "torch,tired", "--output", file)
    found = moectl("run", tiny_kimi, *options, "--json", code=1).document
    assert [it["layer"] for it in found["layers"]] == [1, 2] and not found["ok"]
    assert [it["ok"] for it in found["layers"]] == [True, False]
    assert found["worst"]["layer"] == 2 and found["worst"]["backend"] == "tired"
    assert found["worst"]["rms"] == pytest.approx(1.0, rel=0.01)
    assert {"layers.1.y.torch", "layers.2.y.tired", "layers.2.ids"} <= set(load_file(file))
    text = moectl("run", tiny_kimi, *CPU, "--layers", "2", "--backend", "torch", "--stress").stdout
    every = len(CASES)
    assert f"| {every}/{every}" in text and "worst     layer" in text and "check     passed" in text
    assert "layers    1 of" in text
    brief = moectl("run", tiny_kimi, *CPU, "--layers", "1-2", "--backend", "torch", "-q").stdout
    assert [line.split("\t")[:2] for line in brief.splitlines()] == [["1", "torch"], ["2", "torch"]]


def test_a_damaged_layer_is_an_error_of_its_own_code(tiny_gpt_oss, tmp_path):
    out = tmp_path / "out"
    moectl("convert", tiny_gpt_oss, out, "--to", "marlin")
    file = out / "moectl-layer-00001.experts"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    done = moectl("run", out, *CPU, "--layers", "all", "--json", code=4)
    assert [it["ok"] for it in done.document["layers"]] == [True, False]
    assert done.document["layers"][1]["error"]["exit_code"] == 4
    assert "ERROR" in moectl("run", out, *CPU, "--layers", "all", code=4).stdout


def test_another_dtype_is_said(tiny_gpt_oss, tmp_path):
    file = tmp_path / "y.safetensors"
    done = moectl("run", tiny_gpt_oss, *CPU, "--dtype", "fp16", "--output", file)
    assert "dtype     fp16 activations, the model's are bf16" in done.stdout
    assert load_file(file)["y"].dtype == load_file(file)["x"].dtype == torch.float16
    found = moectl("run", tiny_gpt_oss, *CPU, "--dtype", "BF16", "--json").document
    assert found["dtype"] == found["model_dtype"] == "bf16"
    assert "dtype" not in moectl("run", tiny_gpt_oss, *CPU).stdout
    assert "fp8" in moectl("run", tiny_gpt_oss, "--dtype", "fp8", code=2).stderr


def test_input_for_every_layer(tiny_kimi, tmp_path):
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"x": x}, tmp_path / "x.safetensors")
    options = ("--input", tmp_path / "x.safetensors", "--backend", "torch", "--layers", "all")
    done = moectl("run", tiny_kimi, *CPU, *options, "--output", tmp_path / "y.safetensors", "--json")
    assert [it["tokens"] for it in done.document["layers"]] == [3, 3]
    written = load_file(tmp_path / "y.safetensors")
    assert torch.equal(written["layers.1.x"], x) and torch.equal(written["layers.2.x"], x)
    assert not torch.equal(written["layers.1.y"], written["layers.2.y"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--layers", "all", "--layer", "1"), "--layer and --layers"),
        (("--layers", "0-2"), "MoE layers are 1-2"),
        (("--layers", "first"), "all or 0,3,5-9"),
        (("--layers", "5-1"), "layers '5-1' are not an ascending range; this model has MoE layers 1-2"),
        (("--backend", "warp"), "torch"),
        (("--backend", "all,torch"), "'all' is not known"),
    ],
)
def test_wrong_usage_is_exit_2(options, words, tiny_kimi):
    assert words in moectl("run", tiny_kimi, *CPU, *options, code=2).stderr


def test_numbers_that_are_not_finite_are_the_worst_and_valid_json(tiny_gpt_oss, monkeypatch):
    def spoils(prepared, x, ids, weights):
        y = right(prepared, x, ids, weights)
        y[1] = float("nan")
        return y

    offer(monkeypatch, "spoils", spoils)
    done = moectl("run", tiny_gpt_oss, *CPU, "--layers", "0", "--backend", "torch,spoils", "--json", code=1)
    assert json.loads(done.stdout)["worst"] == {"layer": 0, "backend": "spoils", "rms": None}
    assert done.document["layers"][0]["backends"][1]["worst_tokens"][0]["token"] == 1


def test_times_say_what_they_are(tiny_gpt_oss):
    lines = moectl("run", tiny_gpt_oss, *CPU, "--backend", "torch").stdout.splitlines()
    (first,) = [line for line in lines if line.startswith("first ")]
    (warm,) = [line for line in lines if line.startswith("warm ")]
    assert "compil" not in first
    assert "(median; fastest " in warm
    assert first_words(0.05, "cuda") == "50 ms (loading or compiling its kernels included)"
    times = {"median_us": 2000.0, "fastest_us": 1000.0, "first_seconds": 0.001}
    assert warm_words(times) == "2 ms (median; fastest 1 ms; noisy: slower than the first call)"
    assert warm_words({**times, "first_seconds": 1.0}) == "2 ms (median; fastest 1 ms)"


def test_passed_is_green_and_failed_is_red(tiny_gpt_oss, monkeypatch):
    good, bad = "\x1b[1;32m", "\x1b[1;31m"
    color = ("--color", "always")
    shown = moectl("run", tiny_gpt_oss, *CPU, "--backend", "torch", *color).stdout
    assert f"{good}check     passed" in shown and bad not in shown
    memory = next(line for line in shown.splitlines() if line.startswith("memory"))
    assert memory.count("iB") == 2
    offer(monkeypatch, "louder", louder)
    shown = moectl("run", tiny_gpt_oss, *CPU, "--backend", "louder,torch", *color, code=1).stdout
    assert f"{bad}check     FAILED" in shown and good not in shown


def test_outputs_are_as_private_as_the_weights(tiny_gpt_oss, tmp_path):
    before, file = os.umask(0o022), tmp_path / "y.safetensors"
    source = shutil.copytree(tiny_gpt_oss, tmp_path / "source")
    try:
        for mode in (0o600, 0o644):
            for weights in source.glob("*.safetensors"):
                weights.chmod(mode)
            moectl("run", source, *CPU, "--output", file)
            assert stat.S_IMODE(file.stat().st_mode) == mode
    finally:
        os.umask(before)
