"""Stand-ins for what moectl's plug-in takes from SGLang 0.5.23: names and signatures, no engine.

`test_sglang.py` compares the signatures with those in SGLang's own files where it has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from support.stub_modules import install_modules

QUANTIZATION_METHODS: dict[str, Any] = {}
QUANTIZATION_CHOICES: list[str] = []
MOE_RUNNER_BACKEND_CHOICES: list[str] = []
CORES: dict[str, Callable[[Any], Any]] = {}


@dataclass(frozen=True)
class RegisteredMoeRunnerBackend:
    value: str


def resolve_moe_runner_backend(backend: Any) -> Any:
    return RegisteredMoeRunnerBackend(backend) if isinstance(backend, str) else backend


def register_moe_runner_core(backend_name: str, factory: Callable[[Any], Any]) -> None:
    CORES[backend_name] = factory


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    routed_scaling_factor: float | None = None
    apply_router_weight_on_input: bool = False
    no_combine: bool = False


@dataclass
class MoeQuantInfo:
    pass


class DispatchMoeRunnerCore:
    def __init__(self, config: MoeRunnerConfig):
        self.config = config

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any: ...


class MoeRunner:
    def __init__(self, runner_backend: Any, config: MoeRunnerConfig, lora_enabled: bool = False):
        self.runner_backend, self.config = runner_backend, config
        self.runner_core = CORES[runner_backend.value](config)

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        core = self.runner_core
        assert isinstance(core, DispatchMoeRunnerCore) and core.runner_backend == self.runner_backend
        return core.run_from_dispatch(dispatch_output, quant_info, self.config, hooks=None)


class TopKOutputFormat(Enum):
    STANDARD = 1
    TRITON_KERNEL = 2
    BYPASSED = 3


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor

    @property
    def format(self) -> TopKOutputFormat:
        return TopKOutputFormat.STANDARD


class BypassedTopKOutput(NamedTuple):
    hidden_states: torch.Tensor
    raw_router_logits: torch.Tensor
    topk_config: Any
    num_token_non_padded: torch.Tensor | None = None
    expert_location_dispatch_info: Any = None

    @property
    def format(self) -> TopKOutputFormat:
        return TopKOutputFormat.BYPASSED

    def to_standard(self, layer_id: int | None = None) -> StandardTopKOutput:
        weights, ids = self.raw_router_logits.softmax(-1).topk(self.topk_config)
        return StandardTopKOutput(weights, ids, self.raw_router_logits)


class TopKOutputChecker:
    @staticmethod
    def format_is_standard(topk_output: Any) -> bool:
        return topk_output.format is TopKOutputFormat.STANDARD

    @staticmethod
    def format_is_bypassed(topk_output: Any) -> bool:
        return topk_output.format is TopKOutputFormat.BYPASSED


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any
    hidden_states_pre_quant: tuple[Any, ...] | None = None


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class QuantizationConfig:
    weight_block_size: list[int] | None = None
    convert_mxfp8_to_block_fp8: bool | None = None

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    def update_packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self.packed_modules_mapping = mapping

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any) -> Any:
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any: ...

    def get_name(self) -> Any: ...

    def get_supported_act_dtypes(self) -> Any: ...

    @classmethod
    def get_min_capability(cls) -> Any: ...

    @staticmethod
    def get_config_filenames() -> Any: ...

    def get_scaled_act_names(self) -> Any: ...

    def get_quant_method(self, layer: Any, prefix: str) -> Any: ...

    def is_linear_unquantized(self, prefix: str) -> Any: ...

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None: ...


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer: Any) -> None: ...


class FusedMoEMethodBase(QuantizeMethodBase):
    runner: MoeRunner | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None: ...

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None: ...

    def apply(self, layer: Any, dispatch_output: Any) -> Any: ...


class Mxfp4Config(QuantizationConfig):
    """SGLang's own config of a published checkpoint."""

    fused = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.mapper = config, None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Mxfp4Config:
        return cls(config)

    def get_name(self) -> str:
        return str(self.config["quant_method"])

    def get_quant_method(self, layer: Any, prefix: str) -> str:
        return f"SGLang's method of {prefix}"

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        self.mapper = hf_to_sglang_mapper


class LinearBase(torch.nn.Module):
    pass


class UnquantizedLinearMethod:
    pass


@dataclass
class Parallel:
    moe_tp_size: int = 1
    moe_tp_rank: int = 0
    moe_ep_size: int = 1
    moe_ep_rank: int = 0
    pp_size: int = 1
    attn_dp_size: int = 1


SERVER_ARGS = {
    "moe_runner_backend": "auto",
    "moe_a2a_backend": "none",
    "init_expert_location": "trivial",
    "load_format": "auto",
    "ep_num_redundant_experts": 0,
    "cpu_offload_gb": 0,
    "dwdp_size": 1,
    "enable_eplb": False,
    "enable_lora": None,
    "enable_memory_saver": False,
    "enable_weights_cpu_backup": False,
    "chunked_prefill_size": 8192,
    "max_prefill_tokens": 16384,
    "max_running_requests": None,
}
PARALLEL, ARGS = Parallel(), SimpleNamespace()


def get_parallel() -> Parallel:
    return PARALLEL


def get_server_args() -> SimpleNamespace:
    return ARGS


def get_schedule() -> SimpleNamespace:
    return ARGS


def max_prefill_buffer_tokens() -> int:
    return max(0, ARGS.chunked_prefill_size)


def resolved_view(server_args: Any) -> Any:
    return server_args


class FusedMoE(torch.nn.Module):
    """A layer of experts as SGLang makes it, with its dispatcher for tokens that stay on their rank."""

    is_shared_fused_moe = False

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        top_k: int | None = None,
        num_fused_shared_experts: int = 0,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        quant_config: Any = None,
        prefix: str = "",
        **config: Any,
    ) -> None:
        super().__init__()
        self.moe_tp_size, self.moe_tp_rank = PARALLEL.moe_tp_size, PARALLEL.moe_tp_rank
        self.moe_ep_size, self.moe_ep_rank = PARALLEL.moe_ep_size, PARALLEL.moe_ep_rank
        self.num_experts, self.layer_id, self.top_k = num_experts, layer_id, top_k
        self.hidden_size_unpadded, self.num_fused_shared_experts = hidden_size, num_fused_shared_experts
        self.moe_runner_config = MoeRunnerConfig(num_experts, **config)
        self.quant_method = quant_config.get_quant_method(self, prefix)
        if isinstance(self.quant_method, str):
            return
        local = num_experts // self.moe_ep_size
        size = intermediate_size // self.moe_tp_size
        self.quant_method.create_weights(self, local, hidden_size, size, torch.bfloat16, weight_loader=None)
        self.quant_method.create_moe_runner(self, self.moe_runner_config)

    def forward(
        self, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None
    ) -> torch.Tensor:
        if self.moe_ep_size > 1:
            local = self.num_experts // self.moe_ep_size
            ids = topk_output.topk_ids - self.moe_ep_rank * local
            topk_output = topk_output._replace(topk_ids=torch.where((ids < 0) | (ids >= local), -1, ids))
        sent = StandardDispatchOutput(hidden_states, None, topk_output)
        (out,) = self.quant_method.apply(layer=self, dispatch_output=sent)
        return out


@dataclass
class SharedExpertsConfig:
    fusion_disabled: bool = False
    num_fused_shared_experts: int = 0
    use_waterfill: bool = False


def resolve_shared_experts_config(model_class: Any, hf_config: Any, quant_config: Any) -> SharedExpertsConfig:
    return SharedExpertsConfig(num_fused_shared_experts=1)


@dataclass
class ModelConfig:
    """What the adapter reads of SGLang's `ModelConfig`."""

    model_path: str
    quantization: str | None
    hf_config: Any
    revision: str | None = None
    dtype: torch.dtype = torch.bfloat16
    is_draft_model: bool = False
    hf_text_config: Any = field(default_factory=lambda: SimpleNamespace(num_hidden_layers=2))

    def _verify_quantization(self) -> None:
        published = self.hf_config.quantization_config
        for method in QUANTIZATION_METHODS.values():
            if claimed := method.override_quantization_method(published, self.quantization):
                self.quantization = claimed
                return
        if self.quantization is None and published is not None:
            self.quantization = published["quant_method"]


def _get_quantization_config(model_config: ModelConfig, load_config: Any) -> Any:
    if model_config.quantization is None:
        return None
    made = QUANTIZATION_METHODS[model_config.quantization].from_config(
        dict(model_config.hf_config.quantization_config)
    )
    made.apply_weight_name_mapper("mapper")
    return made


def _initialize_model(model_config: ModelConfig, load_config: Any, quant_config: Any = None) -> Any:
    return load_config.model_class(quant_config)


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[dict[str, tuple[Any, HookType]]] = {}

    @classmethod
    def register(
        cls,
        target: str,
        hook: Callable[..., Any],
        hook_type: HookType = HookType.AFTER,
        *,
        source: Any = None,
    ) -> None:
        cls.hooks[target] = (hook, hook_type)

    @classmethod
    def apply_hooks(cls) -> None:
        for target, (hook, kind) in cls.hooks.items():
            module, _, name = target.rpartition(".")
            real = getattr(sys.modules[module], name)
            setattr(sys.modules[module], name, _hooked(real, hook, kind))


def _hooked(real: Any, hook: Any, kind: HookType) -> Any:
    def around(*words: Any, **named: Any) -> Any:
        return hook(real, *words, **named)

    def after(*words: Any, **named: Any) -> Any:
        result = real(*words, **named)
        changed = hook(result, *words, **named)
        return result if changed is None else changed

    return around if kind is HookType.AROUND else after


LAYERS = "sglang.srt.layers"


def is_cuda() -> bool:
    """SGLang asks torch; a test says what it answers in `PLATFORM`."""
    return bool(PLATFORM)


PLATFORM = ["cuda"]

MODULES: dict[str, tuple[Any, ...]] = {
    "sglang.srt.configs.shared_experts": (SharedExpertsConfig,),
    f"{LAYERS}.linear": (LinearBase,),
    f"{LAYERS}.moe.fused_moe_triton.layer": (FusedMoE,),
    f"{LAYERS}.moe.moe_runner.base": (DispatchMoeRunnerCore, MoeQuantInfo, MoeRunnerConfig),
    f"{LAYERS}.moe.moe_runner.runner": (MoeRunner, register_moe_runner_core),
    f"{LAYERS}.moe.token_dispatcher.standard": (StandardCombineInput, StandardDispatchOutput),
    f"{LAYERS}.moe.topk": (BypassedTopKOutput, StandardTopKOutput, TopKOutputChecker, TopKOutputFormat),
    f"{LAYERS}.moe.utils": (
        RegisteredMoeRunnerBackend,
        resolve_moe_runner_backend,
        resolve_shared_experts_config,
    ),
    f"{LAYERS}.quantization.base_config": (FusedMoEMethodBase, QuantizationConfig, QuantizeMethodBase),
    f"{LAYERS}.quantization.unquant": (UnquantizedLinearMethod,),
    "sglang.srt.utils.common": (is_cuda,),
    "sglang.srt.model_loader.loader": (_get_quantization_config, _initialize_model),
    "sglang.srt.plugins.hook_registry": (HookRegistry, HookType),
    "sglang.srt.runtime_context": (
        get_parallel,
        get_schedule,
        get_server_args,
        max_prefill_buffer_tokens,
    ),
    "sglang.srt.arg_groups.model_override_base": (resolved_view,),
}
"""Stand-ins by the module of SGLang that has them."""

VALUES: dict[str, dict[str, Any]] = {
    "sglang.version": {"__version__": "0.5.23"},
    "sglang.srt.arg_groups.choices": {
        "add_quantization_method_choices": QUANTIZATION_CHOICES.extend,
        "add_moe_runner_backend_choices": MOE_RUNNER_BACKEND_CHOICES.extend,
    },
    f"{LAYERS}.moe.utils": {"MoeRunnerBackendLike": RegisteredMoeRunnerBackend},
    f"{LAYERS}.quantization": {"QUANTIZATION_METHODS": QUANTIZATION_METHODS},
}
"""What is no class or function, by module."""


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> None:
    """Make ``import sglang`` find the stand-ins; each test gets moectl's adapter anew."""
    QUANTIZATION_METHODS.clear()
    QUANTIZATION_METHODS["mxfp4"] = Mxfp4Config
    for kept in (QUANTIZATION_CHOICES, MOE_RUNNER_BACKEND_CHOICES, CORES, HookRegistry.hooks):
        kept.clear()
    ARGS.__dict__.clear()
    ARGS.__dict__.update(SERVER_ARGS)
    PARALLEL.__dict__.update(Parallel().__dict__)
    contents = {name: {item.__name__: item for item in items} for name, items in MODULES.items()}
    for name, values in VALUES.items():
        contents.setdefault(name, {}).update(values)
    contents["sglang.version"]["__version__"] = version
    install_modules(monkeypatch, contents, "moectl.integrations.sglang")
