"""Every family of kernels over the grid of formats, on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import pytest
import torch

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.stream_launches import FOUR_ROWS, TALL, StreamTile
from moectl.kernels.reference import moe_reference
from moectl.kernels.tolerance import check, tolerance_for
from moectl.kernels.triton.triton_runner import FAMILIES, run_with
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from moectl.problem.padding import pad
from moectl.problem.schemes import MXFP8, Scheme, WeightFormat
from support import kernel_cases as cases
from support.kernel_grid import CASES, CHOICES, FEWER_CASES, FORMATS, Case
from support.random_layers import inputs_of, random_layer

pytestmark = pytest.mark.gpu

FLOATS = CHOICES["floats"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.poison_new_memory(monkeypatch)


OTHER_TILES: dict[str, tuple[Any, ...]] = {
    "decode": tuple(it.tile for it in cases.LAUNCHES.values() if it.family == "decode"),
    "grouped": tuple(it.tile for it in cases.LAUNCHES.values() if it.family == "grouped"),
    "stream": (
        StreamTile(8, 1, *astuple(TALL), *astuple(TALL)),
        StreamTile(1, 0, *astuple(FOUR_ROWS), *astuple(FOUR_ROWS), split=2),
    ),
}
"""Tiles that are legal, beside a family's candidates: plans and splits that no candidate has."""


def tiles_in(family: str, problem: MoEProblem) -> list[Any]:
    """The tiles of a family that take `problem`, as it is stored."""
    kernel_family, stored = FAMILIES[family], pad("moectl-mtile64", problem)
    tiles = (*kernel_family.candidates(stored), *OTHER_TILES.get(family, ()))
    return [tile for tile in dict.fromkeys(tiles) if not kernel_family.fits(stored, tile)]


def kind(tile: Any) -> Any:
    """`tile` but for the length of its ring, which follows from a layer's format."""
    return replace(tile, stages=0) if hasattr(tile, "stages") else tile


@cache
def launches_in(grid: tuple[Case, ...], family: str) -> dict[Case, list[Launch]]:
    """For each case of a grid that a family takes, the launch of it whose kind was taken least until then.

    If there are more kinds than cases, some cases have one of the others in addition.
    """
    tiles = {case: found for case in grid if (found := tiles_in(family, case.problem))}
    taken: Counter[Any] = Counter()
    launches: dict[Case, list[Launch]] = {}
    for case, its in tiles.items():
        tile = min(its, key=lambda tile: taken[kind(tile)])
        taken[kind(tile)] += 1
        launches[case] = [Launch(family, tile)]
    for case, its in tiles.items():
        if left := [tile for tile in its if not taken[kind(tile)]]:
            taken[kind(left[0])] += 1
            launches[case].append(Launch(family, left[0]))
    return launches


def here(family: str) -> bool:
    """Whether a family's code exists for this GPU."""
    return FAMILIES[family].runs_on(torch.device("cuda"))


def taking(problem: MoEProblem, turn: int) -> Iterator[Launch]:
    """The `turn`-th launch of every family that runs here and takes `problem`."""
    for family in filter(here, FAMILIES):
        if tiles := tiles_in(family, problem):
            yield Launch(family, tiles[turn % len(tiles)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", FEWER_CASES, ids=str)
def test_agrees_with_the_reference(case: Case, family: str) -> None:
    if not here(family):
        pytest.skip(f"{family}: its code does not exist for this GPU")
    launches = launches_in(FEWER_CASES, family)
    if case not in launches:
        pytest.skip(f"{family}: none of its tiles takes such a layer")
    for launch in launches[case]:
        cases.agrees_in(case, launch, "cuda")


def probes() -> Iterator[tuple[WeightFormat, tuple[str, str], Launch]]:
    """Every format with two pairs of types, by the family that had the fewest, and all that come out folded.

    Those are weights times a power of two, which the Hopper kernels take out of the sums again.
    """
    asked: list[tuple[WeightFormat, tuple[str, str], Sequence[str]]] = [
        (FORMATS[turn % len(FORMATS)], FLOATS[turn % len(FLOATS)], tuple(FAMILIES))
        for turn in range(2 * len(FORMATS))
    ]
    folded = [it for it in FORMATS if it == MXFP8 or (it.bits == 4 and not it.zero_point)]
    asked += [(weight, ("bf16", "BF16"), [family]) for weight in folded for family in ("mid", "prefill")]
    had: Counter[str] = Counter()
    for weight, floats, among in asked:
        problem = cases.probe(weight, floats)
        family = min((name for name in among if tiles_in(name, problem)), key=lambda name: had[name])
        tiles = tiles_in(family, problem)
        yield weight, floats, Launch(family, tiles[had[family] % len(tiles)])
        had[family] += 1


PROBES = tuple(probes())


@pytest.mark.parametrize("probe", PROBES, ids=lambda it: f"{it[0]} {' '.join(it[1])} {it[2].family}")
def test_decodes_exactly(probe: tuple[WeightFormat, tuple[str, str], Launch]) -> None:
    weight, floats, launch = probe
    if not here(launch.family):
        pytest.skip(f"{launch.family}: its code does not exist for this GPU")
    cases.decodes_exactly(weight, floats, launch, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_of_choices(case: Case, family: str) -> None:
    if not here(family):
        pytest.skip(f"{family}: its code does not exist for this GPU")
    launches = launches_in(CASES, family)
    if case not in launches:
        pytest.skip(f"{family}: none of its tiles takes such a layer")
    for launch in launches[case]:
        cases.agrees_in(case, launch, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("floats", FLOATS, ids=str)
@pytest.mark.parametrize("weight", FORMATS, ids=str)
def test_every_format_decodes_exactly(weight: WeightFormat, floats: tuple[str, str], family: str) -> None:
    launch = next((it for it in taking(cases.probe(weight, floats), 1) if it.family == family), None)
    if launch is None:
        pytest.skip(f"{family}: this GPU has no code of it, or none of its tiles takes such a layer")
    cases.decodes_exactly(weight, floats, launch, "cuda")


@pytest.mark.parametrize("family", [it for it in FAMILIES if tiles_in(it, cases.ONE_EXPERT)])
def test_every_scale_is_right(family: str) -> None:
    if not here(family):
        pytest.skip(f"{family}: its code does not exist for this GPU")
    cases.every_scale_is_right(Launch(family, tiles_in(family, cases.ONE_EXPERT)[0]), "cuda")


NAN_LAYER = replace(cases.KIMI, scheme=Scheme(MXFP8), dims=Dims(96, 64))
"""The layer of `nan_codes_stay_nan`."""


@pytest.mark.parametrize(
    ("dtype", "launch"),
    [
        (dtype, Launch(family, tile))
        for dtype, most in (("bf16", None), ("fp16", 1))
        for family in FAMILIES
        for tile in tiles_in(family, replace(NAN_LAYER, dtype=dtype))[:most]
    ],
    ids=str,
)
def test_nan_codes_stay_nan(launch: Launch, dtype: str) -> None:
    """Whatever codes are next to a matrix whose columns end within a step."""
    if not here(launch.family):
        pytest.skip(f"{launch.family}: its code does not exist for this GPU")
    cases.nan_codes_stay_nan(launch, "cuda", dtype)


@pytest.mark.parametrize("weight", FORMATS[:2], ids=str)
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(1024, 8, 33), (512, 22, 40)])
def test_many_experts(experts: int, top_k: int, tokens: int, weight: WeightFormat) -> None:
    case = replace(CASES[0], weight=weight, floats=("bf16", "BF16"))
    problem = replace(case.problem, experts=experts, local_experts=experts, top_k=top_k, dims=Dims(64, 64))
    layer = random_layer(problem)
    prepared = layer.prepared("moectl", "cuda")
    inputs = inputs_of(problem, tokens, device="cuda")
    expected = moe_reference(
        *(t.cpu() for t in (inputs.x, inputs.ids, inputs.weights)), layer.reference, problem
    )
    # Of a family's tiles the first have no records, and the fifth has.
    for launch in dict.fromkeys((*taking(problem, 0), *taking(problem, 4))):
        y = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        assert check(y.cpu(), expected, tolerance_for(problem)).ok, launch


def test_rows_beyond_32_bits() -> None:
    """65,536 tokens of width 7168 with top-k 8: three of the call's tensors have more than 2^31 numbers."""
    weight = FORMATS[1]
    problem = MoEProblem(
        Dims(7168, 256), 16, 8, replace(CASES[0].problem.scheme, weight=weight), SILU, bias=False
    )
    prepared = random_layer(problem).prepared("moectl", "cuda")
    inputs = inputs_of(problem, 65_536, device="cuda")
    some = torch.tensor([0, 1, 30_000, 37_448, 37_449, 65_534, 65_535])
    x, ids, weights = (t[some].cpu() for t in (inputs.x, inputs.ids, inputs.weights))
    expected = moe_reference(x, ids, weights, lambda e: prepared.expert(e), problem)
    for launch in taking(problem, 1):
        if launch.family == "decode":
            continue
        y = run_with(prepared, inputs.x, inputs.ids, inputs.weights, launch)
        assert check(y[some].cpu(), expected, tolerance_for(problem)).ok, launch
