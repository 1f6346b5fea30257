"""A layer's tensors on a device: the same bytes however many batches they are made in, and wherever."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moectl
from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.manifest.manifest import load_manifest
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.rank_slice import shard_of
from moectl.convert.stream.file_transfers import announce
from moectl.errors import NoBackend
from moectl.integrations.model_experts import open_experts
from moectl.layer import experts
from moectl.layer.experts import ExpertLayer
from moectl.layer.prepare import checkpoint_layer, converted_layer
from moectl.layer.rank_share import rank_share
from moectl.run.layer_variants import every_second, in_dtype
from moectl.synth import synthesize

SIZES = {"layers": 1, "experts": 6, "hidden": 256, "intermediate": 256, "top_k": 2}
MODELS = {
    "mxfp4, interleaved, biases": "openai/gpt-oss-20b",
    "int4, a tensor for each expert": "moonshotai/Kimi-K2-Thinking",
    "bf16": "Qwen/Qwen3-30B-A3B",
    "nvfp4, statistics of the layer": "nvidia/DeepSeek-R1-0528-FP4",
}
VARIANTS: Mapping[str, Callable[[ExpertLayer], ExpertLayer]] = {
    "whole": lambda layer: layer,
    "tp 2": lambda layer: rank_share(layer, shard_of(1, tp_size=2, ep_size=1)),
    "ep 2": lambda layer: rank_share(layer, shard_of(1, tp_size=1, ep_size=2)),
    "every second": lambda layer: every_second(layer)[0],
    "fp16": lambda layer: in_dtype(layer, "fp16"),
}
BACKENDS = ("moectl", "marlin", "torch")


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(request.param, tmp_path_factory.mktemp("loading") / "model", **SIZES)


def prepared(layer: ExpertLayer, device: str) -> dict[str, Tensor]:
    """All tensors of `layer` in the layouts that hold it, moved to the CPU."""
    found = {}
    for backend in BACKENDS:
        try:
            weights = layer.prepared(backend, device).weights
        except NoBackend:
            continue
        assert all(t.device.type == device for t in weights.values())
        found |= {f"{backend} {role}": t.cpu() for role, t in weights.items()}
    assert found
    return found


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    def equal(x: Tensor, y: Tensor) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and bytes_of(x) == bytes_of(y)

    return a.keys() == b.keys() and all(equal(t, b[role]) for role, t in a.items())


def bytes_of(t: Tensor) -> bytes:
    return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one or two experts."""
    monkeypatch.setattr(experts, "BATCH_BYTES", {"cpu": 250_000, "cuda": 250_000})


@pytest.mark.parametrize("variant", VARIANTS)
def test_batches_change_no_byte(
    folder: Path, variant: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    layer = VARIANTS[variant](checkpoint_layer(open_checkpoint(folder)))
    at_once = prepared(layer, "cpu")
    request.getfixturevalue("small_batches")
    assert len(list(layer._batches(torch.device("cpu")))) > 1
    assert same(prepared(layer, "cpu"), at_once)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpu_lays_out_the_same_bytes(folder: Path, variant: str) -> None:
    layer = VARIANTS[variant](checkpoint_layer(open_checkpoint(folder)))
    assert same(prepared(layer, "cuda"), prepared(layer, "cpu"))
    assert same(
        {role: t.cpu() for role, t in layer.canonical([2, 0], torch.device("cuda")).items()},
        layer.canonical([2, 0]),
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("small_batches")
def test_a_gpu_holds_what_a_converted_folder_does(tmp_path: Path) -> None:
    source = open_checkpoint(synthesize("openai/gpt-oss-20b", tmp_path / "model", **SIZES))
    layout = layout_for("moectl", source.groups[0].problem.scheme.weight)
    layer = converted_layer(load_manifest(convert(plan_conversion(source, layout), tmp_path / "out").folder))
    assert same(prepared(layer, "cuda"), prepared(layer, "cpu"))
    assert not layer.prepared("moectl", "cuda").relaid and layer.prepared("marlin", "cuda").relaid


@pytest.mark.gpu
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    source = open_checkpoint(synthesize("openai/gpt-oss-20b", tmp_path / "model", layers=1))
    layout = layout_for("moectl", source.groups[0].problem.scheme.weight)
    out = convert(plan_conversion(source, layout), tmp_path / "out", device="cuda").folder
    for layer, extra in ((checkpoint_layer(source), 256 << 20), (converted_layer(load_manifest(out)), 0)):
        stored = layer.stored if extra == 0 else lambda device: layer.prepared("moectl", device).weights  # noqa: B023
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weights = stored(torch.device("cuda"))
        torch.cuda.synchronize()
        block = 2 << 20  # the allocator rounds large tensors up to whole blocks
        held = sum(-(-t.nbytes // block) * block for t in weights.values())
        assert torch.cuda.max_memory_allocated() - before <= held + extra
        del weights


@pytest.mark.parametrize("converted", [False, True], ids=["published", "converted"])
def test_the_next_layers_pages_are_asked_for(
    converted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synthesize("moonshotai/Kimi-K2-Thinking", tmp_path / "model", **SIZES | {"layers": 2})
    checkpoint = open_checkpoint(folder)
    shard = shard_of(1, tp_size=1, ep_size=2)
    layers = sorted(checkpoint.groups[0].layers)
    assert layers == [1, 2]  # the model begins with a dense layer
    names = [name for name in checkpoint.tensors if re.search(r"layers\.2\..*experts\.[345]\.", name)]
    held = {(info.file, info.start, info.nbytes) for info in map(checkpoint.tensors.__getitem__, names)}
    if converted:
        moectl.convert(folder, tmp_path / "out", "moectl", ep_size=2)
        folder = tmp_path / "out"
        record = load_manifest(folder / "rank-01").layer(2)
        held = {(record.file, 0, record.size)}
    asked: list[tuple[str, int, int]] = []

    def advise(fd: int, offset: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            asked.append((Path(f"/proc/self/fd/{fd}").readlink().name, offset, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    model = open_experts(folder)
    for layer in layers:
        model.prepared(layer, torch.device("cpu"), "bf16", "torch", shard)
        announce(tmp_path, []).result()  # the thread has done all that it was given before
        assert set(asked) == held and len(asked) == len(held)


def test_what_cannot_be_asked_for_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(tmp_path, [("missing", 0, 10)]).result()
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    announce(tmp_path, [("missing", 0, 10)]).result()
