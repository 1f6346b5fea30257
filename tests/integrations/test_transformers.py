"""Models of transformers with experts that moectl loads and computes."""

import shutil

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import moectl  # noqa: E402
from moectl.errors import CheckpointError, UsageError  # noqa: E402
from moectl.integrations.transformers import MoectlExperts, moectl_config  # noqa: E402

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


def test_an_unfinished_directory_is_refused(folders, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folders["gpt-oss"][2], broken)
    (broken / "READY").unlink()
    with pytest.raises(CheckpointError, match="READY is missing"):
        load(broken)
