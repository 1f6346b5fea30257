"""Stand-ins for what moectl's plug-in takes from vLLM 0.33: names and signatures, no engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.stub_modules import install_modules

METHODS: dict[str, Any] = {}

CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    parallel_config=SimpleNamespace(data_parallel_size=2),
)
"""vLLM's config of a deployment."""

LOGGED: list[str] = []
"""What was logged."""

QUIET = SimpleNamespace(info_once=lambda *words: None, info=lambda *words: None, warning=lambda *words: None)
"""A logger that vLLM's configuration has no handlers for."""

LOGGER = SimpleNamespace(info_once=lambda *words: None, info=lambda text, *words: LOGGED.append(text % words))


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        return WeightsMapper()

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return WeightsMapper()

    def apply_vllm_mapper(self, mapper: Any) -> None: ...

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: Any = None) -> None: ...

    @classmethod
    def override_quantization_method(cls, config: Any, user_quant: Any, hf_config: Any = None) -> Any:
        return None


class PublishedConfig(QuantizationConfig):
    """vLLM's own config of a published checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PublishedConfig:
        return cls(config)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if getattr(layer, "moe_config", None) is None or layer.moe_config.moe_backend == "auto":
            return f"vLLM's method of {prefix}"
        if layer.moe_config.moe_backend not in RUNS_HERE:
            raise ValueError("not on this GPU")
        return GptOssMxfp4MoEMethod(layer.moe_config)


RUNS_HERE = {"marlin", "humming"}
"""Values of ``--moe-backend`` that vLLM's kernels take on the GPU that tests pretend to have."""


@dataclass
class WeightsMapper:
    orig_to_new_regex: dict[re.Pattern[str], Any] = field(default_factory=dict)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        return WeightsMapper({**self.orig_to_new_regex, **other.orig_to_new_regex})

    def drops(self, name: str) -> bool:
        return any(new is None and old.search(name) for old, new in self.orig_to_new_regex.items())


@dataclass
class ParallelConfig:
    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    enable_eplb: bool = False
    use_batched_activation_format: bool = False
    use_all2all_kernels: bool = False
    dp_size: int = 1
    dp_rank: int = 0

    @staticmethod
    def make(rank: int, tp: int, dp: int, ep: bool) -> ParallelConfig:
        """What vLLM makes on a device of TP and DP sizes: experts over all devices, or slices of each."""
        among = {"dp_size": dp, "dp_rank": rank // tp, "use_all2all_kernels": dp > 1 and ep}
        return (
            ParallelConfig(ep_size=tp * dp, ep_rank=rank, **among)
            if ep
            else ParallelConfig(tp_size=tp * dp, tp_rank=rank, **among)
        )

    def expert_map(self, experts: int) -> torch.Tensor | None:
        """vLLM's map from an expert's number to its number on this rank, -1 elsewhere; None for all."""
        if self.ep_size == 1:
            return None
        each, more = divmod(experts, self.ep_size)
        first = self.ep_rank * each + min(self.ep_rank, more)
        local = each + (self.ep_rank < more)
        found = torch.full((experts,), -1, dtype=torch.int32)
        found[first : first + local] = torch.arange(local, dtype=torch.int32)
        return found


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    moe_parallel_config: ParallelConfig
    in_dtype: torch.dtype = torch.bfloat16
    is_lora_enabled: bool = False
    moe_backend: str = "auto"
    has_bias: bool = True

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.moe_parallel_config.ep_size


def engine_config(model: str = "", **options: Any) -> SimpleNamespace:
    """vLLM's config, as far as moectl asks: what `options` do not say has vLLM's default."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None),
        load_config=SimpleNamespace(
            load_format=options.get("load_format", "auto"), download_dir=options.get("download_dir")
        ),
        parallel_config=SimpleNamespace(
            enable_elastic_ep=options.get("enable_elastic_ep", False),
            expert_placement_strategy=options.get("expert_placement_strategy", "linear"),
            all2all_backend=options.get("all2all_backend", "allgather_reducescatter"),
        ),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=options.get("cpu_offload_gb", 0)),
            prefetch=SimpleNamespace(offload_group_size=options.get("offload_group_size", 0)),
        ),
        weight_transfer_config=options.get("weight_transfer_config"),
    )


class ModelConfig:
    """vLLM's config of a model, as far as it settles the quantization when it is made."""

    def __init__(
        self,
        published: dict[str, Any] | None = None,
        quantization: str | None = None,
        experts: int = 8,
        runner_type: str = "generate",
    ) -> None:
        self.model, self.quantization, self.runner_type = "the model", quantization, runner_type
        self.model_arch_config = SimpleNamespace(quantization_config=published)
        self.is_moe = experts > 0
        self._verify_quantization()

    def _verify_quantization(self) -> None:
        if (published := self.model_arch_config.quantization_config) is not None:
            claimed = METHODS["moectl"].override_quantization_method(published, self.quantization)
            self.quantization = claimed or published["quant_method"]


CURRENT: list[SimpleNamespace | None] = [None]
"""vLLM's current config."""


class RoutedExperts(torch.nn.Module):
    """A layer of experts as vLLM makes it; `expert_map` as for a linear placement."""

    def __init__(self, moe_config: FusedMoEConfig, expert_map: torch.Tensor | None = None) -> None:
        super().__init__()
        self.moe_config, self.expert_map = moe_config, expert_map
        self.activation, self.global_num_experts = "silu", moe_config.num_experts
        self.apply_router_weight_on_input = False
        self.hidden_size = moe_config.hidden_dim
        self.params_dtype = moe_config.in_dtype

    def _expert_routing_tables(self) -> None:
        return None


class FusedMoEMethodBase:
    def __init__(self, moe: FusedMoEConfig) -> None:
        self.moe, self.moe_kernel, self.moe_quant_config = moe, None, None


class MarlinExperts:
    """vLLM's own kernel, as far as a method builds it."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    @staticmethod
    def is_monolithic() -> bool:
        return False

    def process_weights_after_loading(self, layer: RoutedExperts) -> None: ...


class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
    """vLLM's own method of published MXFP4 experts."""

    experts_cls = MarlinExperts

    def create_weights(self, layer: RoutedExperts, num_experts: int, hidden_size: int, *rest: Any) -> None:
        layer.num_experts = num_experts
        for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
            layer.register_parameter(name, torch.nn.Parameter(torch.empty(num_experts, hidden_size)))

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        raise AssertionError("vLLM's own repacking is not to run")

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> dict[str, torch.Tensor]:
        return {name: getattr(layer, name) for name in ("w13_weight_scale", "w2_weight_scale")}


@dataclass
class HummingSchema:
    """Humming's description of a matrix; its enumerations and dtypes are words here."""

    b_dtype: Any = None
    bs_dtype: Any = None
    weight_scale_group_size: int = 0
    weight_scale_type: Any = None
    weight_scale_2_type: Any = None
    has_zero_point: bool = False


HUMMING = SimpleNamespace(asked={}, override=None, native=False)
"""What vLLM was told of tokens for Humming, and whether Humming's codes have their own order here."""


def humming_config(shape_n: int, shape_k: int, **others: Any) -> SimpleNamespace:
    """Humming's config of a layer's matrix."""
    return SimpleNamespace(shape_n=shape_n, shape_k=shape_k, use_native_dequant=HUMMING.native, **others)


HUMMING_DTYPES = SimpleNamespace(
    DataType=SimpleNamespace(from_torch_dtype=str, from_str=str),
    FloatingPointType=lambda num_bits, exponent_bits, mantissa_bits: f"e{exponent_bits}m{mantissa_bits}",
    **{name: name for name in ("float4e2m1", "float8e4m3", "float8e8m0", "float32")},
)


class FusedMoEExpertsModular:
    def __init__(self, moe_config: FusedMoEConfig, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config


class FusedMoEKernel:
    """Calls the experts as vLLM does for one rank: the workspace and the output are its own."""

    def __init__(self, around: Any, experts: Any) -> None:
        self.around, self.fused_experts = around, experts

    def apply(
        self, hidden_states: torch.Tensor, topk_weights: Any, topk_ids: Any, **named: Any
    ) -> torch.Tensor:
        experts, w1, w2 = self.fused_experts, named["w1"], named["w2"]
        _, m, n, k, top_k = experts.moe_problem_size(hidden_states, w1, w2, topk_ids)
        shapes = experts.workspace_shapes(m, n, k, top_k, named["global_num_experts"], 0, None, "silu")
        output = torch.full(shapes[2], float("nan"), dtype=hidden_states.dtype)
        rest = (named["activation"], named["global_num_experts"], named["expert_map"], None, None)
        experts.apply(output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, None, None, None, False)
        return output


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.33.0") -> None:
    """Make ``import vllm`` find the stand-ins; each test gets moectl's adapter anew."""
    METHODS.clear()
    CURRENT[0] = None
    HUMMING.asked, HUMMING.override, HUMMING.native = {}, None, False

    def register(name: str) -> Any:
        def registered(cls: Any) -> Any:
            METHODS[name] = cls
            return cls

        return registered

    moe = "vllm.model_executor.layers.fused_moe"
    quantization = "vllm.model_executor.layers.quantization"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.version": {"__version__": version},
        "vllm.config": {
            "VllmConfig": object,
            # Its functions are replaced: each test gets a class of its own.
            "ModelConfig": type("ModelConfig", (ModelConfig,), {}),
            "get_current_vllm_config": lambda: CONFIG,
            "get_current_vllm_config_or_none": lambda: CURRENT[0],
        },
        "vllm.envs": {"__getattr__": lambda name: HUMMING.asked.get(name)},
        "vllm.utils": {},
        "vllm.utils.humming": {
            "HummingInputSchema": SimpleNamespace,
            "HummingWeightSchema": HummingSchema,
            "dtypes": HUMMING_DTYPES,
        },
        "humming": {},
        "humming.transform": {"prepare_layer_config": humming_config},
        "humming.config": {},
        "humming.config.enum": {
            "WeightScaleType": SimpleNamespace(TENSOR="tensor"),
            "WeightScale2Type": SimpleNamespace(NONE="none", TENSOR="tensor", CHANNEL="channel"),
        },
        "vllm.logger": {"init_logger": lambda name: LOGGER if name.startswith("vllm.") else QUIET},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            "LinearBase": torch.nn.Linear,
            "UnquantizedLinearMethod": type("UnquantizedLinearMethod", (), {}),
        },
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.utils": {
            "WeightsMapper": WeightsMapper,
            "extract_layer_index": lambda prefix: int(re.findall(r"\.(\d+)\.", prefix)[0]),
        },
        quantization: {
            "QUANTIZATION_METHODS": ["mxfp4"],
            "QuantizationMethods": None,
            "get_quantization_config": lambda name: PublishedConfig,
            "register_quantization_config": register,
        },
        f"{quantization}.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "QuantizeMethodBase": object,
        },
        moe: {"FusedMoEMethodBase": FusedMoEMethodBase, "RoutedExperts": RoutedExperts},
        f"{moe}.oracle.mxfp4": {"_user_moe_activation_override": lambda: HUMMING.override},
        f"{moe}.all2all_utils": {"maybe_make_prepare_finalize": lambda *words, **named: "around"},
        f"{moe}.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": "unquantized", "FusedMoEConfig": FusedMoEConfig},
        f"{moe}.modular_kernel": {
            "FusedMoEExpertsModular": FusedMoEExpertsModular,
            "FusedMoEKernel": FusedMoEKernel,
            "FusedMoEActivationFormat": SimpleNamespace(Standard="standard"),
            "TopKWeightAndReduce": object,
        },
        f"{moe}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": type("NoOP", (), {})},
    }
    install_modules(monkeypatch, modules, "moectl.integrations.vllm")
