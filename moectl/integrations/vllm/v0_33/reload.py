"""`reload_weights` of vLLM with experts that moectl loaded: read again from a path, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from vllm.config import get_current_vllm_config_or_none

from ....errors import UsageError
from ...model_experts import ModelExperts, open_experts
from .engine_calls import HANDED_OVER, refused


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
        raise refused(HANDED_OVER)
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
