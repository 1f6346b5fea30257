"""Where vLLM's own kernels look for a layer's weights: parameters, wrapped tensors, descriptions of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts

from ....errors import NoBackend
from ....problem.moe_problem import MoEProblem
from ....problem.schemes import FULL
from ...model_experts import default_device
from ..engine_layouts import ParameterNames

Weights = Mapping[str, Tensor]
Place = Callable[[FusedMoEMethodBase, RoutedExperts, Weights, MoEProblem], None]
"""Puts a layer's tensors by role where vLLM's method and kernel look for them."""


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


def wrapped(method: Any, layer: RoutedExperts, weights: Weights, problem: MoEProblem) -> None:
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
            register(layer, f"{role}_bias", weights[f"{role}_bias"])


def in_humming(
    method: Any,
    layer: RoutedExperts,
    weights: Weights,
    problem: MoEProblem,
    *,
    layout: str,
    magnitude: bool = False,
) -> None:
    """Parameters of Humming's names, and the schemas and configs of both matrices that its kernels go by.

    Args:
        layout: its name, for errors; `magnitude`: whether codes are sign and magnitude.

    Raises NoBackend where Humming reads codes in another order, or vLLM quantizes tokens for it.
    """
    from humming.transform import prepare_layer_config
    from vllm.utils.humming import HummingInputSchema

    _check_tokens(layout)
    dims, moe = problem.dims, layer.moe_config
    inner, hidden = dims.padded_intermediate, dims.padded_hidden
    rows = 2 * inner if problem.activation.gated else inner
    layer.weight_schemas, layer.input_schemas, layer.humming_configs = {}, {}, {}
    for matrix, n, k in (("w13", rows, hidden), ("w2", hidden, inner)):
        tokens = HummingInputSchema()
        schema = _humming_schema(problem, weights, matrix, layer.params_dtype, magnitude)
        config = prepare_layer_config(
            shape_n=n,
            shape_k=k,
            weight_schema=schema,
            input_schema=tokens,
            num_experts=moe.num_local_experts,
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            has_bias=moe.has_bias,
            torch_dtype=layer.params_dtype,
            device=weights[matrix].device,
        )
        if config.use_native_dequant != layout.endswith("-sm100"):
            raise NoBackend(
                f"Humming reads codes of {problem.scheme.weight} in another order than {layout} has here",
                hint="convert for this GPU: --to humming or --to humming-sm100",
            )
        layer.weight_schemas[matrix], layer.input_schemas[matrix] = schema, tokens
        layer.humming_configs[matrix] = config
    for role, tensor in weights.items():
        register(layer, HUMMING_NAMES.of(role), tensor)
    if getattr(method, "weight_scale_name", "weight_scale") != "weight_scale":
        for matrix in ("w13", "w2"):
            register(layer, f"{matrix}_{method.weight_scale_name}", weights[f"{matrix}_scale"])
    # Methods pass these on, and Humming's kernels take none.
    for name in ("w13_weight_scale_2", "w2_weight_scale_2", "w13_input_scale", "w2_input_scale"):
        if not hasattr(layer, name):
            setattr(layer, name, None)


HUMMING_NAMES = ParameterNames(zero="zero_point")


def _check_tokens(layout: str) -> None:
    """NoBackend if vLLM was told to have Humming quantize tokens: `layout` is for 16-bit ones."""
    from vllm.envs import VLLM_HUMMING_INPUT_QUANT_CONFIG as asked
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import _user_moe_activation_override

    if asked or _user_moe_activation_override() is not None:
        raise NoBackend(
            f"{layout} is for 16-bit tokens, and vLLM was told to quantize them",
            hint="leave out VLLM_HUMMING_INPUT_QUANT_CONFIG and the activations of --quantization-config",
        )


def _humming_schema(
    problem: MoEProblem, weights: Weights, matrix: str, dtype: torch.dtype, magnitude: bool
) -> Any:
    """Humming's description of a matrix's codes and scales, as it makes of the checkpoint's."""
    from humming.config.enum import WeightScale2Type, WeightScaleType
    from vllm.utils.humming import HummingWeightSchema, dtypes

    weight, model = problem.scheme.weight, dtypes.DataType.from_torch_dtype(dtype)
    second, kind = WeightScale2Type.NONE, None
    if weight.name in ("int4", "int8"):
        codes = dtypes.DataType.from_str(f"uint{weight.bits}")
        if magnitude:
            codes = dtypes.FloatingPointType(
                num_bits=weight.bits, exponent_bits=0, mantissa_bits=weight.bits - 1
            )
        scales = model
    else:
        codes = dtypes.float4e2m1 if weight.bits == 4 else dtypes.float8e4m3
        scales = {"mxfp4": dtypes.float8e8m0, "mxfp8": dtypes.float8e8m0, "nvfp4": dtypes.float8e4m3}.get(
            weight.name, model
        )
    if weight.name == "nvfp4":
        of_rows = weights[f"{matrix}_global"].ndim > 1
        second = WeightScale2Type.CHANNEL if of_rows else WeightScale2Type.TENSOR
    if weight.block == (FULL, FULL):
        kind, scales = WeightScaleType.TENSOR, dtypes.float32
    return HummingWeightSchema(
        b_dtype=codes,
        bs_dtype=scales,
        weight_scale_group_size=0 if weight.group == FULL else weight.group,
        weight_scale_type=kind,
        weight_scale_2_type=second,
        has_zero_point=weight.zero_point,
    )


def register(layer: RoutedExperts, name: str, tensor: Tensor) -> None:
    """Give the layer a parameter that holds `tensor` itself."""
    layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
