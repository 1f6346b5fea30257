"""Which source a reference leads to, without a network."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moectl
from moectl.checkpoint import open_checkpoint
from moectl.errors import CheckpointError, Unavailable


def test_folder_and_config_say_the_same(tiny_kimi: Path) -> None:
    folder = open_checkpoint(tiny_kimi)
    config = open_checkpoint(str(tiny_kimi / "config.json"))
    assert (folder.origin.kind, config.origin.kind) == ("folder", "config")
    assert folder.groups[0].problem == config.groups[0].problem
    assert config.tensors == {}
    assert config.folder is None


def test_folder_without_weights(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_gpt_oss / "config.json").read_bytes())
    found = open_checkpoint(tmp_path)
    assert (found.origin.kind, found.folder) == ("config", None)
    assert "no safetensors" in found.origin.note


def test_quantization_in_a_file_of_its_own(tiny_kimi: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_kimi / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).groups[0].problem.storage == "plain"
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    (group,) = open_checkpoint(tmp_path).groups
    assert group.problem.scheme.weight.name == "nvfp4"
    assert group.sources["scheme"].startswith("config:hf_quant_config.json.")


SEPARATE = {
    "quantize_config.json": ({"bits": 4, "group_size": 128}, "gptq"),
    "quant_config.json": ({"w_bit": 4, "q_group_size": 64, "zero_point": True}, "awq"),
    "quantization_config.json": ({"bits": 4, "group_size": 32, "data_type": "mx_fp"}, "compressed-tensors"),
}


@pytest.mark.parametrize("empty", [None, {}])
@pytest.mark.parametrize("file", SEPARATE)
def test_every_separate_file_counts_unless_the_config_says_more(
    file: str, empty: dict[str, str] | None, tiny_kimi: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_kimi / "config.json").read_text())
    inner, config["quantization_config"] = config["quantization_config"], empty
    (tmp_path / "config.json").write_text(json.dumps(config))
    document, storage = SEPARATE[file]
    (tmp_path / file).write_text(json.dumps(document))
    (group,) = open_checkpoint(tmp_path).groups
    assert group.problem.storage == storage
    assert group.sources["scheme"].startswith(f"config:{file}.")
    (tmp_path / file).write_text("{}")
    assert open_checkpoint(tmp_path).groups[0].problem.storage == "plain"
    (tmp_path / file).write_text(json.dumps(document))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": inner}))
    assert open_checkpoint(tmp_path).groups[0].problem.storage == "compressed-tensors"
    assert open_checkpoint(tmp_path).groups[0].problem.scheme.weight.name == "int4"


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "a/b/c", "org/name@", "-x/y", "org/na me"])
def test_no_such_checkpoint(name: str) -> None:
    with pytest.raises(CheckpointError, match="built-in"):
        open_checkpoint(name)


@pytest.mark.parametrize("name", ["", " "])
def test_empty_name(name: str) -> None:
    with pytest.raises(CheckpointError, match="is empty"):
        open_checkpoint(name)


@pytest.mark.parametrize(
    "name",
    [
        "./x",
        "../x",
        "/no/such",
        "~/no/such",
        "a/b/c",
        "ckpt/",
        "ckpt/config.json",
        "a\\b",
        "/x/y@z",
        "x.json",
    ],
)
def test_a_path_that_does_not_exist_is_not_looked_up(name: str) -> None:
    with pytest.raises(CheckpointError, match="there is no"):
        open_checkpoint(name)


def test_unknown_home() -> None:
    with pytest.raises(CheckpointError, match="home folder"):
        open_checkpoint("~no-such-user-here/x")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://huggingface.co/openai/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("http://www.huggingface.co/openai/gpt-oss-20b/", "openai/gpt-oss-20b"),
        ("https://hf.co/openai/gpt-oss-20b", "openai/gpt-oss-20b"),
    ],
)
def test_address_of_a_model_page(url: str, name: str) -> None:
    assert open_checkpoint(url, offline=True).origin.name == name


@pytest.mark.parametrize("revision", ["refs/pr/1", "refs%2Fpr%2F1"])
def test_address_with_a_revision(revision: str) -> None:
    with pytest.raises(Unavailable, match="org/name@refs/pr/1 is not in the Hub cache"):
        open_checkpoint(f"https://huggingface.co/org/name/tree/{revision}", offline=True)


@pytest.mark.parametrize("url", ["https://example.com/org/name", "https://huggingface.co/org", "s3://a/b"])
def test_other_addresses(url: str) -> None:
    with pytest.raises(CheckpointError, match="not that of a model's page"):
        open_checkpoint(url)


def test_catalogue_says_what_it_leaves_out() -> None:
    assert "MoE tensors only" in open_checkpoint("gpt-oss-20b").origin.note
    assert "K2.5" in open_checkpoint("Kimi-K2-Thinking").origin.note


def test_broken_config_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n  "a": 1,\n  b\n}')
    with pytest.raises(CheckpointError, match="line 3, column 3") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint


def test_catalogue_can_be_left_out() -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint("gpt-oss-20b", allow_catalogue=False)


def test_wrong_files(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one weight file") as caught:
        open_checkpoint(next(tiny_gpt_oss.glob("*.safetensors")))
    assert str(tiny_gpt_oss) in caught.value.hint
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe"):
        open_checkpoint(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="index"):
        open_checkpoint(tiny_gpt_oss / "model.safetensors.index.json")


def test_converted_folder(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_gpt_oss / "config.json").read_bytes())
    (tmp_path / "moectl.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    for word in ("converted folder", "run", "bench", "verify", "unconvert"):
        assert word in str(caught.value)


def test_group_of(tiny_kimi: Path) -> None:
    found = open_checkpoint(tiny_kimi)
    assert found.group_of(None) is found.group_of(2) is found.groups[0]
    with pytest.raises(KeyError):
        found.group_of(0)


def test_no_heavy_import() -> None:
    """Reading a checkpoint needs no torch, and a folder or a built-in model no Hub client."""
    code = (
        "import sys; from moectl.checkpoint import open_checkpoint; open_checkpoint('gpt-oss-120b'); "
        "print(sorted({'torch', 'triton', 'huggingface_hub', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"], ids=["too long", "with a NUL"])
def test_a_name_that_no_file_can_have_is_one_sentence(name):
    with pytest.raises(CheckpointError):
        open_checkpoint(name, offline=True)


ERRORS = {"CheckpointError", "HubUnreachable", "NotOnHub", "Unavailable", "UsageError"}


def test_every_error_says_what_to_do() -> None:
    package = Path(moectl.__file__).parent
    errors = [
        (f"{module.relative_to(package)}:{node.lineno}", {key.arg for key in node.keywords})
        for room in ("checkpoint", "files")
        for module in sorted((package / room).rglob("*.py"))
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS
    ]
    assert len(errors) > 60
    assert [place for place, named in errors if "hint" not in named] == []


@pytest.mark.parametrize("revision", ["../../x", "main/../..", ".."])
def test_a_revision_leads_nowhere_else(revision: str) -> None:
    with pytest.raises(CheckpointError, match="Hub id"):
        open_checkpoint(f"org/name@{revision}", offline=True)
