"""`reload_weights` of vLLM with experts that moectl loaded: read again from a path, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vllm.config import get_current_vllm_config_or_none

from ....checkpoint.source.catalogue import spell_layers
from ....errors import NoBackend, UsageError
from ....problem.moe_problem import MoEProblem
from ...model_experts import ModelExperts, open_experts
from .engine_calls import HANDED_OVER, refused


class Refillable(Protocol):
    """A layer's method whose weights can be replaced in place."""

    moe_kernel: Any
    """None until the layer has been loaded."""

    def problem_of(self, experts: ModelExperts) -> MoEProblem:
        """What this rank computes of the layer in `experts`."""

    def misfit(self, experts: ModelExperts) -> str:
        """Why tensors of `experts` cannot take the place of the layer's, from headers; empty if they can."""

    def unsuited(self, experts: ModelExperts) -> str:
        """What the layer's kernels would not compute right in values of `experts`; empty if nothing."""

    def refill(self, experts: ModelExperts) -> None:
        """Replace the layer's values by those of `experts`, which neither `misfit` nor `unsuited` object to.

        CUDA graphs that were captured stay valid.
        """


def checked(
    experts: ModelExperts,
    name: str,
    methods: Mapping[int, Refillable],
    now: str,
    revision: str | None = None,
) -> ModelExperts:
    """The experts of the checkpoint `now`, which can replace all loaded layers among `methods`.

    Headers of all layers are compared first. Kernels that are chosen by the range of a layer's scales are
    compared with those of the new weights after that, layer by layer: checkpoints record no ranges, so these
    layers are read and laid out twice, here and when they are replaced, with one of them beside the weights
    at a time. So nothing has been written when anything is refused.

    Raises:
        UsageError: another model, layout, version of a layout, deployment or form of tensors.
        NoBackend: values that the layers' kernels were not chosen for.
        CheckpointError: it is damaged.
    """
    other = open_experts(now, revision=revision, offline=False, download=True).in_cache(experts.hub_cache)
    loaded = _loaded(methods)
    different = [
        n for n, m in loaded.items() if n not in other.layers or m.problem_of(other) != m.problem_of(experts)
    ]
    if different:
        raise UsageError(f"layers {spell_layers(different)} of {now} are not those of {name}", reason=KEPT)
    for number, method in loaded.items():
        if why := method.misfit(other):
            raise UsageError(
                f"layer {number} of {now} cannot take the place of that of {name}: it is {why}",
                reason=KEPT,
                hint="start vLLM again with it, or convert it as the other was",
            )
    for number, method in loaded.items():
        if why := method.unsuited(other):
            raise NoBackend(
                f"layer {number} of {now} has {why}",
                reason=KEPT,
                hint="start vLLM again with the new weights",
            )
    return other


KEPT = "No weights were changed."


def reload(
    experts: ModelExperts,
    name: str,
    methods: Mapping[int, Refillable],
    ahead: Callable[[str], ModelExperts | None] = lambda now: None,
) -> tuple[ModelExperts, str]:
    """Read the loaded layers among `methods` again; returns the model's experts and their checkpoint's name.

    Args:
        ahead: experts of a checkpoint's name that were `checked` already, for these methods.

    vLLM calls this while its model loads weights: the first time no layer has been loaded, and nothing is
    read. Raises NoBackend when weights are handed over in memory, and what `checked` raises before anything
    is written.
    """
    loaded = _loaded(methods)
    if not loaded:
        return experts, name
    config = get_current_vllm_config_or_none()
    if config is None:
        raise refused(HANDED_OVER)
    now = config.model_config.model
    if config.load_config.load_format == "dummy":
        return experts, name
    other = ahead(now) or checked(experts, name, methods, now, config.model_config.revision)
    for method in loaded.values():
        method.refill(other)
    return other, now


def _loaded(methods: Mapping[int, Refillable]) -> dict[int, Refillable]:
    return {number: method for number, method in methods.items() if method.moe_kernel is not None}
