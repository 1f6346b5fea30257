"""One catalogue for all commands: short names, published formats, and weights in the Hub cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import (
    SHORT_NAMES,
    CatalogueEntry,
    built_in,
    find_entry,
    model_names,
    short_name,
    weights_missing,
)
from moectl.checkpoint.source.named_layers import named_layer
from moectl.errors import UsageError
from moectl.files.tensor_table import TensorTable
from moectl.problem.published_layers import MODELS, SCHEMES
from support.invoking import moectl
from support.sampling import every_nth


def test_layers_that_kernels_are_tuned_for_are_the_published_ones() -> None:
    assert set(SHORT_NAMES) == set(MODELS)
    for name, problem in MODELS.items():
        published = named_layer(name)[1]
        assert (published.dims, published.experts, published.top_k) == (
            problem.dims,
            problem.experts,
            problem.top_k,
        )
        assert (published == problem) is (name != "deepseek-v3")


@pytest.mark.parametrize("model", every_nth(model_names(), 4))
def test_every_built_in_model_is_a_layer_in_its_published_format(model: str) -> None:
    name, problem = named_layer(model)
    entry = find_entry(name)
    assert entry is not None and entry.name == model and short_name(model) == name
    groups = open_checkpoint(model.split("/")[1], offline=True).groups
    assert problem.scheme in {group.problem.scheme for group in groups}
    assert named_layer(name.upper()) == (name, problem)


def test_formats_by_name_and_unknown_names() -> None:
    for format, scheme in SCHEMES.items():
        assert named_layer(f"moonshotai/Kimi-K2-Thinking:{format}")[1].scheme == scheme
    with pytest.raises(UsageError, match="no format is called 'int3'"):
        named_layer("kimi-k2:int3")
    with pytest.raises(UsageError, match="no built-in model"):
        named_layer("gpt-5")


def test_formats_of_a_model_read_its_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(built_in("gpt-oss-20b"))
    monkeypatch.setattr("moectl.checkpoint.source.named_layers.built_in", lambda name: entry)
    listing = CatalogueEntry.listing
    listed: list[CatalogueEntry] = []

    def counted(self: CatalogueEntry) -> TensorTable:
        listed.append(self)
        return listing(self)

    monkeypatch.setattr(CatalogueEntry, "listing", counted)
    schemes = {named_layer(f"gpt-oss-20b:{format}")[1].scheme for format in SCHEMES}
    assert schemes == set(SCHEMES.values())
    assert listed == [entry]
    assert named_layer("gpt-oss-20b")[1].scheme == SCHEMES["mxfp4"]


def test_explain_takes_the_names_of_bench() -> None:
    for short, model in SHORT_NAMES.items():
        answer = moectl("explain", short, "--gpu", "h200", "--offline", "--json").document
        assert answer["checkpoints"][0]["name"] == model


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("name", ["kimi-k2", "Kimi-K2-Thinking", "moonshotai/Kimi-K2-Thinking"])
def test_missing_weights_say_where_they_are(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    stderr = moectl(command, name, "--offline", code=3).stderr
    assert "weights of moonshotai/Kimi-K2-Thinking are not on this machine" in stderr
    assert "hf download moonshotai/Kimi-K2-Thinking " in stderr
    assert "moectl bench --model kimi-k2)" in stderr


def test_a_model_that_is_not_built_in_has_no_random_weights() -> None:
    assert weights_missing("me/mine").hint == "hf download me/mine"


@pytest.mark.parametrize("name", ["gpt-oss-20b", "GPT-OSS-20B", "openai/gpt-oss-20b"])
def test_weights_in_the_hub_cache_are_found_by_any_name(
    name: str, tiny_gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "models--openai--gpt-oss-20b"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / commit).symlink_to(tiny_gpt_oss)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = open_checkpoint(name, offline=True)
    assert (found.origin.kind, found.origin.name) == ("cache", "openai/gpt-oss-20b")
    assert found.folder is not None and found.groups[0].problem.experts == 8
