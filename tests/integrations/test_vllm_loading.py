"""What the plug-in for vLLM loads, when, and into what, against stand-ins for vLLM's classes."""

import dataclasses
import importlib
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import moectl
from moectl.checkpoint import open_checkpoint
from moectl.convert.manifest.manifest import load_layer, load_manifest
from moectl.convert.sources import output_name
from moectl.errors import MoectlError
from moectl.integrations import vllm as plugin
from moectl.integrations.vllm.engine_layouts import untaken
from moectl.integrations.vllm.limits import LIMITS, refusals
from moectl.problem.layouts import FOLDER_READERS, OWN_LAYOUTS
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_ACT,
    Scheme,
    int_format,
)
from moectl.synth import synthesize
from support import vllm_stubs
from support.vllm_stubs import METHODS, FusedMoEConfig, ParallelConfig, RoutedExperts, engine_config, install

EXPERTS, TOP_K, HIDDEN = 8, 4, 256
NAME = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    install(monkeypatch)
    plugin.register()


@pytest.fixture(scope="module")
def converted(tiny_gpt_oss, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted")
    moectl.convert(tiny_gpt_oss, out / "marlin", "marlin")
    moectl.convert(tiny_gpt_oss, out / "moectl", "moectl")
    moectl.convert(tiny_gpt_oss, out / "cutlass", "cutlass-sm90")
    moectl.convert(tiny_gpt_oss, out / "humming", "humming")
    return out


def opened(folder):
    quantization = METHODS["moectl"].from_config(json.loads((folder / "config.json").read_text()))
    quantization.maybe_update_config(str(folder))
    return quantization


def layer_of(dtype=torch.bfloat16, **parallel):
    return RoutedExperts(FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig(**parallel), dtype))


def loaded(quantization, layer=None, name=NAME):
    layer = layer or layer_of()
    method = quantization.get_quant_method(layer, name)
    method.create_weights(layer, EXPERTS, HIDDEN, 192, torch.bfloat16)
    assert not any(parameter.numel() for parameter in layer.parameters())
    method.process_weights_after_loading(layer)
    return method, layer


def output(method, layer, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, HIDDEN, generator=g).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(5)])
    return method.apply(layer, x, torch.rand(5, TOP_K, generator=g), ids, None, None)


def test_a_directory_for_marlin_gets_vllms_method_and_its_own_bytes(converted):
    folder = converted / "marlin"
    method, layer = loaded(opened(folder))
    assert type(method).__name__ == "GptOssMxfp4MoEMethod"
    assert layer.moe_config.moe_backend == "marlin" and layer.num_experts == EXPERTS
    stored = load_layer(load_manifest(folder), 0)
    names = {output_name("", role): tensor for role, tensor in stored.items()}
    assert names.keys() == dict(layer.named_parameters()).keys()
    for name, tensor in names.items():
        parameter = getattr(layer, name)
        e8m0 = name.endswith("_scale")
        assert parameter.dtype == (torch.float8_e8m0fnu if e8m0 else tensor.dtype)
        assert torch.equal(parameter.view(torch.uint8), tensor.view(torch.uint8))
    assert type(method.moe_kernel.fused_experts).__name__ == "MarlinExperts"
    assert method.moe_kernel.fused_experts.quant_config["w2_weight_scale"] is layer.w2_weight_scale


def test_a_directory_for_humming_gets_its_parameters_and_what_describes_them(converted):
    folder = converted / "humming"
    method, layer = loaded(opened(folder))
    assert layer.moe_config.moe_backend == "humming" and method.moe_kernel is not None
    stored = load_layer(load_manifest(folder), 0)
    assert len(stored) == len(dict(layer.named_parameters())) == 6
    for role, tensor in stored.items():
        matrix, _, kind = role.partition("_")
        parameter = getattr(layer, f"{matrix}_{ {'': 'weight', 'scale': 'weight_scale'}.get(kind, kind) }")
        assert parameter.dtype == (torch.float8_e8m0fnu if kind == "scale" else tensor.dtype)
        assert torch.equal(parameter.view(torch.uint8), tensor.view(torch.uint8))
    sizes = {matrix: (config.shape_n, config.shape_k) for matrix, config in layer.humming_configs.items()}
    assert sizes == {"w13": (2 * 192, HIDDEN), "w2": (HIDDEN, 192)}
    for config in layer.humming_configs.values():
        assert (config.num_experts, config.has_bias, config.torch_dtype) == (EXPERTS, True, torch.bfloat16)
        # As vLLM pads in it, to what the layout has.
        assert (config.pad_n_to_multiple, config.pad_k_to_multiple) == (256, 128)
    assert {(s.b_dtype, s.bs_dtype, s.weight_scale_group_size) for s in layer.weight_schemas.values()} == {
        ("float4e2m1", "float8e8m0", 32)
    }


def test_humming_is_refused_where_it_would_read_something_else(converted, monkeypatch):
    vllm_stubs.HUMMING.native = True
    with pytest.raises(MoectlError, match=r"reads codes of .*in another order than humming-mxfp4 has here"):
        loaded(opened(converted / "humming"))
    vllm_stubs.HUMMING.native = False
    refusal = "humming-mxfp4 is for 16-bit tokens, and vLLM was told to quantize them"
    vllm_stubs.HUMMING.override = "fp8"
    with pytest.raises(MoectlError, match=refusal):
        loaded(opened(converted / "humming"))
    vllm_stubs.HUMMING.override = None
    vllm_stubs.HUMMING.asked = {"VLLM_HUMMING_INPUT_QUANT_CONFIG": {"dtype": "float8e4m3"}}
    with pytest.raises(MoectlError, match=refusal):
        loaded(opened(converted / "humming"))


@pytest.mark.parametrize(
    ("problem", "magnitude", "said"),
    [
        (int_format(4, 128), False, ("uint4", "torch.bfloat16", 128, None, "none", False)),
        (int_format(4, FULL, zero_point=True), False, ("uint4", "torch.bfloat16", 0, None, "none", True)),
        (int_format(4, 32), True, ("e0m3", "torch.bfloat16", 32, None, "none", False)),
        (int_format(8, 64), True, ("e0m7", "torch.bfloat16", 64, None, "none", False)),
        (MXFP8, False, ("float8e4m3", "float8e8m0", 32, None, "none", False)),
        (NVFP4, False, ("float4e2m1", "float8e4m3", 16, None, "tensor", False)),
        (FP8_BLOCK, False, ("float8e4m3", "torch.bfloat16", 128, None, "none", False)),
        (FP8_CHANNEL, False, ("float8e4m3", "torch.bfloat16", 0, None, "none", False)),
        (FP8_TENSOR, False, ("float8e4m3", "float32", 0, "tensor", "none", False)),
    ],
)
def test_humming_is_told_what_codes_and_scales_are(problem, magnitude, said):
    parameters = importlib.import_module("moectl.integrations.vllm.v0_33.engine_parameters")
    layer = MoEProblem(Dims(256, 256), 8, 2, Scheme(problem))
    weights = {"w13_global": torch.ones(8)}
    made = parameters._humming_schema(layer, weights, "w13", torch.bfloat16, magnitude)
    assert dataclasses.astuple(made) == said
    if problem == NVFP4:
        weights["w13_global"] = torch.ones(8, 512)
        made = parameters._humming_schema(layer, weights, "w13", torch.bfloat16, magnitude)
        assert made.weight_scale_2_type == "channel"


def test_only_what_was_compared_is_taken_by_vllms_kernels():
    kernels = importlib.import_module("moectl.integrations.vllm.v0_33.engine_kernels").KERNELS
    fp8, tokens = kernels["humming-fp8"], NVFP4_ACT
    assert fp8.takes(Scheme(FP8_BLOCK)) and not fp8.takes(Scheme(FP8_TENSOR))
    # Humming leaves tokens in 16 bits where a checkpoint asks for less, the others do not compute such.
    assert kernels["humming-nvfp4"].takes(Scheme(NVFP4, tokens))
    assert not kernels["humming-mxfp4"].takes(Scheme(MXFP4, tokens))
    assert not kernels["marlin-mxfp4"].takes(Scheme(MXFP4, tokens))


def test_moectl_backend_chooses_between_moectl_and_vllm(converted, monkeypatch):
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    method, layer = loaded(opened(converted / "marlin"))
    assert type(method).__name__ == "MoectlMoEMethod"
    want = output(method, layer)
    monkeypatch.setenv("MOECTL_BACKEND", "vllm")
    assert type(loaded(opened(converted / "marlin"))[0]).__name__ == "GptOssMxfp4MoEMethod"
    with pytest.raises(MoectlError, match=r"layout moectl-mtile64.*neither moectl's kernels nor vLLM's"):
        loaded(opened(converted / "moectl"))
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    assert torch.equal(output(*loaded(opened(converted / "moectl"))), want)


def test_a_kernel_that_vllm_does_not_run_here_is_refused(converted):
    with pytest.raises(MoectlError, match=r"layout cutlass-sm90.*flashinfer_cutlass.*not on this GPU"):
        loaded(opened(converted / "cutlass"))
    with pytest.raises(MoectlError, match=r"does not compute .* in fp16"):
        loaded(opened(converted / "marlin"), layer_of(torch.float16))
    wider = layer_of()
    wider.hidden_size = 512
    with pytest.raises(MoectlError, match=r"converted for a hidden size of 256, vLLM's marlin has 512"):
        loaded(opened(converted / "marlin"), wider)


@pytest.mark.parametrize("folder", ("checkpoint", "marlin"))
def test_dummy_weights_are_random_and_read_nothing(tiny_gpt_oss, converted, monkeypatch, folder):
    checkpoint = tiny_gpt_oss if folder == "checkpoint" else converted / folder
    if folder == "checkpoint":
        monkeypatch.setenv("MOECTL_BACKEND", "torch")
    real = {name: p.clone() for name, p in loaded(opened(checkpoint))[1].named_parameters() if p.numel()}
    quantization = opened(checkpoint)
    vllm_stubs.CURRENT[0] = engine_config(str(checkpoint), load_format="dummy")
    for module in ("moectl.convert.stream.source_reader", "moectl.layer.prepare"):
        monkeypatch.setattr(f"{module}.FolderReader", None)
    monkeypatch.setattr("moectl.layer.prepare.load_layer", None)
    method, layer = loaded(quantization)
    random = {name: p for name, p in layer.named_parameters() if p.numel()}
    forms = [{n: (p.shape, p.dtype) for n, p in found.items()} for found in (real, random)]
    assert forms[0] == forms[1]
    assert not torch.equal(real["w2_weight"].view(torch.uint8), random["w2_weight"].view(torch.uint8))
    if folder == "checkpoint":
        y = output(method, layer).float()
        assert y.isfinite().all() and 0.01 < y.std() < 100


def test_weights_are_read_again_in_place(tiny_gpt_oss, converted, monkeypatch):
    for folder, backend in ((tiny_gpt_oss, "torch"), (converted / "marlin", "")):
        monkeypatch.setenv("MOECTL_BACKEND", backend)
        quantization = opened(folder)
        quantization.get_checkpoint_weight_mapper()
        method, layer = loaded(quantization)
        before = {name: (p.data_ptr(), p.clone()) for name, p in layer.named_parameters()}
        vllm_stubs.CURRENT[0] = engine_config(str(folder))
        for parameter in layer.parameters():
            parameter.data.view(torch.uint8).zero_()
        quantization.get_checkpoint_weight_mapper()
        for name, parameter in layer.named_parameters():
            pointer, value = before[name]
            assert parameter.data_ptr() == pointer
            assert torch.equal(parameter.view(torch.uint8), value.view(torch.uint8)), name
        assert method.moe_kernel is not None


def test_weights_of_another_checkpoint_are_taken_and_another_model_is_refused(
    tiny_gpt_oss, tiny_kimi, tmp_path, monkeypatch
):
    from moectl.synth import synthesize

    other = synthesize(str(tiny_gpt_oss), tmp_path / "other", seed=5)
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    quantization = opened(tiny_gpt_oss)
    method, layer = loaded(quantization)
    first = output(method, layer)
    vllm_stubs.CURRENT[0] = engine_config(str(other))
    quantization.get_checkpoint_weight_mapper()
    second = output(method, layer)
    assert torch.equal(second, output(*loaded(opened(other)))) and not torch.equal(first, second)
    vllm_stubs.CURRENT[0] = engine_config(str(tiny_kimi))
    with pytest.raises(MoectlError, match=r"layers 0 of .*kimi are not those of"):
        quantization.get_checkpoint_weight_mapper()


def bits(layer):
    return {name: p.data.clone().view(torch.uint8) for name, p in layer.named_parameters()}


def same(layer, before):
    now = bits(layer)
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)


@pytest.mark.parametrize(
    ("first", "second", "backend", "why"),
    [
        ("marlin", "humming", "", "in the layout humming-mxfp4, expected the layout marlin-mxfp4"),
        ("marlin", "moectl", "", "in the layout moectl-mtile64, expected the layout marlin-mxfp4"),
        ("marlin", "", "", "in a published checkpoint's own storage, expected the layout marlin-mxfp4"),
        ("", "marlin", "torch", "in the layout marlin-mxfp4, expected a published checkpoint's own storage"),
        ("marlin", "", "torch", "in a published checkpoint's own storage, expected the layout marlin-mxfp4"),
    ],
)
def test_tensors_of_another_form_are_refused_before_any_is_replaced(
    tiny_gpt_oss, converted, monkeypatch, first, second, backend, why
):
    monkeypatch.setenv("MOECTL_BACKEND", backend)
    old, new = (converted / name if name else tiny_gpt_oss for name in (first, second))
    quantization = opened(old)
    layers = [loaded(quantization, name=name)[1] for name in (NAME, NAME.replace("0", "1"))]
    before = [bits(layer) for layer in layers]
    vllm_stubs.CURRENT[0] = engine_config(str(new))
    with pytest.raises(MoectlError) as error:
        quantization.get_checkpoint_weight_mapper()
    assert why in str(error.value)
    assert all(map(same, layers, before)) and quantization.name == str(old)


def test_another_version_of_a_layout_is_refused_before_any_tensor_is_replaced(
    converted, tmp_path, monkeypatch
):
    folder = shutil.copytree(converted / "marlin", tmp_path / "old")
    quantization = opened(converted / "marlin")
    _, layer = loaded(quantization)
    before = bits(layer)
    monkeypatch.setattr("moectl.integrations.model_experts.layout_recipe", lambda *words: None)
    vllm_stubs.CURRENT[0] = engine_config(str(folder))
    with pytest.raises(MoectlError, match=r"old has an older version of marlin-mxfp4.* Convert it again"):
        quantization.get_checkpoint_weight_mapper()
    assert same(layer, before)


def test_a_later_layer_that_does_not_fit_keeps_all_as_they_are(tiny_gpt_oss, monkeypatch, tmp_path):
    from moectl.synth import synthesize

    other = synthesize(str(tiny_gpt_oss), tmp_path / "other", seed=5)
    experts = importlib.import_module("moectl.integrations.vllm.v0_33.experts")
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    quantization = opened(tiny_gpt_oss)
    layers = [loaded(quantization, name=name)[1] for name in (NAME, NAME.replace("0", "1"))]
    before, seen = [bits(layer) for layer in layers], []
    vllm_stubs.CURRENT[0] = engine_config(str(other))

    def ranges(prepared):
        seen.append(prepared)
        return (1 if len(seen) < 4 else 2,)

    monkeypatch.setattr(experts, "scale_ranges", ranges)
    with pytest.raises(MoectlError, match=r"layer 1 of .*other has scales of another range than kernels "):
        quantization.get_checkpoint_weight_mapper()
    assert len(seen) == 4 and all(map(same, layers, before))
    monkeypatch.setattr(experts, "scale_ranges", lambda prepared: (1,))
    quantization.get_checkpoint_weight_mapper()
    assert not any(map(same, layers, before)) and quantization.name == str(other)


def test_what_cannot_be_reloaded_is_refused_before_vllm_takes_weights_away(
    tiny_gpt_oss, converted, monkeypatch
):
    """vLLM empties the model before it asks for new weights: it could not go on serving the old ones."""
    reloaded = []
    quantization = opened(converted / "marlin")
    config = engine_config(str(converted / "marlin"))
    config.quant_config = quantization

    def reload(vllm_config, model, weights_iterator=None, weights_path=None, is_checkpoint_format=True):
        reloaded.append(weights_path)
        vllm_config.model_config.model = weights_path or vllm_config.model_config.model
        vllm_stubs.CURRENT[0] = vllm_config
        quantization.get_checkpoint_weight_mapper()

    runner = SimpleNamespace(reload_weights=reload)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", runner)
    _, layer = loaded(quantization)
    before = bits(layer)
    with pytest.raises(MoectlError, match=r"layer 0 of .*humming cannot take the place .* No weights were"):
        runner.reload_weights(config, None, weights_path=str(converted / "humming"))
    assert not reloaded and same(layer, before)
    read = []
    checking = importlib.import_module("moectl.integrations.vllm.v0_33.reload")
    opening = checking.open_experts
    monkeypatch.setattr(checking, "open_experts", lambda *a, **n: read.append(a) or opening(*a, **n))
    runner.reload_weights(config, None, weights_path=str(converted / "marlin"))
    runner.reload_weights(config, None)
    assert len(read) == len(reloaded) == 2 and same(layer, before) and not quantization.ahead


def test_ranges_are_those_of_kernels_that_have_some():
    ranges = importlib.import_module("moectl.integrations.vllm.v0_33.experts").scale_ranges
    known = SimpleNamespace(exponents=(1, 2), numbers=True)
    for matrix, found in ((known, (((1, 2), True),) * 2), (SimpleNamespace(), ())):
        layer = SimpleNamespace(w13=matrix, w2=matrix)
        assert ranges(SimpleNamespace(derived={"moectl": layer})) == found
    assert ranges(SimpleNamespace(derived={})) == ()


def test_a_directory_for_some_ranks_is_reloaded_by_each(tiny_gpt_oss, tmp_path, monkeypatch):
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    for name in ("one", "two"):
        moectl.convert(tiny_gpt_oss, tmp_path / name, "marlin", tp_size=2)
    quantization = opened(tmp_path / "one")
    _, layer = loaded(quantization, layer_of(tp_size=2, tp_rank=1))
    before = bits(layer)
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).zero_()
    vllm_stubs.CURRENT[0] = engine_config(str(tmp_path / "two"))
    quantization.get_checkpoint_weight_mapper()
    assert same(layer, before)


def test_weights_that_are_handed_over_are_refused(tiny_gpt_oss, monkeypatch):
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    runner = SimpleNamespace(reload_weights=lambda *words, **named: "reloaded")
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", runner)
    quantization = opened(tiny_gpt_oss)
    loaded(quantization)
    # A trainer calls the model's load_weights itself, outside of vLLM's config.
    with pytest.raises(MoectlError, match=r"do not support weights that are handed over in memory"):
        quantization.get_checkpoint_weight_mapper()
    opened(tiny_gpt_oss).get_quant_method(layer_of(), NAME)
    assert runner.reload_weights(None, None, weights_path="there") == "reloaded"
    for named in ({}, {"is_checkpoint_format": False}):
        with pytest.raises(MoectlError, match=r"handed over in memory. Call reload_weights with a path"):
            runner.reload_weights(None, None, weights_iterator=iter(()), **named)


def test_sleep_that_discards_weights_is_refused(tiny_gpt_oss, monkeypatch):
    slept = []

    class Worker:
        def __init__(self, quantization):
            model = SimpleNamespace(quantization=quantization)
            self.vllm_config = SimpleNamespace(model_config=model)

        def sleep(self, level=1):
            slept.append(level)

    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))
    for _ in range(2):
        loaded(opened(tiny_gpt_oss))
    ours, theirs = Worker("moectl"), Worker("mxfp4")
    ours.sleep()
    ours.sleep(level=1)
    theirs.sleep(2)
    assert slept == [1, 1, 2]
    with pytest.raises(MoectlError) as error:
        ours.sleep(level=2)
    assert slept == [1, 1, 2] and str(error.value) == (
        "moectl's experts in vLLM do not support sleep that discards weights. "
        "Call wake_up, then sleep with level=1."
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("enable_elastic_ep", True),
        ("expert_placement_strategy", "round_robin"),
        ("load_format", "tensorizer"),
        ("weight_transfer_config", object()),
        ("cpu_offload_gb", 4),
        ("offload_group_size", 2),
    ],
)
def test_options_of_vllm_are_refused_at_start(tiny_gpt_oss, option, value):
    vllm_stubs.CURRENT[0] = engine_config(**{option: value})
    with pytest.raises(MoectlError) as error:
        opened(tiny_gpt_oss).get_quant_method(layer_of(ep_size=2), NAME)
    limit = LIMITS[f"--{option.replace('_', '-')}"]
    assert f"moectl's experts in vLLM do not support {limit.why}" in str(error.value)
    assert limit.hint[1:] in str(error.value)


def test_every_limit_is_asked_of_vllm():
    deployment = importlib.import_module("moectl.integrations.vllm.v0_33.deployment")
    asked = deployment.options_of(engine_config(), layer_of().moe_config)
    assert asked.keys() == LIMITS.keys()
    assert not refusals(asked), "vLLM's defaults are supported"


@pytest.mark.parametrize(
    ("model", "layouts"),
    (
        ("openai/gpt-oss-20b", ("marlin-mxfp4", "triton-hopper", "triton-blackwell", "cutlass-sm90")),
        ("openai/gpt-oss-20b", ("trtllm-mxfp4", "humming-mxfp4", "humming-mxfp4-sm100")),
        ("moonshotai/Kimi-K2-Thinking", ("marlin-int4", "humming-int4", "humming-int4-e0m3")),
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", ("marlin-int4", "humming-int4")),
        ("RedHatAI/Qwen3-Coder-Next-NVFP4", ("humming-nvfp4", "humming-nvfp4-rows", "humming-nvfp4-sm100")),
        ("Qwen/Qwen3-30B-A3B-FP8", ("humming-fp8", "humming-fp8-sm100")),
        ("MiniMaxAI/MiniMax-M3-MXFP8", ("humming-mxfp8", "humming-mxfp8-sm100")),
    ),
)
def test_what_was_compared_with_vllms_own_loading_is_taken(model, layouts):
    problem = open_checkpoint(model, offline=True).groups[0].problem
    assert [untaken(layout, problem) for layout in layouts] == [""] * len(layouts)


def test_other_exporters_and_schemes_are_refused_as_by_the_method(tmp_path):
    for model, to, layout in (
        ("amd/Kimi-K2.5-MXFP4", "marlin", "marlin-mxfp4"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "humming", "humming-fp8"),
    ):
        source = synthesize(model, tmp_path / layout, layers=2, experts=8, hidden=256, intermediate=256)
        moectl.convert(source, out := tmp_path / f"{layout}-out", to)
        experts = opened(out).experts
        number = min(experts.layers)
        problem = experts.problem_of(number)
        sizes = (problem.experts, problem.top_k, problem.dims.hidden)
        layer = RoutedExperts(FusedMoEConfig(*sizes, ParallelConfig(), torch.bfloat16))
        with pytest.raises(MoectlError, match="neither moectl's kernels nor vLLM's take as it is"):
            opened(out).get_quant_method(layer, f"model.layers.{number}.mlp.experts")
        assert f"do not take {problem.scheme.words} in the layout {layout}" in untaken(layout, problem)
    problem = open_checkpoint("nvidia/Qwen3-30B-A3B-NVFP4", offline=True).groups[0].problem
    assert "with ModelOptNvFp4FusedMoE, and moectl does not know" in untaken("humming-nvfp4", problem)


def test_directories_that_vllm_loads_are_listed():
    kernels = importlib.import_module("moectl.integrations.vllm.v0_33.engine_kernels")
    listed = {layout for reader in FOLDER_READERS if reader.program == "vLLM" for layout in reader.layouts}
    assert listed == kernels.KERNELS.keys() | {*OWN_LAYOUTS}
