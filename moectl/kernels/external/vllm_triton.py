"""The triton backend: vLLM's Triton experts, two launches of one kernel with moectl's kernels around them.

It needs only the kernel's source file and the tuned files beside it, not the engine: the kernel is compiled
out of the file, whose imports are not made. Launches are those of vLLM: of the tuned file for the layer's
shape and GPU, in the directory that ``VLLM_TUNED_CONFIG_FOLDER`` names or vLLM's own, else its defaults.
Tokens and activations are quantized in the call as the checkpoint declares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...capabilities.external_kernels import VLLM_TRITON
from ...capabilities.kernel_packages import TRITON_KERNEL
from ...capabilities.unpacked_libraries import (
    TRITON_EXPERTS_PEER,
    VARIABLE,
    library_file,
    peers_folder,
)
from ...capabilities.vllm_launches import (
    FOLDER_VARIABLE,
    FP8_TOKENS,
    TunedName,
    VllmLaunch,
    block_in_names,
    default_launch,
    find_tuned_file,
    gpu_in_names,
    nearest_launch,
    read_launches,
)
from ...errors import Unavailable
from ...problem.moe_problem import MoEProblem
from ...problem.schemes import FULL
from ..prepared_layer import PreparedMoE
from ..runner import Runner, check_dtype
from ..tolerance import DECLARED
from .fp8_rows import GROUP, formats_refusal, fp8_matrix, quantize_rows
from .gemm_glue import (
    ACT_ORDER_REFUSAL,
    ExpertBlocks,
    activate,
    align_blocks,
    device_refusal,
    weighted_sum,
)
from .import_library import failing_as, unavailable_reason
from .triton_source import kernel_from, parameters_of

NAME = "triton"

PARAMETERS = (
    *("a_ptr", "b_ptr", "c_ptr", "b_bias_ptr", "a_scale_ptr", "b_scale_ptr", "topk_weights_ptr"),
    *("sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr", "N", "K", "EM"),
    *("num_valid_tokens", "stride_am", "stride_ak", "stride_be", "stride_bk", "stride_bn", "stride_cm"),
    *("stride_cn", "stride_asm", "stride_ask", "stride_bse", "stride_bsk", "stride_bsn", "stride_bbe"),
    *("stride_bbn", "group_n", "group_k", "naive_block_assignment", "BLOCK_SIZE_M", "BLOCK_SIZE_N"),
    *("BLOCK_SIZE_K", "GROUP_SIZE_M", "SPLIT_K", "MUL_ROUTED_WEIGHT", "top_k", "compute_type"),
    *("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "per_channel_quant", "HAS_BIAS", "SWAP_AB"),
    "USE_TD",
)
"""Parameters of the kernel in vLLM 0.33.0; any other signature is rejected."""

COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

SWAPPED_BELOW, SWAPPED_FROM = 64, 64
"""On SM90 the operands of FP8 products are swapped in blocks of fewer rows and at least as many columns."""


@cache
def _kernel_in(file: Path) -> Any:
    kernel = kernel_from(file, TRITON_KERNEL)
    names = parameters_of(kernel)
    if names != PARAMETERS:
        different = sorted(set(names) ^ set(PARAMETERS))
        raise Unavailable(
            f"the parameters of {TRITON_KERNEL} in {file} differ from vLLM 0.33.0's: "
            f"{', '.join(different) or 'another order'}",
            hint="moectl peers triton",
        )
    return kernel


def experts_folder() -> Path:
    """vLLM's directory with the kernel's file, unpacked or installed; Unavailable without one."""
    folder = library_file(peers_folder(), TRITON_EXPERTS_PEER)
    if folder is None:
        raise Unavailable(
            f"vLLM's Triton experts are neither in the directory {VARIABLE} nor part of an installed vLLM",
            hint="moectl peers triton",
        )
    return folder


def kernel() -> Any:
    """vLLM's kernel; Unavailable if its file is missing, or its parameters differ from vLLM 0.33.0's."""
    return _kernel_in(experts_folder() / "fused_moe.py")


@dataclass(frozen=True)
class VllmTritonMatrix:
    """One of the two expert matrices in the kernel's terms.

    Attributes:
        weight: ``[e, n, k]``, 16-bit or E4M3.
        scales: fp32 ``[e, n / 128, k / 128]``, ``[e, n, 1]`` or ``[e]``; None for 16-bit weights.
        bias: ``[e, n]``, or None.
        input_scale: ``[1]`` fp32, the static scale of what enters; None if there is none.
        block: rows and columns that share a scale; ``(0, 0)`` unless both are more than one.
        by_row: whether tokens, and rows of the matrix, have scales of their own.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    block: tuple[int, int]
    by_row: bool


def matrix_of(prepared: PreparedMoE, role: str) -> VllmTritonMatrix:
    """The matrix `role` of a layer in one of the plain layouts."""
    weights, scheme = prepared.weights, prepared.problem.scheme
    bias = weights.get(f"{role}_bias")
    if scheme.weight.name != "fp8":
        return VllmTritonMatrix(weights[role], None, bias, None, (0, 0), False)
    weight, scales, static = fp8_matrix(prepared, role)
    by_row = scheme.act.block == (1, FULL) or (scales.ndim == 3 and not all(block_in_names(scheme)))
    return VllmTritonMatrix(weight, scales, bias, static, block_in_names(scheme), by_row)


@dataclass(frozen=True)
class VllmTritonLayer:
    """A layer in the kernel's terms.

    Attributes:
        launches: those of its tuned file by number of tokens; empty without one.
        default: experts, and dtype and block in the file's name, of which a launch follows without a file.
        swaps: whether FP8 operands are swapped in small blocks: on SM90.
    """

    w13: VllmTritonMatrix
    w2: VllmTritonMatrix
    launches: Mapping[int, VllmLaunch]
    default: tuple[int, str, tuple[int, int]]
    swaps: bool

    def launch_for(self, tokens: int) -> VllmLaunch:
        """The launch for this many tokens, as vLLM chooses it."""
        if self.launches:
            return nearest_launch(self.launches, tokens)
        experts, dtype, block = self.default
        return default_launch(tokens, experts, dtype, block)


def tuned_name(problem: MoEProblem, gpu: str) -> TunedName:
    """The name of the layer's tuned file on a GPU that torch calls `gpu`."""
    dtype = FP8_TOKENS if problem.scheme.weight.name == "fp8" else ""
    size, block = problem.dims.intermediate, block_in_names(problem.scheme)
    return TunedName(problem.local_experts, size, gpu_in_names(gpu), dtype, block)


def tuned_folders() -> list[Path]:
    """Directories with tuned files, the first first: one named by the environment, and vLLM's own."""
    named = os.environ.get(FOLDER_VARIABLE, "")
    return [*([Path(named)] if named else []), experts_folder() / "configs"]


def gpu_of(device: torch.device) -> tuple[str, bool]:
    """Torch's name of a GPU, and whether FP8 operands are swapped in small blocks there; empty for a CPU."""
    if device.type != "cuda":
        return "", False
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device) == (9, 0)


def ready(prepared: PreparedMoE) -> VllmTritonLayer:
    """The layer in the kernel's terms, created once; raises MoectlError for a tuned file that is broken."""
    return prepared.derive(NAME, _layer)


def _layer(prepared: PreparedMoE) -> VllmTritonLayer:
    gpu, swaps = gpu_of(prepared.device)
    name = tuned_name(prepared.problem, gpu)
    file = find_tuned_file(name, tuned_folders()) if gpu else None
    return VllmTritonLayer(
        matrix_of(prepared, "w13"),
        matrix_of(prepared, "w2"),
        read_launches(file) if file else {},
        (name.experts, name.dtype, name.block),
        swaps,
    )


def kernel_arguments(
    matrix: VllmTritonMatrix,
    launch: VllmLaunch,
    x: Tensor,
    x_scale: Tensor | None,
    y: Tensor,
    blocks: ExpertBlocks,
    weights: Tensor | None,
    top_k: int,
    swaps: bool = False,
) -> dict[str, Any]:
    """The kernel's arguments by name, with ``num_warps`` and ``num_stages``.

    Args:
        x: ``[rows, k]``; slot s reads row ``s // top_k``.
        x_scale: fp32 ``[rows, k / 128]``, ``[rows, 1]`` or ``[1]``; None for 16-bit rows.
        y: ``[slots, n]``; only rows of valid slots are written.
        weights: ``[slots]`` fp32 by which rows of `y` are multiplied; None for no weights.
        swaps: whether FP8 operands may be swapped.
    """
    weight, scales, bias = matrix.weight, matrix.scales, matrix.bias
    fp8, block_k = scales is not None, launch.block_k
    if all(matrix.block):
        block_k = min(block_k, *matrix.block)
    by_row = x_scale is not None and x_scale.ndim == 2
    swap = fp8 and swaps and launch.block_m < SWAPPED_BELOW and launch.block_n >= SWAPPED_FROM
    return {
        "a_ptr": x,
        "b_ptr": weight,
        "c_ptr": y,
        "b_bias_ptr": bias,
        "a_scale_ptr": x_scale,
        "b_scale_ptr": scales,
        "topk_weights_ptr": weights,
        "sorted_token_ids_ptr": blocks.slots,
        "expert_ids_ptr": blocks.experts,
        "num_tokens_post_padded_ptr": blocks.total,
        "N": weight.shape[1],
        "K": weight.shape[2],
        "EM": len(blocks.slots),
        "num_valid_tokens": len(y),
        "stride_am": x.stride(0),
        "stride_ak": x.stride(1),
        "stride_be": weight.stride(0),
        "stride_bk": weight.stride(2),
        "stride_bn": weight.stride(1),
        "stride_cm": y.stride(0),
        "stride_cn": y.stride(1),
        "stride_asm": x_scale.stride(0) if x_scale is not None and by_row else 0,
        "stride_ask": x_scale.stride(1) if x_scale is not None and by_row else 0,
        "stride_bse": 0 if scales is None else scales.stride(0),
        "stride_bsk": 0 if scales is None or scales.ndim < 3 else scales.stride(2),
        "stride_bsn": 0 if scales is None or scales.ndim < 3 or scales.shape[1] == 1 else scales.stride(1),
        "stride_bbe": 0 if bias is None else bias.stride(0),
        "stride_bbn": 0 if bias is None else bias.stride(1),
        "group_n": matrix.block[0],
        "group_k": matrix.block[1],
        "naive_block_assignment": False,
        "BLOCK_SIZE_M": launch.block_m,
        "BLOCK_SIZE_N": launch.block_n,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": launch.group_m,
        "SPLIT_K": 1,
        "MUL_ROUTED_WEIGHT": weights is not None,
        "top_k": top_k,
        "compute_type": COMPUTE_TYPES[y.dtype],
        "use_fp8_w8a8": fp8,
        "use_int8_w8a8": False,
        "use_int8_w8a16": False,
        "per_channel_quant": matrix.by_row,
        "HAS_BIAS": bias is not None,
        "SWAP_AB": swap,
        "USE_TD": False,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def _gemm(function: Any, arguments: dict[str, Any]) -> None:
    row_blocks = triton.cdiv(arguments["EM"], arguments["BLOCK_SIZE_M"])
    function[(row_blocks * triton.cdiv(arguments["N"], arguments["BLOCK_SIZE_N"]),)](**arguments)


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    function, layer = kernel(), ready(prepared)
    launch, experts, form = layer.launch_for(len(x)), problem.local_experts, problem.scheme.act
    x, ids, weights = x.contiguous(), ids.contiguous().view(-1), weights.contiguous().view(-1)
    slots, on_input = ids.numel(), problem.routing.weight_on_input
    w13, w2 = layer.w13, layer.w2
    with failing_as(NAME, x.device):
        blocks = align_blocks(ids, experts, launch.block_m, 0)
        gate_up, h = x.new_empty(slots, w13.weight.shape[1]), None
        parts, scale = x.new_empty(slots, problem.dims.hidden), None
        if w13.scales is not None:
            x, scale = quantize_rows(x, problem, form, w13.input_scale)
        first = weights if on_input else None
        _gemm(
            function,
            kernel_arguments(w13, launch, x, scale, gate_up, blocks, first, problem.top_k, layer.swaps),
        )
        if w2.scales is not None:
            h, scale = quantize_rows(gate_up, problem, form, w2.input_scale, activated=True, ids=ids)
        else:
            h = gate_up.new_empty(slots, w2.weight.shape[2])
            activate(gate_up, h, problem, interleaved=False)
        second = None if on_input else weights
        _gemm(function, kernel_arguments(w2, launch, h, scale, parts, blocks, second, 1, layer.swaps))
        weighted_sum(parts, y, ids, experts)
    return y


def problem_refusal(problem: MoEProblem) -> str:
    """Why the kernel does not support `problem` on any GPU, as a clause; empty if it does."""
    if reason := formats_refusal(problem, VLLM_TRITON):
        return reason
    if problem.act_order == "group":
        return ACT_ORDER_REFUSAL
    if problem.routing.weight_on_input and problem.bias:
        return "it would also multiply the first GEMM's bias by the router's weights (weight on the input)"
    if all(block_in_names(problem.scheme)):
        for name, size in (("hidden", problem.dims.hidden), ("intermediate", problem.dims.intermediate)):
            if size % GROUP:
                return f"blocks of {GROUP} need multiples of {GROUP}; the layer's {name} size is {size}"
    return VLLM_TRITON.activation_refusal(problem.activation)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why the kernel cannot run `problem` on `device`, as a clause; empty if it can."""
    return (
        device_refusal(device, VLLM_TRITON)
        or problem_refusal(problem)
        or format_device_refusal(problem, device)
        or unavailable_reason(kernel)
    )


def format_device_refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why the GPU has no products of the layer's formats, as a clause; empty if it has."""
    row, capability = VLLM_TRITON.row_of(problem.scheme.weight), torch.cuda.get_device_capability(device)
    if row is None or row.lowest is None or capability >= row.lowest:
        return ""
    needed, found = (".".join(map(str, it)) for it in (row.lowest, capability))
    return (
        f"{problem.scheme.weight.name} tokens need compute capability {needed} or newer; the GPU has {found}"
    )


def layout(problem: MoEProblem) -> str:
    """The layout of a problem's weights; that of 16-bit ones for unsupported weights, rejected later."""
    return (VLLM_TRITON.row_of(problem.scheme.weight) or VLLM_TRITON.weights[0]).layout


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """The launch, and whether a tuned file has it."""
    layer = ready(prepared)
    return f"{layer.launch_for(tokens)}, {'tuned file' if layer.launches else 'default'}"


def accumulation(problem: MoEProblem) -> str:
    """The tolerance of the layer: what the first GEMM leaves is rounded, and tokens as the layer declares."""
    return "steps" if problem.scheme.act.bits == 16 else DECLARED


RUNNER = Runner(
    NAME, layout, compute, refusal, accumulation=accumulation, ready=ready, tactic=tactic, keeps="numbers"
)
