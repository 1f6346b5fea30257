"""Files that are none: pipes, devices and holes in the place of everything that a command reads."""

import json
import os

import pytest

from moectl.convert.quantize.calibration import Calibration
from moectl.errors import CheckpointError
from moectl.files.strict_json import VALUES_LIMIT
from support.invoking import moectl

CPU = ("--device", "cpu", "--backend", "torch")
EXPLAIN = ("explain", "IN", "--gpu", "h100", "--offline")
CHECKPOINT = {
    "config.json": EXPLAIN,
    "quantize_config.json": EXPLAIN,
    "model.safetensors.index.json": EXPLAIN,
    "model.safetensors": EXPLAIN,
    "moectl.json": ("verify", "IN"),
    "moectl-report.json": ("verify", "IN"),
    "adapter_config.json": EXPLAIN,
}
GIVEN = {
    "rows.jsonl": (("compare", "IN", "IN"), ("bench", "--rows", "IN")),
    "rows.csv": (("compare", "IN", "IN"),),
    "document.json": (
        ("explain", "--replay", "IN"),
        ("explain", "gpt-oss-20b", "--gpu", "h100", "--offline", "--diff", "IN"),
    ),
    "x.safetensors": (
        ("run", "CKPT", *CPU, "--input", "IN"),
        ("bench", "CKPT", *CPU, "-m", 1, "--repeats", 1, "--routing", "trace:IN"),
        ("bench", "CKPT", *CPU, "-m", 1, "--repeats", 1, "--routing", "router", "--input", "IN"),
        ("parity", "IN", "IN"),
    ),
}
KINDS = ("pipe", "device", "hole")


def put(path, kind):
    """Something in the place of a file that is not to be read: a pipe, a device, a terabyte of nothing."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHECKPOINT)
def test_in_a_checkpoint(tmp_path, name, kind):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    if name not in ("config.json", "adapter_config.json"):
        config = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}
        (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 64}))
    put(folder / name, kind)
    done = moectl(*(str(folder) if word == "IN" else word for word in CHECKPOINT[name]), code=None)
    assert done.code in (2, 4) and "error:" in done.stderr, done
    assert "internal" not in done.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name, commands in GIVEN.items() for words in commands]
)
def test_given_by_name(tiny_gpt_oss, tmp_path, name, words, kind):
    file = tmp_path / name
    put(file, kind)
    paths = {"IN": file, "CKPT": tiny_gpt_oss, "OUT": tmp_path / "out", "trace:IN": f"trace:{file}"}
    done = moectl(*(paths.get(word, word) for word in words), code=None)
    assert done.code in (2, 4), done
    assert file.name in "".join(done.stderr.split()) and "internal" not in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_calibration(tmp_path, kind):
    put(tmp_path / "x.safetensors", kind)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        Calibration(tmp_path / "x.safetensors")


@pytest.mark.parametrize("opening", ['{"a":', "["])
@pytest.mark.parametrize("depth", [2_000, 1_000_000])
def test_nesting(tmp_path, opening, depth):
    deep = opening * depth + "1" + ("}" if "{" in opening else "]") * depth
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "x": ' + deep + "}")
    (tmp_path / "document.json").write_text('{"groups": ' + deep + "}")
    (tmp_path / "rows.jsonl").write_text('{"kind": "run", "x": ' + deep + "}\n")
    (tmp_path / "rows.json").write_text('{"rows": ' + deep + "}\n")
    for words, code in (
        (("explain", tmp_path, "--gpu", "h100", "--offline"), 4),
        (("explain", "--replay", tmp_path / "document.json"), 2),
        (("compare", tmp_path / "rows.jsonl", tmp_path / "rows.jsonl"), 2),
        (("compare", tmp_path / "rows.json", tmp_path / "rows.json"), 2),
    ):
        done = moectl(*words, code=code)
        assert "error:" in done.stderr and "internal" not in done.stderr


@pytest.mark.parametrize("name", ["config.json", "document.json", "rows.jsonl"])
def test_values_that_take_more_memory_than_their_text(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b'{"groups": [' + b"{}," * (VALUES_LIMIT // 2) + b"{}]}\n")
    words = {
        "config.json": ("explain", path, "--gpu", "h100", "--offline"),
        "document.json": ("explain", "--replay", path),
        "rows.jsonl": ("compare", path, path),
    }[name]
    done = moectl(*words, code=4 if name == "config.json" else 2)
    assert "values" in done.stderr
