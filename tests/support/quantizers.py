"""What other packages make of weights by their own way of quantizing them, as float32, and test tensors.

Every function takes float32 weights ``[n, k]`` and returns what they decode to, or None for a format that
the package does not have. Scales of integers and FP8 are float32, as all of them keep the dtype of the
weights.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moectl.problem.schemes import FULL, MXFP4, MXFP8, NVFP4, WeightFormat, int_format

FORMATS: Mapping[str, WeightFormat] = {
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "mxfp8": MXFP8,
    "int4 g32": int_format(4, 32, "F32"),
    "int4 g32 bf16 scales": int_format(4, 32, "BF16"),
    "int4 g128": int_format(4, 128, "F32"),
    "int4 g128 zeros": int_format(4, 128, "F32", zero_point=True),
    "int8 channel": int_format(8, FULL, "F32"),
    "fp8 block": WeightFormat("fp8", 8, (128, 128), "F32"),
    "fp8 channel": WeightFormat("fp8", 8, (1, FULL), "F32"),
    "fp8 tensor": WeightFormat("fp8", 8, (FULL, FULL), "F32"),
}


def tensors(n: int = 512, k: int = 2048) -> dict[str, Tensor]:
    """Weights ``[n, k]`` of three kinds, scaled like a trained layer's and rounded to bfloat16."""
    generator = torch.Generator().manual_seed(20)
    normal, *rest = torch.randn(4, n, k, generator=generator) / math.sqrt(k)
    student = normal / (k * sum(t.square() for t in rest) / 3).sqrt()
    outliers = normal.clone()
    outliers[:, torch.randperm(k, generator=generator)[: k // 100]] *= 20
    found = {"gaussian": normal, "student t(3)": student, "outlier channels": outliers}
    return {name: t.bfloat16().float() for name, t in found.items()}


def compressed_tensors(w: Tensor, weight: WeightFormat) -> Tensor | None:
    """Min-max ranges, the package's own scales and rounding (what llm-compressor does by default)."""
    args = importlib.import_module("compressed_tensors.quantization.quant_args")
    own = importlib.import_module("compressed_tensors.quantization.utils")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    rows, columns = weight.block
    kinds = {(FULL, FULL): "tensor", (1, FULL): "channel"}
    strategy = kinds.get(weight.block, "group" if rows == 1 else "block")
    described: dict[str, object] = {
        "num_bits": weight.bits,
        "type": "int" if weight.name.startswith("int") else "float",
        "symmetric": not weight.zero_point,
        "strategy": "tensor_group" if weight.name == "nvfp4" else strategy,
    }
    if strategy == "group":
        described["group_size"] = columns
    if strategy == "block":
        described["block_structure"] = [rows, columns]
    if weight.name == "nvfp4":
        described["scale_dtype"] = torch.float8_e4m3fn
    if weight.name.startswith("mx"):
        described["scale_dtype"] = torch.uint8
    spec = args.QuantizationArgs(**described)
    n, k = w.shape
    down, across = (n if rows == FULL else rows), (k if columns == FULL else columns)
    blocks = w.reshape(n // down, down, k // across, across)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    if weight.scale_dtype == "BF16":
        low, high = low.bfloat16(), high.bfloat16()
    factor = own.generate_gparam(w.min(), w.max()) if weight.name == "nvfp4" else None
    scale, zero = own.calculate_qparams(low, high, spec, global_scale=factor)
    decoded: Tensor = forward.fake_quantize(w, scale.float(), zero, spec, global_scale=factor)
    return decoded


def torchao(w: Tensor, weight: WeightFormat) -> Tensor | None:
    """The tensor subclasses' own conversions, with the options that they default to."""
    k = w.shape[1]
    decoded: Tensor
    if weight.name.startswith("mx"):
        mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        dtype = torch.float4_e2m1fn_x2 if weight.name == "mxfp4" else torch.float8_e4m3fn
        decoded = mx.MXTensor.to_mx(w, dtype, 32).dequantize(torch.float32)
        return decoded
    if weight.name == "nvfp4":
        nvfp4 = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
        factor = nvfp4.per_tensor_amax_to_scale(w.abs().max())
        decoded = nvfp4.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=factor).dequantize(torch.float32)
        return decoded
    if weight.name == "fp8":
        fp8 = importlib.import_module("torchao.quantization.quantize_.workflows")
        sizes = importlib.import_module("torchao.quantization.granularity")
        kinds = {(FULL, FULL): sizes.PerTensor(), (1, FULL): sizes.PerRow()}
        granularity = kinds.get(weight.block) or sizes.PerBlock(list(weight.block))
        decoded = fp8.Float8Tensor.from_hp(w, granularity=granularity).dequantize(torch.float32)
        return decoded
    if weight.scale_dtype != "F32":
        return None
    intx = importlib.import_module("torchao.quantization.quantize_.workflows")
    mapping = importlib.import_module("torchao.quantization.quant_primitives").MappingType
    decoded = intx.IntxUnpackedToInt8Tensor.from_hp(
        w,
        (1, k if weight.group == FULL else weight.group),
        {4: torch.int4, 8: torch.int8}[weight.bits],
        mapping_type=mapping.ASYMMETRIC if weight.zero_point else mapping.SYMMETRIC,
    ).dequantize()
    return decoded.float()


def modelopt(w: Tensor, weight: WeightFormat) -> Tensor | None:
    """The quantized tensors' own conversions (maximum calibration, ModelOpt's default for weights)."""
    q = importlib.import_module("modelopt.torch.quantization.qtensor")
    decoded: Tensor
    if weight.name == "nvfp4":
        t, scale, factor = q.NVFP4QTensor.quantize(w.clone(), 16)
        decoded = t.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
        return decoded
    if weight.name == "mxfp4":
        t, scale = q.MXFP4QTensor.quantize(w, 32)
        decoded = t.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
        return decoded
    if weight.name == "mxfp8":
        t, scale = q.MXFP8QTensor.quantize(w)
        decoded = t.dequantize(torch.float32, scale=scale)
        return decoded
    if weight.name == "int4" and not weight.zero_point and weight.scale_dtype == "F32":
        t, scale = q.INT4QTensor.quantize(w, weight.group)
        decoded = t.dequantize(torch.float32, scale=scale, block_sizes={-1: weight.group})
        return decoded
    blocks = {-1: weight.block[1], -2: weight.block[0]} if weight.block[0] > 1 else None
    axis = 0 if weight.block == (1, FULL) else None
    kinds = {"fp8": "FP8QTensor", "int8": "INT8QTensor"}
    if weight.name not in kinds:
        return None
    t, scale = getattr(q, kinds[weight.name]).quantize(w, axis=axis, block_sizes=blocks)
    decoded = t.dequantize(torch.float32, scale=scale, **({"block_sizes": blocks} if blocks else {}))
    return decoded


PEERS: Mapping[str, tuple[str, Callable[[Tensor, WeightFormat], Tensor | None]]] = {
    "compressed-tensors": ("compressed_tensors", compressed_tensors),
    "torchao": ("torchao", torchao),
    "nvidia-modelopt": ("modelopt.torch.quantization", modelopt),
}
"""Package names, the modules that show that they are installed, and how they quantize."""
