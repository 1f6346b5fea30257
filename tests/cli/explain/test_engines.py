"""`moectl explain --engine all`: one checkpoint under every registered engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moectl.oracle import ENGINES
from moectl.oracle.registry import newest_engines
from oracle.acme_1_0 import ACME
from support.invoking import moectl

GPT, AWQ, DENSE = "openai/gpt-oss-120b", "QuantTrio/Qwen3.6-35B-A3B-AWQ", "baidu/ERNIE-4.5-21B-A3B-PT"


def explain(*options, code=0):
    return moectl("explain", *options, "--offline", "--engine", "all", code=code)


def test_every_registered_engine_has_a_line_with_its_backend_and_reason(monkeypatch):
    monkeypatch.setitem(ENGINES, ACME.name, ACME)
    done = explain(GPT, "--gpu", "h200", "--quiet")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == [engine.name for engine in newest_engines()]
    assert all(reason for *_, reason in lines) and lines[-1][:2] == ["acme-1.0", "quick"]
    for name, backend, _ in lines:
        alone = moectl("explain", GPT, "--gpu", "h200", "--offline", "--engine", name, "--quiet")
        assert alone.stdout == f"0-35\t{backend}\n"
    text = explain(GPT, "--gpu", "h200")
    assert text.stdout.startswith(f"{GPT}   1x NVIDIA H200   every engine\n")
    assert "vLLM 0.33.0 triton (OpenAI triton_kernels): highest priority" in text.words
    assert "not flashinfer_trtllm: needs SM100-SM109; this device is SM90" in text.words
    assert "assuming the default packages of vLLM, SGLang, transformers, TensorRT-LLM and Acme" in " ".join(
        text.stderr.split()
    )


def test_an_answer_that_was_never_recorded_is_marked(monkeypatch):
    read = replace(ACME, policy=replace(ACME.policy, unrecorded=lambda ask: "all of it"))
    monkeypatch.setitem(ENGINES, ACME.name, read)
    lines = explain(GPT, "--gpu", "h200", "--quiet").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines if line.endswith("(from source, not recorded)")] == [
        "tensorrt-llm-d1fce83",
        "acme-1.0",
    ]


def test_layers_with_different_answers_are_told_apart():
    words = explain(AWQ, "--gpu", "h200").words
    assert "layer 0 triton (vLLM Triton): highest priority" in words
    assert "; layers 1-39 humming: highest priority of those that pass all checks on SM90" in words
    assert "vllm-0.33.0\ttriton,humming\t" in explain(AWQ, "--gpu", "h200", "-q").stdout


def test_an_engine_that_refuses_says_why_and_fails_only_a_strict_call(monkeypatch):
    """Acme has no rules for AMD's GPUs; the others answer."""
    monkeypatch.setitem(ENGINES, ACME.name, ACME)
    words = explain(DENSE, "--gpu", "mi300x").words
    assert "Acme 1.0 none: " in words and "vLLM 0.33.0 triton" in words
    refused = explain(DENSE, "--gpu", "mi300x", "--strict", "--json", code=1).document
    row = next(row for row in refused["engines"] if row["policy"] == "acme-1.0")
    assert row["usable"] is False and row["backends"] == [] and row["because"] and refused["usable"]


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "says"),
    [
        # The engine refuses the config, whatever the backend.
        ("kimi-k2", "b200", "tensorrt-llm", "none: TensorRT-LLM fails on the checkpoint's config: "),
        # What would do if it were asked for by name is named, and nothing else that is asked for by name.
        (
            "deepseek-v3",
            "a100",
            "tensorrt-llm",
            "supports SM80. vanilla is used only with moe_config.backend ",
        ),
        ("gpt-oss-20b", "a100", "tensorrt-llm", "none: no candidate of W4A16_MXFP4 supports SM80 ("),
        ("deepseek-v3", "a100", "sglang", "not deep_gemm: needs SM90 or newer; this device is SM80 ("),
        ("deepseek-v3", "h200", "sglang", "deep_gemm has higher priority and fits, but needs all2all deepep"),
        # A choice that fails later is said to.
        ("qwen3-30b", "cpu", "sglang", "checks pass; CompressedTensorsWNA16MoE fails on loading weights ("),
    ],
)
def test_the_reason_is_what_decides(model, gpu, engine, says):
    lines = explain(model, "--gpu", gpu, "--tp", "8" if gpu != "cpu" else "1", "--quiet").stdout.splitlines()
    [line] = [line for line in lines if line.startswith(engine)]
    assert says in line.replace("\t", ": ")


def test_verbose_shows_every_engine_in_full():
    short, full = (explain(GPT, "--gpu", "h200", *more).stdout for more in ((), ("--verbose",)))
    assert short.rstrip().endswith("--engine NAME: one in full") and short.count("candidates, in") == 0
    assert full.startswith(short.rsplit("  more", 1)[0])
    assert full.count("candidates, in priority order") == len(newest_engines())


def test_no_engine_at_all_is_a_failure():
    done = explain(GPT, "--gpu", "tpu", "--quiet", code=1)
    assert {line.split("\t")[1] for line in done.stdout.splitlines()} == {"none"}


def test_json_has_the_rows_of_every_engine():
    document = explain(GPT, "--gpu", "h200", "--json").document
    names = [engine.name for engine in newest_engines()]
    assert document["policy"] == "all" and [row["policy"] for row in document["engines"]] == names
    assert [row["policy"] for row in document["rows"]] == names
    assert all(row["decision"]["inputs"]["policy"] == row["policy"] for row in document["rows"])


def test_a_document_of_every_engine_is_replayed(tmp_path):
    first = explain(AWQ, "--gpu", "b200", "--json").document
    kept = tmp_path / "all.json"
    kept.write_text(json.dumps(first))
    again = moectl("explain", "--replay", kept, "--json").document
    assert [(row["policy"], row["layers"], row["backend"]) for row in again["rows"]] == [
        (row["policy"], row["layers"], row["backend"]) for row in first["rows"]
    ]
    assert [row["backends"] for row in again["engines"]] == [row["backends"] for row in first["engines"]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((GPT, "--backend", "triton"), "--engine all takes no --backend"),
        ((GPT, "--why", "marlin"), "--engine all takes no --why"),
        ((GPT, AWQ), "--engine all takes one checkpoint, one GPU and one deployment"),
        ((GPT, "--tp", "1,2"), "--engine all takes one checkpoint, one GPU and one deployment"),
        ((), "CKPT is missing"),
        ((GPT, "--from", "0.31.0"), "--from compares two releases"),
    ],
)
def test_wrong_usage_is_a_sentence(options, says):
    assert says in " ".join(explain(*options, "--gpu", "h100", code=2).stderr.split())
