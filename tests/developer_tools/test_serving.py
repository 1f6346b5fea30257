"""Whole random models for serving engines, and the tables of what engines did with them."""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from devtools.serving.one_engine import covered
from devtools.serving.report import differences, experts_share, log_figures, table
from devtools.serving.whole_models import MODELS, write_model

from moectl.checkpoint import open_checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = {"layers": 2, "experts": 8, "hidden": 256, "intermediate": 128, "vocabulary": 512}


@pytest.fixture(params=["gpt-oss-20b", "qwen3-30b", "qwen3-30b-fp8", "qwen3-30b-int4"])
def model(request, tmp_path):
    family, sizes = MODELS[request.param]
    size = write_model(family, replace(sizes, **SMALL), tmp_path / "model")
    return tmp_path / "model", size


def test_models_are_checkpoints_that_are_understood(model):
    folder, size = model
    checkpoint = open_checkpoint(str(folder), offline=True)
    assert [list(group.layers) for group in checkpoint.groups] == [[0, 1]]
    problem = checkpoint.groups[0].problem
    assert (problem.experts, problem.dims.hidden, problem.dims.intermediate) == (8, 256, 128)
    assert size == sum(info.nbytes for info in checkpoint.tensors.values())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(checkpoint.tensors)


def test_greedy_decoding_does_not_depend_on_rounding_but_on_experts(tmp_path):
    transformers = pytest.importorskip("transformers")
    family, sizes = MODELS["gpt-oss-20b"]
    write_model(family, replace(sizes, **SMALL), tmp_path / "model")
    dequantized = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, quantization_config=dequantized
    )
    ids = torch.arange(24).reshape(4, 6)
    with torch.no_grad():
        rounded = model(ids).logits.float().log_softmax(-1)
        exact = model.float()(ids).logits.log_softmax(-1)
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_hook(lambda module, inputs, out: out * -1)
        wrong = model(ids).logits.log_softmax(-1)
    assert torch.equal(rounded.argmax(-1), exact.argmax(-1))
    assert (wrong - exact).abs().mean() > 3 * (rounded - exact).abs().mean()


def row_of(name, rate, tokens, logprob):
    return {
        "run": name,
        "decode": {batch: rate * int(batch) for batch in ("1", "16", "64", "256")},
        "prefill": 1000 * rate,
        "kernels": {"16": {"_decode_gemm1_kernel": 30.0, "nvjet_sm90_tst": 70.0}},
        "busy_us": {"16": 90.0},
        "prefill_busy_us": 2000.0,
        "model_s": 4.0,
        "engine_s": 20.0,
        "weights_bytes": 2**30,
        "peak_bytes": 2**30 + 2**28,
        "answers": {"tokens": [tokens], "logprobs": [[logprob] * 3], "given": [[logprob, -2.0]]},
    }


def test_a_table_has_ratios_to_the_first_run_and_blanks_for_what_was_not_measured():
    first, second = row_of("own", 100.0, [1, 2, 3], -1.0), row_of("moectl", 150.0, [1, 2, 4], -1.5)
    del second["kernels"], second["busy_us"], second["prefill"], second["prefill_busy_us"]
    lines = table(["own", "moectl"], [first, second]).splitlines()
    cells = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:4]] for line in lines}
    assert cells["decode, batch 16 (tokens/s)"] == ["1,600", "2,400 (1.50)"]
    assert cells["prefill (tokens/s)"] == ["100,000", ""]
    assert cells["experts in a step of 16 (%)"] == ["30", ""]
    assert cells["GPU busy in a step of 16 (us)"] == ["90", ""]
    assert cells["GPU busy in prefill (us)"] == ["2,000", ""]
    assert cells["peak memory over weights while loading (MiB)"] == ["256", "256"]
    assert experts_share(first, 64) is None


@pytest.mark.parametrize(
    "name",
    [
        "fused_moe_kernel",
        "void vllm::act_and_mul_kernel<c10::BFloat16, true>(...)",
        "void per_token_group_quant_8bit_register_kernel<c10::BFloat16>(...)",
        "_rows_gemm_kernel",
        "_block_codes_kernel",
    ],
)
def test_products_activations_and_codes_of_tokens_are_time_of_experts(name):
    assert experts_share({"kernels": {"16": {name: 30.0, "nvjet_sm90_tst_rms_norm": 70.0}}}, 16) == 30.0


def test_kernels_that_overlap_keep_the_gpu_busy_once():
    assert covered([(5.0, 9.0), (0.0, 3.0), (1.0, 2.0), (8.0, 12.0), (20.0, 21.0)]) == 11.0
    assert covered([]) == 0.0


def test_log_probabilities_count_until_greedy_tokens_part():
    first, second = row_of("own", 1.0, [1, 2, 3], -1.0), row_of("moectl", 1.0, [1, 9, 3], -1.5)
    second["answers"]["logprobs"] = [[-1.25, -7.0, -9.0]]
    found = differences(first, second)
    assert (found["equal"], found["tokens"]) == (2, 3)
    assert (found["greedy_largest"], found["greedy_mean"]) == (0.25, 0.25)
    assert (found["given_largest"], found["given_mean"]) == (0.5, 0.25)
    del second["answers"]
    assert differences(first, second) is None


def test_figures_come_from_the_log_of_the_engine():
    log = (
        "INFO Model loading took 13.03 GiB memory and 6.630434 seconds\n"
        "INFO [backbone] torch.compile took 15.11 s in total\n"
        "INFO Graph capturing finished in 14 secs, took 0.26 GiB\n"
        "INFO init engine (profile, create kv cache, warmup model) took 65.89 s (compilation: 15.11 s)"
    )
    assert log_figures(log) == {"model_s": 6.630434, "compile_s": 15.11, "graphs_s": 14.0, "init_s": 65.89}
    assert log_figures("nothing") == {}


STARTS = {
    "cold": """\
INFO 11-23 18:02:11 [gpu_model_runner.py] Model loading took 12.04 GiB memory and 3.824110 seconds
INFO 11-23 18:02:13 [monitor.py:47] [backbone] Starting torch.compile
INFO 11-23 18:02:31 [compile_at_load.py:41] moectl: 31 kernels, 30 from the cache, 1 \
compiled in 18.3 s; 29 were compiled by 8 processes in 21.9 s, of which this one waited 17.6 s
INFO 11-23 18:02:33 [monitor.py:63] [backbone] torch.compile took 19.42 s in total
INFO 11-23 18:02:41 [gpu_model_runner.py:6516] Graph capturing finished in 7 secs, took 0.31 GiB
INFO 11-23 18:02:41 [jit_monitor.py:90] Kernel JIT monitor activated; monitored JIT \
compilations during inference will use mode=warn.
INFO 11-23 18:02:41 [core.py:404] init engine (profile, create kv cache, warmup model) took \
28.90 s (compilation: 19.42 s)
WARNING 11-23 18:02:44 [jit_monitor.py:140] Triton kernel JIT compilation during inference: \
_topk_topp_kernel. This causes a latency spike; consider extending warmup to cover this shape/config.
WARNING 11-23 18:02:45 [jit_monitor.py:140] CuTeDSL JIT compilation during inference: \
norm_kernel. This causes a latency spike; consider extending warmup to cover this shape/config.
""",
    "warm, two ranks": """\
INFO 11-23 18:12:20 [gpu_model_runner.py] Model loading took 6.11 GiB memory and 2.100000 seconds
INFO 11-23 18:12:21 [compile_at_load.py:41] moectl: 31 kernels, 31 from the cache, 0 compiled in 0.4 s
INFO 11-23 18:12:21 [compile_at_load.py:41] moectl: 28 kernels, 28 from the cache, 0 compiled in 0.3 s
INFO 11-23 18:12:24 [monitor.py:63] torch.compile and initial profiling/warmup run together took \
3.51 s in total
INFO 11-23 18:12:29 [jit_monitor.py:90] Kernel JIT monitor activated; monitored JIT \
compilations during inference will use mode=warn.
""",
}
"""Lines in the words of vLLM 0.33.0's and moectl's log."""


def test_a_table_of_starts_says_what_was_compiled():
    cold, warm = (log_figures(log) for log in STARTS.values())
    assert cold == {
        "model_s": 3.82411,
        "compile_s": 19.42,
        "graphs_s": 7.0,
        "init_s": 28.9,
        "moectl_compiled": 30,
        "moectl_cached": 1,
        "moectl_s": 18.3,
        "serving_compiled": 2,
    }
    assert (warm["moectl_compiled"], warm["moectl_cached"], warm["serving_compiled"]) == (0, 59, 0)
    assert warm["compile_s"] == 3.51 and warm["moectl_s"] == pytest.approx(0.7)
    lines = table(["own", "cold", "warm"], [{}, cold, warm]).splitlines()
    cells = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:5]] for line in lines}
    assert cells["moectl's kernels compiled at start"] == ["", "30", "0"]
    assert cells["moectl's kernels from the cache"] == ["", "1", "59"]
    assert cells["kernels compiled while serving"] == ["", "2", "0"]
    assert cells["torch.compile (s)"] == ["", "19.42", "3.51"] and cells["graphs captured (s)"][1] == "7"


def test_moectls_line_is_the_one_that_its_loads_print():
    from moectl.layer.background_compile import KernelLoad
    from moectl.layer.compile_ahead import CompileResult

    load = object.__new__(KernelLoad)
    load.trouble, load.result = "", CompileResult(31, 2, 29, 21.9, processes=8)
    said = load._says(CompileResult(31, 30, 1, 18.3), 17.6, first=True)
    assert log_figures(f"INFO moectl: {said}\n") == {
        name: log_figures(STARTS["cold"])[name] for name in ("moectl_compiled", "moectl_cached", "moectl_s")
    }


def test_runs_are_named_with_checkpoints_and_arguments():
    run_of = runpy.run_path(str(SCRIPTS / "bench_vllm"))["run_of"]
    assert run_of("own", "ck") == ("own", "ck", {})
    assert run_of("two=./dir,tensor_parallel_size=2,moe_backend=marlin", "ck") == (
        "two",
        "./dir",
        {"tensor_parallel_size": 2, "moe_backend": "marlin"},
    )
    with pytest.raises(SystemExit, match="ARGUMENT=VALUE"):
        run_of("own,enforce_eager", "ck")


CHECK_VLLM = SCRIPTS / "check_vllm"


def answers_of(tokens, logprob):
    return {"tokens": [tokens], "logprobs": [[logprob] * 3], "given": [[logprob, -2.0]]}


def test_directories_are_compared_with_engines_whose_layouts_convert_knows():
    from moectl.problem.layouts import LAYOUTS

    own = runpy.run_path(str(CHECK_VLLM))["OWN"]
    targets = {facts.target for facts in LAYOUTS.values()}
    assert own.keys() - {"moectl"} <= targets


@pytest.mark.parametrize(
    ("second", "same"),
    [
        (answers_of([1, 2, 3], -1.0), True),
        (answers_of([1, 2, 4], -1.0), False),
        (answers_of([1, 2, 3], -1.0001), False),
    ],
)
def test_answers_are_the_same_to_the_last_bit_or_not(second, same, capsys):
    compared = runpy.run_path(str(CHECK_VLLM))["compared"]
    assert compared("directory", answers_of([1, 2, 3], -1.0), second) is same
    assert ("differs" in capsys.readouterr().out.splitlines()[0].split("most")[1]) is not same


STAND_IN = """
import json, sys
from pathlib import Path
started = {"tokens": [[1]], "logprobs": [[-1.0]], "given": [[-2.0]]}
row = {"experts": ["Experts"], "answers": {"started": started}}
if "sleep" in sys.argv[2]:
    row["answers"]["awake"] = started | {"tokens": [[7]]}
    row["freed_bytes"] = 2**31
Path(sys.argv[3]).write_text(json.dumps(row))
sys.exit(3 if "marlin" in sys.argv[2] else 0)
"""


def test_an_engine_that_stops_or_answers_otherwise_is_a_finding(tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(CHECK_VLLM))
    run = subprocess.run
    starts = []

    def stand_in(command, **options):
        if "convert" in command:
            Path(command[5]).mkdir()
            return subprocess.CompletedProcess(command, 1 if command[4] == "broken" else 0)
        starts.append((command[3], options["env"]["CUDA_VISIBLE_DEVICES"]))
        return run([sys.executable, "-c", STAND_IN, *command[3:]], **options)

    main = script["main"]
    monkeypatch.setitem(main.__globals__, "need_a_gpu", lambda: None)
    monkeypatch.setattr(main.__globals__["subprocess"], "run", stand_in)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    arguments = ["check_vllm", "ck", "--to", "moectl,marlin,humming", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 1
    out = capsys.readouterr().out
    assert "own-marlin: exit status 3" in out and "own-humming" in out
    assert "awake: 0 of 1 greedy tokens equal" in out and "2.00 GiB of the GPU were free" in out
    assert {gpu for _, gpu in starts} == {"4", "5"} and len(starts) == 6
    monkeypatch.setattr(sys, "argv", ["check_vllm", "ck", "--to", "humming", "--out", str(tmp_path / "new")])
    assert main() == 0
    for wrong, said in (
        (["ck", "--to", "nothing"], "nothing is no layout"),
        (["ck", "--to", "humming", "--out", str(tmp_path / "new")], "is there already"),
        (["broken", "--to", "humming", "--out", str(tmp_path / "other")], "cannot be converted to humming"),
        (["ck", "--jobs", "0"], "argument --jobs"),
    ):
        monkeypatch.setattr(sys, "argv", ["check_vllm", *wrong])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2 and said in capsys.readouterr().err
