"""moectl's kernels in vLLM: compiled while weights are loaded, and at hand before the first forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....kernels.prepared_layer import PreparedMoE
from ....problem.moe_problem import MoEProblem
from ....run.layer_variants import problem_in_dtype
from .log import logger_of

if TYPE_CHECKING:
    from ....layer.background_compile import KernelLoad

logger = logger_of(__name__)


def begin(problem: MoEProblem, dtype: str, backend: str, device: torch.device) -> KernelLoad | None:
    """Starts to compile what a layer needs for every number of tokens that vLLM's scheduler may give it.

    None where there is nothing to compile ahead: on a CPU, and for backends of other libraries.
    """
    if device.type != "cuda":
        return None
    from vllm.config import get_current_vllm_config

    from ....layer.background_compile import start  # needs triton

    config = get_current_vllm_config()
    # With data parallelism the experts see the tokens of all ranks.
    ranks = config.parallel_config.data_parallel_size
    tokens = config.scheduler_config.max_num_batched_tokens * ranks
    return start(problem_in_dtype(problem, dtype), backend, device, tokens)


def take(load: KernelLoad, layer: PreparedMoE) -> None:
    """Waits for the kernels of `layer`, takes them into this process, and logs what was compiled."""
    if said := load.ready(layer):
        logger.info("moectl: %s", said)
