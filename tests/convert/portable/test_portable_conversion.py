"""A portable conversion from the command line and as a program: resumed, checked, refused, calibrated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moectl.checkpoint import open_checkpoint
from moectl.cli.convert.planner import TargetOptions, planner
from moectl.cli.main import app
from moectl.convert.execute import layer_stages
from moectl.convert.execute.convert import convert
from moectl.convert.portable import finish_portable
from moectl.convert.portable.options import PortableOptions
from moectl.convert.portable.portable_plan import plan_portable
from moectl.convert.portable.report_fragments import PART, read_report
from moectl.convert.portable.verify_portable import verify_portable
from moectl.convert.rank_slice import shard_of
from moectl.errors import CheckpointError, UsageError
from moectl.kernels.activation import activate
from moectl.problem.moe_problem import Dims
from moectl.problem.schemes import BF16, MXFP4
from support.portable_folders import contents, converted, random_layer, write_folder

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}


def model(folder: Path) -> Path:
    """A plain checkpoint of three layers."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(16, 64, generator=generator)}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = torch.randn(3, 64, generator=generator)
        for expert in range(3):
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight = torch.randn(64, 64, generator=generator) / 8
                tensors[f"{prefix}.experts.{expert}.{name}.weight"] = weight
    folder.mkdir()
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "quant_config.json").write_text("{}")
    return folder


def run(*words: object) -> None:
    app([str(word) for word in words], standalone_mode=False)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_writes_verifies_and_leaves_no_traces(tmp_path, capsys):
    source, out = model(tmp_path / "source"), tmp_path / "out"
    run("convert", source, out, "--to", "int4-g32", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["converted_layers"] == [0, 1, 2]
    names = set(files(out))
    assert "config.json" in names and "moectl-report.json" in names
    assert not {"moectl.json", "READY", "quant_config.json", "progress.jsonl"} & names
    assert not any(name.startswith(PART) for name in names)
    assert verify_portable(out).ok
    damaged = next(out.glob("experts-*"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert verify_portable(out).findings == (f"{damaged.name} has changed since it was written",)


def test_an_interrupted_conversion_is_resumed_to_the_same_bytes(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(model(tmp_path / "source"))

    def go(out: str, target: str = "nvfp4", method: str = "search", **options: bool) -> None:
        convert(plan_portable(checkpoint, PortableOptions(target, method=method)), tmp_path / out, **options)

    go("whole")
    record, seen = layer_stages.LayerInProgress.record, []

    def broken(self):
        seen.append(self.plan.layer)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return record(self)

    monkeypatch.setattr(layer_stages.LayerInProgress, "record", broken)
    with pytest.raises(KeyboardInterrupt):
        go("out")
    monkeypatch.undo()
    assert "config.json" not in files(tmp_path / "out")
    for target, method in (("mxfp4", "search"), ("nvfp4", "rtn")):
        with pytest.raises(UsageError, match=r"holds a nvfp4 .* conversion"):
            go("out", target, method, resume=True)
    go("out", resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    go("out", resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    with pytest.raises(UsageError, match="another conversion"):
        go("out", "int8", resume=True)


def test_what_a_writer_leaves_that_is_killed_at_its_end_goes_with_the_next(tmp_path, monkeypatch):
    """Fragments of the report beside the config, which is written last: they are no damage."""
    checkpoint, out = open_checkpoint(model(tmp_path / "source")), tmp_path / "out"
    plan = plan_portable(checkpoint, PortableOptions("int8"))

    def killed(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(finish_portable, "remove_parts", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(plan, out)
    monkeypatch.undo()
    assert list(out.glob("moectl-report-part-*")) and (out / "config.json").exists()
    convert(plan, out, resume=True)
    convert(plan, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole") and verify_portable(out).ok


def partly_quantized(folder: Path) -> Path:
    """A compressed-tensors model of three layers whose author left the experts of layer 1 in BF16."""
    source = model(folder / "plain")
    convert(plan_portable(open_checkpoint(source), PortableOptions("int4-g32")), folder / "ct")
    out = folder / "ct"
    tensors = contents(out)
    plain = contents(source)
    ours = [name for name in tensors if name.startswith("model.layers.1.mlp.experts")]
    kept = {name: t for name, t in plain.items() if name.startswith("model.layers.1.mlp.experts")}
    for name in ours:
        del tensors[name]
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"] += [name.removesuffix(".weight") for name in kept]
    mixed = folder / "mixed"
    mixed.mkdir()
    save_file({**tensors, **kept}, mixed / "model.safetensors")
    (mixed / "config.json").write_text(json.dumps(config))
    return mixed


@pytest.mark.parametrize("container", ["compressed-tensors", "gptq"])
def test_layers_that_the_source_leaves_unquantized_are_kept(container, tmp_path, capsys):
    source, out = partly_quantized(tmp_path), tmp_path / "out"
    run("convert", source, out, "--to", "int4-g32", "--container", container)
    text = capsys.readouterr().out
    assert "repacked exactly  layers 0, 2\n" in text
    assert "kept              layer 1: unquantized, as in the source" in text
    before, after = contents(source), contents(out)
    kept = [name for name in before if name.startswith("model.layers.1.")]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    report = read_report(out)
    assert report["layer_kinds"] == {"repacked": [0, 2], "kept": [1]}
    assert set(report["layers"]) == {"0", "2"}
    groups = {layer: g for g in open_checkpoint(out).groups for layer in g.layers}
    assert [groups[layer].problem.scheme.weight.name for layer in range(3)] == ["int4", "bf16", "int4"]


def test_layers_that_the_source_leaves_unquantized_are_converted_on_request(tmp_path, capsys):
    source, out = partly_quantized(tmp_path), tmp_path / "out"
    run("convert", source, out, "--to", "int4-g32", "--include-unquantized")
    text = capsys.readouterr().out
    assert "repacked exactly  layers 0, 2\n" in text
    assert "quantized         layer 1: to the new format\n" in text
    (group,) = open_checkpoint(out).groups
    assert group.problem.scheme.weight.name == "int4"
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in row] for row in rows[2:]] == [
        ["0, 2", "w13", "repacked"],
        ["0, 2", "w2", "repacked"],
        ["1", "w13", "quantized"],
        ["1", "w2", "quantized"],
    ]


def test_the_dry_run_names_layers_by_what_becomes_of_them(tmp_path, capsys):
    source = partly_quantized(tmp_path)
    run("convert", source, tmp_path / "out", "--to", "int4-g32", "--dry-run")
    text = capsys.readouterr().out
    assert "repacked        layers 0, 2: codes and scales are moved, not quantized again" in text
    assert "kept            layer 1: unquantized" in text and "--include-unquantized" in text
    run("convert", source, tmp_path / "out", "--to", "int4-g32", "--dry-run", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["layer_kinds"] == {"repacked": [0, 2], "kept": [1]}
    assert not (tmp_path / "out").exists()


def test_a_model_without_quantization_has_no_layers_to_keep(tmp_path):
    plan = plan_portable(open_checkpoint(model(tmp_path / "source")), PortableOptions("int8"))
    assert plan.finalizer is not None and dict(plan.finalizer.kinds) == {"quantized": (0, 1, 2)}


def test_there_is_no_way_back(tmp_path):
    from moectl.convert.restore.unconvert import unconvert

    out = converted(random_layer("plain", BF16), tmp_path, "int8")
    with pytest.raises(
        CheckpointError, match="portable checkpoint, from which the source cannot be restored"
    ):
        unconvert(out, tmp_path / "back")


def test_calibration_lowers_the_errors_of_outputs(tmp_path):
    layer = random_layer("plain", BF16)
    checkpoint = write_folder(tmp_path / "source", layer)
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(128, 128, generator=generator) * torch.logspace(-1, 1, 128)
    save_file({"x": torch.randn(512, 128, generator=generator) @ mixed}, tmp_path / "seen.safetensors")
    found = {}
    for method in ("gptq", "search"):
        asked = PortableOptions("int4-g128", method=method, calibration=tmp_path / "seen.safetensors")
        plan = plan_portable(
            checkpoint, asked, activate=lambda h, problem, rows: activate(h, problem.activation, rows)
        )
        convert(plan, tmp_path / method)
        found[method] = read_report(tmp_path / method)["layers"]["7"]
    for role in ("w13", "w2"):
        gptq, search = found["gptq"][role], found["search"][role]
        assert gptq["output_snr_db"] > search["output_snr_db"] > search["rtn"]["output_snr_db"], role


def test_calibration_of_another_size_is_refused_before_anything_is_written(tmp_path):
    checkpoint = write_folder(tmp_path / "source", random_layer("plain", BF16))
    save_file({"x": torch.randn(8, 96)}, tmp_path / "seen.safetensors")
    asked = PortableOptions("int8", method="gptq", calibration=tmp_path / "seen.safetensors")
    with pytest.raises(CheckpointError, match=r"\[tokens, 128\], got"):
        plan_portable(checkpoint, asked, activate=lambda h, problem, rows: h)
    with pytest.raises(ValueError, match="activation function"):
        plan_portable(checkpoint, asked)


@pytest.mark.parametrize(
    "words, why",
    [
        (("--to", "bf16", "--container", "gptq"), "bf16 is not written in a gptq container"),
        (("--to", "int8", "--method", "gptq"), "--method gptq needs activations"),
        (("--to", "int8", "--tp-size", "2"), "a portable checkpoint is not sliced"),
        (("--to", "marlin", "--container", "gptq"), "--container applies to portable formats only"),
        (("--to", "marlin", "--include-unquantized", True), "--include-unquantized applies to portable"),
        (("--to", "int8", "--mx-scale", "even"), "--mx-scale is for power-of-two scales"),
        (("--to", "bf16", "--method", "rtn"), "--method sets how weights are quantized, but these become"),
    ],
    ids=lambda it: "",
)
def test_options_that_do_not_go_together(words, why, tmp_path):
    source = model(tmp_path / "source")
    given = dict(zip(words[::2], words[1::2], strict=True))
    fields = {
        "--container": "container",
        "--method": "method",
        "--mx-scale": "rule",
        "--include-unquantized": "include_unquantized",
    }
    options = {name: given[key] for key, name in fields.items() if key in given}
    portable = PortableOptions(given["--to"], **options)
    with pytest.raises(UsageError, match=why):
        plan = planner(open_checkpoint(source), TargetOptions(given["--to"]), portable)
        plan(shard_of(0, int(given.get("--tp-size", 1))))


def test_a_repack_heeds_no_quantizer(tmp_path):
    checkpoint = write_folder(tmp_path / "source", random_layer("compressed-tensors", MXFP4))
    asked = PortableOptions("mxfp4", method="rtn", rule="up")
    with pytest.raises(UsageError, match=r"--method sets .* Leave --method and --mx-scale out"):
        plan_portable(checkpoint, asked)


def test_groups_that_do_not_fill_a_row_are_refused(tmp_path):
    layer = random_layer("plain", BF16, dims=Dims(160, 96))
    checkpoint = write_folder(tmp_path / "source", layer)
    with pytest.raises(UsageError, match=r"hidden size 160 is not a whole number of groups of 128 .* --to"):
        plan_portable(checkpoint, PortableOptions("int4-g128"))


def test_a_conversion_is_named_by_what_it_heeds(tmp_path):
    checkpoint = write_folder(tmp_path / "source", random_layer("plain", BF16))
    names = [
        plan_portable(checkpoint, PortableOptions(target)).layout.name for target in ("int8", "mxfp4", "bf16")
    ]
    assert names == [
        "int8 in compressed-tensors, search",
        "mxfp4 in compressed-tensors, search, floor",
        "bf16 in native",
    ]


def test_mxfp4_scale_rules_differ(tmp_path):
    layer = random_layer("plain", BF16)
    found = {
        rule: read_report(converted(layer, tmp_path / rule, "mxfp4", method="rtn", rule=rule))["layers"]["7"]
        for rule in ("floor", "even")
    }
    assert found["floor"]["w2"]["rms_error"] != found["even"]["w2"]["rms_error"]
    assert converted(random_layer("quark", MXFP4, "weight"), tmp_path / "kept", "mxfp4").is_dir()
