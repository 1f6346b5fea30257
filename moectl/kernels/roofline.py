"""The work of a call with known routing, for `moectl.floors`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..floors import Work, work_of_hits
from ..problem import MoEProblem


def work_of(problem: MoEProblem, ids: Tensor) -> Work:
    """What a call with expert `ids` ``[tokens, top_k]`` must do; negative ids do nothing."""
    valid = ids[ids >= 0]
    return work_of_hits(problem, len(ids), int(valid.numel()), torch.unique(valid).numel())
