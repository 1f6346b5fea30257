"""The triton_kernels backend: OpenAI's ``matmul_ogs`` with MXFP4 weights on Hopper, two calls per layer.

The package is part of Triton's repository; vLLM vendors it. Its routing metadata is built from expert ids by
moectl's sort, which supports any top-k and skipped assignments, or by the package itself from logits.
gpt-oss's activation is fused in the first GEMM; any other runs between the two GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...capabilities.external_kernels import TRITON_KERNELS
from ...errors import NoBackend, Unavailable
from ...problem.moe_problem import MoEProblem, Routing
from ...problem.padding import pad
from ..prepared_layer import PreparedMoE
from ..runner import LIBRARY, Runner, check_dtype, chosen_by
from .gemm_glue import INPUT_WEIGHT_REFUSAL, activate, device_refusal, sort_assignments
from .import_library import failing_as, module, package, unavailable_reason

NAME = "triton_kernels"
LAYOUT = TRITON_KERNELS.weights[0].layout
WARPS = 8
"""Warps of its GEMMs, on which the layout of the scales depends."""

NO_LIMIT = 3e38
FUSED = "swigluoai"
"""The activation that is fused in the first GEMM's epilogue."""

CONSTRAINTS = {"split_k": 1, "fused_scatter": False}
"""No split-K, as in vLLM on Hopper; without the fused scatter, tokens without any expert are written too."""


@dataclass(frozen=True)
class TritonKernelsLibrary:
    """The modules of the package that are used, and its SwiGLU."""

    matmul: ModuleType
    routing: ModuleType
    numerics: ModuleType
    tensor: ModuleType
    layouts: ModuleType
    swiglu: Any


@cache
def library() -> TritonKernelsLibrary:
    """The package; Unavailable if it is missing, or lacks a function that is used."""
    package(NAME)
    try:
        modules = TritonKernelsLibrary(
            module(f"{NAME}.matmul_ogs"),
            module(f"{NAME}.routing"),
            module(f"{NAME}.numerics"),
            module(f"{NAME}.tensor"),
            module(f"{NAME}.tensor_details.layout"),
            module(f"{NAME}.swiglu").swiglu_fn,
        )
        used = (
            (modules.matmul, ("matmul_ogs", "FusedActivation", "FnSpecs", "FlexCtx")),
            (modules.routing, ("routing", "RoutingData", "ExptData", "compute_expt_data")),
            (modules.layouts, ("HopperMXValueLayout", "HopperMXScaleLayout")),
        )
        for owner, names in used:
            for name in names:
                getattr(owner, name)
        module(f"{NAME}.matmul_ogs_details.opt_flags").update_opt_flags_constraints(CONSTRAINTS)
    except (AttributeError, Unavailable) as error:
        raise Unavailable(
            f"this version of {NAME} is not compatible with the one in vLLM 0.33.0: {error}"
        ) from error
    return modules


@dataclass(frozen=True)
class TritonKernelsMatrix:
    """One of the two expert matrices in the package's terms."""

    weight: Any
    bias: Tensor | None
    precision: Any


@dataclass(frozen=True)
class TritonKernelsLayer:
    """Both matrices; `fused` is the activation fused in the first GEMM, None if it runs separately."""

    w13: TritonKernelsMatrix
    w2: TritonKernelsMatrix
    fused: Any


def matrix_of(prepared: PreparedMoE, role: str, n: int, k: int) -> TritonKernelsMatrix:
    """The matrix `role` ``[n, k]``; the package takes its tensors transposed."""
    modules, weights, experts = library(), prepared.weights, prepared.problem.local_experts
    groups = -(-k // 32 // 4) * 4
    value_layout = modules.layouts.HopperMXValueLayout([experts, k // 2, n], mx_axis=1)
    scale_layout = modules.layouts.HopperMXScaleLayout([experts, groups, n], mx_axis=1, num_warps=WARPS)
    value = modules.tensor.Tensor(
        modules.tensor.Storage(weights[role].mT, value_layout),
        dtype=modules.tensor.FP4,
        shape=[experts, k, n],
    )
    scale = modules.tensor.Tensor(
        modules.tensor.Storage(weights[f"{role}_scale"].mT, scale_layout),
        dtype=torch.uint8,
        shape=[experts, groups, n],
    )
    context = modules.matmul.FlexCtx(rhs_data=modules.numerics.InFlexData())
    precision = modules.matmul.PrecisionConfig(weight_scale=scale, flex_ctx=context)
    return TritonKernelsMatrix(value, weights.get(f"{role}_bias"), precision)


def ready(prepared: PreparedMoE) -> TritonKernelsLayer:
    """The layer in the package's terms, created once."""
    return prepared.derive(NAME, _layer)


def _layer(prepared: PreparedMoE) -> TritonKernelsLayer:
    problem = pad(LAYOUT, prepared.problem)
    hidden, inter = problem.dims.padded_hidden, problem.dims.padded_intermediate
    with failing_as(NAME):
        return TritonKernelsLayer(
            matrix_of(prepared, "w13", 2 * inter, hidden),
            matrix_of(prepared, "w2", hidden, inter),
            fused_activation(problem),
        )


def fused_activation(problem: MoEProblem) -> Any:
    """The package's ``FusedActivation``; None if its GEMM cannot fuse the layer's activation."""
    act = problem.activation
    if act.name != FUSED:
        return None
    modules = library()
    parameters = (1.0 if act.alpha is None else act.alpha, NO_LIMIT if act.limit is None else act.limit)
    specs = modules.matmul.FnSpecs("swiglu", modules.swiglu, ("alpha", "limit"))
    return modules.matmul.FusedActivation(specs, parameters, 2)


def routing_data(ids: Tensor, weights: Tensor, experts: int, top_k: int) -> tuple[Any, Any, Any]:
    """The package's ``RoutingData``, ``GatherIndx`` and ``ScatterIndx`` for flat `ids` and fp32 `weights`."""
    routing = library().routing
    assignments = sort_assignments(ids, weights, experts)
    data = routing.RoutingData(
        assignments.weights,
        assignments.counts,
        experts,
        top_k,
        routing.compute_expt_data(assignments.counts, experts, ids.numel()),
    )
    slots, positions = assignments.slots, assignments.positions
    gather = routing.GatherIndx(src_indx=slots, dst_indx=positions)
    return data, gather, routing.ScatterIndx(src_indx=positions, dst_indx=slots)


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    if not len(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    with failing_as(NAME, x.device):
        flat = ids.contiguous().view(-1), weights.contiguous().view(-1)
        return _run(prepared, x, routing_data(*flat, problem.local_experts, problem.top_k))


def monolithic(prepared: PreparedMoE, x: Tensor, logits: Tensor, correction_bias: Tensor | None) -> Tensor:
    """``[tokens, hidden]`` for tokens routed by the package; NoBackend if it cannot route the layer."""
    problem = prepared.problem
    check_dtype(problem, x)
    reason = routing_refusal(problem, correction_bias)
    if reason:
        raise NoBackend(f"the {NAME} backend cannot route: {reason}", hint="route first, and pass expert ids")
    if not len(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    with failing_as(NAME, x.device):
        softmax_first = not problem.routing.renormalize
        routed = library().routing.routing(logits.contiguous(), problem.top_k, sm_first=softmax_first)
        return _run(prepared, x, routed)


def _run(prepared: PreparedMoE, x: Tensor, routed: tuple[Any, Any, Any]) -> Tensor:
    (data, gather, scatter), layer, gemm = routed, ready(prepared), library().matmul.matmul_ogs
    w13, w2, hidden = layer.w13, layer.w2, layer.w2.weight.shape[-1]
    x = torch.nn.functional.pad(x, (0, hidden - x.shape[1])) if hidden > x.shape[1] else x.contiguous()
    h = gemm(
        x, w13.weight, w13.bias, data,
        gather_indx=gather, precision_config=w13.precision, fused_activation=layer.fused,
    )  # fmt: skip
    if layer.fused is None:
        gate_up, h = h, x.new_empty(h.shape[0], w2.weight.shape[-2])
        activate(gate_up, h, prepared.problem, interleaved=True)
    y: Tensor = gemm(
        h, w2.weight, w2.bias, data,
        scatter_indx=scatter, precision_config=w2.precision, gammas=data.gate_scal,
    )  # fmt: skip
    return y[:, : prepared.problem.dims.hidden]


def routing_refusal(problem: MoEProblem, correction_bias: Tensor | None = None) -> str:
    """Why the package does not support the layer's routing by logits, as a clause; empty if it does."""
    supported = Routing(
        renormalize=problem.routing.renormalize,
        after_topk=problem.routing.after_topk,
        router_bias=problem.routing.router_bias,
    )
    if problem.routing != supported or correction_bias is not None:
        return f"it supports softmax before or after the top-k only; the layer has {problem.routing}"
    if problem.top_k & (problem.top_k - 1):
        return f"its top-k must be a power of two; the layer's is {problem.top_k}"
    if problem.local_experts != problem.experts:
        return "it needs all experts on one rank; this rank has some of them"
    return ""


def problem_refusal(problem: MoEProblem) -> str:
    """Why the package does not support `problem` on any GPU, as a clause; empty if it does."""
    weight = problem.scheme.weight
    row = TRITON_KERNELS.row(weight.name)
    if row is None or not TRITON_KERNELS.reads(weight):
        return f"moectl uses it with {', '.join(TRITON_KERNELS.names)} weights; the layer has {weight}"
    if not problem.activation.gated and not TRITON_KERNELS.ungated:
        return "its weight layout is for gated experts; the layer's have no gate"
    if problem.dtype not in row.dtypes:
        return f"it supports {' and '.join(row.dtypes)} models; this one is {problem.dtype}"
    if problem.routing.weight_on_input and not TRITON_KERNELS.weight_on_input:
        return INPUT_WEIGHT_REFUSAL
    return TRITON_KERNELS.activation_refusal(problem.activation)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why the package cannot run `problem` on `device`, as a clause; empty if it can."""
    return device_refusal(device, TRITON_KERNELS) or problem_refusal(problem) or unavailable_reason(library)


RUNNER = Runner(NAME, LAYOUT, compute, refusal, ready=ready, monolithic=monolithic, tactic=chosen_by(LIBRARY))
