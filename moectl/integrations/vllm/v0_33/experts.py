"""One layer's experts in vLLM: loaded by moectl when vLLM's loading is over, computed by moectl's kernels."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ....convert.sources import output_name
from ....errors import NoBackend
from ....kernels.modular.fused_moe_kernel import FusedMoEKernel, layer_kernel
from ....kernels.prepared_layer import PreparedMoE
from ....kernels.registry import runner_for
from ....problem.moe_problem import MoEProblem
from ...compile_at_load import begin, take
from ...model_experts import BACKEND, DTYPES, OWN, ModelExperts, default_device, hold_nothing, takes_over
from .. import OWN_KERNELS
from .deployment import check_map, dummy, most_tokens, refuse, shard_of
from .engine_kernels import KERNELS, engine_method
from .log import logger_of

if TYPE_CHECKING:
    from ....layer.background_compile import KernelLoad

logger = logger_of(__name__)


def experts_method(
    experts: ModelExperts,
    layer: RoutedExperts,
    number: int,
    prefix: str,
    published: QuantizationConfig | None,
) -> FusedMoEMethodBase | None:
    """The method of a layer's experts; None if vLLM's own is to load and compute them, which the log says.

    A converted directory in a layout of vLLM's own kernels is computed by these.

    Args:
        prefix: the layer's name in vLLM's model.
        published: vLLM's config of the experts as published; None without one.

    Raises NoBackend for what moectl's experts do not do in vLLM, and for a converted directory that no
    kernel here takes.
    """
    moe = layer.moe_config
    shard = shard_of(moe)
    problem = experts.problem_of(number, shard)
    refuse(moe, problem, number)
    experts.refuse_weight_on_input("vLLM", (number,), shard)
    if dummy():
        experts = experts.at_random
    asked = os.environ.get(BACKEND, "")
    layout = experts.layout_of(shard)
    if experts.converted and (asked == OWN_KERNELS or (not asked and layout in KERNELS)):
        return engine_method(experts, layer, number, prefix, published)
    if asked == OWN_KERNELS:
        return None
    names = (asked,) if asked else experts.backends(problem, default_device())
    if asked or takes_over(names[0], problem) or (experts.converted and names[0] in OWN):
        return MoectlMoEMethod(moe, experts, number, names[0])
    if experts.converted:
        raise NoBackend(
            f"layer {number} is in a converted directory of the layout {layout}, and moectl has no kernel "
            f"for {problem.scheme} here",
            hint="serve the published checkpoint, or set MOECTL_BACKEND",
        )
    why = (
        "its kernels for them were not checked on a GPU yet"
        if names[0] in OWN
        else "it has no kernel for them"
    )
    logger.info_once("moectl leaves experts in %s to vLLM: %s", problem.scheme, why)
    return None


class MoectlMoEMethod(FusedMoEMethodBase):
    """Has vLLM allocate and load nothing for the experts, and puts moectl's there when loading is over."""

    def __init__(self, moe: FusedMoEConfig, experts: ModelExperts, number: int, backend: str) -> None:
        super().__init__(moe)
        self.experts, self.number, self.backend = experts, number, backend
        self.experts_cls = VllmExperts
        self.kernel: FusedMoEKernel | None = None
        problem = experts.problem_of(number, shard_of(moe))
        device, dtype = default_device(), DTYPES[moe.in_dtype]
        self.load = begin(problem, dtype, backend, device, most_tokens())
        experts.expect(number, device, dtype, backend, shard_of(moe))

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
        hold_nothing(layer)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        prepared = self._prepared()
        check_map(layer.expert_map, prepared.problem, prepared.first_expert, self.number)
        if prepared.relaid or not self.experts.converted:
            logger.info_once("moectl lays out experts while loading, as %s", prepared.layout)
        weights = {}
        for role, tensor in prepared.weights.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(output_name("", role), parameter)
            weights[role] = parameter.data
        self.kernel = layer_kernel(replace(prepared, weights=weights))
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        around = maybe_make_prepare_finalize(
            self.moe, self.moe_quant_config, layer._expert_routing_tables(), allow_new_interface=True
        )
        load = self.load
        if load is not None and load.compiled:
            take(load, self.kernel.prepared, logger.info)  # while threads read the layers after this one
            load = None
        ours = VllmExperts(self.moe, self.moe_quant_config, self.kernel, load)
        self.moe_kernel = mk.FusedMoEKernel(around, ours)

    def _prepared(self) -> PreparedMoE:
        dtype = DTYPES[self.moe.in_dtype]
        return self.experts.prepared(self.number, default_device(), dtype, self.backend, shard_of(self.moe))

    def problem_of(self, experts: ModelExperts) -> MoEProblem:
        return experts.problem_of(self.number, shard_of(self.moe))

    def misfit(self, experts: ModelExperts) -> str:
        assert self.kernel is not None
        mine, dtype = self.kernel.prepared, DTYPES[self.moe.in_dtype]
        form = experts.form_of(self.number, dtype, self.backend, shard_of(self.moe))
        return form.misfit(mine.layout, mine.weights)

    def unsuited(self, experts: ModelExperts) -> str:
        """Whether kernels were chosen for another range of scales, which takes the layer laid out to say."""
        assert self.kernel is not None
        ranges = scale_ranges(self.kernel.prepared)
        if not any(ranges):
            return ""
        device, dtype = default_device(), DTYPES[self.moe.in_dtype]
        fresh = experts.prepared(self.number, device, dtype, self.backend, shard_of(self.moe))
        return "" if scale_ranges(fresh) == ranges else "scales of another range than kernels were chosen for"

    def refill(self, experts: ModelExperts) -> None:
        assert self.kernel is not None
        self.experts = experts
        fresh, mine = self._prepared(), self.kernel.prepared
        for role, tensor in mine.weights.items():
            tensor.copy_(fresh.weights[role])
        mine.derived.clear()
        runner_for(self.backend).ready(mine)

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


def scale_ranges(prepared: PreparedMoE) -> tuple[object, ...]:
    """What moectl's kernels of a layer depend on besides its form, by matrix.

    That is the range of its scales, and whether all its codes are numbers. Empty for other backends, and for
    layers in rows.
    """
    layer = prepared.derived.get("moectl")
    matrices = () if layer is None else (layer.w13, layer.w2)
    return tuple((m.exponents, m.numbers) for m in matrices if getattr(m, "exponents", None) is not None)


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
            take(self.load, self.kernel.prepared, logger.info)
            self.load = None
        self.kernel.call_into(output, hidden_states, topk_ids.to(torch.int32), topk_weights.float())
