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


def test_formats_that_nobody_compared_are_not() -> None:
    device, humming = find_device("h200"), BACKENDS["humming"]
    found = {name: humming.untried(device, scheme) for name, scheme in SCHEMES.items()}
    assert found["mxfp8"] and not any(found[name] for name in ("nvfp4", "mxfp4", "fp8-block", "fp8-channel"))


@pytest.mark.parametrize(("name", "where"), [("nvfp4", ["sm90"]), ("mxfp8", [])])
def test_what_explain_prints_of_devices_is_of_the_format(name: str, where: list[str]) -> None:
    decision = select(
        MoEProblem(Dims(512, 256), 8, 2, SCHEMES[name]),
        find_device("h200"),
        Packages(),
        policy_named("moectl"),
    )
    found = {it["backend"]: it["verified_on"] for it in decision.to_json()["candidates"]}
    assert found["humming"] == where and found["moectl"] == ["sm90"]
