"""Layers that are read ahead: the right tensors, begun in time, given up when they are not wanted."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moectl
from moectl.convert.stream import file_transfers, tensor_reading
from moectl.errors import CheckpointError
from moectl.integrations.model_experts import ModelExperts, open_experts
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.layer import layers_ahead
from moectl.layer.prepare import ConvertedTensors, begin_layer
from moectl.synth import synthesize

CPU = torch.device("cpu")
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ahead")
    sizes = {"layers": LAYERS, "experts": 4, "hidden": 128, "intermediate": 128, "top_k": 2}
    synthesize("openai/gpt-oss-20b", base / "model", **sizes)
    moectl.convert(base / "model", base / "out", "moectl")
    return base / "out"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is begun, finished and stopped. The CPU reads as a GPU does, through buffers and by threads."""
    said: list[str] = []
    monkeypatch.setattr(
        ConvertedTensors,
        "begin",
        lambda self, device: (
            said.append(f"begin {self.number}") or begin_layer(self.manifest, self.locations, device)
        ),
    )
    for name in ("finish", "stop"):
        real = getattr(file_transfers.Filling, name)

        def call(self: file_transfers.Filling, name: str = name, real: object = real) -> None:
            said.append(name)
            real(self)  # type: ignore[operator]

        monkeypatch.setattr(file_transfers.Filling, name, call)
    yield said


def ask(model: ModelExperts, layer: int, dtype: str = "bf16", backend: str = "torch") -> PreparedMoE:
    return model.prepared(layer, CPU, dtype, backend)


def expecting(folder: Path, *layers: int) -> ModelExperts:
    model = open_experts(folder)
    for layer in layers:
        model.expect(layer, CPU, "bf16", "torch")
    return model


def same(prepared: PreparedMoE, folder: Path, layer: int) -> bool:
    plain: dict[str, Tensor] = dict(ask(open_experts(folder), layer).weights)
    return prepared.weights.keys() == plain.keys() and all(
        torch.equal(t.view(torch.uint8), plain[role].view(torch.uint8))
        for role, t in prepared.weights.items()
    )


def test_expected_layers_are_begun_at_once_and_in_order(folder: Path, events: list[str]) -> None:
    model = expecting(folder, *range(LAYERS))
    assert events == ["begin 0", "begin 1", "begin 2", "begin 3"]
    layers = [ask(model, layer) for layer in range(LAYERS)]
    assert events[4:] == 4 * ["finish"] and not model._ahead._begun
    assert all(same(prepared, folder, layer) for layer, prepared in enumerate(layers))


def test_a_layer_is_begun_once(folder: Path, events: list[str]) -> None:
    model = expecting(folder, 1, 1)
    assert events == ["begin 1"]
    assert same(ask(model, 1), folder, 1)
    # Again, as for new weights: nothing is allocated ahead.
    assert same(ask(model, 1), folder, 1) and events == ["begin 1", "finish"]


def test_what_was_not_announced_begins_nothing(folder: Path, events: list[str]) -> None:
    assert same(ask(open_experts(folder), 1), folder, 1) and not events


def test_random_layers_are_not_read(folder: Path, events: list[str]) -> None:
    model = open_experts(folder).at_random
    model.expect(0, CPU, "bf16", "torch")
    assert not events and ask(model, 0).weights


def test_layers_out_of_turn_are_right_and_waste_none(folder: Path, events: list[str]) -> None:
    model = expecting(folder, *range(LAYERS))
    for layer in (2, 0, 0, 3, 1):
        assert same(ask(model, layer), folder, layer)
    assert "stop" not in events and events.count("finish") == LAYERS and not model._ahead._begun


def test_a_layer_in_another_dtype_is_not_the_one_that_was_begun(folder: Path, events: list[str]) -> None:
    model = expecting(folder, 0, 1)
    assert ask(model, 1, "fp16").problem.dtype == "fp16" and events[-1] == "stop"
    assert same(ask(model, 1), folder, 1) and same(ask(model, 0), folder, 0)
    assert events[-1] == "finish"


def test_a_layer_that_is_laid_out_anew_is_not_begun(folder: Path, events: list[str]) -> None:
    model = open_experts(folder)
    for layer in (0, 1):
        model.expect(layer, CPU, "fp16", "torch")
    ask(model, 0, "fp16")
    assert not events
    layer = open_experts(folder).source.layer(0)
    assert layer.is_read_as_stored("moectl") and not layer.is_read_as_stored("marlin")


def test_errors_belong_to_the_layer_that_has_them(
    folder: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = file_transfers.read_exactly

    def fails(fd: int, view: memoryview, offset: int, name: str) -> None:
        if "00001" in name or name.endswith("1.safetensors"):
            raise CheckpointError(f"{name} is truncated")
        read(fd, view, offset, name)

    monkeypatch.setattr(file_transfers, "read_exactly", fails)
    model = expecting(folder, 0, 1, 2)
    assert ask(model, 0).weights
    with pytest.raises(CheckpointError, match="is truncated"):
        ask(model, 1)
    assert same(ask(model, 2), folder, 2)


def test_what_cannot_be_opened_is_told_when_it_is_asked_for(folder: Path, events: list[str]) -> None:
    model = expecting(folder, 0, 99)
    assert events == ["begin 0"] and same(ask(model, 0), folder, 0)
    with pytest.raises((CheckpointError, KeyError)):
        ask(model, 99)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "forgotten"])
def test_what_was_begun_is_let_go(
    folder: Path, events: list[str], closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[tensor_reading.TensorReading] = []
    real = layers_ahead.BegunTensors.__init__
    monkeypatch.setattr(
        layers_ahead.BegunTensors,
        "__init__",
        lambda self, reading, *more: readings.append(reading) or real(self, reading, *more),
    )
    model = expecting(folder, 0, 1)
    prepared = ask(model, 0)
    if closed:
        model._ahead.close()
        assert readings[1]._tensors == {} and readings[1]._reader._open == {}
    readings.clear()
    del model
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "stop reading":
            thread.join()
    assert events[-1] == "stop" and same(prepared, folder, 0)
