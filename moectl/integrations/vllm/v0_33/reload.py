"""`reload_weights` of vLLM with experts that moectl loaded: read again from a path, in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol

from vllm.config import get_current_vllm_config_or_none

from ....errors import NoBackend, UsageError
from ...model_experts import ModelExperts, open_experts
from ..limits import CALLS, Limit, sentence

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules that call vLLM's function ``reload_weights``."""


class Refillable(Protocol):
    """A layer's method whose weights can be replaced in place."""

    moe_kernel: Any
    """None until the layer has been loaded."""

    def refill(self, experts: ModelExperts) -> None:
        """Replace the layer's values by those of `experts`."""


def reload(experts: ModelExperts, name: str, methods: Mapping[int, Refillable]) -> tuple[ModelExperts, str]:
    """Read the loaded layers among `methods` again; returns the model's experts and their checkpoint's name.

    vLLM calls this while its model loads weights: the first time no layer has been loaded, and nothing is
    read. Raises NoBackend when weights are handed over in memory, UsageError for another model's checkpoint.
    """
    loaded = {number: method for number, method in methods.items() if method.moe_kernel is not None}
    if not loaded:
        return experts, name
    config = get_current_vllm_config_or_none()
    if config is None:
        raise _refusal(CALLS["LLM.reload_weights(weights_iterator=...)"])
    now = config.model_config.model
    if config.load_config.load_format == "dummy":
        return experts, name
    if now != name:
        other = open_experts(now)
        different = [
            n for n in loaded if n not in other.layers or other.problem_of(n) != experts.problem_of(n)
        ]
        if different:
            raise UsageError(f"layers {', '.join(map(str, different))} of {now} are not those of {name}")
        experts = other
    for method in loaded.values():
        method.refill(experts)
    return experts, now


def refuse_handed_over_weights() -> None:
    """Have vLLM refuse `reload_weights` with weights in memory, after which experts would have their old."""
    for module in RUNNERS:
        runner = sys.modules.get(module)
        function = getattr(runner, "reload_weights", None)
        if function is not None and not hasattr(function, "__wrapped__"):
            runner.reload_weights = _from_a_path(function)  # type: ignore[union-attr]


def _from_a_path(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def reload_weights(
        vllm_config: Any, model: Any, weights_iterator: Any = None, *others: Any, **named: Any
    ) -> Any:
        if weights_iterator is not None:
            checkpoint = named.get("is_checkpoint_format", True)
            kind = "weights_iterator=..." if checkpoint else "is_checkpoint_format=False"
            raise _refusal(CALLS[f"LLM.reload_weights({kind})"])
        return function(vllm_config, model, weights_iterator, *others, **named)

    return reload_weights


def _refusal(limit: Limit) -> NoBackend:
    says, hint = sentence((limit,))
    return NoBackend(says, hint=hint)
