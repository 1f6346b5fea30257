"""The plug-in for SGLang, against stand-ins for its classes, whose signatures are compared with its files."""

import ast
import dataclasses
import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moectl
from moectl.capabilities.own_kernels import TRITON
from moectl.errors import MoectlError
from moectl.integrations import sglang as plugin
from moectl.integrations.model_experts import takes_over
from moectl.layer.layer_source import CheckpointLayers
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import A16, FP8_ACT_TOKEN, INT8_ACT_TOKEN, MXFP4, NVFP4_ACT, Scheme
from support import sglang_stubs as stubs
from support.sglang_stubs import QUANTIZATION_METHODS, BypassedTopKOutput, FusedMoE, StandardTopKOutput
from support.stored_problems import apply_router_weights_to_inputs

EXPERTS, TOP_K, HIDDEN = 8, 4, 256


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    stubs.install(monkeypatch)
    monkeypatch.setenv("MOECTL_BACKEND", "torch")
    plugin.register()
    stubs.HookRegistry.apply_hooks()


@pytest.fixture(scope="module")
def converted(tiny_gpt_oss, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted")
    moectl.convert(tiny_gpt_oss, out / "whole", "marlin")
    moectl.convert(tiny_gpt_oss, out / "tp", "marlin", tp_size=2)
    moectl.convert(tiny_gpt_oss, out / "ep", "marlin", ep_size=2)
    return out


class Model(torch.nn.Module):
    """Two layers of experts, and a loader that keeps the names that it sees."""

    sizes = (EXPERTS, HIDDEN, 192)

    def __init__(self, quant_config, **config):
        super().__init__()
        self.quant_config, self.seen = quant_config, set()
        self.experts = torch.nn.ModuleList(
            FusedMoE(
                *self.sizes,
                layer_id=number,
                top_k=TOP_K,
                quant_config=quant_config,
                prefix=f"model.layers.{number}.mlp.experts",
                **config,
            )
            for number in (0, 1)
        )

    def load_weights(self, weights):
        self.seen |= {name for name, _ in weights}


def model_config(folder, quantization="moectl", **config):
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    return stubs.ModelConfig(str(folder), quantization, SimpleNamespace(quantization_config=stated), **config)


def loader():
    return sys.modules["sglang.srt.model_loader.loader"]


def quantization_of(folder, **config):
    return loader()._get_quantization_config(model_config(folder, **config), None)


def loaded(folder, model_class=Model, **parallel):
    """A model as SGLang loads it: config, model, weights, what follows loading."""
    stubs.PARALLEL.__dict__.update(stubs.Parallel(**parallel).__dict__)
    config = model_config(folder)
    quantization = loader()._get_quantization_config(config, None)
    model = loader()._initialize_model(config, SimpleNamespace(model_class=model_class), quantization)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    model.load_weights((name, None) for name in moectl.open_checkpoint(source_of(folder)).tensors)
    for layer in model.experts:
        layer.quant_method.process_weights_after_loading(layer)
        assert all(parameter.numel() for parameter in layer.parameters())
    return model


def source_of(folder):
    manifest = folder / "moectl.json"
    return json.loads(manifest.read_text())["source"]["name"] if manifest.exists() else folder


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, HIDDEN, generator=g).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(5)]).to(torch.int32)
    return x, torch.rand(5, TOP_K, generator=g), ids


def run(layer):
    x, weights, ids = inputs()
    return layer(x, StandardTopKOutput(weights, ids, torch.empty(0)))


def wanted(folder, number=0, scale=1.0):
    x, weights, ids = inputs()
    layer = CheckpointLayers(moectl.open_checkpoint(folder)).layer(number).prepared("torch", "cpu")
    return layer(x, ids, weights * scale)


def test_published_and_converted_experts_give_the_same(tiny_gpt_oss, converted):
    for folder in (tiny_gpt_oss, converted / "whole"):
        model = loaded(folder)
        for number in (0, 1):
            assert torch.equal(run(model.experts[number]), wanted(tiny_gpt_oss, number)), folder


@pytest.mark.parametrize("kind", ("tp", "ep"))
def test_ranks_add_up(tiny_gpt_oss, converted, kind):
    want = wanted(tiny_gpt_oss).float()
    for of_rank in (lambda rank: tiny_gpt_oss, lambda rank: converted / kind):
        parts = [
            run(loaded(of_rank(rank), **{f"moe_{kind}_size": 2, f"moe_{kind}_rank": rank}).experts[0])
            for rank in (0, 1)
        ]
        assert (sum(part.float() for part in parts) - want).norm() < 0.01 * want.norm()


def test_a_directory_of_another_deployment_is_refused(converted):
    with pytest.raises(MoectlError, match=r"was converted for rank 0 of 2 .* this is rank 0 of 1"):
        loaded(converted / "tp")


@pytest.mark.parametrize(("platform", "scale"), [(["cuda"], 2.5), ([], 1.0)])
def test_the_scaling_factor_of_routed_experts_is_the_runners_on_cuda(
    tiny_gpt_oss, monkeypatch, platform, scale
):
    """Elsewhere SGLang's models apply it."""
    monkeypatch.setattr(stubs, "PLATFORM", platform)
    model = loaded(tiny_gpt_oss, lambda quantization: Model(quantization, routed_scaling_factor=2.5))
    assert torch.equal(run(model.experts[0]), wanted(tiny_gpt_oss, scale=scale))


def test_routing_that_sglang_left_to_the_runner_is_done_by_sglang(tiny_gpt_oss):
    layer = loaded(tiny_gpt_oss).experts[0]
    x, _, _ = inputs()
    logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(1))
    bypassed = BypassedTopKOutput(x, logits, TOP_K)
    assert torch.equal(layer(x, bypassed), layer(x, bypassed.to_standard()))
    assert layer(x[:0], bypassed).shape == (0, HIDDEN)
    other = SimpleNamespace(format=stubs.TopKOutputFormat.TRITON_KERNEL)
    with pytest.raises(MoectlError, match="do not support routing in the form TRITON_KERNEL"):
        layer(x, other)


def test_experts_reach_no_model_class_and_other_layers_are_left_alone(tiny_gpt_oss, converted):
    names = set(moectl.open_checkpoint(tiny_gpt_oss).tensors)
    model = loaded(tiny_gpt_oss)
    assert names - model.seen == {name for name in names if ".mlp.experts." in name}
    inner = model.quant_config.inner
    assert inner.config["quant_method"] == "mxfp4" and inner.mapper == "mapper"
    assert model.quant_config.fused is True, "attributes of the published config"
    linear = model.quant_config.get_quant_method(stubs.LinearBase(), "model.layers.0.self_attn.qkv")
    assert linear == "SGLang's method of model.layers.0.self_attn.qkv"
    assert quantization_of(converted / "whole").inner.config["quant_method"] == "mxfp4"


def test_layers_of_16_bit_checkpoints_stay_unquantized(tiny_gpt_oss, converted, tmp_path):
    folder = converted / "whole"
    quantization = quantization_of(folder)
    quantization.inner = None
    assert isinstance(quantization.get_quant_method(stubs.LinearBase(), "a"), stubs.UnquantizedLinearMethod)
    assert quantization.get_quant_method(torch.nn.Module(), "a") is None
    with pytest.raises(AttributeError):
        _ = quantization.fused


def test_the_page_lists_the_formats_that_are_taken_over():
    text = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    sentence = text[text.index("moectl's kernels compute ") :].split(".")[0]
    sized = MoEProblem(Dims(256, 256), EXPERTS, TOP_K, Scheme(MXFP4))

    def taken(row, act):
        problems = (dataclasses.replace(sized, scheme=Scheme(weight, act)) for weight in row.formats)
        return all(row.takes(problem.scheme) and takes_over("moectl", problem) for problem in problems)

    said = dict.fromkeys(re.findall(r"\b[A-Z]+\d+(?= weights|,| and )", sentence))
    assert set(said) == {name.upper() for name in TRITON.names}
    # Which of them take more than 16-bit activations, in the sentence's second and third part.
    sixteen, kept, coded = re.split(r", (?=MXFP4)|, and (?=FP8)", sentence)
    for row in TRITON.weights:
        names = {weight.name.upper() for weight in row.formats}
        part = next(part for part in (coded, kept, sixteen) if names <= set(re.findall(r"[A-Z]+\d+", part)))
        assert taken(row, A16) is (row.any_act or A16 in row.acts)
        assert taken(row, FP8_ACT_TOKEN) is (row.any_act or "FP8" in names)
        assert taken(row, INT8_ACT_TOKEN) is (part is kept or "INT8" in names)
        assert taken(row, NVFP4_ACT) is row.any_act


def test_who_is_taken_over(monkeypatch):
    assert next(iter(QUANTIZATION_METHODS)) == "moectl" and stubs.QUANTIZATION_CHOICES == ["moectl"]
    assert stubs.MOE_RUNNER_BACKEND_CHOICES == ["moectl"] and set(stubs.CORES) == {"moectl"}
    claims = QUANTIZATION_METHODS["moectl"].override_quantization_method
    published = {"quant_method": "mxfp4"}
    assert claims({"quant_method": "moectl"}, None) == claims(published, "moectl") == "moectl"
    assert claims(published, None) is None and claims(None, "moectl") is None
    monkeypatch.setenv("MOECTL_EXPERTS", "kernels")
    assert claims(published, None) == "moectl" and claims(published, "fp8") is None


def test_the_switch_leaves_other_layers_to_the_published_method(tiny_gpt_oss, monkeypatch):
    monkeypatch.setenv("MOECTL_EXPERTS", "kernels")
    assert quantization_of(tiny_gpt_oss).inner.config["quant_method"] == "mxfp4"


def test_where_sglang_does_not_ask_about_the_switch_the_log_says_so(tiny_gpt_oss, monkeypatch, caplog):
    """Without a quantization_config: SGLang loads the experts itself."""
    assert quantization_of(tiny_gpt_oss, quantization=None) is None and not caplog.records
    monkeypatch.setenv("MOECTL_EXPERTS", "kernels")
    assert quantization_of(tiny_gpt_oss, quantization=None) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "--quantization moectl takes experts over" in record.getMessage()
    monkeypatch.setenv("MOECTL_EXPERTS", "yes")
    with pytest.raises(MoectlError, match="MOECTL_EXPERTS must be kernels, got yes"):
        quantization_of(tiny_gpt_oss, quantization=None)


def test_what_it_does_not_do_is_refused_with_every_reason(tiny_gpt_oss):
    stubs.ARGS.enable_eplb, stubs.ARGS.moe_a2a_backend, stubs.ARGS.enable_memory_saver = True, "deepep", True
    with pytest.raises(MoectlError) as caught:
        quantization_of(tiny_gpt_oss)
    assert caught.value.what == (
        "moectl's experts in SGLang do not support EPLB, all-to-all backends (DeepEP, Mooncake, NIXL, "
        "FlashInfer and others), weights that the memory saver discards"
    )
    assert "leave out --moe-a2a-backend" in caught.value.hint
    stubs.ARGS.__dict__.update(stubs.SERVER_ARGS)
    stubs.ARGS.enable_memory_saver = stubs.ARGS.enable_weights_cpu_backup = True
    assert quantization_of(tiny_gpt_oss).backends == {0: "torch", 1: "torch"}
    with pytest.raises(MoectlError, match=r"take bfloat16 or float16, not torch\.float32"):
        quantization_of(tiny_gpt_oss, dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "reason"),
    (
        ({"no_combine": True, "apply_router_weight_on_input": True}, "weights on the input, .* not summed"),
        ({"num_fused_shared_experts": 1}, "shared experts among .* --disable-shared-experts-fusion"),
    ),
)
def test_layers_of_another_kind_are_refused(tiny_gpt_oss, config, reason):
    with pytest.raises(MoectlError, match=reason):
        loaded(tiny_gpt_oss, lambda quantization: Model(quantization, **config))


def test_router_weights_on_the_input_are_refused_before_the_model_is_built(tiny_gpt_oss, monkeypatch):
    apply_router_weights_to_inputs(monkeypatch)
    with pytest.raises(
        MoectlError, match=r"layer 0 applies router weights to its input, .* in SGLang do not"
    ):
        quantization_of(tiny_gpt_oss)


def test_weights_of_the_hub_come_from_where_sglang_downloads_to(tiny_gpt_oss):
    load = SimpleNamespace(download_dir="downloads")
    config = model_config(tiny_gpt_oss)
    config.revision = "main"  # of no meaning for a directory
    assert loader()._get_quantization_config(config, load).experts.hub_cache == "downloads"


def test_another_model_is_refused(tiny_gpt_oss):
    class Narrow(Model):
        sizes = (EXPERTS, 128, 192)

    class Shallow(Model):
        def __init__(self, quant_config):
            super().__init__(quant_config)
            quant_config.placed.discard(1)

    with pytest.raises(MoectlError, match=r"layer 0 has .* SGLang's model has \(8, 4, 128\)"):
        loaded(tiny_gpt_oss, Narrow)
    with pytest.raises(MoectlError, match=r"Shallow has no experts in layers \[1\]"):
        loaded(tiny_gpt_oss, Shallow)


def test_shared_experts_do_not_become_routed_ones(tiny_gpt_oss):
    resolve = sys.modules["sglang.srt.layers.moe.utils"].resolve_shared_experts_config
    assert resolve(None, None, None).num_fused_shared_experts == 1
    apart = resolve(None, None, quantization_of(tiny_gpt_oss))
    assert apart.fusion_disabled and apart.num_fused_shared_experts == 0


def test_draft_models_are_sglangs_or_refused(tiny_gpt_oss, converted):
    assert type(quantization_of(tiny_gpt_oss, is_draft_model=True)) is stubs.Mxfp4Config
    with pytest.raises(MoectlError, match="do not support draft models"):
        quantization_of(converted / "whole", is_draft_model=True)


def test_layers_without_a_kernel_are_left_to_sglang(tiny_gpt_oss, converted, monkeypatch, caplog):
    monkeypatch.delenv("MOECTL_BACKEND")
    # No kernel of moectl's own runs on the CPU.
    with caplog.at_level("INFO"):
        quantization = quantization_of(tiny_gpt_oss)
    assert not quantization.backends and quantization.get_name() == "mxfp4"
    assert "leaves experts in mxfp4" in caplog.text and "layers [0, 1]" in caplog.text
    model = Model(quantization)
    assert model.experts[0].quant_method == "SGLang's method of model.layers.0.mlp.experts"
    with pytest.raises(MoectlError, match="no engine reads a converted directory alone"):
        quantization_of(converted / "whole")


@pytest.mark.parametrize("kind", ("published", "whole"))
def test_new_weights_are_refused_while_it_serves(tiny_gpt_oss, converted, kind):
    folder = tiny_gpt_oss if kind == "published" else converted / kind
    model = loaded(folder)
    with pytest.raises(MoectlError, match="take no new weights while SGLang serves"):
        model.load_weights([("model.norm.weight", None)])
    # What SGLang answers with before it touches any weight.
    said = model.experts[0]._derived_weight_cache_error
    assert said.startswith("moectl's experts take no new weights while SGLang serves: start the server again")
    with pytest.raises(MoectlError, match="take no new weights while SGLang serves"):
        model.experts[0].quant_method.process_weights_after_loading(model.experts[0])


def test_without_its_hooks_it_refuses(tiny_gpt_oss, monkeypatch):
    stubs.install(monkeypatch)
    plugin.register()
    with pytest.raises(MoectlError, match="did not apply moectl's hooks"):
        quantization_of(tiny_gpt_oss)
    monkeypatch.setattr(loader(), "_initialize_model", stubs._initialize_model)
    stubs.HookRegistry.hooks.pop("sglang.srt.model_loader.loader._initialize_model")
    stubs.HookRegistry.apply_hooks()
    with pytest.raises(MoectlError, match="loader did not call moectl's hook"):
        loaded(tiny_gpt_oss)


def test_another_release_is_refused_in_one_sentence(monkeypatch):
    stubs.install(monkeypatch, "0.6.1")
    plugin.register()
    method = QUANTIZATION_METHODS["moectl"]
    for call in (lambda: method.from_config({"quant_method": "moectl"}), method):
        with pytest.raises(MoectlError, match=r"no adapter for SGLang 0.6.1, only for 0.5.23"):
            call()
    assert not stubs.HookRegistry.hooks


@pytest.mark.parametrize(
    ("release", "value", "said"),
    [
        ("0.6.1", "kernels", "moectl has no adapter for SGLang 0.6.1, only for 0.5.23. Use one of these"),
        ("0.6.1", "yes", "MOECTL_EXPERTS must be kernels, got yes. Correct it"),
        ("0.5.23", "yes", "MOECTL_EXPERTS must be kernels, got yes. Correct it"),
    ],
)
def test_what_the_switch_asks_for_ends_sglang_if_it_cannot_be_had(monkeypatch, release, value, said):
    """SGLang logs the exceptions of plug-ins, and starts."""
    stubs.install(monkeypatch, release)
    monkeypatch.setenv("MOECTL_EXPERTS", value)
    with pytest.raises(SystemExit, match=said):
        plugin.register()
    assert "moectl" not in QUANTIZATION_METHODS


@pytest.mark.parametrize(
    ("chunk", "requests", "ranks", "most"),
    [
        (8192, None, 1, 8192),
        (8192, None, 8, 65536),
        (-1, None, 2, 32768),
        (1024, None, 2, 8192),
        (1024, 256, 2, 2048),
        (1024, 3000, 2, 3000),
    ],
)
def test_kernels_are_compiled_while_weights_are_loaded_and_taken_with_the_last_layer(
    tiny_gpt_oss, monkeypatch, caplog, chunk, requests, ranks, most
):
    from moectl.integrations import compile_at_load
    from moectl.integrations.sglang.v0_5_23 import experts
    from moectl.layer import background_compile

    asked, taken, configs = [], [], []

    class Load:
        def ready(self, layer):
            taken.append((layer.problem, sorted(configs[0].loaded)))
            return "3 kernels" if len(taken) == 1 else ""

    def start(problem, backend, device, tokens):
        asked.append((problem, backend, tokens))
        return Load()

    class Watched(Model):
        def load_weights(self, weights):
            configs.append(self.quant_config)
            assert len(asked) == 2 and not taken
            super().load_weights(weights)

    monkeypatch.setattr(background_compile, "start", start)
    opening = compile_at_load.begin
    monkeypatch.setattr(experts, "begin", lambda *words: opening(*words[:3], torch.device("cuda"), words[4]))
    stubs.ARGS.chunked_prefill_size, stubs.ARGS.max_running_requests = chunk, requests
    with caplog.at_level("INFO"):
        model = loaded(tiny_gpt_oss, Watched, attn_dp_size=ranks)
    assert [(backend, tokens) for _, backend, tokens in asked] == [("torch", most)] * 2
    # What was compiled is what the layers are, and nothing is left to be taken by a request.
    assert taken == [(problem, [0, 1]) for problem, *_ in asked]
    assert [record.getMessage() for record in caplog.records] == ["moectl: 3 kernels"]
    run(model.experts[0])
    assert len(taken) == 2


REAL = os.environ.get("MOECTL_TEST_SGLANG", "")
"""A folder with the unpacked wheel of SGLang 0.5.23, which is read and not imported."""

real = pytest.mark.skipif(
    not REAL, reason="MOECTL_TEST_SGLANG names no folder with SGLang 0.5.23's unpacked wheel"
)


def real_module(name):
    path = Path(REAL, *name.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))


def defined(body):
    return {
        node.name: node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def parameters(node):
    given = node.args
    return [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def of_stub(function):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(inspect.unwrap(getattr(function, "__func__", function))).parameters.values()
    return [parameter.name for parameter in found if parameter.kind not in kinds]


def fields_of(node):
    return [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]


PART = {"FusedMoE.__init__"}
"""Of whose parameters a stand-in has the first."""


@real
@pytest.mark.parametrize("module", stubs.MODULES)
def test_stand_ins_have_the_signatures_of_sglang(module):
    theirs = defined(real_module(module).body)
    for stub in stubs.MODULES[module]:
        name = stub.__name__
        assert name in theirs, f"{module} has no {name}"
        if not inspect.isclass(stub):
            assert of_stub(stub) == parameters(theirs[name]), name
            continue
        methods = defined(theirs[name].body)
        kept = {key for key, value in vars(stub).items() if callable(value) or hasattr(value, "__func__")}
        for method in sorted(kept & set(methods)):
            ours, real_ones = of_stub(vars(stub)[method]), parameters(methods[method])
            if f"{name}.{method}" in PART:
                real_ones = real_ones[: len(ours)]
            assert ours == real_ones, f"{name}.{method}"
        if dataclasses.is_dataclass(stub):
            assert {item.name for item in dataclasses.fields(stub)} <= set(fields_of(theirs[name])), name
        elif issubclass(stub, tuple):
            real_ones = fields_of(theirs[name])
            assert list(stub._fields) == real_ones, name


def test_the_adapter_overrides_with_the_same_signatures():
    from moectl.integrations.sglang.v0_5_23.experts import SglangMoEMethod, SglangRunnerCore

    for ours in (SglangMoEMethod, SglangRunnerCore, QUANTIZATION_METHODS["moectl"]):
        for name in set(vars(ours)) - {"__init__"}:
            base = next((vars(kind)[name] for kind in ours.__mro__[1:-1] if name in vars(kind)), None)
            if inspect.isfunction(inspect.unwrap(getattr(base, "__func__", base))):
                assert of_stub(vars(ours)[name]) == of_stub(base), f"{ours.__name__}.{name}"


@real
def test_what_the_adapter_reads_is_there():
    """Names that stand-ins have as values: options, attributes of layers and configs, hooked functions."""
    from moectl.integrations.sglang.limits import LIMITS, MEMORY_SAVER
    from moectl.integrations.sglang.v0_5_23.registration import HOOKS

    for target in HOOKS:
        module, _, name = target.rpartition(".")
        assert name in defined(real_module(module).body), target
    groups = Path(REAL, "sglang/srt/arg_groups/fields").glob("*.py")
    options = {
        item.target.id
        for path in groups
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign)
    }
    named = {limit.field for limit in (*LIMITS.values(), MEMORY_SAVER)} | {"enable_weights_cpu_backup"}
    assert named <= options, sorted(named - options)
    layer = Path(REAL, "sglang/srt/layers/moe/fused_moe_triton/layer.py").read_text("utf-8")
    for attribute in vars(FusedMoE(8, 8, 8, 0, quant_config=SimpleNamespace(get_quant_method=lambda *a: ""))):
        if not attribute.startswith("_") and attribute != "training":
            assert f"self.{attribute} = " in layer, attribute
    config = Path(REAL, "sglang/srt/configs/model_config.py").read_text("utf-8")
    for item in dataclasses.fields(stubs.ModelConfig):
        assert f"self.{item.name}" in config, item.name
    context = Path(REAL, "sglang/srt/runtime_context.py").read_text("utf-8")
    for item in dataclasses.fields(stubs.Parallel):
        assert item.name in context, item.name
    choices = Path(REAL, "sglang/srt/arg_groups/choices.py").read_text("utf-8")
    for name in stubs.VALUES["sglang.srt.arg_groups.choices"]:
        assert f"{name} = " in choices, name
