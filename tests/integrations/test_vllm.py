"""The plug-in for vLLM, against stand-ins for its classes."""

import json
import shutil
from functools import cache

import pytest
import torch

import moectl
from moectl.errors import MoectlError
from moectl.integrations import vllm as plugin
from moectl.kernels.modular.fused_moe_kernel import map_of
from moectl.layer.layer_source import CheckpointLayers
from support.stored_problems import apply_router_weights_to_inputs
from support.vllm_stubs import (
    CURRENT,
    LOGGED,
    METHODS,
    FusedMoEConfig,
    ParallelConfig,
    RoutedExperts,
    engine_config,
    install,
)

EXPERTS, TOP_K, HIDDEN = 8, 4, 256


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    install(monkeypatch)
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    plugin.register()


@pytest.fixture(scope="module")
def converted(tiny_gpt_oss, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted")
    moectl.convert(tiny_gpt_oss, out / "whole", "marlin")
    moectl.convert(tiny_gpt_oss, out / "own", "moectl")
    moectl.convert(tiny_gpt_oss, out / "tp", "marlin", tp_size=2)
    moectl.convert(tiny_gpt_oss, out / "ep", "marlin", ep_size=2)
    return out


def opened(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    quantization = METHODS["moectl"].from_config(config)
    quantization.maybe_update_config(str(folder))
    return quantization


def built(quantization, number=0, **parallel):
    """One layer as vLLM builds it: method, weights, loading, what follows loading."""
    return built_on(quantization, ParallelConfig(**parallel), number)


def built_on(quantization, parallel, number=0):
    moe = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, parallel)
    layer = RoutedExperts(moe, parallel.expert_map(EXPERTS))
    method = quantization.get_quant_method(layer, f"model.layers.{number}.mlp.experts")
    sizes = method.maybe_roundup_sizes(HIDDEN, 192, torch.bfloat16, None)
    assert sizes == (HIDDEN, 192)
    method.create_weights(layer, EXPERTS, *sizes, torch.bfloat16, weight_loader=None)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 0
    method.process_weights_after_loading(layer)
    local = EXPERTS if layer.expert_map is None else int((layer.expert_map >= 0).sum())
    assert {parameter.shape[0] for parameter in layer.parameters()} == {local}
    return lambda x, weights, ids: method.apply(layer, x, weights, ids, None, None)


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, HIDDEN, generator=g).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(5)])
    return x, torch.rand(5, TOP_K, generator=g), ids


def wanted(folder, number=0):
    x, weights, ids = inputs()
    layer = CheckpointLayers(moectl.open_checkpoint(folder)).layer(number).prepared("torch", "cpu")
    return layer(x, ids.to(torch.int32), weights)


def test_published_and_converted_experts_give_the_same(tiny_gpt_oss, converted):
    for folder in (tiny_gpt_oss, converted / "whole"):
        for number in (0, 1):
            got = built(opened(folder), number)(*inputs())
            assert torch.equal(got, wanted(tiny_gpt_oss, number)), folder


@pytest.mark.parametrize("kind", ("tp", "ep"))
def test_ranks_add_up(tiny_gpt_oss, converted, kind):
    want = wanted(tiny_gpt_oss).float()
    for of_rank in (lambda rank: tiny_gpt_oss, lambda rank: converted / kind):
        parts = [
            built(opened(of_rank(rank)), **{f"{kind}_size": 2, f"{kind}_rank": rank})(*inputs())
            for rank in (0, 1)
        ]
        assert (sum(part.float() for part in parts) - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize(("tp", "dp", "ep"), [(1, 2, True), (2, 2, True), (1, 3, True), (1, 3, False)])
def test_each_data_parallel_rank_has_its_own_directory_and_experts(tiny_gpt_oss, tmp_path, tp, dp, ep):
    """With experts over all devices (three of them: 3, 3 and 2 experts), or slices of each."""
    whole, ranks = wanted(tiny_gpt_oss).float(), tp * dp
    out = tmp_path / "ranks"
    moectl.convert(tiny_gpt_oss, out, "marlin", **{"ep_size" if ep else "tp_size": ranks})
    folders = sorted(folder.name for folder in out.glob("rank-*"))
    parts, maps = [], []
    for rank, mine in enumerate(folders):
        # The host of this rank has no other's directory.
        own = tmp_path / f"host {rank}"
        shutil.copytree(out, own, ignore=shutil.ignore_patterns(*(f for f in folders if f != mine)))
        parallel = ParallelConfig.make(rank, tp, dp, ep)
        parts.append(built_on(opened(own), parallel)(*inputs()).float())
        maps.append(parallel.expert_map(EXPERTS))
        others = ParallelConfig.make((rank + 1) % ranks, tp, dp, ep)
        with pytest.raises(MoectlError, match=r"lacks|has no"):
            built_on(opened(own), others)
    assert len(parts) == ranks and (sum(parts) - whole).norm() < 0.01 * whole.norm()
    if ep:
        # Every expert is on one rank, in consecutive numbers.
        assert sum((where >= 0).int() for where in maps).tolist() == [1] * EXPERTS
        assert all(part.norm() > 0 for part in parts)
    # Another placement of the same number of experts is not this directory's.
    if ep:
        layer = RoutedExperts(FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, parallel), maps[-1].flip(0))
        method = opened(own).get_quant_method(layer, "model.layers.0.mlp.experts")
        with pytest.raises(MoectlError, match="otherwise than in consecutive ranges"):
            method.process_weights_after_loading(layer)


def test_ranks_with_unequal_slices_add_up(tiny_gpt_oss, tmp_path):
    """Six blocks of intermediate channels over four ranks: two for the first two, then one."""
    moectl.convert(tiny_gpt_oss, tmp_path / "out", "moectl", tp_size=4)
    whole = wanted(tiny_gpt_oss).float()
    for source in (tiny_gpt_oss, tmp_path / "out"):
        parts = [built(opened(source), tp_size=4, tp_rank=rank)(*inputs()).float() for rank in range(4)]
        assert (sum(parts) - whole).norm() < 0.01 * whole.norm()


def test_a_directory_of_another_deployment_is_refused(converted):
    with pytest.raises(MoectlError, match=r"was converted for rank 0 of 2 .* this is rank 0 of 1"):
        built(opened(converted / "tp"))


def test_experts_reach_no_model_class_and_other_layers_are_left_alone(tiny_gpt_oss, converted):
    names = set(moectl.open_checkpoint(tiny_gpt_oss).tensors)
    quantization = opened(tiny_gpt_oss)
    assert not any(quantization.get_checkpoint_weight_mapper().drops(name) for name in names)
    layer = RoutedExperts(FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig()))
    quantization.get_quant_method(layer, "model.layers.0.mlp.experts")
    mapper = quantization.get_checkpoint_weight_mapper()
    dropped = {name for name in names if mapper.drops(name)}
    assert dropped == {name for name in names if "layers.0.mlp.experts." in name} and len(dropped) == 6
    linear = torch.nn.Linear(1, 1)
    assert quantization.get_quant_method(linear, "model.layers.0.self_attn.qkv") == (
        "vLLM's method of model.layers.0.self_attn.qkv"
    )
    assert opened(converted / "whole").inner.config["quant_method"] == "mxfp4"


def test_who_is_taken_over(monkeypatch):
    claims = METHODS["moectl"].override_quantization_method
    published = {"quant_method": "mxfp4"}
    assert claims({"quant_method": "moectl"}, None) == claims(published, "moectl") == "moectl"
    assert claims(published, None) is None and claims(None, "moectl") is None
    monkeypatch.setenv("MOECTL_EXPERTS", "kernels")
    assert claims(published, None) == "moectl" and claims(published, "fp8") is None


def test_the_variable_takes_over_what_has_no_quantization_config_too(monkeypatch):
    import vllm.config

    def quantization(*words, **named):
        return vllm.config.ModelConfig(*words, **named).quantization

    assert quantization() is None and quantization({"quant_method": "mxfp4"}) == "mxfp4"
    monkeypatch.setenv("MOECTL_EXPERTS", "kernels")
    LOGGED.clear()
    plugin.register()
    plugin.register()
    assert quantization() == "moectl" and LOGGED == ["MOECTL_EXPERTS asks for moectl's experts in the model"]
    assert quantization({"quant_method": "mxfp4"}) == "moectl"
    assert quantization(quantization="fp8") == "fp8" and quantization(experts=0) is None
    LOGGED.clear()
    assert quantization(runner_type="draft") is None
    assert LOGGED == ["moectl leaves the draft model the model to vLLM"]


@pytest.mark.parametrize("value", ("kernel", "1", "KERNELS"))
def test_another_value_of_the_variable_is_refused_at_start(monkeypatch, value):
    monkeypatch.setenv("MOECTL_EXPERTS", value)
    with pytest.raises(MoectlError, match=f"^MOECTL_EXPERTS must be kernels, got {value}. Correct it"):
        plugin.register()
    monkeypatch.setenv("MOECTL_EXPERTS", "")
    plugin.register()


def test_what_it_does_not_do_is_refused_with_every_reason(tiny_gpt_oss):
    quantization = opened(tiny_gpt_oss)
    moe = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig(enable_eplb=True), is_lora_enabled=True)
    with pytest.raises(MoectlError, match="do not support EPLB, LoRA"):
        quantization.get_quant_method(RoutedExperts(moe), "model.layers.0.mlp.experts")
    other = FusedMoEConfig(EXPERTS, 2, HIDDEN, ParallelConfig())
    with pytest.raises(MoectlError, match=r"layer 0 has .* vLLM's model has \(8, 2, 256\)"):
        quantization.get_quant_method(RoutedExperts(other), "model.layers.0.mlp.experts")


def test_router_weights_on_the_input_are_refused_before_weights_are_loaded(tiny_gpt_oss, monkeypatch):
    apply_router_weights_to_inputs(monkeypatch)
    layer = RoutedExperts(FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig()))
    with pytest.raises(MoectlError, match=r"layer 0 applies router weights to its input, .* in vLLM do not"):
        opened(tiny_gpt_oss).get_quant_method(layer, "model.layers.0.mlp.experts")


def test_a_revision_of_a_directory_is_ignored(tiny_gpt_oss):
    """vLLM passes ``--revision`` on with every name."""
    quantization = METHODS["moectl"].from_config({"quant_method": "mxfp4"})
    quantization.maybe_update_config(str(tiny_gpt_oss), revision="main")
    assert quantization.experts.layers == {0, 1}


def test_weights_of_the_hub_come_from_where_vllm_downloads_to(tiny_gpt_oss):
    quantization = opened(tiny_gpt_oss)
    CURRENT[0] = engine_config(download_dir="downloads")
    layer = RoutedExperts(FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig()))
    for number in (0, 1):
        quantization.get_quant_method(layer, f"model.layers.{number}.mlp.experts")
    first, second = (method.experts for method in quantization.methods.values())
    assert first is second is quantization.experts and first.hub_cache == "downloads"


def test_layers_without_a_kernel_are_left_to_vllm(tiny_gpt_oss, converted, monkeypatch):
    monkeypatch.delenv("MOECTL_BACKEND")
    layer = RoutedExperts(FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig()))
    quantization = opened(tiny_gpt_oss)
    # No kernel of moectl's own runs on the CPU.
    assert str(quantization.get_quant_method(layer, "model.layers.0.mlp.experts")).startswith("vLLM's method")
    assert not quantization.methods
    with pytest.raises(MoectlError, match="layout moectl-mtile64, and moectl has no kernel"):
        opened(converted / "own").get_quant_method(layer, "model.layers.0.mlp.experts")


def test_another_placement_of_experts_is_refused(tiny_gpt_oss):
    quantization = opened(tiny_gpt_oss)
    moe = FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig(ep_size=2))
    layer = RoutedExperts(moe, torch.tensor([0, -1, 1, -1, 2, -1, 3, -1], dtype=torch.int32))
    method = quantization.get_quant_method(layer, "model.layers.0.mlp.experts")
    with pytest.raises(MoectlError, match="otherwise than in consecutive ranges"):
        method.process_weights_after_loading(layer)


def test_another_release_is_refused_in_one_sentence(monkeypatch):
    install(monkeypatch, "0.40.1")
    plugin.register()
    with pytest.raises(MoectlError, match=r"no adapter for vLLM 0.40.1, only for 0.33"):
        METHODS["moectl"].from_config({"quant_method": "moectl"})


def test_another_release_does_not_serve_without_the_experts_that_were_asked_for(monkeypatch):
    install(monkeypatch, "0.34.0")
    monkeypatch.setenv("MOECTL_EXPERTS", "kernels")
    with pytest.raises(MoectlError, match=r"no adapter for vLLM 0.34.0, only for 0.33"):
        plugin.register()
    assert not METHODS


@pytest.mark.parametrize("load_format", ("auto", "dummy"))
@pytest.mark.parametrize(("folder", "backend"), [("", ""), ("", "torch"), ("whole", "torch")])
def test_backends_are_chosen_once_for_equal_layers(
    tiny_gpt_oss, converted, monkeypatch, folder, backend, load_format
):
    from moectl.integrations import model_experts

    chosen, looked = [], []
    choose, look = model_experts.choose_backends, model_experts.look_at_machine
    monkeypatch.setattr(
        model_experts, "choose_backends", lambda *words: chosen.append(words) or choose(*words)
    )
    monkeypatch.setattr(model_experts, "machine_of", cache(lambda where: looked.append(where) or look(where)))
    monkeypatch.setenv("MOECTL_BACKEND", backend)
    CURRENT[0] = engine_config(load_format=load_format)
    quantization = opened(converted / folder if folder else tiny_gpt_oss)
    for number in (0, 1):
        layer = RoutedExperts(FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, ParallelConfig()))
        method = quantization.get_quant_method(layer, f"model.layers.{number}.mlp.experts")
        if backend:
            method.process_weights_after_loading(layer)
    assert len(chosen) == len(looked) == 1


def test_an_expert_map_is_that_of_the_layer(tiny_gpt_oss):
    quantization = opened(tiny_gpt_oss)
    built(quantization, ep_size=2, ep_rank=1)
    layer = quantization.experts.prepared(
        0, torch.device("cpu"), "bf16", "torch", plugin_shard(ep_size=2, ep_rank=1)
    )
    assert map_of(layer).tolist() == [-1] * 4 + [0, 1, 2, 3]


def plugin_shard(**sizes):
    from moectl.convert.rank_slice import RankShard

    return RankShard(**sizes)


@pytest.mark.parametrize("warm", (False, True))
def test_kernels_are_compiled_while_weights_are_loaded_and_taken_once(tiny_gpt_oss, monkeypatch, warm):
    from moectl.integrations import compile_at_load
    from moectl.integrations.vllm.v0_33 import experts
    from moectl.layer import background_compile

    asked, taken = [], []

    class Load:
        compiled = warm

        def ready(self, layer):
            taken.append(layer.problem)
            return "3 kernels" if len(taken) == 1 else ""

    def start(problem, backend, device, tokens):
        asked.append((problem, backend, tokens))
        return Load()

    monkeypatch.setattr(background_compile, "start", start)
    opening = compile_at_load.begin
    monkeypatch.setattr(experts, "begin", lambda *words: opening(*words[:3], torch.device("cuda"), words[4]))
    LOGGED.clear()
    layers = [built(opened(tiny_gpt_oss), number) for number in (0, 1)]
    # Weights are loaded; nothing has waited for a kernel yet. What was compiled before was taken meanwhile.
    assert len(taken) == (2 if warm else 0)
    assert [(backend, tokens) for _, backend, tokens in asked] == [("torch", 16384)] * 2
    for layer in layers * 2:
        layer(*inputs())
    assert LOGGED == ["moectl: 3 kernels"]
    # What was compiled is what the layers are.
    assert taken == [problem for problem, *_ in asked]


def test_nothing_is_compiled_ahead_on_a_cpu(tiny_gpt_oss):
    from moectl.integrations.compile_at_load import begin

    problem = opened(tiny_gpt_oss).experts.problem_of(0)
    assert begin(problem, "bf16", "moectl", torch.device("cpu"), 8192) is None
