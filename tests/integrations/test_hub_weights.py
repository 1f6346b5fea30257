"""A model's experts from the Hub: headers while an engine is configured, weights when it loads them.

In processes of their own: the Hub's client reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moectl.integrations.model_experts import open_experts
from support import python_forks
from support.hub_server import COMMIT, Hub, serve

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, pickle, sys
import torch
from moectl.errors import MoectlError
from moectl.integrations.model_experts import open_experts

revision, cache, load = json.loads(sys.argv[1])
try:
    experts = open_experts("org/tiny", revision=revision, offline=False, download=True)
    # As engines hand it to their workers.
    experts = pickle.loads(pickle.dumps(experts)).in_cache(cache)
    random = experts.at_random.prepared(0, torch.device("cpu"), "bf16", "torch")
    found = {"layers": sorted(experts.layers), "names": list(experts.expert_names)}
    if load:
        weights = experts.prepared(1, torch.device("cpu"), "bf16", "torch").weights
        found["sums"] = {role: int(t.view(torch.uint8).sum(dtype=torch.int64)) for role, t in weights.items()}
except MoectlError as error:
    found = {"error": str(error)}
print(json.dumps(found))
"""


@pytest.fixture
def hub(tiny_gpt_oss: Path) -> Iterator[Hub]:
    with serve(tiny_gpt_oss) as running:
        yield running


class Engine:
    """Opens and loads the model as an engine does."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self.home, self.endpoint = home, endpoint

    def __call__(
        self, revision: str | None = None, cache: Path | None = None, load: bool = True, **environment: str
    ) -> dict[str, Any]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        settings = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.endpoint, "PYTHONPATH": str(ROOT)}
        asked = json.dumps([revision, None if cache is None else str(cache), load])
        done = python_forks.run(["-c", SCRIPT, asked], env={**kept, **settings, **environment})
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def weights(self, folder: Path | None = None) -> list[Path]:
        """The weight files in the Hub's cache, or in another."""
        return sorted((folder or self.home / "hub").glob("models--org--tiny/snapshots/*/*.safetensors"))


@pytest.fixture
def engine(hub: Hub, tmp_path: Path) -> Engine:
    return Engine(tmp_path / "home", hub.url)


def sums_of(folder: Path) -> dict[str, int]:
    import torch

    weights = open_experts(folder).prepared(1, torch.device("cpu"), "bf16", "torch").weights
    return {role: int(t.view(torch.uint8).sum(dtype=torch.int64)) for role, t in weights.items()}


def test_headers_are_enough_until_weights_are_read(tiny_gpt_oss: Path, hub: Hub, engine: Engine) -> None:
    found = engine(load=False)
    assert found == {"layers": [0, 1], "names": list(open_experts(tiny_gpt_oss).expert_names)}
    assert not engine.weights()
    assert all(r[2] for r in hub.requests if r[1].endswith(".safetensors")), "only ranges of weight files"
    assert engine()["sums"] == sums_of(tiny_gpt_oss)
    assert {path.parent.name for path in engine.weights()} == {COMMIT}
    # From then on nothing is asked of the Hub.
    asked = len(hub.requests)
    assert engine()["sums"] == sums_of(tiny_gpt_oss) and len(hub.requests) == asked


def test_weights_go_where_the_engine_downloads_to(tiny_gpt_oss: Path, engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    assert engine("v1", folder)["sums"] == sums_of(tiny_gpt_oss)
    assert engine.weights(folder) and not engine.weights()
    # Headers and weights are on this machine now.
    assert engine("v1", folder, HF_HUB_OFFLINE="1")["sums"] == sums_of(tiny_gpt_oss)


def test_without_the_network_what_is_missing_is_said(engine: Engine, tmp_path: Path) -> None:
    assert "org/tiny is not in the Hub cache, and the network is off" in engine(HF_HUB_OFFLINE="1")["error"]
    engine(load=False)
    said = engine(cache=tmp_path / "downloads", HF_HUB_OFFLINE="1")["error"]
    assert "the Hub cannot be reached for org/tiny" in said
    assert "the Hub has no revision v2 of org/tiny" in engine("v2")["error"]


def test_a_directory_has_no_revision(tiny_gpt_oss: Path) -> None:
    """Engines pass on ``--revision`` with every name."""
    assert open_experts(tiny_gpt_oss, revision="main").layers == {0, 1}
