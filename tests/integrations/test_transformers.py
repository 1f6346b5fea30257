"""Models of transformers with experts that moectl loads and computes."""

import json
import re
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import moectl  # noqa: E402
from moectl.errors import CheckpointError, NoBackend, UsageError  # noqa: E402
from moectl.integrations.model_experts import ModelExperts  # noqa: E402
from moectl.integrations.transformers import MoectlExperts, moectl_config, refuse_offloading  # noqa: E402

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "num_experts_per_tok": 2,
}
X = torch.arange(2, 34).reshape(2, 16)


def published(folder, kind):
    """A whole model of random 16-bit weights in `folder`."""
    torch.manual_seed(0)
    if kind == "gpt-oss":
        config = transformers.GptOssConfig(
            num_local_experts=4,
            intermediate_size=96,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            **SMALL,
        )
        model = transformers.GptOssForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            num_experts=8, moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[1], **SMALL
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By model: its directories in 16 bits, quantized, and converted for a kernel."""
    out = tmp_path_factory.mktemp("models")
    made = {}
    for kind, portable, layout in (("gpt-oss", "mxfp4", "moectl"), ("qwen3", "int4-g32", "marlin")):
        plain = published(out / f"{kind}-bf16", kind)
        quantized, prepared = out / f"{kind}-{portable}", out / f"{kind}-{layout}"
        moectl.convert(plain, quantized, portable)
        moectl.convert(quantized, prepared, layout)
        made[kind] = plain, quantized, prepared
    return made


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def logits(model):
    with torch.no_grad():
        return model(X).logits


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("kind", ("gpt-oss", "qwen3"))
def test_a_converted_directory_computes_what_the_checkpoint_does(folders, kind, caplog):
    _, quantized, prepared = folders[kind]
    model = load(prepared)
    original = load(quantized, config=moectl_config(quantized, backend="torch"))
    replaced = [name for name, module in model.named_modules() if isinstance(module, MoectlExperts)]
    assert replaced == [f"model.layers.{n}.mlp.experts" for n in ((0, 1) if kind == "gpt-oss" else (0,))]
    assert torch.equal(logits(model), logits(original))
    assert "UNEXPECTED" not in caplog.text and "MISSING" not in caplog.text


def test_it_is_as_near_to_fp32_as_transformers_is(folders):
    plain, quantized, prepared = folders["gpt-oss"]
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    assert relative(logits(load(prepared)), logits(judge)) < 0.02
    fp32 = logits(transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    ours = relative(logits(load(plain, config=moectl_config(plain))), fp32)
    assert ours < 1.2 * relative(logits(load(plain)), fp32)


def test_it_generates_and_compiles(folders):
    prepared = folders["qwen3"][2]
    model = load(prepared)
    told = model.generate(X, max_new_tokens=4, do_sample=False)
    original = load(folders["qwen3"][1], config=moectl_config(folders["qwen3"][1]))
    assert torch.equal(told, original.generate(X, max_new_tokens=4, do_sample=False))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(logits(compiled), logits(model)) < 0.02


def pack_attention(folder, out):
    """The INT4 checkpoint `folder` with its attention quantized, too; and one with the values of that."""
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from safetensors.torch import load_file, save_file

    dense = out.with_name(f"{out.name}-dense")
    for copy in (out, dense):
        shutil.copytree(folder, copy)
    config = json.loads((out / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["ignore"] = [name for name in quantization["ignore"] if "self_attn" not in name]
    (out / "config.json").write_text(json.dumps(config))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        plain, packed = {}, {}
        for name, tensor in load_file(out / file).items():
            plain[name] = packed[name] = tensor
            if not name.endswith("_proj.weight") or "self_attn" not in name:
                continue
            groups = tensor.float().unflatten(1, (-1, 32))
            scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
            codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
            plain[name] = (codes * scale.float()[..., None]).flatten(1).to(torch.bfloat16)
            del packed[name]
            prefix = name.removesuffix("weight")
            packed[prefix + "weight_packed"] = packing.pack_to_int32(codes.flatten(1).to(torch.int8), 4)
            packed[prefix + "weight_scale"] = scale
            packed[prefix + "weight_shape"] = torch.tensor(tensor.shape)
        save_file(plain, dense / file, {"format": "pt"})
        save_file(packed, out / file, {"format": "pt"})
        index["weight_map"] = {
            **{name: at for name, at in index["weight_map"].items() if at != file},
            **dict.fromkeys(packed, file),
        }
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out, dense


def test_other_quantized_modules_are_left_to_the_published_quantizer(folders, tmp_path):
    packed, dense = pack_attention(folders["qwen3"][1], tmp_path / "packed")
    moectl.convert(packed, tmp_path / "marlin", "marlin")
    want = logits(load(dense, config=moectl_config(dense)))
    for model in (load(tmp_path / "marlin"), load(packed, config=moectl_config(packed))):
        names = {type(module).__name__ for module in model.model.layers[0].modules()}
        assert "MoectlExperts" in names and model.config.quantization_config.quant_method == "moectl"
        assert relative(logits(model), want) < 0.01


def test_what_does_not_work_is_refused(folders, tmp_path, caplog):
    prepared = folders["gpt-oss"][2]
    model = load(prepared)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(UsageError, match=r"stay there.*device_map"):
        model.to("meta")
    with pytest.raises(UsageError, match="no backend that runs here is called 'nosuch'"):
        load(folders["gpt-oss"][1], config=moectl_config(folders["gpt-oss"][1], backend="nosuch"))
    assert load(prepared).dtype == torch.bfloat16
    wide = transformers.AutoModelForCausalLM.from_pretrained(prepared, dtype=torch.float32)
    assert wide.dtype == torch.bfloat16


LAYERS = ("model.layers.0", "model.layers.1")
ELSEWHERE = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


@pytest.mark.parametrize(
    ("first", "second", "rest", "said"),
    [
        ("disk", "cpu", "cpu", r"offloads model.layers.0.mlp.experts to disk"),
        ("cpu", "meta", "cpu", r"offloads model.layers.1.mlp.experts to meta"),
        (0, "cpu", 0, r"offloads model.layers.1.mlp.experts to cpu"),
    ],
)
def test_offloaded_layers_are_refused_before_anything_is_read(folders, first, second, rest, said):
    pytest.importorskip("accelerate", reason="accelerate is not installed, and device_map needs it")
    device_map = dict(zip(LAYERS, (first, second), strict=True)) | dict.fromkeys(ELSEWHERE, rest)
    with pytest.raises(UsageError, match=said):
        load(folders["gpt-oss"][2], device_map=device_map)


def test_a_device_map_of_one_device_is_that_of_no_map(folders):
    pytest.importorskip("accelerate", reason="accelerate is not installed, and device_map needs it")
    prepared = folders["gpt-oss"][2]
    want = logits(load(prepared))
    for given in ("cpu", "auto", {"": "cpu"}, dict.fromkeys((*LAYERS, *ELSEWHERE), "cpu")):
        assert torch.equal(logits(load(prepared, device_map=given)), want)


def test_what_is_offloaded_where_it_counts():
    name = "model.layers.3.mlp.experts"
    for device_map in ({}, {"": 0}, {"": "cpu"}, {"model.layers.3": 1, "model.layers.4": "cpu"}):
        refuse_offloading([name], device_map)
    # The nearest entry above counts, a prefix of another layer's number does not.
    refuse_offloading([name], {"": "disk", "model.layers.3.mlp": "cuda:1", "model.layers.30": "disk"})
    for device_map in ({"": "disk"}, {"": 0, "model.layers": "cpu"}, {"model": "cuda:0", name: "meta"}):
        with pytest.raises(UsageError, match="computed where they are"):
            refuse_offloading([name], device_map)


class OnDevice(torch.nn.Parameter):
    """A parameter that says that it is on another device than it is: there is no second one here."""

    place = torch.device("cpu")

    @property
    def device(self):
        return self.place


def test_experts_are_prepared_on_the_device_of_their_layer(folders, monkeypatch):
    """Two layers are on two GPUs, as transformers and accelerate place them: for where moectl then asks."""
    model = load(folders["gpt-oss"][2])
    quantizer, asked = model.hf_quantizer, []
    places = {f"{layer}.mlp.experts": torch.device("cuda", 1 - n) for n, layer in enumerate(LAYERS)}
    for name, place in places.items():
        router = model.get_submodule(name.replace("experts", "router"))
        router.weight = OnDevice(router.weight.data, requires_grad=False)
        router.weight.place = place
    prepared = ModelExperts.prepared

    def on_cpu(self, layer, device, *others):
        asked.append((layer, device))
        return prepared(self, layer, torch.device("cpu"), *others)

    monkeypatch.setattr(ModelExperts, "prepared", on_cpu)
    expected = []
    monkeypatch.setattr(
        ModelExperts, "expect", lambda self, layer, device, *rest: expected.append((layer, device))
    )
    want = logits(model)
    quantizer._process_model_after_weight_loading(model)
    assert asked == expected == [(0, torch.device("cuda", 1)), (1, torch.device("cuda", 0))]
    assert torch.equal(logits(model), want)
    # A layer that accelerate has offloaded all the same has nothing to compute with.
    model.model.layers[1].mlp.router.to("meta")
    with pytest.raises(UsageError, match=r"layer of model.layers.1.mlp.experts has no weights on any device"):
        quantizer._process_model_after_weight_loading(model)


def test_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(block, names)


def test_an_unfinished_directory_is_refused(folders, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folders["gpt-oss"][2], broken)
    (broken / "READY").unlink()
    with pytest.raises(CheckpointError, match="READY is missing"):
        load(broken)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("gpt-oss", "qwen3"))
def test_a_gpu_computes_the_same_with_moectl_kernels(folders, kind):
    _, quantized, prepared = folders[kind]
    want = logits(load(prepared))
    out = prepared.with_name(f"{kind}-own")
    moectl.convert(quantized, out, "moectl")
    model = load(out, device_map="cuda")
    experts = next(module for module in model.modules() if isinstance(module, MoectlExperts))
    assert experts.layer.backend == "moectl" and experts.layer.device.type == "cuda"
    with torch.no_grad():
        got = model(X.cuda()).logits
        assert torch.equal(got, model(X.cuda()).logits)
    assert relative(got.cpu(), want) < 0.02
    told = model.generate(X.cuda(), max_new_tokens=8, do_sample=False)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        assert relative(compiled(X.cuda()).logits, got) < 0.02
    assert told.shape == (2, 24)


def test_router_weights_on_the_input_are_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    config = transformers.Llama4TextConfig(
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size=128,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=1,
        **{key: value for key, value in SMALL.items() if key != "num_experts_per_tok"},
    )
    folder = tmp_path / "llama4"
    transformers.Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    opened = []
    monkeypatch.setattr("transformers.modeling_utils.safe_open", lambda *words, **named: opened.append(words))
    with pytest.raises(
        NoBackend, match=r"layer 0 applies router weights to its input, .* in transformers do"
    ):
        load(folder, config=moectl_config(folder))
    assert not opened
