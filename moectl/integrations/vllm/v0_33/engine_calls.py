"""Functions of vLLM that moectl answers in front of: vLLM has no hook there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from ....errors import NoBackend
from ...engine_names import SWITCH
from .. import METHOD
from ..limits import CALLS, sentence
from .log import logger_of

logger = logger_of(__name__)

HANDED_OVER = "LLM.reload_weights(weights_iterator=...)"
KERNELS_FORMAT = "LLM.reload_weights(is_checkpoint_format=False)"
SLEEP = "LLM.sleep(level=2)"

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules that call vLLM's function ``reload_weights``."""

WORKER = "vllm.v1.worker.gpu_worker"
"""The module whose ``Worker`` every way to put an engine to sleep calls."""

Function = Callable[..., Any]


def refused(call: str) -> NoBackend:
    """The error of a call that is a row of `CALLS`."""
    says, hint = sentence((CALLS[call],))
    return NoBackend(says, hint=hint)


def claim_unquantized() -> None:
    """Have vLLM take moectl's method for models with experts without a ``quantization_config``, too.

    vLLM asks methods what they claim only where there is one. Draft models are left to it.
    """
    from vllm.config import ModelConfig

    def claiming(verify: Function) -> Function:
        @wraps(verify)
        def verify_quantization(self: Any) -> None:
            published = self.model_arch_config.quantization_config
            if self.quantization is None and published is None and self.is_moe:
                if self.runner_type == "draft":
                    logger.info("moectl leaves the draft model %s to vLLM", self.model)
                else:
                    logger.info("%s asks for moectl's experts in %s", SWITCH, self.model)
                    self.quantization = METHOD
            verify(self)

        return verify_quantization

    _wrap(ModelConfig, "_verify_quantization", claiming)


def refuse_calls() -> None:
    """Have vLLM refuse what would leave moectl's experts with wrong weights.

    That is `reload_weights` with weights in memory or of a checkpoint that cannot take the place of the one
    that was loaded, and sleep that discards weights: `reload_weights` brings back parameters alone, and a
    layer has other tensors in the memory that vLLM discards.
    """
    for module in RUNNERS:
        _wrap(sys.modules.get(module), "reload_weights", _from_a_path)
    _wrap(getattr(sys.modules.get(WORKER), "Worker", None), "sleep", _keeping_weights)


def _wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    """Replaces the function `name` of a module or class, once; nothing where there is none."""
    function = getattr(owner, name, None)
    if function is not None and not getattr(function, "of_moectl", False):
        wrapped: Any = wrapper(function)
        wrapped.of_moectl = True
        setattr(owner, name, wrapped)


def _from_a_path(function: Function) -> Function:
    @wraps(function)
    def reload_weights(
        vllm_config: Any, model: Any, weights_iterator: Any = None, *others: Any, **named: Any
    ) -> Any:
        if weights_iterator is not None:
            raise refused(HANDED_OVER if named.get("is_checkpoint_format", True) else KERNELS_FORMAT)
        reloading = getattr(getattr(vllm_config, "quant_config", None), "reloading", None)
        path = others[0] if others else named.get("weights_path")
        # vLLM takes all weights from the model before it asks for new ones: what is refused then ends it.
        with nullcontext() if reloading is None else reloading(vllm_config, path):
            return function(vllm_config, model, weights_iterator, *others, **named)

    return reload_weights


def _keeping_weights(function: Function) -> Function:
    @wraps(function)
    def sleep(self: Any, level: int = 1) -> Any:
        if level > 1 and self.vllm_config.model_config.quantization == METHOD:
            raise refused(SLEEP)
        return function(self, level)

    return sleep
