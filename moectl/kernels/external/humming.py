"""The humming and humming_grouped backends: Humming's indexed and grouped GEMMs, on weights in its layout.

Weights are converted to it, or transformed by Humming from canonical ones where its order of codes depends
on the CUDA compiler: MXFP4 on SM100 and newer, and integers with INT8 tokens. A call groups the assignments
in blocks of one expert (or puts the tokens into rows by expert), runs a GEMM, the activation and a GEMM, and
sums with the router's weights; tokens are quantized in the call as declared. Humming rounds sizes up, and
selects a kernel from a table by the number of assignments. The first use of a row compiles its kernel, and
the kernel for a single assignment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...capabilities.external_kernels import HUMMING
from ...dtypes import MODEL_DTYPES
from ...errors import NoBackend, Unavailable
from ...problem.moe_problem import MoEProblem
from ...problem.padding import pad, size_rule
from ...problem.schemes import FULL
from ...torch_dtypes import MODEL_TORCH_DTYPES
from ..prepared_layer import CANONICAL, PreparedMoE
from ..runner import Runner, check_dtype
from .gemm_glue import (
    ExpertBlocks,
    activate,
    align_blocks,
    device_refusal,
    weighted_sum,
)
from .grouped_rows import WHOLE_ROWS, RowScales, activate_rows, place_rows, scatter_tokens
from .humming_formats import (
    A_DTYPES,
    SCALE_DTYPES,
    accumulation,
    fused_activation,
    gpu_refusal,
    grouped_refusal,
    input_arguments,
    problem_refusal,
    schema_arguments,
    source_tensors,
    tokens_of,
)
from .import_library import failing_as, module, package, unavailable_reason

NAME = "humming"
PAD_N, PAD_K = 256, 128
"""Multiples to which it pads rows and columns, as vLLM passes them."""

LOCKS = 2048
"""Lock words for its programs."""

GROUPED = "humming_grouped"
GEMM_TYPES: Mapping[str, str] = {NAME: "indexed", GROUPED: "grouped_contiguous"}
"""Its kind of GEMM, by backend."""

FLAT = "humming-fp8-act-fp8"
"""The layout of weights that are as wide as tokens, which are not in tiles."""

CHUNK_BYTES = 1 << 30
"""Bytes of codes that are transformed at a time; the transformation needs several times that."""


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
        (modules.forward, "may_process_input"),
        (modules.schema, "HummingInputSchema"),
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
        tensors: ``weight``, ``weight_scale`` and, if the layer has them, ``zero_point``, ``bias`` and
            ``weight_scale_2``.
        n, k: its rows and columns, without those that Humming adds.
        rows: its tuning table. A row is (a, b, launch) for a < assignments <= b.
        gemm: the kind of GEMM, in JSON.
        launches: tuning config and block size, by number of assignments.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    n: int
    k: int
    rows: Sequence[Any]
    gemm: str = ""
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
    weight, row = problem.scheme.weight, HUMMING.row_for(problem.scheme)
    name = row.layout if row is not None else ""
    if not name or problem.dtype not in MODEL_DTYPES or (weight.name == "mxfp4" and _converts_natively()):
        return CANONICAL
    needs = size_rule(name, weight, problem.activation.gated, problem.dims.hidden).needs
    whole = problem.dims.hidden % needs.hidden == 0 == problem.dims.intermediate % needs.intermediate
    return name if whole else CANONICAL


def _converts_natively() -> bool:
    """True if this machine's GPU converts 4-bit floats with instructions of its own."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


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
    inputs = input_arguments(problem)
    return modules.transform.prepare_layer_config(
        shape_n=n, shape_k=k, weight_schema=modules.schema.HummingWeightSchema(**schema_arguments(problem)),
        input_schema=modules.schema.HummingInputSchema(**inputs) if inputs else None,
        num_experts=experts, has_bias=problem.bias, pad_n_to_multiple=PAD_N, pad_k_to_multiple=PAD_K,
        torch_dtype=MODEL_TORCH_DTYPES[problem.dtype], device=prepared.device,
    )  # fmt: skip


def converted_tensors(prepared: PreparedMoE, role: str) -> dict[str, Tensor]:
    """The tensors of a layer in Humming's layout, under Humming's names; nothing is copied."""
    weights, names = prepared.weights, {"weight": role, "weight_scale": f"{role}_scale"}
    names |= {"zero_point": f"{role}_zero", "bias": f"{role}_bias", "weight_scale_2": f"{role}_global"}
    tensors = {name: weights[stored] for name, stored in names.items() if stored in weights}
    weight = prepared.problem.scheme.weight
    if weight.name in SCALE_DTYPES:
        tensors["weight_scale"] = tensors["weight_scale"].view(SCALE_DTYPES[weight.name][1])
    if prepared.layout == FLAT:
        # In memory chunks of 16 columns of all rows; Humming's shape is that of the matrix.
        n, k = matrix_sizes(prepared, role)
        full = (-(-n // PAD_N) * PAD_N, -(-k // PAD_K) * PAD_K * weight.bits // 32)
        tensors["weight"] = tensors["weight"].view(-1, *full)
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
        layer_config=layer_config, gemm_type=GEMM_TYPES[prepared.backend], device=prepared.device
    )
    gemm = json.dumps({"gemm_type": GEMM_TYPES[prepared.backend]})
    return HummingMatrix(layer_config, tensors, *matrix_sizes(prepared, role), rows, gemm)


def ready(prepared: PreparedMoE) -> tuple[HummingMatrix, HummingMatrix]:
    """The layer's two matrices in Humming's layout, created once; canonical weights are kept beside them."""
    return prepared.derive(NAME, _matrices)


def _matrices(prepared: PreparedMoE) -> tuple[HummingMatrix, HummingMatrix]:
    with failing_as(NAME, prepared.device):
        return _matrix(prepared, "w13"), _matrix(prepared, "w2")


def gemm_arguments(
    matrix: HummingMatrix, x: Tensor, scales: Tensor | None, y: Tensor, tuning_config: str
) -> dict[str, Any]:
    """Keyword arguments of ``humming_forward``, without the layer config and where the rows of experts are.

    Args:
        x: ``[rows, k]``, 16-bit or quantized, then with fp32 `scales` ``[rows, groups]``.
        y: ``[slots, n]``; only rows of valid slots are written.
    """
    tensors = matrix.tensors
    return {
        "inputs": x,
        "input_scale": scales,
        "weight": tensors["weight"],
        "weight_scale": tensors["weight_scale"],
        "zero_point": tensors.get("zero_point"),
        "bias": tensors.get("bias"),
        "weight_scale_2": tensors.get("weight_scale_2"),
        "outputs": y,
        "valid_shape_m": len(y),
        "compute_config": matrix.gemm,
        "tuning_config": tuning_config,
    }


def block_arguments(blocks: ExpertBlocks, top_k: int) -> dict[str, Any]:
    """Those of an indexed GEMM: slot s reads row ``s // top_k``."""
    return {
        "sorted_ids": blocks.slots,
        "expert_ids": blocks.experts,
        "num_tokens_padded": blocks.total,
        "locks": blocks.locks,
        "top_k": top_k,
    }


def quantized(matrix: HummingMatrix, x: Tensor, y: Tensor, **activation: str) -> tuple[Tensor, Tensor]:
    """Rows `x`, after an activation if given, quantized into `y` as they enter `matrix`; and their scales."""
    codes, groups, tokens = library().forward.may_process_input(
        matrix.config, inputs=x, outputs=y, **activation
    )
    return codes, groups if matrix.config.input_quant_mode.has_group_scale else tokens


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as in `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    forward, (w13, w2) = library().forward.humming_forward, ready(prepared)
    ids, weights, experts = ids.contiguous().view(-1), weights.contiguous().view(-1), problem.local_experts
    slots, act = ids.numel(), tokens_of(problem)
    codes = None if act.bits == 16 else A_DTYPES[act.name][1]
    (tuning1, size1), (tuning2, size2) = w13.launch_for(slots), w2.launch_for(slots)
    with failing_as(NAME, x.device):
        # Humming's kernels use programmatic dependent launch, and read the blocks before they wait.
        blocks1 = align_blocks(ids, experts, size1, LOCKS, overlap=False)
        blocks2 = blocks1 if size2 == size1 else align_blocks(ids, experts, size2, LOCKS, overlap=False)
        tokens, scales = x.contiguous(), None
        if codes is not None:
            tokens, scales = quantized(w13, tokens, torch.empty_like(tokens, dtype=codes))
        gate_up = x.new_empty(slots, w13.n)
        given = gemm_arguments(w13, tokens, scales, gate_up, tuning1)
        forward(w13.config, **given, **block_arguments(blocks1, problem.top_k))
        fused = fused_activation(problem) if codes is not None else {}
        h, scales = gate_up, None
        if not fused:
            h = x.new_empty(slots, w2.k)
            activate(gate_up, h, problem)
        if codes is not None:
            h, scales = quantized(w2, h, x.new_empty(slots, w2.k, dtype=codes), **fused)
        parts = x.new_empty(slots, problem.dims.hidden)
        forward(w2.config, **gemm_arguments(w2, h, scales, parts, tuning2), **block_arguments(blocks2, 1))
        weighted_sum(parts, y, ids, experts, weights)
    return y


def compute_grouped(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`compute` by grouped GEMMs, on tokens in rows by expert, which moectl's kernels quantize."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    forward, (w13, w2) = library().forward.humming_forward, ready(prepared)
    ids, weights, experts = ids.contiguous().view(-1), weights.contiguous().view(-1), problem.local_experts
    act, slots = tokens_of(problem), ids.numel()
    columns = WHOLE_ROWS if act.block[1] == FULL else act.block[1]
    scaling = None if act.bits == 16 else RowScales(columns, act.rounds_scales)
    (tuning1, _), (tuning2, _) = w13.launch_for(slots), w2.launch_for(slots)
    with failing_as(GROUPED, x.device):
        # Scales are read row by row: each row is a matrix of its own.
        placed = replace(place_rows(ids, experts), span=1)
        ends = torch.nn.functional.pad(placed.ends, (1, 0)).long()
        where = {"expert_layout": ends, "locks": torch.zeros(LOCKS, dtype=torch.int32, device=x.device)}

        def gemm(matrix: HummingMatrix, rows: Tensor, scales: Tensor, tuning: str) -> Tensor:
            product = x.new_empty(placed.size, matrix.n)
            given = scales.view(placed.size, -1) if scaling else None
            forward(matrix.config, **gemm_arguments(matrix, rows, given, product, tuning), **where)
            return product

        gate_up = gemm(w13, *scatter_tokens(x, placed, problem.top_k, scaling), tuning1)
        if scaling is None:
            h = x.new_empty(placed.size, w2.k)
            activate(gate_up, h, problem)
            parts = gemm(w2, h, h, tuning2)
        else:
            parts = gemm(w2, *activate_rows(gate_up, placed, problem.activation, scaling), tuning2)
        weighted_sum(parts, y, ids, experts, weights, placed.rows)
    return y


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why Humming cannot run `problem` on `device`, as a clause; empty if it can."""
    return (
        device_refusal(device, HUMMING)
        or problem_refusal(problem)
        or gpu_refusal(problem, device)
        or unavailable_reason(library)
    )


def _refusal_of_groups(problem: MoEProblem, device: torch.device) -> str:
    return refusal(problem, device) or grouped_refusal(problem)


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """Block shapes of both GEMMs in the tuning table: tokens x rows x columns."""
    slots = tokens * prepared.problem.top_k
    shapes = []
    for matrix in ready(prepared):
        row = next((row for row in matrix.rows if row[0] < slots <= row[1]), None)
        shapes.append("x".join(map(str, row[2]["block_shape"])) if row else "")
    return ", ".join(shapes)


RUNNER = Runner(
    NAME, layout, compute, refusal, accumulation=accumulation, ready=ready, tactic=tactic, keeps="weights"
)
GROUPED_RUNNER = Runner(
    GROUPED,
    layout,
    compute_grouped,
    _refusal_of_groups,
    accumulation=accumulation,
    ready=ready,
    tactic=tactic,
    keeps="weights",
)
