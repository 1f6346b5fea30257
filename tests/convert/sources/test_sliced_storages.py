"""Slices of every storage: cut, joined and stored again; and experts of a range."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moectl.checkpoint.tensors.storage import Storage
from moectl.convert.canonical import canonical_shapes
from moectl.convert.rank_slice import RankSlice, shard_of
from moectl.convert.sources import map_layer
from moectl.convert.stream.expert_batches import ExpertBatches
from moectl.problem.moe_problem import Dims
from moectl.problem.rank_sizes import slice_unit
from moectl.torch_dtypes import TORCH_DTYPES
from support.sampling import every_nth
from support.stored_layers import EXPERTS, LAYER, cases, make_layer

from .test_storages import READABLE, read, storage_id


@pytest.mark.parametrize("storage", every_nth(READABLE, 3), ids=storage_id)
def test_slices_lead_back_to_the_stored_tensors(storage: Storage) -> None:
    for case in cases(storage):
        inter = 2 * math.lcm(slice_unit(case.weight), 8)
        layer = make_layer(replace(case, dims=Dims(case.dims.hidden, inter)))
        mapped, batch = read(layer)
        shares = [RankSlice(layer.group.problem, shard_of(rank, tp_size=2)) for rank in range(2)]
        assert [share.intermediate for share in shares] == [(0, inter // 2), (inter // 2, inter)]
        slices = [share.slice(batch) for share in shares]
        for share, cut in zip(shares, slices, strict=True):
            inputs = any(role.endswith("_input") for role in mapped.shapes)
            shapes = canonical_shapes(share.problem, EXPERTS, inputs)
            assert share.shapes(mapped.shapes) == shapes
            assert {role: (tuple(cut[role].shape), cut[role].dtype) for role in shapes} == {
                role: (shape, TORCH_DTYPES[dtype]) for role, (dtype, shape) in shapes.items()
            }
        joined = shares[0].join(slices, list(mapped.shapes))
        for mapping in (it.mapping for it in mapped.mapped):
            again, before = (mapping.restored(held).contiguous() for held in (joined, batch))
            assert torch.equal(again.view(-1).view(torch.uint8), before.view(-1).view(torch.uint8)), mapping


@pytest.mark.parametrize("storage", every_nth(READABLE, 3, 1), ids=storage_id)
def test_a_range_of_experts_is_read_from_its_own_bytes(storage: Storage) -> None:
    layer = make_layer(next(cases(storage)))
    _, whole = read(layer)
    checkpoint, data = layer.checkpoint()
    mapped = map_layer(checkpoint, layer.group, LAYER).of_experts(1, 2)
    extents = {info.name: (start, stop) for info, start, stop in mapped.extents}
    seen: dict[str, int] = dict.fromkeys(extents, 0)

    def fill(info, at, view):
        start, stop = extents[info.name]
        assert start <= at
        assert at + len(view) <= stop
        seen[info.name] += len(view)
        view[:] = data[info.start + at : info.start + at + len(view)]

    piece = ExpertBatches(mapped).load(0, 1, fill)
    assert seen == {name: stop - start for name, (start, stop) in extents.items()}
    assert piece.keys() == whole.keys()
    for role, t in piece.items():
        mine, wanted = t.reshape(-1), whole[role][1:2].reshape(-1)
        assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8)), role
