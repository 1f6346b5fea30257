"""Which layers moectl computes in engines that have experts of their own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moectl
from moectl.capabilities import own_kernels
from moectl.integrations import model_experts
from moectl.integrations.model_experts import BACKEND, ModelExperts, open_experts, takes_over
from moectl.problem.published_layers import SCHEMES, model_problem
from moectl.synth import synthesize

CPU = torch.device("cpu")


@pytest.fixture
def experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelExperts:
    """Layers in BF16, as on a GPU where moectl's kernels are the best."""
    monkeypatch.setattr(ModelExperts, "backends", staticmethod(lambda problem, device, *others: ("moectl",)))
    synthesize("qwen3-235b", tmp_path / "model", layers=2, experts=4, hidden=128, intermediate=128, top_k=2)
    return open_experts(tmp_path / "model")


@pytest.mark.parametrize("format", SCHEMES)
def test_engines_keep_layers_whose_kernels_nobody_checked(format: str) -> None:
    problem = model_problem("qwen3-30b", format)
    assert takes_over("moectl", problem) is not own_kernels.TRITON.untried(problem.scheme)
    assert not takes_over("torch", problem)


def test_all_formats_were_checked_on_a_gpu() -> None:
    assert all(takes_over("moectl", model_problem("qwen3-30b", name)) for name in SCHEMES)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has checked any kernel."""
    rows = tuple(replace(row, untried=True) for row in own_kernels.TRITON.weights)
    monkeypatch.setattr(model_experts, "TRITON", replace(own_kernels.TRITON, weights=rows))


@pytest.mark.usefixtures("unchecked")
def test_unchecked_layers_are_left_to_the_engine_unless_the_user_asks(
    experts: ModelExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert experts.own_backends(CPU) == ({}, {"bf16, a16 activations": [0, 1]})
    monkeypatch.setenv(BACKEND, "moectl")
    assert experts.own_backends(CPU) == ({0: "moectl", 1: "moectl"}, {})


@pytest.mark.usefixtures("unchecked")
def test_directories_for_unchecked_kernels_run_on_them(experts: ModelExperts, tmp_path: Path) -> None:
    moectl.convert(tmp_path / "model", tmp_path / "out", "moectl")
    assert open_experts(tmp_path / "out").own_backends(CPU) == ({0: "moectl", 1: "moectl"}, {})


LOADED = """
import sys
before = set(sys.modules)
import torch
of_torch = set(sys.modules) - before
from moectl.integrations.model_experts import open_experts
experts = open_experts(sys.argv[1])
experts.backends(experts.problem_of(0), torch.device("cpu"), "", "torch")
print(*set(sys.modules) - before - of_torch)
"""


@pytest.mark.parametrize("folder", ("model", "out"))
def test_a_server_imports_what_it_needs_to_choose(tmp_path: Path, folder: str) -> None:
    """No command, nothing that only commands use, and the rules of no engine but moectl's own."""
    synthesize("qwen3-235b", tmp_path / "model", layers=1, experts=4, hidden=128, intermediate=128, top_k=2)
    moectl.convert(tmp_path / "model", tmp_path / "out", "moectl")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path / folder)], capture_output=True, text=True, timeout=120
    )
    loaded = set(done.stdout.split())
    assert "moectl.oracle.select" in loaded, done.stderr
    engines = {name.split(".")[3] for name in loaded if name.startswith("moectl.oracle.engines.")}
    assert engines == {"moectl", "shared_repacking"}
    tops = {name.partition(".")[0] for name in loaded}
    assert tops.isdisjoint({"typer", "click", "rich", "pydantic", "numba", "transformers", "vllm"})
    parts = {name.split(".")[1] for name in loaded if name.startswith("moectl.")}
    assert parts.isdisjoint({"cli", "explain", "doctor", "bench", "tuning", "parity", "peers", "synth"})
