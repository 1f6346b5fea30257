"""Backends and formats that moectl's policy calls verified are those whose rows in `docs/` were right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moectl.environment import Packages, find_device
from moectl.oracle.registry import policy_named
from moectl.oracle.select import select
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.published_layers import SCHEMES
from moectl.problem.schemes import INT8_ACT_TOKEN, Scheme, int_format

DOCS = Path(__file__).parents[4] / "docs"
NAMED = {str(scheme): scheme for scheme in SCHEMES.values()}
BACKENDS = {backend.name: backend for route in policy_named("moectl").routes for backend in route.backends()}


def rows_of(file: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == "row"]


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_what_was_timed_and_right_is_verified(gpu: str) -> None:
    rows = [row for file in sorted(DOCS.glob(f"bench*_{gpu}.jsonl")) for row in rows_of(file)]
    right = {(row["backend"], row["scheme"]) for row in rows if row["ok"] and row["median_us"]}
    assert {backend for backend, _ in right} >= {"moectl", "humming", "marlin", "deep_gemm", "cutlass"}
    device = find_device(gpu)
    assert not [
        (backend, scheme)
        for backend, scheme in sorted(right)
        if scheme in NAMED and BACKENDS[backend].untried(device, NAMED[scheme])
    ]


NEVER_COMPARED = Scheme(int_format(4, 32), INT8_ACT_TOKEN)
"""A format that Humming has kernels for, whose results nobody compared."""


def test_formats_that_nobody_compared_are_not() -> None:
    device, humming = find_device("h200"), BACKENDS["humming"]
    compared = ("nvfp4", "mxfp4", "mxfp8", "fp8-block", "fp8-channel", "int4-g128-a8")
    assert humming.untried(device, NEVER_COMPARED)
    assert not any(humming.untried(device, SCHEMES[name]) for name in compared)


@pytest.mark.parametrize(
    ("scheme", "where"), [(SCHEMES["mxfp8"], ["sm90"]), (NEVER_COMPARED, [])], ids=["mxfp8", "int4 a8"]
)
def test_what_explain_prints_of_devices_is_of_the_format(scheme: Scheme, where: list[str]) -> None:
    decision = select(
        MoEProblem(Dims(512, 256), 8, 2, scheme),
        find_device("h200"),
        Packages(),
        policy_named("moectl"),
    )
    found = {it["backend"]: it["verified_on"] for it in decision.to_json()["candidates"]}
    assert found["humming"] == where and found["moectl"] == ["sm90"]
