"""The humming backend: Humming's indexed GEMMs, on weights in its layout.

Weights are converted to it, or transformed by Humming from canonical ones where its order of codes depends
on the CUDA compiler: MXFP4 on SM100 and newer. A call groups the assignments in blocks of one expert, runs a
GEMM, the activation and a GEMM, and sums with the router's weights. Humming rounds sizes up itself, and
selects a kernel from a table by the number of assignments. The first use of a row compiles its kernel, and
the kernel for a single assignment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...capabilities.external_kernels import HUMMING
from ...dtypes import DTYPES, MODEL_DTYPES
from ...errors import NoBackend, Unavailable
from ...problem.moe_problem import MoEProblem
from ...problem.padding import pad, size_rule
from ...problem.schemes import FULL
from ...torch_dtypes import MODEL_TORCH_DTYPES
from ..prepared_layer import CANONICAL, PreparedMoE
from ..runner import Runner
from .gemm_glue import (
    ACT_ORDER_REFUSAL,
    INPUT_WEIGHT_REFUSAL,
    ExpertBlocks,
    activate,
    align_blocks,
    check_dtype,
    device_refusal,
    scale_refusal,
    weighted_sum,
)
from .import_library import failing_as, module, package, unavailable_reason

NAME = "humming"
PAD_N, PAD_K = 256, 128
"""Multiples to which it pads rows and columns, as vLLM passes them."""

LOCKS = 2048
"""Lock words for its programs."""

GEMM_TYPE = "indexed"
COMPUTE = json.dumps({"gemm_type": GEMM_TYPE})

CHUNK_BYTES = 1 << 30
"""Bytes of codes that are transformed at a time; the transformation needs several times that."""

B_DTYPES: Mapping[str, str] = {"int4": "uint4", "int8": "uint8", "mxfp4": "float4e2m1"}
"""Its dtype of the codes, by weight format. Integers without zero points are offset by half their range."""


@dataclass(frozen=True)
class HummingLibrary:
    """The modules of the package that are used."""

    forward: ModuleType
    schema: ModuleType
    transform: ModuleType
    tune: ModuleType


@cache
def library() -> HummingLibrary:
    """The package; Unavailable if it is missing, or lacks a function that is used."""
    package(NAME)
    modules = HummingLibrary(
        *(module(f"{NAME}.{name}") for name in ("forward", "schema", "transform", "tune"))
    )
    used = (
        (modules.forward, "humming_forward"),
        (modules.schema, "HummingWeightSchema"),
        (modules.transform, "prepare_layer_config"),
        (modules.transform, "transform_humming_tensors"),
        (modules.tune, "get_heuristics_config"),
    )
    missing = [f"{owner.__name__}.{name}" for owner, name in used if not hasattr(owner, name)]
    if missing:
        raise Unavailable(
            f"this version of {NAME} lacks {', '.join(missing)}", hint="pip install humming-kernels==0.1.19"
        )
    return modules


@dataclass(frozen=True)
class HummingMatrix:
    """One of the two expert matrices in Humming's layout.

    Attributes:
        config: Humming's layer config.
        tensors: ``weight``, ``weight_scale`` and, if the layer has them, ``zero_point`` and ``bias``.
        n, k: its rows and columns, without those that Humming adds.
        rows: its tuning table. A row is (a, b, launch) for a < assignments <= b.
        launches: tuning config and block size, by number of assignments.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    n: int
    k: int
    rows: Sequence[Any]
    launches: dict[int, tuple[str, int]] = field(default_factory=dict)

    def launch_for(self, assignments: int) -> tuple[str, int]:
        """The tuning config (JSON) for this many assignments, and its block size."""
        if assignments not in self.launches:
            row = next(row for row in self.rows if row[0] < assignments <= row[1])
            tuning_config = json.dumps(rows_for(self.rows, [assignments]))
            self.launches[assignments] = tuning_config, int(row[2]["block_shape"][0])
        return self.launches[assignments]


def rows_for(rows: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """The rows of the tuning table for these numbers of assignments, and for 1, which every call looks up."""
    return [row for row in rows if any(row[0] < count <= row[1] for count in (1, *counts))]


def layout(problem: MoEProblem) -> str:
    """The layout in which it reads `problem`'s weights; canonical ones where Humming lays them out itself."""
    weight = problem.scheme.weight
    name = next((row.layout for row in HUMMING.weights if weight in row.formats), "")
    if not name or problem.dtype not in MODEL_DTYPES or (weight.name == "mxfp4" and _converts_natively()):
        return CANONICAL
    needs = size_rule(name, weight, problem.activation.gated, problem.dims.hidden).needs
    whole = problem.dims.hidden % needs.hidden == 0 == problem.dims.intermediate % needs.intermediate
    return name if whole else CANONICAL


def _converts_natively() -> bool:
    """True if this machine's GPU converts 4-bit floats with instructions of its own."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def schema_arguments(problem: MoEProblem) -> dict[str, Any]:
    """Keyword arguments of ``HummingWeightSchema`` for the layer's weight format."""
    weight, model_dtype = problem.scheme.weight, DTYPES[MODEL_DTYPES[problem.dtype]].torch
    return {
        "b_dtype": B_DTYPES[weight.name],
        "bs_dtype": "float8e8m0" if weight.name == "mxfp4" else model_dtype,
        "weight_scale_group_size": 0 if weight.group == FULL else weight.group,
        "has_zero_point": weight.zero_point,
    }


def source_tensors(problem: MoEProblem, roles: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    """Canonical tensors of some experts, under Humming's names.

    Codes are viewed as int32 along columns; an int32 packs the zero points of 32 / bits consecutive rows.
    """
    weight, scales = problem.scheme.weight, roles[f"{role}_scale"]
    tensors = {
        "weight": roles[role].contiguous().view(torch.int32),
        "weight_scale": scales.view(torch.float8_e8m0fnu) if weight.name == "mxfp4" else scales,
    }
    if weight.zero_point:
        tensors["zero_point"] = pack_zeros(roles[f"{role}_zero"], weight.bits)
    if problem.bias:
        tensors["bias"] = roles[f"{role}_bias"]
    return tensors


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Zero points ``[e, n, groups]`` uint8 as ``[e, n * bits / 32, groups]`` int32, the first row lowest."""
    e, n, groups = zeros.shape
    per_word = 32 // bits
    values = zeros.view(e, n // per_word, per_word, groups).long()
    shifts = torch.arange(0, 32, bits, device=zeros.device).view(1, 1, per_word, 1)
    words = (values << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def matrix_sizes(prepared: PreparedMoE, role: str) -> tuple[int, int]:
    """Rows and columns of the matrix `role`, with what its layout pads."""
    problem = prepared.problem
    dims = problem.dims if prepared.layout == CANONICAL else pad(prepared.layout, problem).dims
    hidden, intermediate = dims.padded_hidden, dims.padded_intermediate
    if role == "w2":
        return hidden, intermediate
    return (2 if problem.activation.gated else 1) * intermediate, hidden


def _config(prepared: PreparedMoE, role: str, experts: int) -> Any:
    """Humming's config of `experts` experts of the matrix `role`.

    Humming could store symmetric integers as sign and magnitude if no code is the lowest one. That depends
    on the weights and is not used, so that the kernel depends on the problem only.
    """
    modules, problem = library(), prepared.problem
    n, k = matrix_sizes(prepared, role)
    return modules.transform.prepare_layer_config(
        shape_n=n, shape_k=k, weight_schema=modules.schema.HummingWeightSchema(**schema_arguments(problem)),
        num_experts=experts, has_bias=problem.bias, pad_n_to_multiple=PAD_N, pad_k_to_multiple=PAD_K,
        torch_dtype=MODEL_TORCH_DTYPES[problem.dtype], device=prepared.device,
    )  # fmt: skip


def converted_tensors(prepared: PreparedMoE, role: str) -> dict[str, Tensor]:
    """The tensors of a layer in Humming's layout, under Humming's names; nothing is copied."""
    weights, names = prepared.weights, {"weight": role, "weight_scale": f"{role}_scale"}
    names |= {"zero_point": f"{role}_zero", "bias": f"{role}_bias"}
    tensors = {name: weights[stored] for name, stored in names.items() if stored in weights}
    if prepared.problem.scheme.weight.name == "mxfp4":
        tensors["weight_scale"] = tensors["weight_scale"].view(torch.float8_e8m0fnu)
    return tensors


def transformed_tensors(prepared: PreparedMoE, role: str) -> dict[str, Tensor]:
    """The same of canonical weights, by Humming's own transformation, a few experts at a time."""
    modules, problem, weights = library(), prepared.problem, prepared.weights
    experts = problem.local_experts
    step = max(1, CHUNK_BYTES // (weights[role].nbytes // experts))
    tensors: dict[str, Tensor] = {}
    for first in range(0, experts, step):
        last = min(experts, first + step)
        chunk = {name: t[first:last] for name, t in weights.items()}
        sources = source_tensors(problem, chunk, role)
        config = _config(prepared, role, last - first)
        for name, t in modules.transform.transform_humming_tensors(config, sources).items():
            if name not in tensors:
                tensors[name] = t.new_empty(experts, *t.shape[1:])
            tensors[name][first:last] = t
    return tensors


def _matrix(prepared: PreparedMoE, role: str) -> HummingMatrix:
    """The matrix `role` in Humming's layout, with its config and tuning table."""
    by_humming = prepared.layout == CANONICAL
    tensors = transformed_tensors(prepared, role) if by_humming else converted_tensors(prepared, role)
    layer_config = _config(prepared, role, prepared.problem.local_experts)
    if layer_config.use_native_dequant and not by_humming:
        raise NoBackend(f"Humming reads {prepared.layout} weights in another order on this GPU")
    rows = library().tune.get_heuristics_config(
        layer_config=layer_config, gemm_type=GEMM_TYPE, device=prepared.device
    )
    return HummingMatrix(layer_config, tensors, *matrix_sizes(prepared, role), rows)


def ready(prepared: PreparedMoE) -> tuple[HummingMatrix, HummingMatrix]:
    """The layer's two matrices in Humming's layout, created once; canonical weights are kept beside them."""
    return prepared.derive(NAME, _matrices)


def _matrices(prepared: PreparedMoE) -> tuple[HummingMatrix, HummingMatrix]:
    with failing_as(NAME, prepared.device):
        return _matrix(prepared, "w13"), _matrix(prepared, "w2")


def gemm_arguments(
    matrix: HummingMatrix, x: Tensor, y: Tensor, blocks: ExpertBlocks, top_k: int, tuning_config: str
) -> dict[str, Any]:
    """Keyword arguments of ``humming_forward``, without the layer config.

    Slot s reads row ``s // top_k`` of `x` ``[rows, k]``; only rows of valid slots of `y` are written.
    """
    tensors = matrix.tensors
    return {
        "inputs": x,
        "weight": tensors["weight"],
        "weight_scale": tensors["weight_scale"],
        "zero_point": tensors.get("zero_point"),
        "bias": tensors.get("bias"),
        "weight_scale_2": tensors.get("weight_scale_2"),
        "outputs": y,
        "sorted_ids": blocks.slots,
        "expert_ids": blocks.experts,
        "num_tokens_padded": blocks.total,
        "locks": blocks.locks,
        "top_k": top_k,
        "valid_shape_m": len(y),
        "compute_config": COMPUTE,
        "tuning_config": tuning_config,
    }


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    forward, (w13, w2) = library().forward.humming_forward, ready(prepared)
    ids, weights, experts = ids.contiguous().view(-1), weights.contiguous().view(-1), problem.local_experts
    slots = ids.numel()
    (tuning1, size1), (tuning2, size2) = w13.launch_for(slots), w2.launch_for(slots)
    with failing_as(NAME, x.device):
        # Humming's kernels use programmatic dependent launch, and read the blocks before they wait.
        blocks1 = align_blocks(ids, experts, size1, LOCKS, overlap=False)
        blocks2 = blocks1 if size2 == size1 else align_blocks(ids, experts, size2, LOCKS, overlap=False)
        gate_up = x.new_empty(slots, w13.n)
        forward(w13.config, **gemm_arguments(w13, x.contiguous(), gate_up, blocks1, problem.top_k, tuning1))
        h = x.new_empty(slots, w2.k)
        activate(gate_up, h, problem)
        parts = x.new_empty(slots, problem.dims.hidden)
        forward(w2.config, **gemm_arguments(w2, h, parts, blocks2, 1, tuning2))
        weighted_sum(parts, y, ids, experts, weights)
    return y


def problem_refusal(problem: MoEProblem) -> str:
    """Why Humming does not support `problem` on any GPU, as a clause; empty if it does."""
    weight = problem.scheme.weight
    row = HUMMING.row(weight.name) if weight.block[0] == 1 else None
    if row is None:
        return f"it supports {', '.join(HUMMING.names)} weights with scales by row; the layer has {weight}"
    if not HUMMING.reads(weight):
        return f"it supports scales of whole rows and of {HUMMING.groups} columns; the layer has {weight}"
    if problem.dtype not in row.dtypes:
        return (
            f"with {weight.name} weights it supports {' and '.join(row.dtypes)} models; this one is "
            f"{problem.dtype}"
        )
    if problem.act_order == "group":
        return ACT_ORDER_REFUSAL
    if problem.routing.weight_on_input and not HUMMING.weight_on_input:
        return INPUT_WEIGHT_REFUSAL
    for name, size in (("hidden", problem.dims.hidden), ("intermediate", problem.dims.intermediate)):
        if size % HUMMING.multiple:
            return (
                f"its packed weights need sizes that are multiples of {HUMMING.multiple}; the layer's {name} "
                f"size is {size}"
            )
    return scale_refusal(problem) or HUMMING.activation_refusal(problem.activation)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why Humming cannot run `problem` on `device`, as a clause; empty if it can."""
    return device_refusal(device, HUMMING) or problem_refusal(problem) or unavailable_reason(library)


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """Block shapes of both GEMMs in the tuning table: tokens x rows x columns."""
    slots = tokens * prepared.problem.top_k
    shapes = []
    for matrix in ready(prepared):
        row = next((row for row in matrix.rows if row[0] < slots <= row[1]), None)
        shapes.append("x".join(map(str, row[2]["block_shape"])) if row else "")
    return ", ".join(shapes)


RUNNER = Runner(
    NAME, layout, compute, refusal, accumulation="steps", ready=ready, tactic=tactic, keeps="weights"
)
