"""What a process without the GPU compiled is all that a layer launches on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moectl.kernels.triton.layer_binaries import counting
from moectl.kernels.triton.triton_runner import RUNNER
from moectl.layer import background_compile
from moectl.problem.moe_problem import Dims
from support.random_layers import GPT_OSS, canonical_roles, inputs_of, layer_of

pytestmark = pytest.mark.gpu

# Sizes that no other test has, for Triton keeps what this process has launched before.
PROBLEM = replace(GPT_OSS, dims=Dims(1472, 1344), experts=24, local_experts=24)


def test_no_launch_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("MOECTL_CACHE", str(tmp_path / "moectl"))
    cuda = torch.device("cuda", torch.cuda.current_device())
    load = background_compile.start(PROBLEM, "moectl", cuda, tokens=300)
    assert load is not None
    layer = layer_of(PROBLEM, canonical_roles(PROBLEM)).prepared("moectl", cuda)
    said = load.ready(layer)
    assert load.result is not None and not load.result.failed and ", 0 compiled in " in said
    with counting() as count:
        for tokens in range(1, 301):
            inputs = inputs_of(PROBLEM, tokens, device="cuda")
            RUNNER.compute(layer, inputs.x, inputs.ids, inputs.weights)
        torch.cuda.synchronize()
    assert (count.compiled, count.cached) == (0, 0)
