"""Whole experts written by guarded passes, in Triton's interpreter; `test_refit` runs this in a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moectl.convert.layouts.registry import layout_named
from moectl.convert.rank_slice import RankShard
from moectl.errors import CheckpointError, MoectlError, NoBackend
from moectl.kernels.triton.kernel_family import layer_of
from moectl.layer import direct_writes
from moectl.layer.refit import LayerRefit, refit
from moectl.problem.moe_problem import Dims
from moectl.problem.schemes import MXFP4, MXFP8, WeightFormat, int_format
from support.layout_cases import problem_for
from support.refit_cases import RefitCase, compare, live_layer, numbers

EXPERTS = 4
OWN = "moectl-mtile64"


@pytest.fixture(autouse=True)
def _passes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_writes, "DEVICES", ("cpu",))


def made(name: str, weight: WeightFormat, rank: RankShard = RankShard()) -> RefitCase:
    layout = layout_named(name)
    shape = problem_for(layout, weight, "concatenated", 64, 64, EXPERTS)
    problem = replace(shape, dims=Dims(64, 64))
    whole, other = numbers(problem, 1), numbers(problem, 3)
    for tensors in (whole, other):
        for role, t in tensors.items():
            if role.endswith("_scale") and t.dtype == torch.uint8:
                tensors[role] = t % 60 + 90
    backend = "moectl" if name == OWN else "torch"
    live = live_layer(layout, problem, rank, whole, backend=backend)
    if name == OWN:
        layer_of(live)
    addresses = {role: t.data_ptr() for role, t in live.weights.items()}
    return RefitCase(layout, rank, problem, whole, other, live, refit(live), addresses)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each batch that was written by passes, or was not, returned."""
    found: list[bool] = []
    write = direct_writes.DirectWrites.write

    def noted(self: direct_writes.DirectWrites, writes: object) -> bool:
        found.append(write(self, writes))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(direct_writes.DirectWrites, "write", noted)
    return found


def give(case: RefitCase, roles: dict[str, Tensor], experts: tuple[int, int] = (0, EXPERTS)) -> None:
    with case.update.batch():
        for role, t in roles.items():
            case.update.update(role, t[slice(*experts)], experts=experts)
            case.whole[role] = case.whole[role].clone()
            case.whole[role][slice(*experts)] = t[slice(*experts)]


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        (OWN, MXFP4),
        (OWN, int_format(4, 32, zero_point=True)),
        (OWN, int_format(8, 64)),
        ("marlin-mxfp4", MXFP4),
    ],
    ids=str,
)
def test_whole_experts(name: str, weight: WeightFormat, direct: list[bool]) -> None:
    case = made(name, weight)
    give(case, case.other)
    compare(case, case.cold(case.whole))
    give(
        case, numbers(case.problem, 3) | {r: t for r, t in case.other.items() if r.endswith("_scale")}, (1, 3)
    )
    compare(case, case.cold(case.whole))
    give(case, {"w2_bias": case.whole["w2_bias"] + 1}, (3, 4))
    compare(case, case.cold(case.whole))
    assert direct == [True, True, True]


def test_ranks_of_experts_take_theirs(direct: list[bool]) -> None:
    case = made("marlin-mxfp4", MXFP4, RankShard(ep_size=2, ep_rank=1))
    give(case, case.other)
    compare(case, case.cold(case.whole))
    assert direct == [True]


@pytest.mark.parametrize(
    ("weight", "place", "number", "error", "message"),
    [
        (MXFP4, 2, 255, CheckpointError, "1 of .* scales are not numbers .E8M0 byte 255., first in expert 2"),
        (MXFP4, 1, 191, NoBackend, r"right for scales from 2\^-63 to below 2\^64, got .* to below 2\^65"),
        (MXFP4, 1, 63, NoBackend, r"right for scales from 2\^-63 to below 2\^64, got 2\^-64"),
        (int_format(4, 32), 3, torch.inf, CheckpointError, "1 of .* scales are not numbers .NaN or infinity"),
        (int_format(4, 32), 3, 2.0**70, NoBackend, r"right for scales from 2\^-63 to below 2\^64"),
    ],
    ids=str,
)
def test_refused_scales_change_nothing(
    weight: WeightFormat,
    place: int,
    number: float,
    error: type[MoectlError],
    message: str,
    direct: list[bool],
) -> None:
    case = made(OWN, weight)
    for matrix in ("w13", "w2"):
        assert getattr(layer_of(case.live), matrix).exponents_within(range(64, 191))
    before = {name: t.clone() for name, t in case.live.weights.items()}
    known = layer_of(case.live)
    scales = case.other["w2_scale"].clone()
    scales[place, 5, 0] = number
    with pytest.raises(error, match=message):
        give(case, case.other | {"w2_scale": scales})
    compare(case, before)
    assert direct == [False] and layer_of(case.live) is known


def test_exponents_of_new_scales_are_remembered(direct: list[bool]) -> None:
    case = made(OWN, MXFP4)
    scales = torch.full_like(case.whole["w13_scale"], 120)
    scales[0, 0, 0], scales[1], scales[2, 1, 1] = 0, 70, 180
    give(case, {"w13_scale": scales}, (0, 2))
    low, high = layer_of(case.live).w13.exponents
    assert (low, high) == (70, 149)
    give(case, {"w13_scale": scales}, (2, 3))
    assert layer_of(case.live).w13.exponents == (70, 180)
    give(case, {"w13_scale": torch.zeros_like(scales)})
    assert layer_of(case.live).w13.exponents == (70, 180)
    assert direct == [True, True, True]


def test_what_passes_cannot_write_takes_another_way(direct: list[bool]) -> None:
    case = made(OWN, MXFP4)
    update: LayerRefit = case.update
    with update.batch():  # the second write of an expert counts
        update.update("w13", case.whole["w13"])
        update.update("w13", case.other["w13"][2:3], experts=2)
    case.whole["w13"] = case.whole["w13"].clone()
    case.whole["w13"][2] = case.other["w13"][2]
    update.update("w2", case.other["w2"][:, :8], rows=(0, 8))
    case.whole["w2"] = case.whole["w2"].clone()
    case.whole["w2"][:, :8] = case.other["w2"][:, :8]
    apart = case.other["w2_scale"].repeat(1, 1, 2)[:, :, : case.whole["w2_scale"].shape[2]]
    assert not apart.is_contiguous()
    update.update("w2_scale", apart)
    case.whole["w2_scale"] = case.other["w2_scale"]
    compare(case, case.cold(case.whole))
    assert direct == [False, False, True]
    codes = made(OWN, MXFP8)
    give(codes, {"w13": codes.other["w13"].clamp(max=0x7E)})
    compare(codes, codes.cold(codes.whole))
    assert not direct[-1]
