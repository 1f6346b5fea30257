"""A layer from a checkpoint and from a converted folder, in every layout that holds it."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.checkpoint import Checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import LAYOUTS, layout_named
from moectl.convert.layouts.weight_layout import WeightLayout
from moectl.convert.manifest.manifest import load_manifest
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.errors import CheckpointError, Unavailable, UsageError
from moectl.kernels.prepared_layer import CANONICAL, PreparedMoE
from moectl.kernels.reference import route
from moectl.kernels.registry import runner_for
from moectl.kernels.routing import route_by
from moectl.layer.prepare import (
    _all_finite,
    checkpoint_layer,
    converted_layer,
    load_prepared,
    prepare,
    read_router,
)
from moectl.problem.schemes import MXFP4, WeightFormat, int_format
from moectl.run.workload import workload_of
from moectl.synth import synthesize
from support.random_layers import inputs_of, judged
from support.runners import apply

CHECKPOINTS = ("tiny_gpt_oss", "tiny_kimi")


def opened(request: pytest.FixtureRequest, name: str) -> Checkpoint:
    return open_checkpoint(request.getfixturevalue(name))


def raw_tensor(folder: Path, name: str) -> bytes:
    """The bytes of a tensor, found without any of the code under test."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        if name in header:
            start, end = header[name]["data_offsets"]
            return data[8 + length + start : 8 + length + end]
    raise AssertionError(name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_layer_runs_and_is_right(request: pytest.FixtureRequest, name: str) -> None:
    checkpoint = opened(request, name)
    layer = checkpoint_layer(checkpoint)
    prepared = prepare(checkpoint, None, "torch")
    assert prepared.layout == CANONICAL and prepared.relaid == "" and prepared.nbytes > 0
    inputs = inputs_of(layer.problem, 9)
    y = apply(runner_for("torch"), prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok


def test_canonical_bytes_are_the_checkpoints_own(tiny_gpt_oss: Path, tiny_kimi: Path) -> None:
    layer = checkpoint_layer(open_checkpoint(tiny_gpt_oss), 1)
    blocks = raw_tensor(tiny_gpt_oss, "model.layers.1.mlp.experts.gate_up_proj_blocks")
    each = len(blocks) // layer.problem.experts
    w13 = layer.canonical([6, 2])["w13"]
    assert w13[0].numpy().tobytes() == blocks[6 * each : 7 * each]
    assert w13[1].numpy().tobytes() == blocks[2 * each : 3 * each]
    layer = checkpoint_layer(open_checkpoint(tiny_kimi), 2)
    stem = "model.layers.2.mlp.experts.5"
    gate, up = (raw_tensor(tiny_kimi, f"{stem}.{part}_proj.weight_packed") for part in ("gate", "up"))
    assert layer.canonical([5])["w13"].numpy().tobytes() == gate + up


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_router_comes_with_the_layer(request: pytest.FixtureRequest, name: str) -> None:
    layer = checkpoint_layer(opened(request, name))
    router = layer.router
    assert router is not None
    assert (router.bias is not None) == layer.problem.routing.router_bias
    assert (router.correction_bias is not None) == layer.problem.routing.correction_bias
    x = inputs_of(layer.problem, 5).x
    ids, weights = route(router.logits(x), layer.problem, router.correction_bias)
    assert ids.shape == weights.shape == (5, layer.problem.top_k)


def test_a_router_that_looks_experts_up(tmp_path: Path) -> None:
    folder = synthesize("deepseek-ai/DeepSeek-V4-Flash", tmp_path / "v4", layers=4, experts=8, hidden=256,
                        intermediate=128)  # fmt: skip
    checkpoint = open_checkpoint(folder)
    layer = checkpoint_layer(checkpoint, 1)
    assert layer.problem.routing.hashed and layer.router is not None and layer.router.table is not None
    tokens = torch.tensor([3, 0, 200])
    x = inputs_of(layer.problem, 3).x
    ids, _, _ = route_by(layer.router, x, layer.problem, tokens)
    assert torch.equal(ids.long(), layer.router.table[tokens])
    with pytest.raises(UsageError, match="needs token ids"):
        route_by(layer.router, x, layer.problem)
    assert workload_of(layer, 3).routed_by == "router"
    chosen = checkpoint_layer(checkpoint, 3)
    assert chosen.router is not None and chosen.router.table is None
    assert route_by(chosen.router, x, chosen.problem)[0].shape == (3, 6)
    damaged = dict(checkpoint.tensors)
    names = {"weight": "layers.1.ffn.gate.weight", "hash": "layers.1.ffn.gate.tid2eid"}
    table = damaged[names["hash"]]
    damaged[names["hash"]] = replace(table, start=table.start - 1, end=table.end - 1)
    with pytest.raises(CheckpointError, match="must hold ids of 8 experts"):
        read_router(folder, damaged, names)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_router_that_is_not_finite_is_a_damaged_checkpoint(
    tiny_gpt_oss: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_gpt_oss, folder)
    named = f"model.layers.0.mlp.router.{name}"
    info = open_checkpoint(folder).tensors[named]
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start)
        file.write(b"\xc0\x7f")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"tensor {named} has numbers that are not finite"):
        checkpoint_layer(checkpoint, 0)
    assert checkpoint_layer(checkpoint, 1).router is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    finite = torch.tensor([0.0, -0.0, 1.5, largest, -largest, torch.finfo(dtype).tiny / 4], dtype=dtype)
    assert _all_finite(finite)
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        assert not _all_finite(torch.cat([finite, torch.tensor([bad], dtype=dtype)]))


def test_a_router_with_factors_on_both_sides(tmp_path: Path) -> None:
    folder = synthesize(
        "google/gemma-4-26B-A4B", tmp_path / "g", layers=1, experts=8, hidden=128, intermediate=64
    )
    layer = checkpoint_layer(open_checkpoint(folder))
    router, x = layer.router, 7 * inputs_of(layer.problem, 5).x.float()
    assert router is not None and router.expert_scale is not None and router.input_scale is not None
    scaled = replace(router, input_scale=router.input_scale * 3)
    unit = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    torch.testing.assert_close(scaled.logits(x), 3 * unit @ router.weight.float().T)
    ids, weights, _ = route_by(router, x, layer.problem)
    factors = router.expert_scale.float()[ids.long()]
    torch.testing.assert_close((weights / factors).sum(1), torch.ones(5))
    assert workload_of(layer, 3).routed_by == "router"


@pytest.fixture(scope="module")
def wide_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi checkpoint whose sizes every int4 layout can hold."""
    folder = tmp_path_factory.mktemp("checkpoints") / "wide-kimi"
    sizes = {"layers": 1, "experts": 4, "hidden": 256, "intermediate": 256, "top_k": 2}
    return synthesize("moonshotai/Kimi-K2-Thinking", folder, **sizes)


@pytest.fixture(scope="module")
def kimi_without_lowest_codes(wide_kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without codes of -8, which sign and magnitude lack."""
    folder = tmp_path_factory.mktemp("checkpoints") / "kimi"
    shutil.copytree(wide_kimi, folder)
    for name, info in open_checkpoint(folder).tensors.items():
        if name.endswith(".weight_packed"):
            codes = np.memmap(folder / info.file, np.uint8, "r+", info.start, (info.nbytes,))
            codes[codes & 0x0F == 0] += 0x01
            codes[codes & 0xF0 == 0] += 0x10
            codes.flush()
    return folder


@pytest.fixture(scope="module")
def wide_gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss checkpoint whose sizes every MXFP4 layout can hold."""
    folder = tmp_path_factory.mktemp("checkpoints") / "wide-gpt-oss"
    sizes = {"layers": 1, "experts": 4, "hidden": 256, "intermediate": 256, "top_k": 2}
    return synthesize("openai/gpt-oss-20b", folder, **sizes)


def checkpoint_for(layout: WeightLayout, weight: WeightFormat) -> str:
    """The fixture whose experts `layout` can hold."""
    if weight == MXFP4:
        return "wide_gpt_oss" if "-act-fp8" in layout.name else "tiny_gpt_oss"
    return "kimi_without_lowest_codes" if "-e0m" in layout.name else "wide_kimi"


HELD = [
    (checkpoint_for(layout, weight), layout.name)
    for weight in (MXFP4, int_format(4, 32))
    for layout in LAYOUTS
    if weight in layout.weights and (layout.bias or weight != MXFP4)
]


def test_every_layout_of_both_formats_is_tested() -> None:
    assert len(HELD) >= 7 and {"moectl-mtile64", "marlin-int4"} <= {layout for _, layout in HELD}


@pytest.fixture(scope="module")
def directly(request: pytest.FixtureRequest) -> Callable[[str], PreparedMoE]:
    """A checkpoint's first layer as moectl's own kernels have it, made once."""
    return cache(lambda name: prepare(opened(request, name), None, "moectl"))


@pytest.mark.parametrize(
    ("name", "layout"),
    # Each layout by default with the first format that it holds.
    [
        pytest.param(name, layout, marks=pytest.mark.slow if (held[0], layout) != (name, layout) else ())
        for name, layout in HELD
        for held in [[other for other, it in HELD if it == layout]]
    ],
)
def test_every_layout_runs_from_its_converted_folder(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    directly: Callable[[str], PreparedMoE],
    name: str,
    layout: str,
) -> None:
    checkpoint = opened(request, name)
    plain = checkpoint_layer(checkpoint)
    out = tmp_path / "out"
    convert(plan_conversion(checkpoint, layout_named(layout)), out)
    prepared = load_prepared(out, plain.layer, "torch")
    assert prepared.layout == layout and prepared.relaid == ""
    inputs = inputs_of(plain.problem, 5)
    y = apply(runner_for("torch"), prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(plain, prepared, y, inputs).ok
    relaid = load_prepared(out, plain.layer, "moectl")
    assert relaid.relaid == ("" if layout == "moectl-mtile64" else f"{layout} -> moectl-mtile64")
    assert all(torch.equal(relaid.weights[role], t) for role, t in directly(name).weights.items())
    converted = converted_layer(load_manifest(out), plain.layer)
    assert torch.equal(converted.reference(3).w13, plain.reference(3).w13)
    assert converted.router is not None and plain.router is not None
    assert torch.equal(converted.router.weight, plain.router.weight)


@pytest.mark.parametrize("layout", ["moectl-mtile64", "marlin-nvfp4", "humming-nvfp4"])
def test_scales_of_activations_that_a_layouts_kernels_need_not_are_still_the_layers(
    tmp_path: Path, layout: str
) -> None:
    source = tmp_path / "source"
    name = "nvidia/Qwen3-30B-A3B-NVFP4"
    synthesize(name, source, layers=1, experts=4, hidden=128, intermediate=128, top_k=2)
    checkpoint = open_checkpoint(source)
    convert(plan_conversion(checkpoint, layout_named(layout)), tmp_path / "out")
    stored, runner = checkpoint_layer(checkpoint).prepared("emulation", "cpu"), runner_for("emulation")
    converted = load_prepared(tmp_path / "out", backend="emulation")
    assert converted.layout == layout and not converted.weights.keys() & {"w13_input", "w2_input"}
    inputs = inputs_of(stored.problem, 5)
    assert torch.equal(
        *(apply(runner, layer, inputs.x, inputs.ids, inputs.weights) for layer in (stored, converted))
    )


def test_layers_that_are_not_there_are_refused(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gpt_oss)
    with pytest.raises(UsageError, match="layer 7 has no experts; MoE layers are 0 to 1"):
        checkpoint_layer(checkpoint, 7)
    with pytest.raises(UsageError, match="'fast' cannot be run"):
        prepare(checkpoint, 0, "fast")
    out = tmp_path / "out"
    convert(plan_conversion(checkpoint, layout_named("moectl-mtile64")), out)
    with pytest.raises(CheckpointError, match="no layer 7"):
        load_prepared(out, 7, "torch")
    (out / "READY").unlink()
    with pytest.raises(CheckpointError, match="READY"):
        load_prepared(out, 0, "torch")


def test_weights_that_are_elsewhere_are_unavailable() -> None:
    with pytest.raises(Unavailable, match="not on this machine"):
        checkpoint_layer(open_checkpoint("openai/gpt-oss-20b", offline=True))


def test_experts_alone_have_no_router(tiny_kimi: Path, tmp_path: Path) -> None:
    layout = layout_named("moectl-mtile64")
    out = tmp_path / "out"
    convert(plan_conversion(open_checkpoint(tiny_kimi), layout, experts_only=True), out)
    assert converted_layer(load_manifest(out)).router is None


def test_a_scale_that_is_no_number_is_refused(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(tiny_gpt_oss, folder)
    layer = checkpoint_layer(open_checkpoint(folder))
    info = open_checkpoint(folder).tensors["model.layers.0.mlp.experts.down_proj_scales"]
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="E8M0 byte 255"):
        layer.prepared("torch", "cpu")
