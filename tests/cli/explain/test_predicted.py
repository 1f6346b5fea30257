"""What `moectl explain` says of the time of moectl's own kernels."""

from __future__ import annotations

from moectl.environment import find_device
from moectl.explain.predicted_time import TOKENS
from moectl.kernels.choice.launch_model import coefficients
from moectl.kernels.choice.predicted_times import predicted_times
from moectl.problem.published_layers import model_problem
from support.invoking import moectl

GPT = "openai/gpt-oss-120b"


def explain(*options, model=GPT):
    return moectl("explain", model, "--policy", "moectl", *options, "--offline")


def test_a_line_and_the_document_have_the_predicted_times():
    (group,) = explain("--gpu", "h200", "--json").document["groups"]
    wanted = predicted_times(model_problem("gpt-oss-120b"), find_device("h200"), TOKENS)
    assert [(it["tokens"], it["us"]) for it in group["predicted"]["times"]] == [
        (time.tokens, time.us) for time in wanted.times
    ]
    error = coefficients().errors["stream"]["NVIDIA H200"]
    assert group["predicted"]["median_error"] == error
    words = explain("--gpu", "h200").words
    one, many, most = (time.us for time in wanted.times)
    assert (
        f"predicted {one:.3g} us at 1 token, {many:.3g} us at 64, {most:.3g} us at 1024 a layer" in words
        and f"(median error {error:.0%} on this GPU)" in words
    )


def test_a_gpu_that_was_not_measured_is_said_to_be_none():
    assert "at 1024 a layer (not measured on this GPU)" in explain("--gpu", "h20").words
    assert explain("--gpu", "h20", "--json").document["groups"][0]["predicted"]["median_error"] is None


def test_gpus_of_other_architectures_have_times_of_portable_kernels():
    options = ("--gpu", "a100", "--tp", "8")
    assert "at 1024 a layer (not measured on this GPU)" in explain(*options).words
    (group,) = explain(*options, "--json").document["groups"]
    assert [it["tokens"] for it in group["predicted"]["times"]] == [1, 64, 1024]
    assert (group["predicted"]["median_error"], group["predicted"]["reason"]) == (None, "")


def test_other_answers_have_no_such_line():
    assert "predicted" not in explain("--gpu", "mi300x").words
    assert explain("--gpu", "mi300x", "--json").document["groups"][0]["predicted"] is None
    engine = ("explain", GPT, "--gpu", "h200", "--offline")
    assert "predicted" not in moectl(*engine).words
    one, *_ = predicted_times(model_problem("gpt-oss-120b"), find_device("h200"), TOKENS).times
    beside = f"; predicted {one.us:.3g} us at 1"
    assert beside in moectl(*engine, "-v").words, "beside what moectl itself would run"


def test_tokens_that_are_not_what_the_checkpoint_declares():
    """Kernels for NVFP4 decode weights for 16-bit tokens; those for FP8 quantize tokens as it declares."""
    kept = (
        "tokens stay in 16 bits; kernels for these weights do not use the declared nvfp4 dynamic activations"
    )
    assert kept in explain("--gpu", "h200", model="nvidia/DeepSeek-R1-0528-FP4").words
    for model, act in ((GPT, "a16"), ("deepseek-ai/DeepSeek-V3", "fp8 dynamic")):
        assert "kernels for these weights" not in explain("--gpu", "h200", model=model).words
        (group, *_) = explain("--gpu", "h200", "--json", model=model).document["groups"]
        assert group["predicted"]["act"] == act


def test_other_backends_are_not_asked_for_their_tokens():
    chosen = explain("--gpu", "h200", "--backend", "torch", model="nvidia/DeepSeek-R1-0528-FP4").words
    assert "backend torch" in chosen and "kernels for these weights" not in chosen
    assumed = explain("--gpu", "h200", "--assume", "act=nvfp4").words
    assert "do not use the assumed nvfp4 dynamic activations" in assumed
