"""Layers of pipeline stages."""

import pytest

from moectl.errors import UsageError
from moectl.problem.model_shape import pipeline_stages


@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        # As vLLM 0.33.0's get_pp_indices.
        (61, (31, 30)),
        (61, (15, 15, 16, 15)),
        (48, (9, 10, 10, 10, 9)),
        (36, (4, 4, 4, 5, 5, 5, 5, 4)),
        (7, (2, 2, 2, 1)),
        (3, (1, 1, 1)),
        (5, (5,)),
    ],
)
def test_layers_are_shared_as_vllm_shares_them(layers, stages):
    assert pipeline_stages(layers, len(stages)) == stages


def test_every_stage_needs_a_layer():
    with pytest.raises(UsageError, match="24 layers cannot be distributed over 25 pipeline stages"):
        pipeline_stages(24, 25)
