"""One layer's experts in SGLang: loaded by moectl when SGLang's loading is over, computed by its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, resolve_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils.common import is_cuda
from torch import Tensor

from ....convert.sources import output_name
from ....errors import NoBackend, UsageError
from ....kernels.modular.fused_moe_kernel import FusedMoEKernel, share_kernel
from ...compile_at_load import begin
from ...limits import Limit, unsupported
from ...model_experts import default_device, hold_nothing
from .. import METHOD
from .deployment import most_tokens, shard_of

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    from .quantization import SglangQuantization


NO_NEW_WEIGHTS = "take no new weights while SGLang serves"


class SglangMoEMethod(FusedMoEMethodBase):
    """Has SGLang allocate and load nothing for the experts, and puts moectl's there when loading is over."""

    def __init__(self, quantization: SglangQuantization, layer: FusedMoE, number: int) -> None:
        self.quant_config, self.number = quantization, number
        self.kernel: FusedMoEKernel | None = None
        refuse_layer(layer, number)
        problem = quantization.experts.problem_of(number, shard_of(layer))
        ours = (problem.experts, problem.top_k, problem.dims.hidden)
        theirs = (layer.num_experts, layer.top_k or problem.top_k, layer.hidden_size_unpadded)
        if ours != theirs:
            raise UsageError(
                f"layer {number} has experts, top-k, hidden size {ours}; SGLang's model has {theirs}"
            )
        backend, device, dtype = quantization.backends[number], default_device(), quantization.dtype
        self.load = begin(problem, dtype, backend, device, most_tokens())
        quantization.experts.expect(number, device, dtype, backend, shard_of(layer))

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        hold_nothing(layer)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        self.runner = MoeRunner(resolve_moe_runner_backend(METHOD), moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        quantization = self.quant_config
        if not quantization.filtered:
            raise NoBackend(
                "SGLang's loader did not call moectl's hook, so it may have read the experts' tensors itself",
                hint="use --load-format auto",
            )
        if self.kernel is not None:
            raise UsageError(
                f"moectl's experts of layer {self.number} {NO_NEW_WEIGHTS}",
                hint="start the server again with the new checkpoint",
            )
        prepared = quantization.experts.prepared(
            self.number,
            default_device(),
            quantization.dtype,
            quantization.backends[self.number],
            shard_of(layer),
        )
        weights = {}
        for role, tensor in prepared.weights.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(output_name("", role), parameter)
            weights[role] = parameter.data
        # SGLang asks every module for this before it changes weights, and answers with it.
        layer._derived_weight_cache_error = (
            f"moectl's experts {NO_NEW_WEIGHTS}: start the server again with the new checkpoint"
        )
        self.kernel = share_kernel(replace(prepared, weights=weights))
        quantization.has_loaded(self.number, self.kernel.prepared, self.load)

    def apply(self, layer: torch.nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        assert self.kernel is not None and self.runner is not None
        return self.runner.run(dispatch_output, SglangQuantInfo(self.kernel))


def refuse_layer(layer: FusedMoE, number: int) -> None:
    """Raises NoBackend with every reason why moectl's experts cannot stand in `layer`."""
    config = layer.moe_runner_config
    apart = "serve without --quantization moectl"
    reasons = {
        "router weights on the input": config.apply_router_weight_on_input,
        "experts' outputs that are not summed": config.no_combine,
        "shared experts among the routed ones": layer.num_fused_shared_experts > 0,
    }
    hints = {"shared experts among the routed ones": "use --disable-shared-experts-fusion"}
    if met := [Limit("", why, hints.get(why, apart)) for why, present in reasons.items() if present]:
        raise unsupported(f"SGLang (layer {number})", met)


@dataclass
class SglangQuantInfo(MoeQuantInfo):
    """A layer's kernel, as SGLang passes it to the runner's core."""

    kernel: FusedMoEKernel


class SglangRunnerCore(DispatchMoeRunnerCore):
    """moectl's kernels behind SGLang's interface: they apply router weights and sum over experts."""

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        return resolve_moe_runner_backend(METHOD)

    def run_from_dispatch(
        self,
        dispatch_output: StandardDispatchOutput,
        quant_info: SglangQuantInfo,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        """The weighted sum of this rank's experts ``[tokens, hidden]``; ids are the rank's own, -1 for none.

        Nothing in it waits for the GPU, so that it can be captured in a graph.
        """
        routed = dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(routed):
            routed = routed.to_standard()
        if hooks is not None or not TopKOutputChecker.format_is_standard(routed):
            what = "LoRA on experts" if hooks is not None else f"routing in the form {routed.format.name}"
            raise NoBackend(f"moectl's experts in SGLang do not support {what}")
        weights = routed.topk_weights.float()
        # Elsewhere SGLang's models multiply the sum, as its own runners do not.
        if is_cuda() and runner_config.routed_scaling_factor not in (None, 1.0):
            weights = weights * runner_config.routed_scaling_factor
        return StandardCombineInput(
            experts_sum(quant_info.kernel, dispatch_output.hidden_states, routed.topk_ids, weights)
        )


def experts_sum(kernel: FusedMoEKernel, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What `kernel` makes of tokens ``[tokens, hidden]``, as one operator where torch compiles."""
    if not len(x):
        return torch.empty_like(x)
    ids = ids.to(torch.int32)
    if torch.compiler.is_compiling():
        return kernel.apply(x, ids, weights)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernel.call_into(y, x, ids, weights)
    return y
