"""Slices of stored tensors of every storage, written into live layers by the checkpoint's names."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from convert.sources.test_storages import READABLE, read, storage_id
from moectl.checkpoint.tensors.storage import Storage
from moectl.convert.rank_slice import RankSlice, shard_of
from moectl.convert.recipe.recipe import Recipe, StoredOutput
from moectl.convert.sources import LayerMapping
from moectl.errors import CheckpointError, UsageError
from moectl.kernels.prepared_layer import CANONICAL, PreparedMoE
from moectl.layer.experts import ExpertLayer, LayerOrigin
from moectl.layer.rank_share import rank_share
from moectl.layer.refit import refit
from moectl.problem.rank_sizes import slice_unit
from support.layout_cases import as_bytes
from support.one_thread import one_thread  # noqa: F401
from support.refit_cases import random_slice
from support.sampling import every_nth
from support.stored_layers import EXPERTS, LAYER, Layer, cases, make_layer


def live_of(layer: Layer, tp: int, rank: int) -> tuple[PreparedMoE, LayerMapping]:
    """A rank's share of the layer in canonical form."""
    mapped, batch = read(layer)
    held = {role: batch[role].clone() for role in mapped.shapes}
    parts = {
        layer.names.experts[m.mapping.stored].replace("{layer}", str(LAYER)): m.mapping for m in mapped.mapped
    }

    def canonical(ids: object, device: torch.device | None = None) -> dict[str, Tensor]:
        index = torch.as_tensor(list(ids))  # type: ignore[call-overload]
        return {role: t[index] for role, t in held.items()}

    recipe = Recipe(mapped.shapes, {role: StoredOutput(role) for role in mapped.shapes})
    whole = ExpertLayer(
        layer.group.problem, LAYER, CANONICAL, recipe, canonical, lambda device: held, None, parts=parts
    )
    share = rank_share(whole, shard_of(rank, tp))
    weights = share.repack(share.recipe, torch.device("cpu"))
    origin = LayerOrigin(share, share.recipe)
    dense = share._dense(weights, origin)
    return PreparedMoE(share.problem, "torch", CANONICAL, weights, dense, origin=origin), mapped


@pytest.mark.parametrize("storage", every_nth(READABLE, 3, 1), ids=storage_id)
def test_slices_of_stored_tensors(storage: Storage) -> None:
    draw = random.Random(storage_id(storage))
    case = draw.choice(list(cases(storage)))
    tp = draw.choice((1, 2))
    case = replace(case, dims=replace(case.dims, intermediate=tp * math.lcm(slice_unit(case.weight), 8)))
    old, new = make_layer(case, 0), make_layer(case, 1)
    rank = draw.randrange(tp)
    live, mapped = live_of(old, tp, rank)
    share = RankSlice(old.group.problem, shard_of(rank, tp))
    update = refit(live)
    for _ in range(8):
        tensors = draw.choice([m for m in mapped.mapped if m.mapping.role])
        mapping, stored = tensors.mapping, tensors.mapping.stored
        name = old.names.experts[stored].replace("{layer}", str(LAYER))
        spans = [random_slice(draw, size) for size in mapping.shape[:2]]
        index = tuple(slice(*span) for span in spans)
        keywords = dict(zip(("rows", "columns"), spans, strict=False))
        if tensors.per_expert:
            expert = draw.randrange(EXPERTS)
            name = name.replace("{expert}", str(expert))
            target, values = old.tensors[stored][expert], new.tensors[stored][expert]
        else:
            target, values = old.tensors[stored][0], new.tensors[stored][0]
            if not mapping.shared:
                first, last = random_slice(draw, EXPERTS)
                keywords["experts"] = (first, last)
                target, values = (t.view(EXPERTS, *mapping.shape)[first:last] for t in (target, values))
                index = (slice(None), *index)
        as_bytes_of(target)[index] = as_bytes_of(values)[index]
        update.update(name, values[index], **keywords)  # type: ignore[arg-type]
        _, batch = read(old)
        expected = share.slice({role: batch[role] for role in mapped.shapes})
        for role, t in live.weights.items():
            assert torch.equal(as_bytes(t), as_bytes(expected[role])), (name, keywords, role)


def as_bytes_of(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.element_size() == 1 else t


def test_tensors_without_weights_are_checked() -> None:
    storage = next(it for it in READABLE if any(s.role.endswith("_shape") for s in it.tensors.values()))
    layer = make_layer(next(cases(storage)))
    live, mapped = live_of(layer, 1, 0)
    extra = next(m for m in mapped.mapped if m.mapping.stored.endswith("_shape"))
    hidden, inter = layer.case.dims.hidden, layer.case.dims.intermediate
    sizes = [hidden, inter] if extra.mapping.stored.startswith("w2") else [inter, hidden]
    name, dtype = extra.tensors[0].name, layer.tensors[extra.mapping.stored][0].dtype
    assert refit(live).update(name, torch.tensor(sizes, dtype=dtype)) is False
    with pytest.raises(CheckpointError, match=r"says \[1, 2\], but its weight is"):
        refit(live).update(name, torch.tensor([1, 2], dtype=dtype))
    with pytest.raises(UsageError, match="names its expert"):
        refit(live).update(name, torch.tensor(sizes, dtype=dtype), experts=0)
