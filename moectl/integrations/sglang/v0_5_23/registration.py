"""What SGLang 0.5.23 has to know of moectl: a runner's name, and hooks around loading."""

from __future__ import annotations

from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .. import METHOD
from .experts import SglangRunnerCore
from .loading import filtered_model, quantization_of, shared_experts_apart
from .quantization import SglangQuantization

LOADER = "sglang.srt.model_loader.loader"

HOOKS = {
    f"{LOADER}._get_quantization_config": (quantization_of, HookType.AROUND),
    f"{LOADER}._initialize_model": (filtered_model, HookType.AFTER),
    "sglang.srt.layers.moe.utils.resolve_shared_experts_config": (shared_experts_apart, HookType.AROUND),
}
"""Functions of SGLang, with what is called around or after them."""


def registered() -> type[SglangQuantization]:
    """Register the runner and the hooks; returns the quantization method to register."""
    register_moe_runner_core(METHOD, SglangRunnerCore)
    add_moe_runner_backend_choices([METHOD])
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
    return SglangQuantization
