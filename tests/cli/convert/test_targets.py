"""What `convert` says of targets and inputs: what to type instead, and who loads the output."""

import pytest

from moectl.convert.layouts.registry import layout_for_all
from moectl.errors import UsageError
from moectl.problem.layouts import FOLDER_READERS, DirectoryReader, loads_folder
from moectl.problem.schemes import MXFP4, NVFP4
from support.invoking import moectl


@pytest.mark.parametrize(
    "typed, words",
    [
        ("gptq", "--to int4-g128 --container gptq"),
        ("AWQ", "--to int4-g128"),
        ("fp8", "--to fp8-block"),
        ("gguf", "convert_hf_to_gguf.py"),
        ("gptq-marlin", "--to marlin for moectl"),
        ("fp4", "--to nvfp4"),
        ("mxfp8", "MXFP8 is read but not written"),
        ("bnb", "neither reads nor writes bitsandbytes"),
    ],
)
def test_a_method_as_target_is_answered_with_what_to_type(tiny_kimi, tmp_path, typed, words):
    text = moectl("convert", tiny_kimi, tmp_path / "out", "--to", typed, code=2).stderr
    assert f"{typed!r} is not known" in text and words in " ".join(text.split())


@pytest.mark.parametrize("target", ["moectl", "marlin", "aiter"])
def test_layers_that_no_target_holds_together_are_named_with_what_does(tmp_path, target):
    asked = ("convert", "QuantTrio/Qwen3.6-35B-A3B-AWQ", tmp_path / "out", "--dry-run", "--offline", "--to")
    text = " ".join(moectl(*asked, target, code=2).stderr.split())
    assert "layer 0 in bf16, layers 1-39 in int4 group 128 with zero points" in text
    assert "No target has one that does. Use the checkpoint itself" in text and "such as --to bf16" in text
    assert "Choose another --to" not in text
    assert "nothing was written" in moectl(*asked, "bf16").stdout


def test_layers_that_another_target_holds_together_are_answered_with_it():
    layers = {MXFP4: (0,), NVFP4: (1, 2)}
    assert layout_for_all("moectl", layers).name == "moectl-mtile64"
    with pytest.raises(UsageError, match="layer 0 in mxfp4 group 32, layers 1-2 in nvfp4 group 16") as told:
        layout_for_all("trtllm", layers)
    assert told.value.hint == "For these weights use one of: moectl."


def test_a_gguf_file_is_named_as_such(tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for given in (file, tmp_path):
        text = " ".join(moectl("convert", given, tmp_path / "out", "--to", "marlin", code=4).stderr.split())
        assert "is a GGUF file" in text and "Give the safetensors checkpoint" in text


def test_a_lora_adapter_is_named_as_such(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    text = " ".join(moectl("explain", tmp_path, "--gpu", "h100", code=4).stderr.split())
    assert "holds a LoRA adapter" in text and "--assume lora=yes" in text


def test_a_format_without_a_loader_is_announced_before_any_work(tmp_path):
    words = ("openai/gpt-oss-20b", tmp_path / "out", "--to", "nvfp4", "--dry-run", "--offline")
    ran = moectl("convert", *words)
    assert "no engine loads gpt_oss in nvfp4" in " ".join(ran.stderr.split())
    assert "read by compressed-tensors decompress" in " ".join(ran.stdout.split())
    assert moectl("convert", *words, "--json").document["readers"] == ["compressed-tensors decompress"]
    native = moectl("convert", *words[:2], "--to", "bf16", "--dry-run", "--offline")
    assert "no engine" not in native.stderr and "read by vLLM" in " ".join(native.stdout.split())


def test_the_default_container_is_one_that_an_engine_loads_this_model_from(tmp_path):
    def planned(model):
        words = (model, tmp_path / "out", "--to", "mxfp4", "--dry-run", "--offline", "--json")
        return moectl("convert", *words).document

    own = planned("openai/gpt-oss-20b")
    assert own["layout"].startswith("mxfp4 in native") and "vLLM mxfp4" in own["readers"]
    # Its fused blocks, as they are in the source.
    assert own["tensors_out"] == own["tensors_in"] == 24 * 6
    assert planned("Qwen/Qwen3-30B-A3B")["layout"].startswith("mxfp4 in compressed-tensors")


def test_a_layout_says_that_no_engine_loads_it(tmp_path):
    words = ("openai/gpt-oss-20b", tmp_path / "out", "--to", "cutlass-sm100", "--dry-run", "--offline")
    ran = moectl("convert", *words)
    told, shown = " ".join(ran.stderr.split()), " ".join(ran.stdout.split())
    assert "no serving engine loads this directory as it is; it is for moectl (run, bench" in told
    assert "loaded by moectl run, bench, load_prepared; transformers moectl.integrations" in shown


def test_explain_proposes_a_conversion_only_where_it_is_loaded():
    loaded = ("gpt-oss-20b", "--gpu", "h100")
    humming = ("--gpu", "h200", "--policy", "vllm-0.33.0", "--backend", "humming")
    for words, advised in (
        ((*loaded, "--policy", "vllm-0.33.0"), True),
        ((*loaded, "--policy", "moectl"), True),
        (("deepseek-ai/DeepSeek-V3", "--gpu", "b200", "--tp", "8", "--policy", "vllm-0.33.0"), False),
        (("RedHatAI/Qwen3-Coder-Next-NVFP4", *humming), True),
        # vLLM's method of ModelOpt's NVFP4 is none that the plug-in knows.
        (("nvidia/Qwen3-30B-A3B-NVFP4", *humming), False),
    ):
        text = moectl("explain", *words, "--offline", "-v").stdout
        assert ("moectl convert" in text) is advised, words


def test_a_plug_in_is_one_row(monkeypatch):
    monkeypatch.setattr(
        "moectl.problem.layouts.FOLDER_READERS",
        (*FOLDER_READERS, DirectoryReader("Acme", ("--load-format",))),
    )
    assert all(loads_folder(engine, "marlin-int4") for engine in ("transformers", "acme", "vllm"))
    assert loads_folder("sglang", "moectl-mtile64") and not loads_folder("sglang", "marlin-int4")


def test_an_unfinished_conversion_is_named_as_such(tiny_gpt_oss, tmp_path):
    out = tmp_path / "out"
    moectl("convert", tiny_gpt_oss, out, "--to", "moectl")
    for name in ("READY", "config.json", "moectl.json"):
        (out / name).unlink()
    (out / "progress.jsonl").write_text("")
    for command in ("run", "bench", "explain"):
        said = " ".join(moectl(command, out, code=4).stderr.split())
        assert "is the unfinished output of `moectl convert`" in said and "and --resume" in said


def test_commands_to_go_on_with_can_be_pasted(tiny_gpt_oss, tmp_path):
    out = tmp_path / "o ut ü"
    said = moectl("convert", tiny_gpt_oss, out, "--to", "moectl").stderr
    assert f"check it with: moectl verify '{out}'\n" in said


def test_a_plan_names_what_all_tensors_begin_with_once(tiny_kimi, tmp_path):
    shown = moectl("convert", tiny_kimi, tmp_path / "out", "--to", "bf16", "--dry-run").stdout
    assert shown.count(".mlp.experts.") == 1
    assert "holds" not in shown and "| down_proj.weight" in shown


def test_a_plan_tells_dtypes_apart_where_they_differ(tiny_gpt_oss, tmp_path):
    shown = moectl("convert", tiny_gpt_oss, tmp_path / "out", "--to", "marlin", "--dry-run").stdout
    assert "| holds" in shown and "| F8_E8M0 |" in shown


def test_columns_without_numbers_are_left_out(tiny_kimi, tmp_path):
    exact = moectl("convert", tiny_kimi, tmp_path / "exact", "--to", "int4-g32").stdout
    assert "lossless" in exact and "RMS error" not in exact
    lossy = moectl("convert", tiny_kimi, tmp_path / "lossy", "--to", "nvfp4", "--requantize").stdout
    assert "RMS error" in lossy and "lossless" not in lossy
