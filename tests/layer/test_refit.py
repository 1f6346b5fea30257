"""Slices written into live layers: every layout against cold conversions, refusals, graphs, memory."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moectl
from moectl.checkpoint import open_checkpoint
from moectl.convert.canonical import canonical_shapes
from moectl.convert.layouts.registry import LAYOUTS, WeightLayout, layout_named
from moectl.convert.rank_slice import RankShard
from moectl.errors import CheckpointError, NoBackend, UsageError
from moectl.kernels import registry
from moectl.kernels.external import humming
from moectl.kernels.modular.fused_moe_kernel import layer_kernel
from moectl.kernels.prepared_layer import CANONICAL, KERNEL, PreparedMoE
from moectl.kernels.runner import Runner
from moectl.kernels.triton.kernel_family import layer_of
from moectl.layer.experts import LayerOrigin, decode
from moectl.layer.prepare import load_prepared, prepare
from moectl.layer.refit import refit
from moectl.layer.renew import renew
from moectl.problem.schemes import FP8_TENSOR, MXFP8, NVFP4, Scheme, int_format
from support import refit_cases
from support.layout_cases import ROWS, as_bytes, lacks_lowest
from support.one_thread import one_thread  # noqa: F401
from support.random_layers import GPT_OSS, canonical_roles
from support.random_layers import layer_of as expert_layer
from support.refit_cases import EXPERTS, SHARDS, RefitCase, compare, live_layer, numbers, step, try_case
from support.refit_rates import rates, scratch_of
from support.sampling import every_nth
from support.scripts import loaded


@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 7), ids=lambda layout: layout.name)
def test_slices_in_any_order_are_a_cold_conversion(layout: WeightLayout) -> None:
    draw = random.Random(layout.name)
    written = 0
    rows = [r for r in ROWS if r != "single" or layout.ungated]
    for weight in layout.weights:
        for shard in draw.sample(SHARDS, 3):
            case = try_case(draw, layout, weight, draw.choice(rows), *shard)
            for _ in range(4 if case else 0):
                written += step(case, draw)
            if case:
                check_dense(case)
    assert written >= 4


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if lacks_lowest(x)], ids=lambda layout: layout.name)
def test_a_code_that_a_layout_lacks_is_refused_and_changes_nothing(layout: WeightLayout) -> None:
    case = try_case(random.Random(0), layout, layout.weights[0], "concatenated", 1, 1)
    assert case is not None
    before = {name: t.clone() for name, t in case.live.weights.items()}
    bits = layout.weights[0].bits
    lowest = torch.zeros(1, 1, 1, dtype=torch.uint8)
    with pytest.raises(CheckpointError) as refused, case.update.batch():
        case.update.update("w2_scale", case.other["w2_scale"])
        case.update.update("w13", lowest, experts=3, rows=5, columns=7)
    assert f"a weight is -{1 << (bits - 1)}, which int{bits} in sign and magnitude lacks" in str(
        refused.value
    )
    compare(case, before)
    assert case.update.update("w13", lowest + 0x11, experts=3, rows=5, columns=7)
    case.whole["w13"][3, 5, 7] = 0x11
    compare(case, case.cold(case.whole))


def check_dense(case: RefitCase) -> None:
    """What a live layer decodes to is what its numbers are now."""
    whole = refit_cases.share_of(case.problem, case.rank, case.whole).canonical([0])
    expected, found = decode(whole, case.live.problem)[0], case.live.expert(0)
    assert torch.equal(found.w13.nan_to_num(), expected.w13.nan_to_num())
    assert torch.equal(found.w2.nan_to_num(), expected.w2.nan_to_num())


@pytest.mark.slow
def test_many_slices() -> None:
    for _ in refit_cases.run_cases(100_000, seed=3):
        pass


def test_the_script_says_what_it_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert loaded("check_refit").main(["--cases", "20"]) == 0
    assert "slices equal cold conversions" in capsys.readouterr().out


def test_the_script_finds_a_wrong_byte(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moectl.layer.refit.LayerRefit._convert", lambda *arguments: None)
    assert loaded("check_refit").main(["--cases", "20", "--seed", "4"]) == 1
    assert "of --seed 4: " in capsys.readouterr().out


def made(
    name: str, weight: object = None, rank: RankShard = RankShard(), seed: int = 1
) -> tuple[RefitCase, dict[str, Tensor]]:
    layout = layout_named(name)
    shape = refit_cases.problem_for(layout, weight or layout.weights[0], "concatenated", 256, 256, EXPERTS)  # type: ignore[arg-type]
    problem = replace(shape, dims=replace(shape.dims, padded_hidden=0, padded_intermediate=0))
    whole, other = numbers(problem, seed), numbers(problem, seed + 100)
    live = live_layer(layout, problem, rank, whole)
    addresses = {role: t.data_ptr() for role, t in live.weights.items()}
    return RefitCase(layout, rank, problem, whole, other, live, refit(live), addresses), other


def test_a_larger_scale_of_one_expert_changes_all_experts_of_a_layout_with_a_maximum() -> None:
    case, _ = made("marlin-nvfp4", NVFP4)
    before = case.live.weights["w13_global"].clone()
    scale = torch.full_like(case.whole["w13_scale"][:1, :1, :1], 5)
    case.whole["w13_scale"][:] = 5
    case.update.update("w13_scale", case.whole["w13_scale"])
    compare(case, case.cold(case.whole))
    assert not torch.equal(before, case.live.weights["w13_global"])
    before = case.live.weights["w13_global"].clone()
    scale[:] = 126
    assert case.update.update("w13_scale", scale, experts=2, rows=0, columns=0)
    case.whole["w13_scale"][2, 0, 0] = 126
    compare(case, case.cold(case.whole))
    assert (before != case.live.weights["w13_global"]).all()


def test_a_maximum_counts_other_ranks_experts() -> None:
    case, _ = made("trtllm-nvfp4", NVFP4, RankShard(ep_size=2))
    largest = torch.full((1, 2, 1), 1000.0)
    assert case.update.update("w13_input", largest, experts=3)
    case.whole["w13_input"][3] = 1000
    compare(case, case.cold(case.whole))
    assert (case.live.weights["w13_input"] == 1000).all()


def test_another_ranks_slices_are_ignored() -> None:
    case, other = made("marlin-int4", int_format(4, 32), RankShard(tp_size=2, ep_size=2))
    before = {name: t.clone() for name, t in case.live.weights.items()}
    update = case.update.update
    assert not update("w13", other["w13"][2:], experts=(2, 4))
    assert not update("w2", other["w2"][:, :, 64:], columns=(64, 128))
    assert not update("w13_scale", other["w13_scale"][:, 128:256], rows=(128, 256))
    assert all(torch.equal(t, before[name]) for name, t in case.live.weights.items())
    assert update("w2", other["w2"][:, :, 63:], columns=(63, 128))
    last, _ = made("marlin-int4", int_format(4, 32), RankShard(tp_size=2, tp_rank=1))
    assert not last.update.update("w2_bias", other["w2_bias"])


def test_a_refused_number_leaves_the_layer_as_it_was() -> None:
    case, other = made("plain-fp8", FP8_TENSOR)
    before = {name: t.clone() for name, t in case.live.weights.items()}
    with pytest.raises(CheckpointError, match="different scales per tensor"):
        case.update.update("w13_scale", torch.ones(1, 1, 1), experts=0, rows=0)
    with pytest.raises(CheckpointError, match="different scales"), case.update.batch():
        case.update.update("w2", other["w2"])
        case.update.update("w13_scale", torch.ones(1, 1, 1), experts=0, rows=0)
    with pytest.raises(CheckpointError, match="1 of 2 scales are not numbers"):
        case.update.update("w13_scale", torch.full((1, 1, 1), torch.nan), experts=0, rows=0)
    assert all(torch.equal(as_bytes(t), as_bytes(before[name])) for name, t in case.live.weights.items())
    with case.update.batch():
        for row in range(2):
            case.update.update("w13_scale", torch.ones(1, 1, 1), experts=0, rows=row)
    case.whole["w13_scale"][0] = 1
    compare(case, case.cold(case.whole))


def test_weights_that_were_quantized_again_change_with_their_scale() -> None:
    case, other = made("plain-fp8", FP8_TENSOR)
    layout = case.layout.requantizing()
    share = refit_cases.share_of(case.problem, case.rank, case.whole)
    recipe = layout.recipe(layout.pad(case.problem), share.recipe.shapes)
    weights = share.repack(recipe, torch.device("cpu"))
    live = PreparedMoE(
        case.problem, "torch", layout.name, weights, case.live.dense, origin=LayerOrigin(share, recipe)
    )
    update = refit(live)
    with pytest.raises(UsageError, match="w13 and w13_scale of an expert change together and whole"):
        update.update("w13", other["w13"][1:2], experts=1)
    scales = torch.tensor([[[1.0], [2.0]]])
    with update.batch():
        update.update("w13", other["w13"][1:2], experts=1)
        update.update("w13_scale", scales, experts=1)
    changed = {role: t.clone() for role, t in case.whole.items()}
    changed["w13"][1], changed["w13_scale"][1] = other["w13"][1], scales[0]
    expected = refit_cases.share_of(case.problem, case.rank, changed).repack(recipe, torch.device("cpu"))
    assert all(torch.equal(as_bytes(t), as_bytes(expected[name])) for name, t in weights.items())


def test_scales_beyond_the_range_that_launched_kernels_need_are_refused() -> None:
    roles = canonical_roles(GPT_OSS)
    roles["w13_scale"].fill_(120)
    live = expert_layer(GPT_OSS, roles).prepared("moectl", "cpu")
    update, scale = refit(live).update, torch.full((1, 1, 1), 190, dtype=torch.uint8)
    assert update("w13_scale", scale, experts=1, rows=3, columns=0)
    assert layer_of(live).w13.exponents == (120, 190)
    assert layer_of(live).w13.exponents_within(range(64, 191))
    before = live.weights["w13_scale"].clone()
    with pytest.raises(
        NoBackend, match=r"right for scales from 2\^-63 to below 2\^64, got 2\^-7 to below 2\^65"
    ):
        update("w13_scale", scale + 1, experts=1, rows=3, columns=0)
    assert torch.equal(before, live.weights["w13_scale"])
    assert update("w13_scale", scale - 126, experts=1, rows=3, columns=0)
    assert layer_of(live).w13.exponents == (64, 190)


def test_nan_codes_are_refused_where_kernels_are_for_numbers() -> None:
    problem = replace(GPT_OSS, scheme=Scheme(MXFP8))
    nan, number = (
        torch.full((1, 1, 1), 0x7F, dtype=torch.uint8),
        torch.full((1, 1, 1), 0x7E, dtype=torch.uint8),
    )
    roles = canonical_roles(problem)
    live = expert_layer(problem, roles).prepared("moectl", "cpu")
    assert layer_of(live).w2.numbers
    before = live.weights["w2"].clone()
    with pytest.raises(NoBackend, match="right for codes that are numbers, got NaN"):
        refit(live).update("w2", nan, experts=1, rows=3, columns=0)
    assert torch.equal(before, live.weights["w2"])
    assert refit(live).update("w2", number, experts=1, rows=3, columns=0)
    assert not torch.equal(before, live.weights["w2"])
    roles["w2"][0, 0, 0] = 0xFF
    live = expert_layer(problem, roles).prepared("moectl", "cpu")
    assert (layer_of(live).w13.numbers, layer_of(live).w2.numbers) == (True, False)
    assert refit(live).update("w2", nan, experts=1, rows=3, columns=0)


def test_the_kernel_that_calls_run_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "accept", lambda runner, prepared: None)  # nothing is launched
    roles = canonical_roles(GPT_OSS)
    roles["w13_scale"].fill_(120)
    live = expert_layer(GPT_OSS, roles).prepared("moectl", "cpu")
    update, scale = refit(live).update, torch.full((1, 1, 1), 191, dtype=torch.uint8)
    copy = live.derive(KERNEL, layer_kernel).prepared  # as the first call of the layer does
    assert layer_of(copy).w13.exponents_within(range(64, 191))
    with pytest.raises(NoBackend, match=r"right for scales from 2\^-63 to below 2\^64"):
        update("w13_scale", scale, experts=1, rows=3, columns=0)
    assert update("w13_scale", scale - 1, experts=1, rows=3, columns=0)
    assert layer_of(copy).w13.exponents == (120, 190)


def fake_runner(**fields: object) -> Runner:
    def ready(prepared: PreparedMoE) -> dict[str, Tensor]:
        return prepared.derive(
            "fake", lambda p: {"doubled": 2 * p.weights["w2_scale"].float(), "own": p.weights["w2_scale"]}
        )

    return Runner("fake", None, None, lambda problem, device: "", ready=ready, **fields)  # type: ignore[arg-type]


def test_numbers_that_a_runner_derives_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = made("marlin-int4", int_format(4, 32))
    runner = fake_runner(keeps="numbers")
    monkeypatch.setattr("moectl.layer.refit.runner_for", lambda name: runner)
    derived = runner.ready(case.live)
    assert isinstance(derived, dict)
    address = derived["doubled"].data_ptr()
    refit(case.live).update("w2_scale", other["w2_scale"])
    assert torch.equal(derived["doubled"], 2 * case.live.weights["w2_scale"].float())
    assert derived["doubled"].data_ptr() == address and derived is runner.ready(case.live)


def test_layers_that_cannot_change_in_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = made("trtllm-nvfp4", NVFP4)
    with pytest.raises(UsageError, match="does not say how its tensors follow"):
        refit(replace(case.live, origin=None))
    scale = fake_runner(input_scale=lambda prepared: torch.ones(1))
    monkeypatch.setattr("moectl.layer.refit.runner_for", lambda name: scale)
    with pytest.raises(NoBackend, match="hold a copy of the scale of inputs"):
        refit(case.live).update("w13_input", other["w13_input"])
    monkeypatch.setattr("moectl.layer.refit.runner_for", lambda name: fake_runner(keeps="weights"))
    with pytest.raises(NoBackend, match="keeps its own copy of the weights"):
        refit(replace(case.live, layout=CANONICAL))
    assert refit(case.live).update("w2", other["w2"])  # it reads this layout as it is
    assert registry.runner_for("torch").keeps == ""


def test_hummings_kernels_read_what_a_refit_of_their_layout_writes() -> None:
    case, other = made("humming-mxfp4")
    live = replace(case.live, backend="humming")
    read = {role: humming.converted_tensors(live, role) for role in ("w13", "w2")}
    with pytest.raises(NoBackend, match="humming backend keeps its own copy of the weights"):
        refit(replace(live, layout=CANONICAL))
    update = refit(live)
    with update.batch():
        for role in ("w13", "w2", "w13_scale", "w2_scale"):
            update.update(role, other[role])
    expected = case.cold(case.whole | {r: other[r] for r in ("w13", "w2", "w13_scale", "w2_scale")})
    for role, tensors in read.items():
        assert torch.equal(as_bytes(tensors["weight"]), as_bytes(expected[role]))
        assert torch.equal(as_bytes(tensors["weight_scale"]), as_bytes(expected[f"{role}_scale"]))


def test_a_converted_rank_does_not_know_other_ranks_input_scales() -> None:
    case, other = made("trtllm-nvfp4", NVFP4, RankShard(ep_size=2))
    origin = replace(case.live.origin, layer=replace(case.live.origin.layer, whole=None), kept={})
    alone = refit(replace(case.live, origin=origin))
    with pytest.raises(UsageError, match="the largest of all ranks' experts, and only this rank's are here"):
        alone.update("w13_input", other["w13_input"])
    assert alone.update("w2", other["w2"])


def test_renewing_copies_into_the_old_tensors() -> None:
    old = {"a": [torch.zeros(2), None], "b": (torch.ones(1), 3)}
    new = {"a": [torch.full((2,), 5.0), None], "b": (torch.zeros(1), 3)}
    kept = old["a"][0]
    renew(old, new)
    assert kept.tolist() == [5, 5] and old["b"][0].item() == 0  # type: ignore[union-attr]


GATE = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("converted", [False, True], ids=["checkpoint", "directory"])
def test_a_layer_becomes_that_of_another_checkpoint(
    converted: bool, tiny_gpt_oss: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from moectl.synth import synthesize

    other = synthesize(
        "openai/gpt-oss-20b", tmp_path / "new", layers=2, experts=8, hidden=256, intermediate=192, seed=5
    )
    new = {name: t for file in other.glob("*.safetensors") for name, t in load_file(file).items()}
    if converted:
        moectl.convert(tiny_gpt_oss, tmp_path / "out", "marlin")
        live = load_prepared(tmp_path / "out", backend="torch")
        moectl.convert(other, tmp_path / "cold", "marlin")
        cold = load_prepared(tmp_path / "cold", backend="torch")
    else:
        live = prepare(open_checkpoint(tiny_gpt_oss), 0, "moectl")
        cold = prepare(open_checkpoint(other), 0, "moectl")
    addresses = {role: t.data_ptr() for role, t in live.weights.items()}
    update = moectl.refit(live)
    with update.batch():
        for name, t in new.items():
            if name.startswith("model.layers.0.mlp.experts."):
                assert update.update(name, t)
    for role, t in live.weights.items():
        assert t.data_ptr() == addresses[role] and torch.equal(as_bytes(t), as_bytes(cold.weights[role]))
    assert torch.equal(live.expert(3).w13, cold.expert(3).w13)


def test_layers_that_were_loaded_in_inference_mode(tiny_gpt_oss: Path) -> None:
    with torch.inference_mode():
        live = prepare(open_checkpoint(tiny_gpt_oss), 0, "moectl")
    bias = torch.nn.Parameter(torch.ones(8, 256).bfloat16())
    assert refit(live).update("w2_bias", bias) and bool((live.weights["w2_bias"][:, :256] == 1).all())


def test_names_and_numbers_that_do_not_fit(tiny_gpt_oss: Path) -> None:
    live = prepare(open_checkpoint(tiny_gpt_oss), 0, "torch")
    update, blocks = refit(live).update, torch.zeros(8, 384, 8, 16, dtype=torch.uint8)
    for name, t, keywords, message in (
        (
            "model.layers.1.mlp.experts.gate_up_proj_blocks",
            blocks,
            {},
            "layer 0 has no tensor model.layers.1",
        ),
        ("w13_zero", blocks, {}, "layer 0 has no tensor w13_zero. Its tensors are w13, w13_scale"),
        (f"{GATE}_blocks", blocks[1:], {}, r"must be \[8, 384, 8, 16\] .* got \[7, 384, 8, 16\]"),
        (f"{GATE}_blocks", blocks, {"experts": 8}, "experts of .* are 0 to 7, got 8 to 8"),
        (f"{GATE}_blocks", blocks, {"rows": (3, 2)}, "rows of .* are 0 to 383, got 3 to 1"),
        (f"{GATE}_blocks", blocks.half(), {}, "must be torch.uint8 as the checkpoint stores it"),
        (f"{GATE}_bias", torch.zeros(8, 384), {}, "must be torch.bfloat16"),
        (f"{GATE}_bias", torch.zeros(8, 384), {"columns": 1}, "has no columns"),
    ):
        with pytest.raises(UsageError) as refused:
            update(name, t, **keywords)  # type: ignore[arg-type]
        assert re.search(message, str(refused.value)), str(refused.value)
    editor = refit(live)
    with editor.batch(), pytest.raises(UsageError, match="open already"), editor.batch():
        pass


MORE_THAN_AN_EXPERT = ("cpu-amx-int4", "humming-mxfp4-act-fp8")
"""Layouts whose value steps work on whole experts; see docs/refit.md."""


@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 9), ids=lambda layout: layout.name)
def test_scratch_memory_is_at_most_an_expert_however_many_the_layer_has(layout: WeightLayout) -> None:
    """Beside copies of what is kept on the CPU, which are no memory of the layer's device."""
    try:
        for rate in rates(torch.device("cpu"), [layout.name], 3, 512, 512, times=1):
            if not holds_apart(layout) and layout.name not in MORE_THAN_AN_EXPERT:
                assert rate.scratch <= rate.expert, str(rate)
    except CheckpointError as error:
        assert lacks_lowest(layout) or "different" in str(error)  # the layout cannot hold these numbers


def holds_apart(layout: WeightLayout) -> bool:
    """Whether scales or codes of a layer in this layout are kept on the CPU."""
    problem = refit_cases.problem_for(layout, layout.weights[0], "concatenated", 512, 512, EXPERTS)
    shapes = canonical_shapes(problem, EXPERTS)
    return any(not role.endswith(("_input", "_global")) for role in layout.recipe(problem, shapes).kept)


@pytest.mark.parametrize(
    "name", every_nth(("moectl-mtile64", "moectl-bf16", "triton-hopper", "marlin-mxfp4"), 2)
)
def test_scratch_memory_does_not_grow_with_experts(name: str) -> None:
    few, many = (
        {rate.what: rate for rate in rates(torch.device("cpu"), [name], experts, 512, 256, times=1)}
        for experts in (4, 16)
    )
    assert many.keys() == few.keys() >= {"whole layer", "expert by expert", "gate alone", "a row"}
    assert all(rate.scratch <= rate.expert for rate in many.values())
    for what in ("expert by expert", "gate alone"):
        assert many[what].scratch == few[what].scratch
    codes = many["gate alone"]
    assert codes.written == 16 * codes.role // 2
    assert codes.role <= codes.scratch <= codes.role + 4096  # one copy: nothing is converted step by step
    assert many["whole layer"].scratch <= many["whole layer"].expert / 4


class Cycle:
    """An object that only Python's garbage collector frees, with the tensor it holds."""

    def __init__(self, held: torch.Tensor) -> None:
        self.me, self.held = self, held


def test_tensors_of_earlier_measurements_are_not_taken_off_when_they_are_freed() -> None:
    kept: list[torch.Tensor] = []

    def call() -> None:
        Cycle(kept.pop())
        assert len([[] for _ in range(5000)]) == 5000  # enough for a collection of garbage
        torch.zeros(18, dtype=torch.uint8)

    for _ in range(3):
        assert scratch_of(lambda: kept.append(torch.zeros(40)), torch.device("cpu")) == 160
        assert scratch_of(call, torch.device("cpu")) == 18


def test_rates_are_printed_beside_plain_copies(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rate", "--layouts", "moectl-bf16,moectl-mtile64", "--sizes", "2,128,64"]
    assert loaded("check_refit").main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = ["whole layer", "expert by expert", "gate alone", "a row"]
    expected = [("moectl-bf16", part) for part in (*parts, "a bias")]
    expected += [("moectl-mtile64", part) for part in (*parts, "a scale", "a bias")]
    assert [tuple(line.split(":")[0].split(", ")) for line in lines] == expected
    for line in lines:
        assert re.search(r"GB/s, plain copies .* host \d+ us a batch; scratch memory of [\d.]+ experts", line)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["moectl-mtile64", "marlin-mxfp4", "moectl-bf16", "triton-hopper"])
def test_whole_experts_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By passes, first compiled and then kept: for all experts, some, and those of another address."""
    cuda, layout = torch.device("cuda"), layout_named(name)
    shape = refit_cases.problem_for(layout, layout.weights[0], "concatenated", 256, 256, EXPERTS)
    problem = replace(shape, dims=replace(shape.dims, padded_hidden=0, padded_intermediate=0))
    whole, backend = numbers(problem, 1), "moectl" if name.startswith("moectl") else "torch"
    live = live_layer(layout, problem, RankShard(), whole, cuda, backend)
    addresses = {role: t.data_ptr() for role, t in live.weights.items()}
    case = RefitCase(layout, RankShard(), problem, whole, {}, live, refit(live), addresses)

    def check() -> None:
        expected = case.cold(case.whole)
        assert all(torch.equal(as_bytes(t).cpu(), as_bytes(expected[r])) for r, t in live.weights.items())
        assert all(t.data_ptr() == addresses[role] for role, t in live.weights.items())

    monkeypatch.setattr(
        "moectl.layer.refit.LayerRefit._convert", lambda *arguments: pytest.fail("not direct")
    )
    for seed, (first, last), shift in (
        (2, (0, EXPERTS), 0),
        (3, (0, EXPERTS), 0),
        (4, (1, 3), 0),
        (5, (1, 3), 8),
    ):
        new = numbers(problem, seed)
        with case.update.batch():
            for role, t in new.items():
                some = t[first:last].contiguous()
                room = torch.empty(some.nbytes + shift, dtype=torch.uint8, device=cuda)
                given = room[shift:].view(some.dtype).view(some.shape).copy_(some)
                assert case.update.update(role, given, experts=(first, last))
                case.whole[role] = torch.cat((case.whole[role][:first], some, case.whole[role][last:]))
        check()
    if "w13_scale" in whole and whole["w13_scale"].dtype == torch.uint8:
        scales = case.whole["w13_scale"].to(cuda)
        scales[2, 5, 0] = 255
        with pytest.raises(CheckpointError, match=r"E8M0 byte 255.*first in expert 2"), case.update.batch():
            case.update.update("w13", numbers(problem, 6)["w13"].to(cuda))
            case.update.update("w13_scale", scales)
        check()


@pytest.mark.gpu
def test_graphs_compute_with_the_new_numbers() -> None:
    from moectl.layer.random_layer import RandomLayer

    cuda = torch.device("cuda")
    old, new = RandomLayer(GPT_OSS, cuda).experts, expert_layer(GPT_OSS, canonical_roles(GPT_OSS))
    live, cold = old.prepared("moectl", cuda), new.prepared("moectl", cuda)
    x = torch.randn(4, GPT_OSS.dims.hidden, device=cuda, dtype=torch.bfloat16)
    weights, ids = torch.rand(4, GPT_OSS.experts, device=cuda).softmax(-1).topk(GPT_OSS.top_k)
    arguments = x, ids.int(), weights
    live(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = live(*arguments)
    update = refit(live)
    with update.batch():
        for role, t in new.canonical(range(GPT_OSS.experts)).items():
            update.update(role, t.to(cuda))
    graph.replay()
    assert torch.equal(y, cold(*arguments))
