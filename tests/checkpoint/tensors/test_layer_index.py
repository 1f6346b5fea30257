"""Uniform experts from columns of names: the same layers as when each tensor is looked at by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moectl.checkpoint import TensorInfo, layer_groups
from moectl.checkpoint.source.catalogue import built_in, model_names
from moectl.checkpoint.tensors.layer_index import index_layers, uniform_experts
from moectl.errors import CheckpointError
from moectl.files.tensor_runs import TensorRun, TensorRuns
from moectl.files.tensor_table import TensorType, files_of, joined, table_of
from moectl.synth import SynthSizes, resized
from support.sampling import every_nth

KIMI = "moonshotai/Kimi-K2-Thinking"
Listing = dict[str, TensorInfo]


def small() -> tuple[dict[str, Any], Listing]:
    entry = built_in(KIMI)
    config = resized(entry, SynthSizes(layers=2, experts=12, hidden=256, intermediate=128))
    return config, dict(entry.listing(config))


NAME = "model.layers.2.mlp.experts.11.up_proj.weight_scale"


def without(listing: Listing, *words: str) -> Listing:
    return {name: info for name, info in listing.items() if not any(word in name for word in words)}


def renamed(listing: Listing, old: str, new: str) -> Listing:
    return {
        name.replace(old, new): replace(info, name=name.replace(old, new)) for name, info in listing.items()
    }


CHANGES: dict[str, Callable[[Listing], Listing]] = {
    "nothing": lambda listing: listing,
    "a tensor missing": lambda listing: without(listing, NAME),
    "an expert missing": lambda listing: without(listing, "2.mlp.experts.5."),
    "the last expert missing": lambda listing: without(listing, "2.mlp.experts.11."),
    "the first expert missing": lambda listing: without(listing, "2.mlp.experts.0."),
    "a leaf missing everywhere": lambda listing: without(listing, "2.mlp.experts.", "up_proj.weight_scale"),
    "another shape": lambda listing: {**listing, NAME: replace(listing[NAME], shape=(64, 16))},
    "another dtype": lambda listing: {**listing, NAME: replace(listing[NAME], dtype="F16")},
    "a leading zero": lambda listing: renamed(listing, "2.mlp.experts.5.", "2.mlp.experts.05."),
    "one more number": lambda listing: renamed(listing, "2.mlp.experts.5.", "2.mlp.experts.99."),
    "a strange leaf": lambda listing: renamed(listing, "weight_scale", "weight scale"),
    "experts twice in a name": lambda listing: renamed(
        listing, "2.mlp.experts.5.", "2.mlp.experts.5.experts.5."
    ),
    "no number": lambda listing: renamed(listing, "2.mlp.experts.5.up_proj", "2.mlp.experts.odd"),
    "a second place": lambda listing: {**listing, **renamed(listing, ".mlp.", ".ffn.")},
    "another model's": lambda listing: {**listing, **renamed(listing, "model.layers.2.", "mtp.layers.0.")},
    "layers past the last": lambda listing: {**listing, **renamed(listing, "layers.2.", "layers.77.")},
}


def outcome(config: dict[str, Any], tensors: Any) -> Any:
    try:
        return layer_groups(config, tensors)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("change", CHANGES)
def test_columns_and_single_tensors_say_the_same(change: str) -> None:
    config, listing = small()
    changed = CHANGES[change](listing)
    one_by_one = outcome(config, changed)
    assert outcome(config, table_of(changed.values())) == one_by_one
    assert isinstance(one_by_one, str) == (
        change not in ("nothing", "another model's", "layers past the last")
    )


def test_uniform_experts_are_not_listed() -> None:
    _, listing = small()
    places, others = uniform_experts(table_of(listing.values()))
    assert {stem: (place.count, len(place.leaves)) for stem, place in places.items()} == {
        f"model.layers.{layer}.mlp.experts.": (12, 9) for layer in (1, 2)
    }
    assert others == [name for name in listing if ".experts." not in name]
    damaged = without(listing, NAME)
    places, others = uniform_experts(table_of(damaged.values()))
    assert list(places) == ["model.layers.1.mlp.experts."]
    assert set(others) == {name for name in damaged if "1.mlp.experts." not in name}


FIRST = "model.layers.1.mlp.experts."
TYPE = TensorType("BF16", (4, 8))
GATE = TensorRun(TYPE, FIRST, ".gate_proj.weight", 3)
RUNS = {
    "all alike": [GATE, TensorRun(TYPE, FIRST, ".up_proj.weight", 3), TensorRun(TYPE, "norm.weight")],
    "in one tensor": [TensorRun(TYPE, f"{FIRST}gate_up_proj"), TensorRun(TYPE, f"{FIRST}down_proj")],
    "one more of one expert": [GATE, TensorRun(TYPE, f"{FIRST}1.up_proj.weight")],
    "fewer of one tensor": [GATE, TensorRun(TYPE, FIRST, ".up_proj.weight", 2)],
    "other numbers": [GATE, TensorRun(TYPE, "model.layers.", ".norm", 3)],
    "experts in experts": [GATE, TensorRun(TYPE, f"{FIRST}2.experts.", ".up_proj.weight", 3)],
}


@pytest.mark.parametrize("runs", RUNS)
def test_runs_and_columns_say_the_same(runs: str) -> None:
    described = TensorRuns(RUNS[runs])
    assert uniform_experts(described) == uniform_experts(table_of(described.values()))


@pytest.mark.parametrize("model", every_nth(model_names(), 10))
def test_runs_of_published_models_and_columns_say_the_same(model: str) -> None:
    listing = built_in(model).listing()
    assert uniform_experts(listing) == uniform_experts(table_of(listing.values()))


def test_layers_with_experts_in_one_tensor_do_not_hide_the_others() -> None:
    listing = built_in("QuantTrio/Qwen3.6-35B-A3B-AWQ").listing()
    places, _ = uniform_experts(listing)
    assert len(places) == 39
    layers, _ = index_layers(listing, 40)
    assert [layer.uniform for layer in layers] == [None] + [256] * 39


def test_tables_are_mappings() -> None:
    _, listing = small()
    table = table_of(listing.values())
    assert table == listing
    assert list(table.items()) == list(listing.items())
    assert list(table.values()) == list(listing.values())
    assert NAME in table
    assert "no" not in table
    assert table.get("no") is None
    moved = {name: replace(info, file=f"{len(name) % 2}.safetensors") for name, info in listing.items()}
    ordered = sorted(moved.values(), key=lambda info: info.file)
    assert files_of(table_of(ordered)) == files_of(moved) == {"0.safetensors", "1.safetensors"}
    halves = [table_of([info for info in ordered if info.file == file]) for file in sorted(files_of(moved))]
    assert joined(halves) == moved
    assert joined(halves).repeated is None
    again = joined([*halves, halves[0]]).repeated
    assert again is not None
    assert again[1:] == ("0.safetensors", "0.safetensors")
