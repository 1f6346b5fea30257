"""Both models through explain, convert, verify, run, bench and unconvert."""

import csv
import io
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moectl.cli.verify import MOST_FINDINGS
from moectl.errors import UsageError
from support.invoking import moectl

TARGETS = {
    "tiny_gpt_oss": ["marlin", "trtllm", "triton-hopper", "cutlass-sm90", "moectl"],
    "tiny_kimi": ["moectl"],
}
CASES = [(model, target) for model, targets in TARGETS.items() for target in targets]


@pytest.fixture(scope="module")
def wide_kimi(tmp_path_factory):
    """Sizes that Marlin and TRT-LLM hold without padding the hidden size."""
    from moectl.synth import synthesize

    folder = tmp_path_factory.mktemp("wide") / "kimi"
    return synthesize(
        "moonshotai/Kimi-K2-Thinking", folder, layers=1, experts=8, hidden=256, intermediate=256
    )


def tensors(folder):
    """Every tensor of a folder, as bytes with its dtype and shape."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in list(handle.keys()):
                view = handle.get_slice(name)
                tensor = handle.get_tensor(name)
                data = (
                    tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    if tensor.numel()
                    else b""
                )
                found[name] = (view.get_dtype(), tuple(view.get_shape()), data)
    return found


def round_trip(checkpoint, target, tmp_path):
    out, back = tmp_path / "out", tmp_path / "back"
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    moectl("convert", checkpoint, out, "--to", target)
    assert (out / "READY").is_file()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "moectl"
    report = moectl("verify", out, "--source", checkpoint, "--json").document
    assert report["ok"] and report["compared"]
    ran = moectl("run", out, "--tokens", 5, "--device", "cpu", "--json").document
    assert ran["check"]["ok"]
    assert ran["routed_by"] == "router"
    assert ran["layout"].startswith(target.split("-")[0])
    moectl("unconvert", out, back)
    assert tensors(back) == tensors(checkpoint)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (checkpoint / "config.json").read_text()
    )
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before


@pytest.mark.parametrize(("model", "target"), CASES)
def test_there_and_back(model, target, request, tmp_path):
    round_trip(request.getfixturevalue(model), target, tmp_path)


@pytest.mark.parametrize("target", ["marlin", "trtllm"])
def test_int4_there_and_back(wide_kimi, target, tmp_path):
    round_trip(wide_kimi, target, tmp_path)


def test_a_layout_that_cannot_hold_the_scheme_is_refused_before_anything_is_written(tiny_kimi, tmp_path):
    done = moectl("convert", tiny_kimi, tmp_path / "out", "--to", "triton-hopper", code=2)
    assert "int4" in done.stderr
    assert not (tmp_path / "out").exists()


def test_dry_run_plans_from_the_catalogue_and_writes_nothing(tmp_path):
    out = tmp_path / "out"
    plan = moectl(
        "convert", "openai/gpt-oss-120b", out, "--to", "marlin", "--dry-run", "--json", "--offline"
    ).document
    assert plan["tensors_in"] == 36 * 6 and plan["tensors_out"] == 36 * 6
    assert plan["bytes_in"] == 36 * 128 * (3 * 2880 * 2880 // 2 + 3 * 2880 * 90 + 2 * 3 * 2880)
    assert plan["layers"][0]["tensors"]["model.layers.0.mlp.experts.w13_weight"]["stored_shape"] == [
        128,
        3072 // 16,
        2 * 2944 * 2,
    ]
    assert plan["readers"][0] == "moectl run, bench, load_prepared" and len(plan["readers"]) > 1
    assert "vLLM marlin, batched_marlin" in plan["kernels"]
    text = moectl("convert", "openai/gpt-oss-120b", out, "--to", "marlin", "--dry-run", "--offline").stdout
    assert "nothing was written" in text
    assert not out.exists()


def test_the_same_layer_runs_the_same_from_checkpoint_and_prepared_weights(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "out", "--to", "marlin", "--experts-only")
    results = []
    for place in (tiny_gpt_oss, tmp_path / "out"):
        y = tmp_path / f"y{len(results)}.safetensors"
        x = tmp_path / "x.safetensors"
        generator = torch.Generator().manual_seed(3)
        if not results:
            ids = torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(7)]).int()
            save_file(
                {
                    "x": torch.randn(7, 256, generator=generator).bfloat16(),
                    "ids": ids,
                    "weights": torch.rand(7, 4, generator=generator),
                },
                x,
            )
        options = ["--layer", 1, "--input", x, "--output", y, "--device", "cpu", "--json"]
        assert moectl("run", place, *options).document["routed_by"] == "input"
        results.append(load_file(y)["y"])
    assert torch.equal(*results)
    assert results[0].abs().max() > 0


def test_experts_only_runs_with_random_routing(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "out", "--to", "marlin", "--experts-only")
    assert moectl("run", tmp_path / "out", "--device", "cpu", "--json").document["routed_by"] == "random"


def test_run_ends_with_1_when_the_result_is_too_far_from_the_reference(tiny_gpt_oss, monkeypatch):
    from moectl.kernels import tolerance

    strict = tolerance.Tolerance(1e-9, 1e-9, "no bf16 result is that close")
    monkeypatch.setitem(tolerance.TOLERANCES, ("exact", "fp32"), strict)
    done = moectl("run", tiny_gpt_oss, "--device", "cpu", code=1)
    assert "FAILED" in done.stdout
    done = moectl("bench", tiny_gpt_oss, "-m", "1", "--device", "cpu", "--format", "csv", code=1)
    row = next(csv.DictReader(io.StringIO(done.stdout)))
    assert row["ok"] == "False" and row["median_us"] == ""


def test_run_with_no_tokens(tiny_gpt_oss):
    assert moectl("run", tiny_gpt_oss, "--tokens", 0, "--device", "cpu", "--json").document["check"]["ok"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 99)}, "256"),
        ({"y": torch.zeros(3, 256)}, "must hold a tensor x"),
        ({"x": torch.zeros(3, 256), "ids": torch.zeros(3, 4).int()}, "together"),
        ({"x": torch.zeros(3, 256, dtype=torch.int32)}, "floats [tokens, 256], got int32 [3, 256]"),
        ({"x": torch.zeros(3, 256).index_fill(0, torch.tensor([1]), torch.nan)}, "token 1 is not"),
        ({"x": torch.full((3, 256), 3.4e38)}, "must be finite in bf16"),
    ],
)
def test_bad_input_files_are_named(tiny_gpt_oss, tmp_path, change, words):
    save_file(change, tmp_path / "x.safetensors")
    done = moectl("run", tiny_gpt_oss, "--input", tmp_path / "x.safetensors", "--device", "cpu", code=2)
    assert words in done.stderr


def test_a_config_that_says_something_else_is_noted(tiny_gpt_oss, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(tiny_gpt_oss, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 9}))
    for command in (
        ("run", folder, "--backend", "torch", "--device", "cpu", "--tokens", 1),
        ("bench", folder, "--backend", "torch", "--device", "cpu", "-m", 1, "--repeats", 1, "--warm"),
        ("convert", folder, tmp_path / "out", "--to", "marlin"),
    ):
        assert "experts: the config says 9, the headers say 8" in moectl(*command).stderr


@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_cuda_backend_on_the_cpu_is_exit_3(tiny_gpt_oss, command):
    done = moectl(command, tiny_gpt_oss, "--backend", "moectl", "--device", "cpu", code=3)
    assert "SM80" in done.stderr


def test_an_unknown_backend_names_the_known_ones(tiny_gpt_oss):
    done = moectl("bench", tiny_gpt_oss, "--backend", "warp", "--device", "cpu", code=2)
    assert "torch" in done.stderr


def test_a_layer_without_experts_names_those_with(tiny_kimi):
    done = moectl("run", tiny_kimi, "--layer", 0, "--device", "cpu", code=2)
    assert "1 to 2" in done.stderr


@pytest.mark.parametrize("command", ["bench", "run"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command, tiny_gpt_oss, tmp_path):
    out = tmp_path / "no" / "y.csv"
    done = moectl(command, tiny_gpt_oss, "--output", out, "--device", "cpu", code=3)
    assert "is not a writable directory" in done.stderr


def test_a_dry_run_looks_at_the_output_too(tiny_gpt_oss, tmp_path):
    (tmp_path / "file").write_text("x")
    done = moectl("convert", tiny_gpt_oss, tmp_path, "--to", "marlin", "--dry-run", code=2)
    assert "not empty" in done.stderr


@pytest.mark.parametrize("damage", ["a byte", "cut off", "gone", "no header"])
def test_a_damaged_folder_ends_every_command_that_needs_it_with_4(tiny_gpt_oss, tmp_path, damage):
    out = tmp_path / "out"
    moectl("convert", tiny_gpt_oss, out, "--to", "marlin")
    file = out / "moectl-layer-00000.experts"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    left = {"a byte": data, "cut off": data[:-50], "no header": b"x" * len(data)}
    file.write_bytes(left[damage]) if damage in left else file.unlink()
    assert file.name in moectl("verify", out, code=1).stdout
    quick = ("--device", "cpu", "--backend", "torch")
    for command in (
        ("unconvert", out, tmp_path / "back"),
        ("run", out, *quick),
        ("bench", out, *quick, "-m", 1, "--repeats", 1),
    ):
        assert file.name in moectl(*command, code=4).stderr


def split(checkpoint):
    """Gives what is no expert's a file of its own."""
    file = checkpoint / "model.safetensors"
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    found = load_file(file)
    weight_map = {name: names[".mlp." not in name] for name in found}
    for name in names:
        save_file({key: found[key] for key in found if weight_map[key] == name}, checkpoint / name)
    file.unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("file", ["config.json", "source.config.json", "model-00002-of-00002.safetensors"])
def test_a_damaged_folder_gives_nothing_back(file, tmp_path):
    source, out, back = tmp_path / "source", tmp_path / "out", tmp_path / "back"
    sizes = ("--layers", 1, "--experts", 4, "--hidden", 64, "--intermediate", 64)
    moectl("synth", "openai/gpt-oss-20b", source, *sizes)
    split(source)
    moectl("convert", source, out, "--to", "marlin")
    data = bytearray((out / file).read_bytes())
    data[-2] ^= 1
    (out / file).write_bytes(data)
    assert file in moectl("unconvert", out, back, code=4).stderr
    assert not back.exists() or not list(back.iterdir())


def test_unconverting_experts_alone_says_so(tiny_gpt_oss, tmp_path):
    moectl("convert", tiny_gpt_oss, tmp_path / "out", "--to", "marlin", "--experts-only")
    assert (
        "the restored checkpoint has experts only"
        in moectl("unconvert", tmp_path / "out", tmp_path / "back").stderr
    )


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1000", 1000), ("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("1.5g", 1_500_000_000)]
)
def test_sizes(text, nbytes):
    from moectl.cli.convert.command import parse_size

    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "0", "2 apples", "1e9", "GB"])
def test_bad_sizes(text):
    from moectl.cli.convert.command import parse_size

    with pytest.raises(UsageError):
        parse_size(text)


def test_verify_prints_some_of_many_findings_and_lists_all_with_q(tiny_kimi, tmp_path):
    moectl("convert", tiny_kimi, tmp_path / "out", "--to", "marlin")
    shutil.copytree(tiny_kimi, tmp_path / "other")
    for file in (tmp_path / "other").glob("*.safetensors"):
        save_file({name: t.flip(0) for name, t in load_file(file).items()}, file, {"format": "pt"})
    asked = ("verify", tmp_path / "out", "--source", tmp_path / "other")
    everything = moectl(*asked, "-q", code=1).stdout.splitlines()
    assert len(everything) > MOST_FINDINGS == 20
    lines = moectl(*asked, code=1).stdout.splitlines()
    assert [line.removeprefix("found: ") for line in lines[:20]] == everything[:20]
    assert lines[20] == f"and {len(everything) - 20} more, which -q and --json list"
    assert f"{len(everything)} findings" in lines[21] and len(lines) == 22
