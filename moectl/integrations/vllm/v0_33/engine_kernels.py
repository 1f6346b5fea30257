"""vLLM's own kernels on a converted directory: its method of the published experts, which loads nothing.

The directory's tensors become the layer's parameters as vLLM's own ``process_weights_after_loading`` would
have left them, and the method's kernel is built on them. What depends on a release's private names is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ....errors import NoBackend
from ....kernels.prepared_layer import CANONICAL
from ....layer.experts import LayerForm
from ....problem.layouts import LAYOUTS
from ....problem.moe_problem import MoEProblem
from ....problem.padding import pad
from ...model_experts import DTYPES, ModelExperts, default_device
from ..engine_layouts import ENGINE_LAYOUTS, PARAMETERS, EngineLayout, ParameterNames
from .deployment import check_map, shard_of
from .engine_parameters import Place, in_humming, register, wrapped
from .log import logger_of

logger = logger_of(__name__)


@dataclass(frozen=True)
class EngineKernel(EngineLayout):
    """How a kernel of vLLM's takes a layout.

    Attributes:
        scales: the dtype by which it tells formats apart; None if that of the files.
        place: puts the tensors in place; None for parameters of the method's own names.
    """

    scales: torch.dtype | None = None
    place: Place | None = None


_E8M0, _E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn

SCALES: Mapping[str, torch.dtype] = {
    **dict.fromkeys(("marlin-mxfp4", "humming-mxfp4", "humming-mxfp4-sm100"), _E8M0),
    **dict.fromkeys(("humming-mxfp8", "humming-mxfp8-sm100"), _E8M0),
    **dict.fromkeys(("humming-nvfp4", "humming-nvfp4-rows", "humming-nvfp4-sm100"), _E4M3),
    "trtllm-mxfp4": _E4M3,
}
"""By the layout: dtypes of scales by which kernels tell formats apart, where the files have another."""


def _place(layout: str) -> Place | None:
    if layout.startswith("triton-"):
        return wrapped
    magnitude = "-e0m" in layout
    return partial(in_humming, layout=layout, magnitude=magnitude) if layout.startswith("humming-") else None


KERNELS: Mapping[str, EngineKernel] = {
    name: EngineKernel(facts.backend, facts.quantizes, facts.weight, SCALES.get(name), _place(name))
    for name, facts in ENGINE_LAYOUTS.items()
}
"""By the layout of the directory. A layout's row in `ENGINE_LAYOUTS` is all that another kernel needs."""

TARGETS = frozenset(LAYOUTS[name].target for name in KERNELS)
"""What ``convert --to`` calls these layouts."""


def engine_method(
    experts: ModelExperts,
    layer: RoutedExperts,
    number: int,
    prefix: str,
    published: QuantizationConfig | None,
) -> FusedMoEMethodBase:
    """vLLM's own method of a layer's experts as `published`, which finds them prepared instead.

    Raises NoBackend if the directory's layout is of no kernel of vLLM's, or vLLM does not run that here.
    """
    moe, shard = layer.moe_config, shard_of(layer.moe_config)
    layout, problem = experts.layout_of(shard), experts.problem_of(number, shard)
    kernel = KERNELS.get(layout)
    if kernel is None or published is None or not kernel.takes(problem.scheme):
        raise NoBackend(
            f"layer {number} is in a converted directory of the layout {layout} ({problem.scheme.words}), "
            f"which neither moectl's kernels nor vLLM's take as it is",
            hint=f"convert it --to moectl or {', '.join(sorted(TARGETS))}, or serve the checkpoint",
        )
    moe.moe_backend = kernel.backend
    try:
        method = published.get_quant_method(layer, prefix)
    except (ValueError, NotImplementedError) as error:
        raise NoBackend(
            f"layer {number} is in the layout {layout}, and {kernel.backend} of vLLM does not run: {error}",
            hint="convert to another layout, or serve the checkpoint",
        ) from error
    if moe.in_dtype not in published.get_supported_act_dtypes():
        raise NoBackend(
            f"vLLM's {kernel.backend} does not compute {problem.scheme.words} in {DTYPES[moe.in_dtype]}",
            hint="serve it with --dtype bfloat16",
        )
    names = PARAMETERS.get(type(method).__name__)
    if names is None:
        raise NoBackend(
            f"vLLM computes the experts of layer {number} with {type(method).__name__}, and moectl does not "
            f"know how that takes {layout}",
            hint="serve the checkpoint",
        )
    assert isinstance(method, FusedMoEMethodBase)
    loading = _Loading(experts, method, kernel, names, number)
    method.create_weights = loading.create_weights
    method.process_weights_after_loading = loading.process
    for name in ("problem_of", "misfit", "unsuited", "refill"):  # `reload.Refillable`
        setattr(method, name, getattr(loading, name))
    logger.info_once("vLLM's %s computes prepared experts in %s", kernel.backend, layout)
    return method


class _Loading:
    """What replaces allocation and repacking in a method of vLLM's.

    Attributes:
        tensors: the layer's tensors by role, at the addresses that captured graphs know.
    """

    def __init__(
        self,
        experts: ModelExperts,
        method: FusedMoEMethodBase,
        kernel: EngineKernel,
        names: ParameterNames,
        number: int,
    ) -> None:
        self.experts, self.method, self.kernel, self.names = experts, method, kernel, names
        self.number = number
        self.create_own = method.create_weights
        self.tensors: dict[str, Tensor] = {}

    def create_weights(self, layer: RoutedExperts, *sizes: Any, **attributes: Any) -> None:
        """vLLM's own on the device ``meta``, for what it sets on layer and method; no parameter is left."""
        before = set(layer._parameters)
        with torch.device("meta"):
            self.create_own(layer, *sizes, **attributes)
        for name in set(layer._parameters) - before:
            del layer._parameters[name]

    def process(self, layer: RoutedExperts) -> None:
        """Puts the directory's tensors in place and builds the kernel."""
        method = self.method
        shard = shard_of(method.moe)
        problem = self.experts.problem_of(self.number, shard)
        check_map(layer.expert_map, problem, self.experts.first_expert(self.number, shard), self.number)
        self.tensors = self.read()
        padded = pad(self.experts.layout_of(shard), problem)
        self._check_sizes(layer, padded)
        weights = {role: self._as_read(role, tensor) for role, tensor in self.tensors.items()}
        if self.kernel.place is not None:
            self.kernel.place(method, layer, weights, padded)
        else:
            for role, tensor in weights.items():
                register(layer, self.names.of(role), tensor)
            if self.names.aliased:
                for matrix in ("w13", "w2"):
                    setattr(layer, f"{matrix}_weight", getattr(layer, self.names.of(matrix)))
        method.moe_quant_config = method.get_fused_moe_quant_config(layer)
        monolithic = method.experts_cls.is_monolithic()
        around = maybe_make_prepare_finalize(
            method.moe,
            method.moe_quant_config,
            layer._expert_routing_tables(),
            allow_new_interface=True,
            use_monolithic=monolithic,
        )
        computed = method.experts_cls(moe_config=method.moe, quant_config=method.moe_quant_config)
        method.moe_kernel = mk.FusedMoEKernel(around, computed)
        computed.process_weights_after_loading(layer)

    def read(self) -> dict[str, Tensor]:
        """The layer's tensors by role on this process's device, 16-bit numbers in the model's dtype."""
        dtype = self.method.moe.in_dtype
        stored = self.experts.stored(self.number, default_device(), shard_of(self.method.moe))
        return {role: t.to(dtype) if t.dtype in DTYPES else t for role, t in stored.items()}

    def problem_of(self, experts: ModelExperts) -> MoEProblem:
        return experts.problem_of(self.number, shard_of(self.method.moe))

    def misfit(self, experts: ModelExperts) -> str:
        shard = shard_of(self.method.moe)
        mine = self.experts.layout_of(shard)
        if not experts.converted:
            return LayerForm(CANONICAL, {}).misfit(mine, {})
        return experts.stored_form(self.number, shard).misfit(mine, self.tensors)

    def unsuited(self, experts: ModelExperts) -> str:
        return ""

    def refill(self, experts: ModelExperts) -> None:
        self.experts = experts
        for role, tensor in self.read().items():
            self.tensors[role].copy_(tensor)

    def _as_read(self, role: str, tensor: Tensor) -> Tensor:
        dtype = self.kernel.scales
        return tensor.view(dtype) if dtype is not None and role.endswith("_scale") else tensor

    def _check_sizes(self, layer: RoutedExperts, padded: MoEProblem) -> None:
        ours = padded.dims.padded_hidden
        if layer.hidden_size != ours:
            raise NoBackend(
                f"layer {self.number} was converted for a hidden size of {ours}, vLLM's "
                f"{self.kernel.backend} has {layer.hidden_size} here",
                hint="convert it again with this version of moectl",
            )
