"""Outputs never take the place of what a command reads, nor of a checkpoint's files."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moectl.cli.output_paths import check_not_read, check_writable
from moectl.errors import Unavailable, UsageError
from support.invoking import moectl


@pytest.fixture
def own(tiny_gpt_oss, tmp_path):
    """A copy of a checkpoint, which a test may lose."""
    return shutil.copytree(tiny_gpt_oss, tmp_path / "gpt")


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


CPU = ("--device", "cpu")
BENCH = (*CPU, "-m", 1, "--repeats", 1, "--warm", "--backend", "torch")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", (*CPU, "--output", "{}/model.safetensors")),
        ("run", (*CPU, "--output", "{}/new.safetensors")),
        ("run", (*CPU, "--output", "{}/original/part.bin")),
        ("bench", (*BENCH, "-o", "{}/config.json")),
        ("bench", (*BENCH, "-o", "{}/README.md")),
        ("bench", (*BENCH, "--plot", "{}/picture.svg")),
        ("bench", (*BENCH, "-o", "{}/moectl.json")),
        ("tune", ("--to", "vllm", "{}/config.json")),
    ],
)
def test_a_checkpoints_files_are_not_written_over(own, command, options):
    for name in ("README.md", "picture.svg", "original/part.bin"):
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text("mine")
    before = contents(own)
    done = moectl(command, own, *(str(option).format(own) for option in options), code=2)
    assert f"{own} is the directory of a checkpoint" in " ".join(done.stderr.split())
    assert contents(own) == before


def test_neither_are_those_of_another_checkpoint_or_a_converted_folder(own, tmp_path):
    made = tmp_path / "made"
    moectl("convert", own, made, "--to", "marlin")
    other = shutil.copytree(own, tmp_path / "other")
    before = contents(made), contents(other)
    for file in (made / "moectl-layer-00000.experts", other / "config.json"):
        assert file.exists()
        moectl("run", own, *CPU, "--output", file, code=2)
        moectl("run", made, *CPU, "--output", file, code=2)
    assert (contents(made), contents(other)) == before


def test_inputs_are_not_written_over(own, tmp_path):
    x, trace, rows = tmp_path / "x.safetensors", tmp_path / "t.jsonl", tmp_path / "rows.csv"
    save_file({"x": torch.ones(2, 256)}, x)
    (tmp_path / "link.safetensors").symlink_to(x)
    os.link(x, tmp_path / "hard.safetensors")
    before = x.read_bytes()
    for name in ("x", "link", "hard"):
        output = tmp_path / f"{name}.safetensors"
        done = moectl("run", own, *CPU, "--input", x, "--output", output, code=2)
        assert "this command reads it" in done.stderr and x.read_bytes() == before
    trace.write_text("")
    done = moectl("bench", own, *BENCH, "--routing", f"trace:{trace}", "-o", trace, code=2)
    assert "this command reads it" in done.stderr
    moectl("bench", own, *BENCH, "-o", rows)
    before = rows.read_bytes()
    done = moectl("bench", "--rows", rows, "-o", rows, code=2)
    assert "this command reads it" in done.stderr and rows.read_bytes() == before


def test_what_is_nobodys_may_be_written(own, tmp_path):
    y = tmp_path / "y.safetensors"
    for _ in range(2):
        moectl("run", own, *CPU, "--output", y)
    rows = own / "rows.jsonl"
    moectl("bench", own, *BENCH, "-o", rows)
    moectl("bench", own, *BENCH, "-o", rows, "--resume")
    assert json.loads(rows.read_text().splitlines()[0])["kind"] == "run"
    moectl("bench", own, *BENCH, "-o", own / "rows.md")


def test_links_devices_and_circles(own, tmp_path):
    link = tmp_path / "y.safetensors"
    link.symlink_to(own / "model.safetensors")
    with pytest.raises(UsageError, match="directory of a checkpoint"):
        check_writable(link)
    with pytest.raises(Unavailable, match="pipe or device"):
        check_writable(Path("/dev/null"))
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    check_not_read(circle, [circle, "org/name"])
