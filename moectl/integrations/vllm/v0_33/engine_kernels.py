"""vLLM's own kernels on a converted directory: its method of the published experts, which loads nothing.

The directory's tensors become the layer's parameters as vLLM's own ``process_weights_after_loading`` would
have left them, and the method's kernel is built on them. What depends on a release's private names is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ....errors import NoBackend
from ....problem.layouts import OWN_LAYOUTS
from ....problem.moe_problem import MoEProblem
from ....problem.padding import pad
from ....problem.schemes import A16
from ...model_experts import DTYPES, ModelExperts, default_device
from .deployment import check_map, shard_of

logger = init_logger(__name__)

Weights = Mapping[str, Tensor]
Place = Callable[[FusedMoEMethodBase, RoutedExperts, Weights, MoEProblem], None]
"""Puts a layer's tensors by role where vLLM's method and kernel look for them."""


@dataclass(frozen=True)
class EngineKernel:
    """How a kernel of vLLM's takes a layout.

    Attributes:
        backend: the value of ``--moe-backend`` that selects it.
        scales: the dtype by which it tells formats apart; None if that of the files.
        place: puts the tensors in place; None for parameters of the method's own names.
    """

    backend: str
    scales: torch.dtype | None = None
    place: Place | None = None


@dataclass(frozen=True)
class ParameterNames:
    """The names of a method's parameters, without ``w13_`` and ``w2_``.

    Attributes:
        aliased: whether the kernel reads the weights as ``w13_weight`` and ``w2_weight`` too.
    """

    weight: str = "weight"
    scale: str = "weight_scale"
    zero: str = "weight_zero_point"
    aliased: bool = False

    def of(self, role: str) -> str:
        """The parameter's name for a role such as ``w13_scale``."""
        matrix, _, kind = role.partition("_")
        return f"{matrix}_{ {'': self.weight, 'scale': self.scale, 'zero': self.zero}.get(kind, kind) }"


_OF_INTEGERS = ParameterNames("qweight", "scales", "qzeros", aliased=True)

PARAMETERS: Mapping[str, ParameterNames] = {
    "GptOssMxfp4MoEMethod": ParameterNames(),
    "Mxfp4MoEMethod": ParameterNames(),
    "CompressedTensorsWNA16MoEMethod": ParameterNames("weight_packed", aliased=True),
    "AutoGPTQMoEMethod": _OF_INTEGERS,
    "AutoAWQMoEMethod": _OF_INTEGERS,
}
"""By the class of vLLM's method."""


@cache
def _triton_kernels() -> tuple[ModuleType, ...]:
    """vLLM's triton_kernels: its modules of matrix products, tensors and numerics.

    Swizzles one small matrix with vLLM's own function, which also sets the package's options for this GPU.
    """
    from vllm.model_executor.layers.quantization.utils import mxfp4_utils

    codes, scales = (
        torch.zeros(1, 256, width, dtype=torch.uint8, device=default_device()) for width in (128, 8)
    )
    mxfp4_utils._swizzle_mxfp4(codes, scales)
    return tuple(import_module(f"triton_kernels.{name}") for name in ("matmul_ogs", "tensor", "numerics"))


def _wrapped(method: Any, layer: RoutedExperts, weights: Weights, problem: MoEProblem) -> None:
    """Weights and scales in tensors of triton_kernels, as `_swizzle_mxfp4` returns them."""
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import mx_scale_kwargs

    matmul, tensor, numerics = _triton_kernels()
    layout = import_module("triton_kernels.tensor_details.layout")
    value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    hopper = scale_layout is layout.HopperMXScaleLayout
    dims, experts = problem.dims, problem.local_experts
    inner, hidden = dims.padded_intermediate, dims.padded_hidden
    for role, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        groups = -(-k // 128) * 4 if hopper else k // 32
        codes, scales = weights[role].mT, weights[f"{role}_scale"]
        scales = scales.mT if hopper else scales.view(1, -1, *scales.shape[2:])
        value = tensor.Tensor(
            tensor.Storage(codes, value_layout([experts, k // 2, n], **value_options)),
            dtype=tensor.FP4,
            shape=[experts, k, n],
        )
        scale = tensor.Tensor(
            tensor.Storage(scales, scale_layout([experts, groups, n], **scale_options)),
            dtype=torch.uint8,
            shape=[experts, groups, n],
        )
        setattr(layer, f"{role}_weight", value)
        precision = matmul.PrecisionConfig(
            **mx_scale_kwargs(scale), flex_ctx=matmul.FlexCtx(rhs_data=numerics.InFlexData())
        )
        setattr(method, f"{role}_precision_config", precision)
        if f"{role}_bias" in weights:
            _register(layer, f"{role}_bias", weights[f"{role}_bias"])


def _register(layer: RoutedExperts, name: str, tensor: Tensor) -> None:
    layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


_TRITON = EngineKernel("triton", place=_wrapped)

KERNELS: Mapping[str, EngineKernel] = {
    "marlin-mxfp4": EngineKernel("marlin", scales=torch.float8_e8m0fnu),
    "marlin-int4": EngineKernel("marlin"),
    "marlin-int8": EngineKernel("marlin"),
    "triton-hopper": _TRITON,
    "triton-blackwell": _TRITON,
    "cutlass-sm90": EngineKernel("flashinfer_cutlass"),
    "trtllm-mxfp4": EngineKernel("flashinfer_trtllm", scales=torch.float8_e4m3fn),
}
"""By the layout of the directory. A layout's row is all that another kernel of vLLM's needs."""


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
    if kernel is None or published is None or problem.scheme.act != A16:
        raise NoBackend(
            f"layer {number} is in a converted directory of the layout {layout} ({problem.scheme.words}), "
            f"which neither moectl's kernels nor vLLM's take as it is",
            hint=f"convert to one of {', '.join((*KERNELS, *OWN_LAYOUTS))}, or serve the checkpoint",
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
    method.refill = loading.refill
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
                _register(layer, self.names.of(role), tensor)
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

    def refill(self, experts: ModelExperts) -> None:
        """Replace the layer's values in place by those of `experts`."""
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
