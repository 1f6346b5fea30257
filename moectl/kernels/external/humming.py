"""The humming backend: Humming's indexed GEMMs, on canonical weights repacked by its own transformation.

A call groups the assignments in blocks of one expert, runs a GEMM, the activation and a GEMM, and sums with
the router's weights. Humming pads sizes itself, and selects a kernel from a table by the number of
assignments. The first use of a row compiles its kernel, and the kernel for a single assignment.
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
from ...errors import Unavailable
from ...problem.moe_problem import MoEProblem
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
        rows: its tuning table. A row is (a, b, launch) for a < assignments <= b.
        launches: tuning config and block size, by number of assignments.
    """

    config: Any
    tensors: Mapping[str, Tensor]
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


def _matrix(prepared: PreparedMoE, role: str) -> HummingMatrix:
    """The matrix `role`, transformed a few experts at a time.

    Humming could store symmetric integers as sign and magnitude if no code is the lowest one. That depends
    on the weights and is not used, so that the kernel depends on the problem only.
    """
    modules, problem, weights = library(), prepared.problem, prepared.weights
    experts, n = problem.local_experts, weights[role].shape[1]
    k = problem.dims.hidden if role == "w13" else problem.dims.intermediate
    schema = modules.schema.HummingWeightSchema(**schema_arguments(problem))

    def config(count: int) -> Any:
        return modules.transform.prepare_layer_config(
            shape_n=n, shape_k=k, weight_schema=schema, num_experts=count, has_bias=problem.bias,
            pad_n_to_multiple=PAD_N, pad_k_to_multiple=PAD_K, torch_dtype=MODEL_TORCH_DTYPES[problem.dtype],
            device=prepared.device,
        )  # fmt: skip

    step = max(1, CHUNK_BYTES // (weights[role].nbytes // experts))
    tensors: dict[str, Tensor] = {}
    for first in range(0, experts, step):
        last = min(experts, first + step)
        chunk = {name: t[first:last] for name, t in weights.items()}
        sources = source_tensors(problem, chunk, role)
        for name, t in modules.transform.transform_humming_tensors(config(last - first), sources).items():
            if name not in tensors:
                tensors[name] = t.new_empty(experts, *t.shape[1:])
            tensors[name][first:last] = t
    layer_config = config(experts)
    rows = modules.tune.get_heuristics_config(
        layer_config=layer_config, gemm_type=GEMM_TYPE, device=prepared.device
    )
    return HummingMatrix(layer_config, tensors, rows)


def ready(prepared: PreparedMoE) -> tuple[HummingMatrix, HummingMatrix]:
    """The layer's two matrices in Humming's layout, created once and kept besides the canonical weights."""
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
    slots, dims = ids.numel(), problem.dims
    (tuning1, size1), (tuning2, size2) = w13.launch_for(slots), w2.launch_for(slots)
    with failing_as(NAME, x.device):
        # Humming's kernels use programmatic dependent launch, and read the blocks before they wait.
        blocks1 = align_blocks(ids, experts, size1, LOCKS, overlap=False)
        blocks2 = blocks1 if size2 == size1 else align_blocks(ids, experts, size2, LOCKS, overlap=False)
        halves = 2 if problem.activation.gated else 1
        gate_up = x.new_empty(slots, halves * dims.intermediate)
        forward(w13.config, **gemm_arguments(w13, x.contiguous(), gate_up, blocks1, problem.top_k, tuning1))
        h = x.new_empty(slots, dims.intermediate)
        activate(gate_up, h, problem)
        parts = x.new_empty(slots, dims.hidden)
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
    NAME, CANONICAL, compute, refusal, accumulation="steps", ready=ready, tactic=tactic, keeps="weights"
)
