"""The work of a call with known routing, for `moectl.problem.roofline`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem.moe_problem import MoEProblem
from ..problem.roofline import LayerWork, work_of_hits


def work_of(problem: MoEProblem, ids: Tensor) -> LayerWork:
    """What a call with expert `ids` ``[tokens, top_k]`` must do; negative ids do nothing."""
    valid = ids[ids >= 0]
    return work_of_hits(problem, len(ids), int(valid.numel()), torch.unique(valid).numel())
