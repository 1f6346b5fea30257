"""One layer's experts in vLLM: loaded by moectl when vLLM's loading is over, computed by moectl's kernels."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ....convert.rank_slice import RankShard
from ....convert.sources import output_name
from ....errors import NoBackend, UsageError
from ....kernels.modular.fused_moe_kernel import FusedMoEKernel, layer_kernel, map_of
from ....kernels.prepared_layer import PreparedMoE
from ....problem.moe_problem import MoEProblem
from ...model_experts import ModelExperts
from .compile_at_load import begin, take

if TYPE_CHECKING:
    from ....layer.background_compile import KernelLoad

logger = init_logger(__name__)

OWN = ("moectl", "moectl_marlin")
"""Backends that are faster than vLLM's own; the others are left to vLLM."""

BACKEND = "MOECTL_BACKEND"
"""Environment variable that names the backend of every layer."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def experts_method(experts: ModelExperts, layer: RoutedExperts, number: int) -> FusedMoEMethodBase | None:
    """The method of a layer's experts; None if vLLM's own is to compute them, which the log says.

    Raises NoBackend for what moectl's experts do not do in vLLM, and for a converted directory that none of
    moectl's kernels supports.
    """
    moe = layer.moe_config
    problem = experts.problem_of(number, shard_of(moe))
    _refuse(moe, problem, number)
    asked = os.environ.get(BACKEND, "")
    names = (asked,) if asked else experts.backends(problem, _device())
    if asked or names[0] in OWN:
        return MoectlMoEMethod(moe, experts, number, names[0])
    if experts.converted:
        raise NoBackend(
            f"layer {number} is in a converted directory, and moectl has no kernel for {problem.scheme} here",
            hint="serve the published checkpoint, or set MOECTL_BACKEND",
        )
    logger.info_once("moectl leaves experts in %s to vLLM: it has no kernel for them here", problem.scheme)
    return None


def _refuse(moe: FusedMoEConfig, problem: MoEProblem, number: int) -> None:
    """Raises NoBackend with every reason why moectl's experts cannot serve this deployment."""
    parallel = moe.moe_parallel_config
    reasons = {
        "LoRA on experts": moe.is_lora_enabled,
        "EPLB": parallel.enable_eplb,
        "batched activations (DeepEP low latency, NIXL)": parallel.use_batched_activation_format,
        "router weights on the input": problem.routing.weight_on_input,
    }
    if names := [name for name, present in reasons.items() if present]:
        raise NoBackend(
            f"moectl's experts in vLLM do not support {', '.join(names)}",
            hint="turn it off, or serve without --quantization moectl",
        )
    ours = (problem.experts, problem.top_k, problem.dims.hidden)
    theirs = (moe.num_experts, moe.experts_per_token, moe.hidden_dim)
    if ours != theirs:
        raise UsageError(f"layer {number} has experts, top-k, hidden size {ours}; vLLM's model has {theirs}")


def shard_of(moe: FusedMoEConfig) -> RankShard:
    """This rank among those that share the layer's experts."""
    parallel = moe.moe_parallel_config
    return RankShard(parallel.tp_size, parallel.tp_rank, parallel.ep_size, parallel.ep_rank)


def _device() -> torch.device:
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class MoectlMoEMethod(FusedMoEMethodBase):
    """Has vLLM allocate and load nothing for the experts, and puts moectl's there when loading is over."""

    def __init__(self, moe: FusedMoEConfig, experts: ModelExperts, number: int, backend: str) -> None:
        super().__init__(moe)
        self.experts, self.number, self.backend = experts, number, backend
        self.experts_cls = VllmExperts
        problem = experts.problem_of(number, shard_of(moe))
        self.load = begin(problem, DTYPES[moe.in_dtype], backend, _device())

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        for name in ("w13_weight", "w2_weight"):
            empty = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            layer.register_parameter(name, empty)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        dtype = DTYPES[self.moe.in_dtype]
        prepared = self.experts.prepared(self.number, _device(), dtype, self.backend, shard_of(self.moe))
        if prepared.relaid or not self.experts.converted:
            logger.info_once("moectl lays out experts while loading, as %s", prepared.layout)
        weights = {}
        for role, tensor in prepared.weights.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(output_name("", role), parameter)
            weights[role] = parameter.data
        kernel = layer_kernel(replace(prepared, weights=weights))
        self._check_map(layer.expert_map, kernel.prepared)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        around = maybe_make_prepare_finalize(
            self.moe, self.moe_quant_config, layer._expert_routing_tables(), allow_new_interface=True
        )
        ours = VllmExperts(self.moe, self.moe_quant_config, kernel, self.load)
        self.moe_kernel = mk.FusedMoEKernel(around, ours)

    def _check_map(self, expert_map: Tensor | None, prepared: PreparedMoE) -> None:
        if expert_map is not None and not torch.equal(expert_map.to(prepared.device), map_of(prepared)):
            raise NoBackend(
                f"vLLM places the experts of layer {self.number} otherwise than in consecutive ranges",
                hint="use --expert-placement-strategy linear",
            )

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> Any:
        # Tokens stay in 16 bits; scales and biases are the kernel's own.
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Any:
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


class VllmExperts(mk.FusedMoEExpertsModular):
    """moectl's kernel behind vLLM's interface: it applies router weights, sums, and has its own workspace."""

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: Any,
        kernel: FusedMoEKernel,
        load: KernelLoad | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config)
        self.kernel, self.load = kernel, load

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    # vLLM asks these when it chooses among its own backends; a method that brings its experts has chosen.
    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def moe_problem_size(
        self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
    ) -> tuple[int, int, int, int, int]:
        problem = self.kernel.prepared.problem
        rows = problem.dims.intermediate * (2 if problem.activation.gated else 1)
        return problem.local_experts, a1.shape[0], rows, a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(self, M: int, N: int, K: int, *others: Any) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *others: Any,
        **named: Any,
    ) -> None:
        if self.load is not None:
            take(self.load, self.kernel.prepared)
            self.load = None
        self.kernel.call_into(output, hidden_states, topk_ids.to(torch.int32), topk_weights.float())
