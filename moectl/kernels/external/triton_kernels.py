"""OpenAI's triton_kernels as a backend: MXFP4 weights on Hopper, two calls of ``matmul_ogs``.

The package is the one of Triton's repository, which vLLM carries along. Its data of a routing is made from
expert ids by moectl's sort, which takes any top-k and assignments without an expert; or by the package
itself from logits. An activation other than gpt-oss's runs between the two GEMMs.
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
from ..runner import LIBRARY, Runner, chosen_by
from .gemm_glue import activate, check_dtype, device_refusal, ragged_of
from .import_library import failing_as, module, package, why_not

NAME = "triton_kernels"
LAYOUT = TRITON_KERNELS.weights[0].layout
WARPS = 8
"""Of its GEMMs, which the order of the scales depends on."""

NO_LIMIT = 3e38
FUSED = "swigluoai"
"""The activation that its first GEMM computes as it ends."""

CONSTRAINTS = {"split_k": 1, "fused_scatter": False}
"""Sums are not split, as engines ask on Hopper; results of tokens without any expert are written too."""


@dataclass(frozen=True)
class TritonKernelsLibrary:
    """The modules of the package that are called."""

    matmul: ModuleType
    routing: ModuleType
    numerics: ModuleType
    tensor: ModuleType
    layouts: ModuleType
    swiglu: Any


@cache
def library() -> TritonKernelsLibrary:
    """The package; Unavailable when it is not here, or has other functions than these."""
    package(NAME)
    try:
        found = TritonKernelsLibrary(
            module(f"{NAME}.matmul_ogs"),
            module(f"{NAME}.routing"),
            module(f"{NAME}.numerics"),
            module(f"{NAME}.tensor"),
            module(f"{NAME}.tensor_details.layout"),
            module(f"{NAME}.swiglu").swiglu_fn,
        )
        needed = (
            *((found.matmul, name) for name in ("matmul_ogs", "FusedActivation", "FnSpecs", "FlexCtx")),
            *((found.routing, name) for name in ("routing", "RoutingData", "ExptData", "compute_expt_data")),
            *((found.layouts, name) for name in ("HopperMXValueLayout", "HopperMXScaleLayout")),
        )
        for place, name in needed:
            getattr(place, name)
        module(f"{NAME}.matmul_ogs_details.opt_flags").update_opt_flags_constraints(CONSTRAINTS)
    except (AttributeError, Unavailable) as error:
        raise Unavailable(
            f"this version of {NAME} has other functions than the one that vLLM 0.33.0 carries: {error}"
        ) from error
    return found


@dataclass(frozen=True)
class TritonKernelsMatrix:
    """One of the two expert matrices as the GEMM takes it."""

    weight: Any
    bias: Tensor | None
    precision: Any


@dataclass(frozen=True)
class TritonKernelsLayer:
    """Both matrices; `fused` is the activation of the first GEMM, None where it runs by itself."""

    w13: TritonKernelsMatrix
    w2: TritonKernelsMatrix
    fused: Any


def matrix_of(prepared: PreparedMoE, role: str, n: int, k: int) -> TritonKernelsMatrix:
    """The matrix `role` of ``[n, k]``; the package sees its tensors transposed."""
    found, weights, experts = library(), prepared.weights, prepared.problem.local_experts
    groups = -(-k // 32 // 4) * 4
    codes = found.layouts.HopperMXValueLayout([experts, k // 2, n], mx_axis=1)
    steps = found.layouts.HopperMXScaleLayout([experts, groups, n], mx_axis=1, num_warps=WARPS)
    store = found.tensor.Storage
    value = found.tensor.Tensor(store(weights[role].mT, codes), dtype=found.tensor.FP4, shape=[experts, k, n])
    scale = found.tensor.Tensor(
        store(weights[f"{role}_scale"].mT, steps), dtype=torch.uint8, shape=[experts, groups, n]
    )
    context = found.matmul.FlexCtx(rhs_data=found.numerics.InFlexData())
    precision = found.matmul.PrecisionConfig(weight_scale=scale, flex_ctx=context)
    return TritonKernelsMatrix(value, weights.get(f"{role}_bias"), precision)


def ready(prepared: PreparedMoE) -> TritonKernelsLayer:
    """The layer as the package takes it; made once and kept with it."""
    made: TritonKernelsLayer | None = prepared.derived.get(NAME)
    if made is None:
        problem = pad(LAYOUT, prepared.problem)
        hidden, inter = problem.dims.padded_hidden, problem.dims.padded_intermediate
        with failing_as(NAME):
            made = TritonKernelsLayer(
                matrix_of(prepared, "w13", 2 * inter, hidden),
                matrix_of(prepared, "w2", hidden, inter),
                fused_activation(problem),
            )
        prepared.derived[NAME] = made
    return made


def fused_activation(problem: MoEProblem) -> Any:
    """The package's record of the activation; None when its GEMM cannot compute it."""
    act = problem.activation
    if act.name != FUSED:
        return None
    found = library()
    numbers = (1.0 if act.alpha is None else act.alpha, NO_LIMIT if act.limit is None else act.limit)
    specs = found.matmul.FnSpecs("swiglu", found.swiglu, ("alpha", "limit"))
    return found.matmul.FusedActivation(specs, numbers, 2)


def routing_of(ids: Tensor, weights: Tensor, experts: int, top_k: int) -> tuple[Any, Any, Any]:
    """The package's data of a routing, its gather and its scatter, of flat `ids` and fp32 `weights`."""
    routing = library().routing
    made = ragged_of(ids, weights, experts)
    data = routing.RoutingData(
        made.weights,
        made.counts,
        experts,
        top_k,
        routing.compute_expt_data(made.counts, experts, ids.numel()),
    )
    gather = routing.GatherIndx(src_indx=made.slots, dst_indx=made.places)
    return data, gather, routing.ScatterIndx(src_indx=made.places, dst_indx=made.slots)


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as of `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    if not len(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    with failing_as(NAME, x.device):
        flat = ids.contiguous().view(-1), weights.contiguous().view(-1)
        return _run(prepared, x, routing_of(*flat, problem.local_experts, problem.top_k))


def monolithic(prepared: PreparedMoE, x: Tensor, logits: Tensor, correction_bias: Tensor | None) -> Tensor:
    """``[tokens, hidden]`` of tokens routed by the package; NoBackend for what it cannot route."""
    problem = prepared.problem
    check_dtype(problem, x)
    reason = routing_refusal(problem, correction_bias)
    if reason:
        raise NoBackend(f"the {NAME} backend cannot route: {reason}", hint="route first, and give expert ids")
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
        first, h = h, x.new_empty(h.shape[0], w2.weight.shape[-2])
        activate(first, h, prepared.problem, pairs=True)
    y: Tensor = gemm(
        h, w2.weight, w2.bias, data,
        scatter_indx=scatter, precision_config=w2.precision, gammas=data.gate_scal,
    )  # fmt: skip
    return y[:, : prepared.problem.dims.hidden]


def routing_refusal(problem: MoEProblem, correction_bias: Tensor | None = None) -> str:
    """Why the package cannot route by logits as the layer does, in a sentence; empty when it can."""
    plain = Routing(
        renormalize=problem.routing.renormalize,
        after_topk=problem.routing.after_topk,
        router_bias=problem.routing.router_bias,
    )
    if problem.routing != plain or correction_bias is not None:
        return f"it takes the softmax of the best or the best of a softmax, the layer has {problem.routing}"
    if problem.top_k & (problem.top_k - 1):
        return f"its top-k is a power of two, the layer's is {problem.top_k}"
    if problem.local_experts != problem.experts:
        return "it routes among all experts, and this rank has some of them"
    return ""


def problem_refusal(problem: MoEProblem) -> str:
    """Why the package cannot compute `problem` on any GPU, in a sentence; empty when it can."""
    weight = problem.scheme.weight
    row = TRITON_KERNELS.row(weight.name)
    if row is None or not TRITON_KERNELS.reads(weight):
        return f"it takes {', '.join(TRITON_KERNELS.names)} weights here, the layer has {weight}"
    if not problem.activation.gated and not TRITON_KERNELS.ungated:
        return "its weights' layout is for gated experts, the layer has none"
    if problem.dtype not in row.dtypes:
        return f"it takes {' and '.join(row.dtypes)} models, this is {problem.dtype}"
    if problem.routing.weight_on_input and not TRITON_KERNELS.weight_on_input:
        return "it multiplies by the router's weight at the end, the layer does on its input"
    return TRITON_KERNELS.activation_refusal(problem.activation)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why it cannot run `problem` on `device`, in a sentence; empty when it can."""
    return device_refusal(device, TRITON_KERNELS) or problem_refusal(problem) or why_not(library)


RUNNER = Runner(NAME, LAYOUT, compute, refusal, ready=ready, monolithic=monolithic, tactic=chosen_by(LIBRARY))
