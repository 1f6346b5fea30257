"""Runs of tensors that differ in a number are a mapping like any other."""

from __future__ import annotations

import pytest

from moectl.files.tensor_runs import TensorRun, TensorRuns
from moectl.files.tensor_table import TensorInfo, TensorType, files_of, table_of

CODES, SCALES = TensorType("U8", (4, 16)), TensorType("BF16", (4, 2))
RUNS = TensorRuns(
    [
        TensorRun(CODES, "layers.3.experts.", ".codes", 12),
        TensorRun(SCALES, "layers.3.experts.", ".scales", 12),
        TensorRun(SCALES, "layers.3.router"),
        TensorRun(SCALES, "layers.", ".norm", 2),
    ]
)


def test_runs_are_a_mapping() -> None:
    names = [f"layers.3.experts.{expert}.{leaf}" for leaf in ("codes", "scales") for expert in range(12)]
    names += ["layers.3.router", "layers.0.norm", "layers.1.norm"]
    assert list(RUNS) == names and len(RUNS) == len(names)
    assert RUNS["layers.3.experts.11.codes"] == TensorInfo("layers.3.experts.11.codes", *CODES, "", 0, 64)
    assert RUNS["layers.3.router"] == TensorInfo("layers.3.router", *SCALES, "", 0, 16)
    assert [RUNS[name] for name in names] == list(RUNS.values())
    assert table_of(RUNS.values()) == RUNS == dict(RUNS)
    assert files_of(RUNS) == {""}


@pytest.mark.parametrize(
    "name",
    [
        *("", "layers.3", "layers.3.experts.", "layers.3.experts.12.codes", "layers.3.experts.05.codes"),
        *("layers.3.experts.-1.codes", "layers.3.experts.x.codes", "layers.4.experts.1.codes"),
        *("layers.3.experts.1.norm", "layers.2.norm", "layers.3.experts.٣.codes", "layers.3.router.1"),
        f"layers.3.experts.{'1' * 5000}.codes",
    ],
)
def test_names_that_no_run_has(name: str) -> None:
    assert name not in RUNS and RUNS.get(name) is None
    with pytest.raises(KeyError):
        RUNS[name]
