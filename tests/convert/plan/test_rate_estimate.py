"""The rate that --dry-run states."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moectl.convert.plan import rate_estimate
from moectl.convert.plan.rate_estimate import measured_rate
from moectl.errors import CheckpointError
from support.stream_checkpoints import folder_bytes

from ..conftest import plan_of


def test_the_rate_is_measured_without_reading(source: Path) -> None:
    plan = plan_of(source)
    for path in source.glob("*.safetensors"):
        path.write_bytes(b"")
    before = folder_bytes(source)
    rate = measured_rate(plan)
    assert rate.measured and 1e4 < rate.bytes_per_second < 1e12
    assert measured_rate(plan, 1).measured
    assert folder_bytes(source) == before


def test_numbers_that_cannot_be_converted_leave_an_assumed_rate(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise CheckpointError("a scale is no number")

    monkeypatch.setattr(rate_estimate.ExpertBatches, "convert", refuse)
    rate = measured_rate(plan_of(gpt_oss))
    assert dataclasses.astuple(rate) == (rate_estimate.ASSUMED_RATE, False)
