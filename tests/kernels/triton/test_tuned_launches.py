"""Launches that a user tuned: taken before the shipped ones, for their own layer and numbers of tokens."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from moectl.cache.cache_file import CacheWarning
from moectl.cache.launches_file import KIND, LaunchesStore, LaunchRow
from moectl.environment import find_device
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_table import near, tuned
from moectl.kernels.choice.portable_launches import Tile
from moectl.kernels.triton import triton_runner
from moectl.kernels.triton.expert_batches import CHOSEN_FOR
from moectl.kernels.triton.triton_runner import choose, choose_shipped, launch_on
from moectl.layer.experts import empty_layer
from moectl.problem.published_layers import MODELS

QWEN = MODELS["qwen3-30b"]
H200 = find_device("h200")
CUDA = torch.device("cuda")
OWN = Tile(16, 128, 64, stages=3, warps=4)


def _row(tokens: int, family: str = "grouped", tile: dict[str, int] | None = None) -> LaunchRow:
    return LaunchRow(tokens, family, asdict(OWN) if tile is None else tile, 30.0, 40.0, 1e-3, 3, 0, "now")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that it has an H200."""
    about = type("About", (), {"multi_processor_count": 132, "name": H200.name})()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: about)
    monkeypatch.setattr(triton_runner, "gpu_of", lambda device: H200)


@pytest.mark.parametrize(
    ("tokens", "own"), [(15, True), (16, True), (22, True), (23, False), (11, False), (1024, False)]
)
def test_a_row_holds_within_half_a_doubling(h200: None, tokens: int, own: bool) -> None:
    LaunchesStore.of(QWEN, H200).finish(_row(16))
    assert choose(QWEN, tokens, CUDA) == (
        Launch("grouped", OWN) if own else choose_shipped(QWEN, tokens, CUDA)
    )


def test_the_nearest_row_comes_first() -> None:
    store = LaunchesStore.of(QWEN, H200)
    for tokens in (16, 24):
        store.finish(_row(tokens, tile=asdict(OWN) | {"stages": tokens}))
    assert [row.tile["stages"] for row in near(tuned(QWEN, H200), 21)] == [24, 16]
    assert [row.tile["stages"] for row in near(tuned(QWEN, H200), 17)] == [16, 24]


def test_a_layer_without_weights_looks_up_once_what_others_look_up_for_each_number(
    h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layer = LaunchesStore.of(QWEN, H200), empty_layer(QWEN, "moectl")
    store.finish(_row(16))
    asked = []
    monkeypatch.setattr(triton_runner, "tuned", lambda *of: asked.append(of) or tuned(*of))
    layer.derived[CHOSEN_FOR] = CUDA
    launches = [launch_on(layer, tokens) for tokens in range(1, 40)]
    assert len(asked) == 1
    assert launches == [choose(QWEN, tokens, CUDA) for tokens in range(1, 40)]
    assert len(asked) == 40 and launches.count(Launch("grouped", OWN)) == 11


@pytest.mark.parametrize(
    "row",
    [
        _row(16, "of the future"),
        _row(16, tile={"tokens": 16}),
        _row(16, tile=asdict(OWN) | {"more": 1}),
        _row(16, tile=asdict(OWN) | {"rows": 8}),
    ],
    ids=["family", "fields missing", "fields unknown", "not legal"],
)
def test_a_row_that_cannot_be_launched_is_passed_over(h200: None, row: LaunchRow) -> None:
    LaunchesStore.of(QWEN, H200).finish(row)
    assert choose(QWEN, 16, CUDA) == choose_shipped(QWEN, 16, CUDA)


def test_a_damaged_file_is_a_warning_and_no_failure(h200: None) -> None:
    path = KIND.path(H200)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.warns(CacheWarning, match="is damaged and begun anew"):
        assert choose(QWEN, 16, CUDA) == choose_shipped(QWEN, 16, CUDA)


def test_without_a_cache_nothing_is_read_or_said(h200: None, user_cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(QWEN, 16, CUDA) == choose_shipped(QWEN, 16, CUDA)
    assert not user_cache.exists()
