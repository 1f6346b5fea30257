"""SGLang itself: its engine on a CPU with moectl's experts, beside its own.

``MOECTL_TEST_SGLANG_PYTHON`` names the interpreter of an environment that can import SGLang 0.5.23, which
`scripts/test_sglang` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import moectl
from support import whole_models
from support.sglang_generate import PROMPT

ENGINE = os.environ.get("MOECTL_TEST_SGLANG_PYTHON", "")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not ENGINE, reason="MOECTL_TEST_SGLANG_PYTHON names no environment with SGLang 0.5.23"
)

MOECTL = {"quantization": "moectl"}
SINKS = {f"{part}attention_backend": "intel_amx" for part in ("", "prefill_", "decode_")}
"""The only attention that SGLang lets gpt-oss have on a CPU; its operators are stand-ins in plain torch."""


@pytest.fixture(scope="module")
def plugged(tmp_path_factory):
    """A directory for PYTHONPATH in which SGLang finds the plug-in by its entry point, in every process."""
    folder = tmp_path_factory.mktemp("plugged")
    info = folder / "moectl-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moectl\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nmoectl = moectl.integrations.sglang:register\n"
    )
    return folder


@pytest.fixture(scope="module")
def start(plugged):
    """Starts SGLang's engine with moectl's torch backend, which runs on a CPU; the finished process."""

    def started(model: Path, options: dict) -> subprocess.CompletedProcess[str]:
        machine = ROOT / "tests" / "support" / "sglang_machine"
        path = [str(part) for part in (machine, ROOT, plugged, os.environ.get("PYTHONPATH", ""))]
        return subprocess.run(
            [ENGINE, ROOT / "tests" / "support" / "sglang_generate.py", model, json.dumps(options)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "MOECTL_BACKEND": "torch"},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return started


@pytest.fixture(scope="module")
def generate(start):
    """Greedy tokens and their log-probabilities."""

    def generated(model: Path, options: dict) -> dict:
        done = start(model, options)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(lines[-1])

    return generated


def near(got: dict, want: dict, tolerance: float = 0.02) -> bool:
    return got["tokens"] == want["tokens"] and got["scores"] == pytest.approx(want["scores"], abs=tolerance)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory, generate):
    """A whole model with INT4 experts, and what the engine makes of it with moectl's experts on one rank."""
    model = whole_models.qwen3(tmp_path_factory.mktemp("qwen3") / "model")
    return model, generate(model, MOECTL)


def test_int4_experts_give_the_tokens_of_sglangs_own_in_16_bits(qwen3, generate, tmp_path):
    model, got = qwen3
    moectl.convert(model, tmp_path / "bf16", "bf16", requantize=True)
    # How bf16 products are summed depends on the CPU: 0.027 apart on one.
    assert near(got, generate(tmp_path / "bf16", {}), 0.05)


def test_a_converted_directory_gives_the_same_tokens(qwen3, generate, tmp_path):
    model, want = qwen3
    moectl.convert(model, tmp_path / "prepared", "moectl")
    assert near(generate(tmp_path / "prepared", {}), want, 0)


def test_new_weights_are_refused_and_it_goes_on_serving(qwen3):
    _, got = qwen3
    taken, message = got["update"]
    assert not taken and message.startswith("moectl's experts take no new weights while SGLang serves")
    assert got["again"] == got["tokens"]


def test_scaled_routing_and_shared_experts_give_the_tokens_of_sglangs_own(generate, tmp_path):
    """GLM-4.5's: sigmoid scores, a factor on their sum, a shared expert beside the routed ones."""
    model = whole_models.glm(tmp_path / "model")
    assert near(generate(model, MOECTL), generate(model, {}))


@pytest.mark.parametrize("experts", (1, 2))
def test_two_ranks_give_the_same_tokens(qwen3, generate, experts):
    model, want = qwen3
    got = generate(model, {**MOECTL, "tp_size": 2, "ep_size": experts})
    # Sums in another order: greedy decoding of random weights may part at a near tie.
    assert got["tokens"][:6] == want["tokens"][:6]
    assert got["scores"][:6] == pytest.approx(want["scores"][:6], abs=0.05)


def test_dummy_weights_read_nothing_of_the_checkpoint(qwen3, generate):
    model, want = qwen3
    dummy = generate(model, {**MOECTL, "load_format": "dummy"})
    assert len(dummy["tokens"]) == len(want["tokens"]) and dummy["tokens"] != want["tokens"]


def of_transformers(folder: Path, prompt: list[int]) -> dict:
    """The greedy tokens of transformers' own model and their log-probabilities."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    told: dict = {"tokens": [], "scores": []}
    with torch.no_grad():
        for _ in range(12):
            scores = model(torch.tensor([prompt + told["tokens"]])).logits[0, -1].float().log_softmax(-1)
            told["tokens"].append(int(scores.argmax()))
            told["scores"].append(float(scores.max()))
    return told


def test_gpt_oss_gives_the_tokens_of_transformers(generate, tmp_path):
    model = whole_models.gpt_oss(tmp_path / "model")
    want = generate(model, MOECTL | SINKS)
    moectl.convert(model, tmp_path / "bf16", "bf16")
    reference = of_transformers(tmp_path / "bf16", PROMPT)
    assert want["tokens"][:6] == reference["tokens"][:6]
    assert want["scores"][:6] == pytest.approx(reference["scores"][:6], abs=0.05)
    moectl.convert(model, tmp_path / "prepared", "moectl")
    assert near(generate(tmp_path / "prepared", SINKS), want, 0)


def test_what_it_does_not_do_is_refused_at_start(qwen3, start):
    done = start(qwen3[0], {**MOECTL, "cpu_offload_gb": 1})
    assert done.returncode != 0
    assert "moectl's experts in SGLang do not support offloading to the CPU" in done.stdout + done.stderr
