"""The comparison: what passes, what fails, and which token is named."""

from __future__ import annotations

import math

import pytest
import torch

from moectl.errors import NoBackend, UsageError
from moectl.kernels.tolerance import TOLERANCES, Tolerance, check, tolerance_for
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import MXFP4, Scheme, WeightFormat

LIMIT = Tolerance(0.05, 0.01, "test")


def random_reference() -> torch.Tensor:
    return torch.randn(7, 40, generator=torch.Generator().manual_seed(1))


def test_an_equal_result_passes_with_no_error() -> None:
    reference = random_reference()
    result = check(reference.clone(), reference, LIMIT)
    assert result.ok and result.max == result.rms == 0.0


def test_one_wrong_element_fails_and_names_its_token() -> None:
    reference = random_reference()
    y = reference.clone()
    y[5, 3] += 0.1 * reference[5].square().mean().sqrt()
    result = check(y, reference, LIMIT)
    assert not result.ok and result.worst_token == 5
    assert result.max == pytest.approx(0.1, rel=1e-3) and result.rms < LIMIT.rms


def test_many_small_errors_fail_by_their_rms() -> None:
    reference = random_reference()
    off = 0.02 * reference.square().mean(1, keepdim=True).sqrt()
    result = check(reference + off, reference, LIMIT)
    assert not result.ok and result.rms == pytest.approx(0.02, rel=1e-3) and result.max < LIMIT.max


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_passes(value: float) -> None:
    reference = random_reference()
    y = reference.clone()
    y[2, 0] = value
    result = check(y, reference, Tolerance(math.inf, math.inf, "anything"))
    assert not result.ok and result.worst_token == 2
    assert not check(y, y, LIMIT).ok


def test_a_zero_reference_allows_zeros_only() -> None:
    zero = torch.zeros(3, 4)
    assert check(zero.clone(), zero, LIMIT).ok
    y = zero.clone()
    y[1, 1] = 1e-30
    assert not check(y, zero, LIMIT).ok


def test_a_row_of_zeros_must_stay_near_zero() -> None:
    reference = random_reference()
    reference[4] = 0.0
    y = reference.clone()
    y[4, 0] = 0.01
    result = check(y, reference, LIMIT)
    assert not result.ok and result.worst_token == 4


def test_no_tokens_pass_and_shapes_must_agree() -> None:
    assert check(torch.empty(0, 4), torch.empty(0, 4), LIMIT).ok
    with pytest.raises(UsageError, match=r"\[1, 4\] and \[2, 4\]"):
        check(torch.empty(1, 4), torch.empty(2, 4), LIMIT)


def test_every_tolerance_has_a_reason_and_a_missing_one_is_refused() -> None:
    assert all(t.reason and t.rms < t.max < 0.5 for t in TOLERANCES.values())
    problem = MoEProblem(Dims(64, 64), 4, 2, Scheme(MXFP4))
    assert tolerance_for(problem) is TOLERANCES["exact", "fp32"]
    with pytest.raises(NoBackend, match="int3 weights with fp32"):
        tolerance_for(MoEProblem(Dims(64, 64), 4, 2, Scheme(WeightFormat("int3", 3))))
