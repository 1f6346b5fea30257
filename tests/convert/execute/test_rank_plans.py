"""Ranks' folders: each as if the checkpoint had its slice alone, and together the whole checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moectl
from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.open_checkpoint import rank_folder
from moectl.convert.execute.convert import ConversionSummary, convert
from moectl.convert.execute.rank_plans import check_outputs, convert_ranks, plan_ranks
from moectl.convert.layouts.registry import layout_for
from moectl.convert.manifest.manifest import load_manifest
from moectl.convert.plan.kernel_layout_plan import plan_conversion, shared_passthrough
from moectl.convert.rank_slice import shard_of
from moectl.convert.restore.unconvert import unconvert
from moectl.convert.restore.verify import verify
from moectl.errors import CheckpointError, UsageError
from moectl.kernels.layer_inputs import make_inputs
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import runner_for
from moectl.layer.prepare import checkpoint_layer, load_prepared
from moectl.problem.schemes import A16
from moectl.synth import synthesize
from support.converted_folders import edit_rank
from support.runners import apply
from support.sampling import every_nth
from support.stream_checkpoints import (
    all_tensors,
    folder_bytes,
    gpt_oss_checkpoint,
    kimi_checkpoint,
    same_tensors,
)

ROOT = Path(__file__).resolve().parents[3]
MAKE: dict[str, Callable[..., Path]] = {"gpt_oss": gpt_oss_checkpoint, "kimi": kimi_checkpoint}


def shard_all(
    source: Path, out: Path, tp: int = 1, ep: int = 1, target: str = "marlin", **options: Any
) -> list[ConversionSummary]:
    """Every rank of `source` converted into `out`."""
    checkpoint = open_checkpoint(source)
    layout = layout_for(target, checkpoint.groups[0].problem.scheme.weight)
    plans = plan_ranks(out, tp, ep, None, lambda s: plan_conversion(checkpoint, layout, shard=s, **options))
    check_outputs(source, out, plans, resume=False)
    return convert_ranks(plans, lambda item, progress: convert(item.plan, item.folder, progress=progress))


def layers_of(folder: Path) -> dict[str, Tensor]:
    """The converted tensors of a folder."""
    return {key: t for path in sorted(folder.glob("moectl-layer-*")) for key, t in load_file(path).items()}


def gpt_oss_slice(t: Tensor, name: str, low: int, high: int, size: int, first: bool) -> Tensor:
    """A gpt-oss tensor of lanes `low` to `high`, with zeros up to `size` lanes."""
    if "gate_up" in name:
        made = t.new_zeros(len(t), 2 * size, *t.shape[2:])
        made[:, : 2 * (high - low)] = t[:, 2 * low : 2 * high]
        return made
    if name.endswith("_bias"):
        return t if first else torch.zeros_like(t)
    made = t.new_zeros(*t.shape[:2], size // 32, *t.shape[3:])
    made[:, :, : (high - low) // 32] = t[:, :, low // 32 : high // 32]
    return made


def kimi_slice(t: Tensor, name: str, low: int, high: int, size: int, first: bool) -> Tensor:
    """A pack-quantized tensor of lanes `low` to `high`; sizes divide."""
    assert high - low == size
    down = ".down_proj." in name
    if name.endswith("weight_shape"):
        return torch.tensor([t[0], size] if down else [size, t[1]], dtype=t.dtype)
    if not down:
        return t[low:high].contiguous()
    unit = 8 if name.endswith("weight_packed") else 32
    return t[:, low // unit : high // unit].contiguous()


SLICES = {
    "gpt_oss": (gpt_oss_slice, "intermediate_size", "num_local_experts"),
    "kimi": (kimi_slice, "moe_intermediate_size", "n_routed_experts"),
}


def sliced_checkpoint(kind: str, source: Path, folder: Path, low: int, high: int, size: int) -> Path:
    """The checkpoint of `source` with lanes `low` to `high` of every expert alone, of `size` lanes."""
    take, key, _ = SLICES[kind]
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        for name, t in tensors.items():
            if ".mlp.experts." in name:
                tensors[name] = take(t, name, low, high, size, low == 0)
        save_file(tensors, folder / path.name, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config[key] = size
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("target", ["marlin", "moectl"])
@pytest.mark.parametrize(
    ("kind", "inter", "ranges"),
    [
        ("gpt_oss", 64, [(0, 32), (32, 64)]),
        ("gpt_oss", 160, [(0, 64), (64, 128), (128, 160)]),
        ("kimi", 64, [(0, 32), (32, 64)]),
    ],
)
def test_a_rank_is_the_conversion_of_its_slice(
    kind: str, inter: int, ranges: list[tuple[int, int]], target: str, tmp_path: Path
) -> None:
    """The last rank of gpt-oss, which has less, is that of a slice filled up with zeros."""
    source = MAKE[kind](tmp_path / "source", **{SLICES[kind][1]: inter})
    shard_all(source, tmp_path / "out", tp=len(ranges), target=target)
    size = ranges[0][1]
    for rank, (low, high) in enumerate(ranges):
        alone = sliced_checkpoint(kind, source, tmp_path / f"slice{rank}", low, high, size)
        shard_all(alone, tmp_path / f"alone{rank}", target=target)
        mine, wanted = layers_of(rank_folder(tmp_path / "out", rank)), layers_of(tmp_path / f"alone{rank}")
        kept = {name for name in wanted if name.endswith("_shape")}
        assert mine.keys() == wanted.keys()
        assert same_tensors(
            {name: t for name, t in mine.items() if name not in kept},
            {name: t for name, t in wanted.items() if name not in kept},
        )


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 3), (2, 2)])
def test_all_ranks_are_the_source(kind: str, tp: int, ep: int, tmp_path: Path) -> None:
    source, out, back = MAKE[kind](tmp_path / "source"), tmp_path / "out", tmp_path / "back"
    summaries = shard_all(source, out, tp, ep)
    assert [summary.folder for summary in summaries] == [rank_folder(out, rank) for rank in range(tp * ep)]
    report = verify(out, source)
    assert report.ok, report.findings
    assert report.compared
    experts = [name for name in all_tensors(source) if ".mlp.experts." in name]
    fused = ep if kind == "gpt_oss" else 1
    assert report.tensors == len(experts) * fused
    done = unconvert(out, back)
    assert same_tensors(all_tensors(source), all_tensors(back))
    assert folder_bytes(source).keys() == folder_bytes(back).keys()
    assert done.tensors == len(all_tensors(source)) - (2 if kind == "gpt_oss" else 0)
    for rank in range(tp * ep):
        assert verify(rank_folder(out, rank)).ok


def test_a_rank_reads_its_own_experts_alone(gpt_oss: Path) -> None:
    checkpoint = open_checkpoint(gpt_oss)
    layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight)
    plans = [plan_conversion(checkpoint, layout, shard=shard_of(rank, 1, 2)) for rank in range(2)]
    whole = plan_conversion(checkpoint, layout)
    assert [plan.bytes_in * 5 for plan in plans] == [whole.bytes_in * 3, whole.bytes_in * 2]
    # Tensors of other ranks' experts are not taken for something else.
    assert [shared_passthrough(plan) for plan in plans] == [whole.passthrough, whole.passthrough]
    assert [plan.passthrough for plan in plans] == [(), ()]


def test_a_rank_of_per_expert_tensors_leaves_the_others_out(kimi: Path, tmp_path: Path) -> None:
    shard_all(kimi, tmp_path / "out", ep=2)
    for rank in range(2):
        names = all_tensors(rank_folder(tmp_path / "out", rank))
        assert not [name for name in names if ".experts.0." in name or name.endswith("weight_packed")]


@pytest.mark.parametrize(
    ("model", "tp", "ep", "target"),
    every_nth(
        [
            (model, *sizes, target)
            for sizes in ((2, 2), (1, 3), (2, 1))
            for model in ("tiny_gpt_oss", "tiny_kimi")
            for target in ("marlin", "moectl")
        ],
        3,
    ),
)
def test_partial_sums_add_up(
    model: str, tp: int, ep: int, target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(model)
    shard_all(source, tmp_path / "out", tp, ep, target)
    whole = checkpoint_layer(open_checkpoint(source), 1)
    inputs = make_inputs(whole.problem, 6, seed=3)
    wanted = moe_reference(
        inputs.x, inputs.ids, inputs.weights, whole.reference, whole.problem, dtype=torch.float64
    )
    total = torch.zeros_like(wanted)
    for rank in range(tp * ep):
        layer = load_prepared(tmp_path / "out", 1, "torch", rank=rank)
        ids = layer.local_ids(inputs.ids)
        assert layer.relaid == ""
        assert layer.problem.dims.intermediate == whole.problem.dims.intermediate // tp
        total += moe_reference(
            inputs.x, ids, inputs.weights, layer.expert, layer.problem, dtype=torch.float64
        )
    assert 0.1 < wanted.abs().max() < 100
    assert (total - wanted).abs().max() < 1e-9


UNEQUAL = {
    "mxfp4": ("openai/gpt-oss-20b", 192, (64, 64, 32, 32)),
    "int4": ("moonshotai/Kimi-K2-Thinking", 128, (64, 32, 32)),
    "fp8-block": ("Qwen/Qwen3-30B-A3B-FP8", 384, (256, 128)),
    "nvfp4": ("nvidia/Qwen3-30B-A3B-NVFP4", 80, (48, 32)),
}
"""Model, intermediate size, and channels of each rank, where engines' slices would be no whole blocks."""


@pytest.mark.parametrize("name", UNEQUAL)
def test_ranks_hold_whole_blocks_where_equal_slices_do_not(name: str, tmp_path: Path) -> None:
    model, intermediate, channels = UNEQUAL[name]
    sizes = {"layers": 1, "experts": 4, "top_k": 2, "hidden": 256, "intermediate": intermediate}
    source = synthesize(model, tmp_path / "source", **sizes)
    ranks, out, back = len(channels), tmp_path / "out", tmp_path / "back"
    with pytest.raises(
        UsageError, match=f"engines cut intermediate size {intermediate} for {ranks}"
    ) as refused:
        shard_all(source, out, ranks, target="marlin")
    assert "--to moectl, whose ranks may hold unequal slices" in refused.value.hint
    assert not out.exists()
    shard_all(source, out, ranks, target="moectl")
    number = open_checkpoint(source).groups[0].layers[0]
    whole = checkpoint_layer(open_checkpoint(source), number)
    inputs = make_inputs(whole.problem, 5, seed=4)
    exact = {"dtype": torch.float64}
    wanted = moe_reference(inputs.x, inputs.ids, inputs.weights, whole.reference, whole.problem, **exact)
    total = torch.zeros_like(wanted)
    held = []
    for rank in range(ranks):
        layer = load_prepared(out, number, "torch", rank=rank)
        held.append(layer.problem.dims.intermediate)
        if whole.problem.scheme.act == A16:  # otherwise ranks round the products of their channels alone
            total += moe_reference(inputs.x, inputs.ids, inputs.weights, layer.expert, layer.problem, **exact)
    assert tuple(held) == channels
    assert whole.problem.scheme.act != A16 or (total - wanted).abs().max() < 1e-9 < wanted.abs().max()
    assert verify(out, source).ok
    unconvert(out, back)
    assert same_tensors(all_tensors(source), all_tensors(back))


def test_more_ranks_than_blocks_are_refused(tmp_path: Path) -> None:
    source = synthesize("openai/gpt-oss-20b", tmp_path / "source", layers=1, experts=4, intermediate=96)
    with pytest.raises(UsageError, match="96 has 3 blocks of 32 weights, fewer than 4 tensor-parallel ranks"):
        shard_all(source, tmp_path / "out", 4, target="moectl")


def test_the_torch_backend_runs_a_share(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    shard_all(tiny_gpt_oss, tmp_path / "out", tp=2, ep=2, target="moectl")
    whole = checkpoint_layer(open_checkpoint(tiny_gpt_oss))
    inputs = make_inputs(whole.problem, 9)
    wanted = moe_reference(inputs.x, inputs.ids, inputs.weights, whole.reference, whole.problem)
    total = torch.zeros_like(wanted)
    for rank in range(4):
        layer = load_prepared(tmp_path / "out", backend="torch", rank=rank)
        ids = layer.local_ids(inputs.ids)
        total += apply(runner_for("torch"), layer, inputs.x, ids, inputs.weights).float()
    assert (total - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_ranks_of_eight_with_less_for_the_last(tmp_path: Path) -> None:
    """2880 lanes over 8: seven ranks of 384, and one of 192 that is padded to 384."""
    source = gpt_oss_checkpoint(
        tmp_path / "source", num_hidden_layers=1, intermediate_size=2880, num_local_experts=2
    )
    shard_all(source, tmp_path / "out", tp=8, target="marlin")
    layers = [load_prepared(tmp_path / "out", rank=rank) for rank in range(8)]
    assert [layer.problem.dims.intermediate for layer in layers] == [384] * 7 + [192]
    shapes = [{role: t.shape for role, t in layer.weights.items()} for layer in layers]
    assert all(shape == shapes[0] for shape in shapes)
    assert not layers[7].weights["w2_bias"].any()
    assert layers[0].weights["w2_bias"].any()
    unconvert(tmp_path / "out", tmp_path / "back")
    assert same_tensors(all_tensors(source), all_tensors(tmp_path / "back"))


@pytest.fixture
def ranks(gpt_oss: Path, tmp_path: Path) -> Path:
    """A gpt-oss checkpoint for two ranks that slice, times two that share experts."""
    shard_all(gpt_oss, tmp_path / "ranks", 2, 2)
    return tmp_path / "ranks"


def test_one_rank_gives_no_source_back(ranks: Path, gpt_oss: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rank-01 holds rank 1 of 4 \(tp 2, ep 2\) alone"):
        unconvert(rank_folder(ranks, 1), tmp_path / "back")
    with pytest.raises(UsageError, match="is restored from all of them together"):
        verify(rank_folder(ranks, 1), gpt_oss)
    assert not (tmp_path / "back").exists()


def test_a_missing_rank_is_named(ranks: Path, tmp_path: Path) -> None:
    rank_folder(ranks, 2).rename(tmp_path / "elsewhere")
    for call in (lambda: verify(ranks), lambda: unconvert(ranks, tmp_path / "back")):
        with pytest.raises(CheckpointError, match="lacks rank-02 of 4 ranks"):
            call()


def test_ranks_under_wrong_names_are_found(ranks: Path) -> None:
    rank_folder(ranks, 1).rename(ranks / "away")
    rank_folder(ranks, 3).rename(rank_folder(ranks, 1))
    (ranks / "away").rename(rank_folder(ranks, 3))
    for read in (verify, lambda folder: load_prepared(folder, rank=1)):
        with pytest.raises(CheckpointError, match=r"rank-01/moectl.json is not the one .* but rank-03/"):
            read(ranks)


def test_another_deployments_folder_is_not_loaded(ranks: Path) -> None:
    assert load_prepared(ranks, rank=3, tp_size=2, ep_size=2).first_expert == 3
    with pytest.raises(CheckpointError, match="tp_size is 2, not 4, ep_size is 2, not 1"):
        load_prepared(rank_folder(ranks, 3), tp_size=4, ep_size=1)
    with pytest.raises(
        CheckpointError, match="holds the directories of several ranks, and none was asked for"
    ):
        load_prepared(ranks)
    with pytest.raises(CheckpointError, match="rank-04"):
        load_prepared(ranks, rank=4)


@pytest.mark.parametrize(("target", "field"), [("trtllm", "layout"), ("marlin", "the bytes of the source")])
def test_ranks_of_two_conversions_are_not_joined(
    ranks: Path, gpt_oss: Path, tmp_path: Path, target: str, field: str
) -> None:
    info = open_checkpoint(gpt_oss).tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    path = gpt_oss / info.file
    data = bytearray(path.read_bytes())
    data[info.start] ^= 1
    path.write_bytes(data)
    shard_all(gpt_oss, tmp_path / "other", 2, 2, target)
    rank_folder(ranks, 1).rename(tmp_path / "away")
    rank_folder(tmp_path / "other", 1).rename(rank_folder(ranks, 1))
    with pytest.raises(CheckpointError, match=r"rank-01/moectl.json .* but another conversion's"):
        verify(ranks)
    original = json.loads((rank_folder(ranks, 1) / "moectl.json").read_text())
    edit_rank(ranks, 1, lambda document: document)
    with pytest.raises(CheckpointError, match=f"{field}"):
        verify(ranks)
    assert json.loads((rank_folder(ranks, 1) / "moectl.json").read_text()) == original


def test_damage_in_a_rank_is_named(ranks: Path, tmp_path: Path) -> None:
    path = rank_folder(ranks, 2) / "moectl-layer-00001.experts"
    data = bytearray(path.read_bytes())
    data[load_manifest(path.parent).open_layer(1)["w2_bias"].start] ^= 4
    path.write_bytes(data)
    for folder in (ranks, rank_folder(ranks, 2)):
        findings = verify(folder).findings
        assert any(text.startswith(f"rank-02/{path.name}: ") for text in findings), findings
        assert any("the restored slice of w2_bias does not have the SHA-256" in text for text in findings)
    assert not any("rank-03" in text for text in verify(ranks).findings)
    assert verify(rank_folder(ranks, 3)).ok
    with pytest.raises(CheckpointError, match=f"rank-02/{path.name}"):
        unconvert(ranks, tmp_path / "back")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shard": {"tp_rank": 1}}, "intermediate range is not that of rank 1 of 4"),
        ({"shard": {"ep_rank": 1}}, "expert range is not that of rank 2 of 4"),
        ({"shard": {"tp_size": 4}}, "does not|leave the last|range is not that"),
        ({"shard": {"tp_rank": 7}}, "there is no rank 7 of 4"),
        ({"shard": {"ep_size": -1}}, "there is no rank"),
        ({"group": {"intermediate": [0, 64]}}, "intermediate range is not that of rank 0"),
        ({"group": {"whole_intermediate": 128}}, "intermediate range is not that of rank 0"),
        ({"group": {"whole_intermediate": 1 << 60}}, "intermediate is 1152921504606846976"),
        ({"layer": {"slices": {}}}, "hashed slices are not its canonical roles"),
    ],
)
def test_a_manifest_that_says_another_rank_is_refused(
    ranks: Path, change: dict[str, dict[str, Any]], words: str
) -> None:

    def tamper(document: dict[str, Any]) -> None:
        places = {"shard": document["shard"], "group": document["groups"][0], "layer": document["layers"][0]}
        for place, fields in change.items():
            places[place].update(fields)

    edit_rank(ranks, 0, tamper)
    with pytest.raises(CheckpointError, match=words):
        load_prepared(ranks, rank=0)


def test_another_ranks_conversion_is_not_resumed(gpt_oss: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gpt_oss)
    layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight)
    convert(plan_conversion(checkpoint, layout, shard=shard_of(0, 2)), tmp_path / "out")
    with pytest.raises(UsageError, match=r"rank \(rank 0 of 2 \(tp 2, ep 1\), not rank 1 of 2"):
        convert(plan_conversion(checkpoint, layout, shard=shard_of(1, 2)), tmp_path / "out", resume=True)


def test_the_folder_of_ranks_holds_nothing_else(gpt_oss: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("")
    with pytest.raises(UsageError, match="is for ranks only, but holds notes"):
        shard_all(gpt_oss, tmp_path / "out", 2)


def test_a_rank_converted_before_is_found_finished(gpt_oss: Path, tmp_path: Path) -> None:
    checkpoint, out = open_checkpoint(gpt_oss), tmp_path / "out"
    layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight)
    plans = plan_ranks(out, 2, 1, None, lambda shard: plan_conversion(checkpoint, layout, shard=shard))
    convert(plans[0].plan, plans[0].folder)
    with pytest.raises(UsageError, match="has rank-00 already") as refused:
        check_outputs(gpt_oss, out, plans, resume=False)
    assert "--resume" in refused.value.hint
    seen: list[tuple[int, int]] = []
    check_outputs(gpt_oss, out, plans, resume=True)
    summaries = convert_ranks(
        plans,
        lambda item, tell: convert(item.plan, item.folder, resume=True, progress=tell),
        lambda done, total, text: seen.append((done, total)),
    )
    assert [len(summary.converted) for summary in summaries] == [0, 3]
    assert len({total for _, total in seen}) == 1
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert verify(out, gpt_oss).ok


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, moectl; assert 'torch' not in sys.modules; assert callable(moectl.load_prepared); "
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert moectl.load_prepared is load_prepared
    with pytest.raises(AttributeError, match="has no attribute 'load_prepare'"):
        moectl.load_prepare  # type: ignore[attr-defined] # noqa: B018


MAPPED = """
import sys, moectl
def anonymous():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024
moectl.load_prepared(sys.argv[1], 0, "torch")  # what is imported and allocated once
before = anonymous()
layers = [moectl.load_prepared(sys.argv[1], 0, "torch") for _ in range(4)]
print(sum(layer.nbytes for layer in layers), anonymous() - before)
"""


def test_loading_maps_the_file(tmp_path: Path) -> None:
    """Four times the same layer take no memory of their own, and what is written to one stays there."""
    source = gpt_oss_checkpoint(
        tmp_path / "source", num_hidden_layers=1, hidden_size=768, intermediate_size=768, num_local_experts=8
    )
    shard_all(source, tmp_path / "out", target="moectl")
    path = tmp_path / "out" / "moectl-layer-00000.experts"
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    loaded, taken = map(int, done.stdout.split())
    assert loaded > 4 * 7 * 2**20
    assert taken < 2 * 2**20  # with the small tensors that are checked
    before = path.read_bytes()
    layer, other = (load_prepared(tmp_path / "out", backend="torch") for _ in range(2))
    layer.weights["w2"].view(torch.uint8).fill_(7)
    assert path.read_bytes() == before
    assert not torch.equal(other.weights["w2"], layer.weights["w2"])


def test_damage_of_small_tensors_is_found_and_of_large_ones_when_asked_for(tmp_path: Path) -> None:
    source = gpt_oss_checkpoint(
        tmp_path / "source", num_hidden_layers=1, hidden_size=768, intermediate_size=768, num_local_experts=8
    )
    shard_all(source, tmp_path / "out", target="moectl")
    path = tmp_path / "out" / "moectl-layer-00000.experts"
    whole = path.read_bytes()
    header = read_header_bytes(path)

    def damaged(role: str) -> None:
        begin, _ = header[f"model.layers.0.mlp.experts.{role}"]
        path.write_bytes(whole[:begin] + bytes([whole[begin] ^ 1]) + whole[begin + 1 :])

    damaged("w2_weight")
    assert load_prepared(tmp_path / "out", 0).nbytes
    for role, asked in (("w2_weight", True), ("w2_weight_scale", False)):
        damaged(role)
        with pytest.raises(CheckpointError, match="fails its SHA-256 check"):
            load_prepared(tmp_path / "out", 0, check=asked)
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="must have "):
        load_prepared(tmp_path / "out", 0)


def read_header_bytes(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes begin and end in a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return {
        name: (8 + size + about["data_offsets"][0], 8 + size + about["data_offsets"][1])
        for name, about in header.items()
        if name != "__metadata__"
    }


def test_the_backend_follows_from_the_layout(gpt_oss: Path, tmp_path: Path) -> None:
    """A CPU has no kernels for any layout but torch's way back, and a backend asked for is taken."""
    shard_all(gpt_oss, tmp_path / "out", target="marlin")
    layer = load_prepared(tmp_path / "out", 2)
    assert (layer.backend, layer.layout, layer.relaid) == ("torch", "marlin-mxfp4", "")
    relaid = load_prepared(tmp_path / "out", 2, "moectl")
    assert (relaid.backend, relaid.relaid) == ("moectl", "marlin-mxfp4 -> moectl-mtile64")
    with pytest.raises(UsageError, match="backend 'trition' cannot be run here"):
        load_prepared(tmp_path / "out", 2, "trition")
    with pytest.raises(CheckpointError, match="holds no layer 7; it has layers 0, 1, 2"):
        load_prepared(tmp_path / "out", 7)
    assert dataclasses.is_dataclass(layer)
