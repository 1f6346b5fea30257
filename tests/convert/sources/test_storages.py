"""Every storage of the table: stored tensors to canonical roles and back, and what the numbers mean."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from moectl.checkpoint import TensorInfo, layer_groups
from moectl.checkpoint.tensors.layer_index import LayerTensors
from moectl.checkpoint.tensors.match_storage import match_storage
from moectl.checkpoint.tensors.storage import Storage, storages
from moectl.convert.codecs import decode_role
from moectl.convert.sources import LayerMapping, map_layer
from moectl.convert.stream.expert_batches import ExpertBatches
from moectl.errors import CheckpointError, NoBackend, UsageError
from moectl.torch_dtypes import TORCH_DTYPES
from support.sampling import every_nth
from support.stored_layers import EXPERTS, LAYER, PREFIX, Layer, cases, judge, make_layer


def storage_id(storage: Storage) -> str:
    name = f"{storage.format.storages[0]}-{storage.weight}-{storage.arrangement.name}"
    return f"{name}-{min(storage.tensors)}".replace(" ", "_")


READABLE = [
    it
    for it in storages()
    if it.format.packing != "two_level" and (it.format.packing, it.weight.bits) != ("awq", 8)
]


def read(layer: Layer, first: int = 0, last: int = EXPERTS) -> tuple[LayerMapping, dict[str, torch.Tensor]]:
    """The layer's map, and experts `first` to `last` as they are read."""
    checkpoint, data = layer.checkpoint()
    mapped = map_layer(checkpoint, layer.group, LAYER)

    def fill(info, at, view):
        view[:] = data[info.start + at : info.start + at + len(view)]

    batch = ExpertBatches(mapped).load(first, last, fill)
    assert {role: (tuple(t.shape), t.dtype) for role, t in batch.items()} == {
        role: ((last - first, *shape[1:]), TORCH_DTYPES[dtype])
        for role, (dtype, shape) in mapped.batch_shapes.items()
    }
    return mapped, batch


@pytest.mark.parametrize("storage", every_nth(READABLE, 3), ids=storage_id)
def test_back_and_forth_and_values(storage):
    for case in cases(storage):
        layer = make_layer(case)
        mapped, batch = read(layer)
        for tensors in mapped.mapped:
            mapping = tensors.mapping
            whole = mapping.restored(batch).contiguous().reshape(EXPERTS, -1).view(torch.uint8)
            stored = layer.tensors[mapping.stored]
            if tensors.per_expert:
                expected = torch.stack([t.reshape(-1).view(torch.uint8) for t in stored])
            elif mapping.shared:
                expected = stored[0].reshape(-1).view(torch.uint8).expand(EXPERTS, -1)
            else:
                expected = stored[0].reshape(-1).view(torch.uint8).reshape(EXPERTS, -1)
            assert torch.equal(whole, expected), (mapping, case)
        check_values(layer, batch)


def check_values(layer, batch):
    case, gated = layer.case, layer.case.storage.gated
    for role in ("w13", "w2"):
        halves = 2 if role == "w13" and gated else 1
        found = decode_role(case.weight, batch, role, halves).double().numpy()
        for expert in range(EXPERTS):
            if role in layer.tensors:
                expected = judge(layer, role, expert)
            else:
                expected = np.concatenate(
                    [judge(layer, m, expert) for m in ("w1", "w3") if m in layer.tensors]
                )
            assert found[expert].shape == expected.shape
            np.testing.assert_allclose(found[expert], expected, rtol=2**-22, err_msg=str(case))


@pytest.mark.parametrize("storage", READABLE[::7], ids=storage_id)
def test_experts_are_read_in_any_pieces(storage):
    layer = make_layer(next(cases(storage)))
    _, whole = read(layer)
    _, piece = read(layer, 1, 2)
    assert all(
        torch.equal(piece[role].view(-1).view(torch.uint8), whole[role][1:2].reshape(-1).view(torch.uint8))
        for role in whole
    )


@pytest.mark.parametrize("storage", [it for it in storages() if it not in READABLE], ids=storage_id)
def test_storages_out_of_reach_say_why(storage):
    layer = make_layer(next(cases(storage)))
    with pytest.raises(UsageError, match=r"layer 7: .*(AWQ defines an order of 4-bit codes|Quark int4-fp8)"):
        read(layer)


def storage_of(packing: str, arrangement: str = "per_expert", bits: int = 4) -> Storage:
    return next(
        it
        for it in READABLE
        if (it.format.packing, it.arrangement.name, it.weight.bits) == (packing, arrangement, bits)
    )


def test_smoothing_scales_are_refused():
    case = next(it for it in cases(next(s for s in READABLE if "gate_proj.pre_quant_scale" in s.tensors)))
    layer = make_layer(replace(case, left_out=frozenset()))
    with pytest.raises(UsageError, match="pre_quant_scale"):
        read(layer)


def test_columns_ordered_by_group_are_refused():
    layer = make_layer(next(cases(storage_of("gptq"))))
    checkpoint, _ = layer.checkpoint()
    group = replace(layer.group, problem=replace(layer.case.problem, act_order="group"))
    with pytest.raises(UsageError, match="act order"):
        map_layer(checkpoint, group, LAYER)


@pytest.mark.parametrize("packing", ["words", "gptq", "awq"])
def test_words_must_be_whole(packing):
    case = next(cases(storage_of(packing)))
    odd = replace(case, dims=replace(case.dims, hidden=68, padded_hidden=68))
    with pytest.raises((UsageError, NoBackend), match=r"multiples of 8|whole number of groups"):
        read(make_layer(odd))


def test_blocks_of_gate_and_up_rows_together_are_refused():
    storage = next(
        it
        for it in READABLE
        if it.weight.name == "fp8" and it.weight.block[0] == -2 and it.arrangement.name == "fused"
    )
    case = next(cases(storage))
    odd = replace(case, weight=replace(case.weight, block=(64, 32)))
    with pytest.raises(UsageError, match="gate and up rows in one block"):
        read(make_layer(odd))


CONFIG = {
    "num_hidden_layers": LAYER + 1,
    "hidden_size": 64,
    "moe_intermediate_size": 96,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("storage", every_nth(READABLE, 3, 2), ids=storage_id)
def test_the_storage_that_headers_show_maps_the_same(storage):
    for case in cases(storage):
        layer = make_layer(case)
        checkpoint, _ = layer.checkpoint()
        stem = PREFIX.format(layer=LAYER)
        experts: dict[int | None, dict[str, TensorInfo]] = {}
        for name, info in checkpoint.tensors.items():
            leaf = name.removeprefix(stem)
            number, _, after = leaf.partition(".")
            own = experts.setdefault(None if storage.fused else int(number), {})
            own[leaf if storage.fused else after] = info
        tensors = LayerTensors(LAYER, "", "", stem, experts)
        if missing := storage.missing(tensors.leaves):
            # Reading a checkpoint asks for gpt-oss' biases.
            assert missing == ["down_proj_bias", "gate_up_proj_bias"]
            continue
        match = match_storage(tensors, case.problem, EXPERTS)
        # Symmetric codes may be stored with zero points, which only the config tells from others.
        assert replace(match.weight, zero_point=case.weight.zero_point) == case.weight
        assert match.storage.arrangement.name == storage.arrangement.name
        assert (match.sizes["hidden"], match.sizes["intermediate"]) == (64, 96)
        group = replace(layer.group, storage=match.storage)
        assert map_layer(checkpoint, group, LAYER) == map_layer(checkpoint, layer.group, LAYER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "expert 1 has no tensor {name}, which others have"),
        ("shape", "tensor '{name}' must be {dtype} [96, 2] like the other experts', got {dtype} [1, 2]"),
        ("dtype", "tensor '{name}' must be {dtype} [96, 2] like the other experts', got I32 [96, 2]"),
        ("extra", "up_proj.weight_scale_2', which is not understood"),
    ],
)
def test_headers_are_checked(change, message):
    """When the checkpoint is read, and so for everything that maps its layers."""
    layer = make_layer(next(cases(storage_of("words"))))
    checkpoint, _ = layer.checkpoint()
    (group,) = layer_groups(CONFIG, checkpoint.tensors)
    assert group.storage is layer.case.storage
    name = next(name for name in checkpoint.tensors if name.endswith("1.up_proj.weight_scale"))
    info, tensors = checkpoint.tensors[name], dict(checkpoint.tensors)
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors[name + "_2"] = replace(info, name=name + "_2")
    else:
        tensors[name] = replace(info, **({"shape": (1, 2)} if change == "shape" else {"dtype": "I32"}))
    with pytest.raises(CheckpointError, match=re.escape(message.format(name=name, dtype=info.dtype))):
        layer_groups(CONFIG, tensors)


def extras(packing: str, version: str | None = None, **changes):
    """A mapped layer, its problem, and its tensors that carry no weights."""
    layer = make_layer(next(cases(storage_of(packing))))
    config = {"quantization_config": {"checkpoint_format": version}} if version else {}
    checkpoint, _ = layer.checkpoint(config)
    group = replace(layer.group, problem=replace(layer.case.problem, **changes))
    mapped = map_layer(checkpoint, group, LAYER)
    return (
        mapped,
        group.problem,
        {it.mapping.stored: it.mapping for it in mapped.mapped if not it.mapping.role},
    )


def test_sizes_must_be_the_weights():
    mapped, problem, parts = extras("words")
    assert not mapped.check(parts["w1_shape"], problem, torch.tensor([96, 64], dtype=torch.int32))
    assert not mapped.check(parts["w2_shape"], problem, torch.tensor([64, 96]))
    assert "says [64, 96], but its weight is [96, 64]" in mapped.check(
        parts["w3_shape"], problem, torch.tensor([64, 96])
    )


def test_order_must_be_the_columns_own():
    mapped, problem, parts = extras("words")
    order = torch.arange(64) // 32
    assert not mapped.check(parts["w1_order"], problem, order.int())
    assert "act order" in mapped.check(parts["w1_order"], problem, order.flip(0))
    assert not mapped.check(parts["w1_order"], replace(problem, act_order="weight"), order.flip(0))


@pytest.mark.parametrize(
    ("version", "word"), [(None, 0x77777777), ("gptq", 0x77777777), ("gptq_v2", -0x77777778)]
)
def test_zero_points_of_symmetric_codes(version, word):
    mapped, problem, parts = extras("gptq", version)
    zeros = torch.full((2, 12), word, dtype=torch.int32)
    assert not mapped.check(parts["w1_zero"], problem, zeros)
    zeros[0, 0] += 1
    assert "zero points other than the middle code" in mapped.check(parts["w1_zero"], problem, zeros)


def test_second_version_of_gptq_stores_zero_points_as_they_are():
    case = next(it for it in cases(storage_of("gptq")) if it.weight.zero_point)
    layer = make_layer(case)
    found = []
    for version in ("gptq", "gptq_v2"):
        checkpoint, _ = layer.checkpoint(
            {"text_config": {"quantization_config": {"checkpoint_format": version}}}
        )
        mapped = map_layer(checkpoint, layer.group, LAYER)
        zeros = next(it.mapping for it in mapped.mapped if it.mapping.stored == "w2_zero")
        found.append(zeros.canonical(torch.stack(layer.tensors["w2_zero"])))
    assert torch.equal(found[0], found[1] + 1)
