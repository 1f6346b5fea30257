"""Built-in models: their schema's sizes, names and sources."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from devtools.catalogue.described_checkpoint import entry_document, read_described

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source import catalogue
from moectl.checkpoint.source.catalogue import (
    MOE_ONLY,
    built_in,
    find_entry,
    model_names,
    near_names,
    parse_layers,
    read_entry,
    spell_layers,
    suggestion,
)
from moectl.checkpoint.tensors.shapes import parse_shape
from moectl.errors import CheckpointError, Unavailable, UsageError
from moectl.files.safetensors_header import TENSOR_LIMIT

SHAPES = {
    "openai/gpt-oss-120b": {
        "model.layers.35.mlp.experts.gate_up_proj_blocks": ("U8", (128, 5760, 90, 16)),
        "model.layers.0.mlp.experts.down_proj_scales": ("U8", (128, 2880, 90)),
        "model.layers.7.mlp.experts.down_proj_bias": ("BF16", (128, 2880)),
        "model.layers.7.mlp.router.weight": ("BF16", (128, 2880)),
    },
    "openai/gpt-oss-20b": {"model.layers.23.mlp.experts.down_proj_blocks": ("U8", (32, 2880, 90, 16))},
    "moonshotai/Kimi-K2-Thinking": {
        "model.layers.60.mlp.experts.383.gate_proj.weight_packed": ("I32", (2048, 896)),
        "model.layers.1.mlp.experts.0.down_proj.weight_scale": ("BF16", (7168, 64)),
        "model.layers.1.mlp.experts.0.up_proj.weight_shape": ("I32", (2,)),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (384,)),
        "model.layers.1.mlp.shared_experts.down_proj.weight": ("BF16", (7168, 2048)),
    },
}


@pytest.mark.parametrize("model", SHAPES)
def test_published_tensors(model: str) -> None:
    found = open_checkpoint(model.split("/")[1])
    assert (found.origin.kind, found.origin.name, found.origin.revision) == ("catalogue", model, None)
    assert found.folder is None
    for name, (dtype, shape) in SHAPES[model].items():
        info = found.tensors[name]
        assert (info.dtype, info.shape, info.file, info.start) == (dtype, shape, "", 0)


@pytest.mark.parametrize("model", SHAPES)
def test_listing_agrees_with_expert_bytes(model: str) -> None:
    """The headers' bytes of one expert are the problem's own count, `weight_shape` aside."""
    found = open_checkpoint(model.split("/")[1])
    (group,) = found.groups
    layer = group.layers[0]
    fused = group.problem.storage == "gpt_oss"
    total = sum(
        found.tensors[template.format(layer=layer, expert=0)].nbytes
        for role, template in group.names.experts.items()
        if not role.endswith("_shape")
    )
    assert total == group.problem.expert_bytes() * (group.problem.experts if fused else 1)


def test_names() -> None:
    assert set(SHAPES) <= set(model_names())
    assert len(model_names()) == 60
    assert len({name.casefold().split("/")[-1] for name in model_names()}) == 60
    assert find_entry("GPT-OSS-20B") is built_in("openai/gpt-oss-20b")
    assert find_entry("someone/gpt-oss-20b") is None
    with pytest.raises(UsageError, match="gpt-oss-120b"):
        built_in("gpt-oss")


@pytest.mark.parametrize("text", ["a b/", "2*", "a-b", "a*2", "-1", "A"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="no axis"):
        parse_shape(text)


def test_shape_values() -> None:
    axes = parse_shape("experts 2*rows columns/32 columns/group 16")
    sizes = {"experts": 3, "rows": 5, "columns": 65, "group": -1}
    assert [axis.value(sizes) for axis in axes] == [3, 10, 3, 1, 16]


def test_near_names() -> None:
    assert near_names("DeepSeek-v31")[:2] == ["deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3"]
    assert near_names("someone/gpt-oss-20b")[0] == "openai/gpt-oss-20b"
    assert near_names("mixtral")[0] == "mistralai/Mixtral-8x7B-v0.1"
    assert near_names("nothing like it") == []
    said = suggestion("deepseek-v33")
    assert said.startswith("Did you mean deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-V3.1 or ")
    assert "moectl list models" in suggestion("nothing like it")
    with pytest.raises(Unavailable, match="not in the Hub cache") as caught:
        open_checkpoint("deepseek-ai/DeepSeek-V33", offline=True)
    assert "Did you mean deepseek-ai/DeepSeek-V3" in caught.value.hint


def test_one_model_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse = catalogue.parse_json_object
    monkeypatch.setattr(
        catalogue, "parse_json_object", lambda data, where: read.append(where) or parse(data, where)
    )
    read_entry.cache_clear()
    assert find_entry("deepseek-v3") is not None
    assert read == ["deepseek-ai--DeepSeek-V3.json"]


@pytest.mark.parametrize("model", model_names())
def test_every_entry(model: str) -> None:
    entry = read_entry(model)
    assert entry.name == model
    assert entry.note.startswith(MOE_ONLY)
    assert entry.provenance.startswith("config: ")
    assert ("partial" in entry.provenance) == ("partial" in entry.note)
    assert entry.layers
    for layer in (entry.layers[0], entry.layers[-1]):
        own = [schema for schema in entry.tensors if schema.layers is None or layer in schema.layers]
        names = [name for schema in own for name in schema.run(layer, entry.experts, ()).names()]
        assert any(".experts." in name or "_linear." in name for name in names)
        assert any("router" in name or "gate." in name for name in names)
        assert not {"{", "}"} & set("".join(names))


def test_the_model_with_most_tensors_can_be_read_from_its_files() -> None:
    """With a tenth more, for what is not in the catalogue."""
    entries = {name: read_entry(name) for name in model_names()}
    largest = max(entries, key=lambda name: len(entries[name].layers) * entries[name].experts)
    assert len(open_checkpoint(largest, offline=True).tensors) <= TENSOR_LIMIT / 1.1


def test_catalogue_is_small() -> None:
    folder = Path(catalogue.__file__).parents[2] / "data/catalogue"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 600_000


@pytest.mark.parametrize(("text", "layers"), [("0-2,5", (0, 1, 2, 5)), ("7", (7,)), ("1,3", (1, 3))])
def test_layers(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers
    assert spell_layers(layers) == text


def test_layers_of_another_kind() -> None:
    hashed = built_in("deepseek-ai/DeepSeek-V4-Flash").listing()
    assert [name for name in hashed if "tid2eid" in name] == [
        f"layers.{i}.ffn.gate.tid2eid" for i in range(3)
    ]
    assert "layers.2.ffn.gate.bias" not in hashed
    assert "layers.3.ffn.gate.bias" in hashed
    mixed = built_in("QuantTrio/Qwen3.6-35B-A3B-AWQ").listing()
    first = {
        name.removeprefix("model.language_model.layers.0.mlp.") for name in mixed if ".layers.0." in name
    }
    assert {"experts.gate_up_proj", "experts.down_proj", "gate.weight"} <= first
    assert not any("qweight" in name for name in first)
    assert mixed["model.language_model.layers.0.mlp.experts.down_proj"].shape == (256, 2048, 512)


def test_what_a_folder_describes_comes_back(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }
    rows = [
        {"name": "model.layers.1.mlp.experts.{e}.up_proj.weight", "shape": [32, 64], "dtype": "BF16"},
        {"name": "model.layers.1.mlp.gate.weight", "shape": [8, 64], "dtype": "F32"},
    ]
    listed = {
        "layer_shown": "model.layers.1 (0 dense)",
        "num_experts": 8,
        "tensors": rows,
        "provenance": "inferred",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tensors.json").write_text(json.dumps(listed))
    (tmp_path / "source.md").write_text("# it\n\nconfig.json: **partial (cut)**\n")
    entry = read_described(tmp_path, "org/it")
    assert entry.layers == (1, 2, 3)
    assert len(entry.listing()) == 3 * 9
    assert entry.listing()["model.layers.3.mlp.experts.7.up_proj.weight"].shape == (32, 64)
    assert "partial" in entry.note
    assert "inferred" in entry.note
    document = entry_document(entry)
    again = catalogue._entry(document, "it.json")
    assert asdict(again) == asdict(replace(entry, note=f"{MOE_ONLY}; {entry.note}"))
    for key, value in {
        "num_experts": 0,
        "tensors": [{**rows[0], "shape": [0]}],
        "layer_shown": "none",
    }.items():
        (tmp_path / "tensors.json").write_text(json.dumps({**listed, key: value}))
        with pytest.raises(CheckpointError, match="cannot be"):
            read_described(tmp_path, "org/it")


@pytest.mark.parametrize(
    ("model", "name", "form"),
    [
        ("DeepSeek-V3", "model.layers.61.mlp.experts.255.up_proj.weight", ("F8_E4M3", (2048, 7168))),
        ("DeepSeek-V3.1-NVFP4", "model.layers.61.mlp.experts.0.down_proj.weight", ("BF16", (7168, 2048))),
        ("DeepSeek-V3.1-NVFP4", "model.layers.61.mlp.shared_experts.up_proj.weight", ("BF16", (2048, 7168))),
        ("DeepSeek-V4-Flash", "mtp.0.ffn.experts.7.w1.scale", ("F8_E8M0", (2048, 128))),
        ("Qwen3.5-35B-A3B", "mtp.layers.0.mlp.experts.9.gate_proj.weight", ("BF16", (512, 2048))),
        ("Qwen3.5-397B-A17B-NVFP4", "mtp.layers.0.mlp.experts.9.down_proj.weight", ("BF16", (4096, 1024))),
    ],
)
def test_multi_token_prediction(model: str, name: str, form: tuple[str, tuple[int, ...]]) -> None:
    entry = built_in(model)
    assert "multi-token prediction, are derived" in entry.note
    info = entry.listing()[name]
    assert (info.dtype, info.shape) == form


@pytest.mark.parametrize("model", ["DeepSeek-V4-Flash-NVFP4", "MiniMax-M2"])
def test_multi_token_prediction_of_an_unknown_format(model: str) -> None:
    entry = built_in(model)
    assert "multi-token prediction are left out" in entry.note
    assert all("{layer}" in schema.name for schema in entry.tensors)
