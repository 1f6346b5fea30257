"""Built-in models: their schema's sizes, names and sources."""

from __future__ import annotations

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.catalogue import MOE_ONLY, built_in, catalogue, find_entry
from moectl.checkpoint.storage import parse_shape
from moectl.errors import UsageError

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
    assert set(catalogue()) == set(SHAPES)
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


def test_every_entry_says_what_it_leaves_out() -> None:
    assert all(entry.note.startswith(MOE_ONLY) for entry in catalogue().values())
    assert "sibling" in built_in("moonshotai/Kimi-K2-Thinking").note
