"""Humming as a backend: its indexed GEMMs on weights that its own transformation has made of canonical ones.

A call lists the assignments in blocks of one expert, runs a GEMM, the activation and a GEMM, and sums with
the router's weights. Humming pads sizes by itself, and chooses a kernel by a table with rows by numbers of
assignments; it compiles a row's kernel, and that for one assignment, when the row is first asked for.
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
    ExpertBlocks,
    activate,
    blocks_of,
    check_dtype,
    device_refusal,
    scale_refusal,
    weighted_sum,
)
from .import_library import failing_as, module, package, why_not

NAME = "humming"
PAD_N, PAD_K = 256, 128
"""Multiples that it rounds rows and columns up to, as engines ask."""

LOCKS = 2048
"""Words that its programs wait on."""

GEMM_TYPE = "indexed"
COMPUTE = json.dumps({"gemm_type": GEMM_TYPE})

AT_ONCE = 1 << 30
"""Bytes of codes that are transformed together; its steps take several times that."""


@dataclass(frozen=True, slots=True)
class HummingWeightType:
    """Weights that it takes.

    Attributes:
        dtype: its name of what a code stands for; integers without zero points are less half their range.
        scales: dtype as which scales that are bytes are handed over, or None.
    """

    dtype: str
    scales: torch.dtype | None = None


KINDS: Mapping[str, HummingWeightType] = {
    "int4": HummingWeightType("uint4"),
    "int8": HummingWeightType("uint8"),
    "mxfp4": HummingWeightType("float4e2m1", torch.float8_e8m0fnu),
}
"""By the name of the format, with or without zero points, and with scales by row."""


@dataclass(frozen=True)
class HummingLibrary:
    """The modules of the package that are called."""

    forward: ModuleType
    schema: ModuleType
    transform: ModuleType
    tune: ModuleType


@cache
def library() -> HummingLibrary:
    """The package; Unavailable when it is not here, or lacks a function that is called."""
    package(NAME)
    found = HummingLibrary(*(module(f"{NAME}.{name}") for name in ("forward", "schema", "transform", "tune")))
    needed = (
        (found.forward, "humming_forward"),
        (found.schema, "HummingWeightSchema"),
        (found.transform, "prepare_layer_config"),
        (found.transform, "transform_humming_tensors"),
        (found.tune, "get_heuristics_config"),
    )
    lacks = [f"{place.__name__}.{name}" for place, name in needed if not hasattr(place, name)]
    if lacks:
        raise Unavailable(
            f"this version of {NAME} lacks {', '.join(lacks)}", hint="pip install humming-kernels==0.1.19"
        )
    return found


@dataclass(frozen=True)
class HummingMatrix:
    """One of the two expert matrices as it takes it.

    Attributes:
        config: its record of the layer.
        tensors: ``weight``, ``weight_scale``, and ``zero_point`` and ``bias`` where there are some.
        rows: of its table: fewest assignments less one, most, and the launch.
        chosen: the row's text and its block size, by number of assignments.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    rows: Sequence[Any]
    chosen: dict[int, tuple[str, int]] = field(default_factory=dict)

    def choice(self, assignments: int) -> tuple[str, int]:
        """What it is told to launch for so many assignments, and its block size."""
        if assignments not in self.chosen:
            row = next(row for row in self.rows if row[0] < assignments <= row[1])
            text = json.dumps(rows_for(self.rows, [assignments]))
            self.chosen[assignments] = text, int(row[2]["block_shape"][0])
        return self.chosen[assignments]


def rows_for(rows: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Rows of its table for so many assignments, and for 1, which every call asks for."""
    return [row for row in rows if any(row[0] < count <= row[1] for count in (1, *counts))]


def schema_arguments(problem: MoEProblem) -> dict[str, Any]:
    """What its record of a weight format is made of, by name, with dtypes spelled as it spells them."""
    weight, model = problem.scheme.weight, DTYPES[MODEL_DTYPES[problem.dtype]].torch
    return {
        "b_dtype": KINDS[weight.name].dtype,
        "bs_dtype": "float8e8m0" if weight.name == "mxfp4" else model,
        "weight_scale_group_size": 0 if weight.group == FULL else weight.group,
        "has_zero_point": weight.zero_point,
    }


def source_tensors(problem: MoEProblem, roles: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    """Canonical tensors of some experts by its names: words of codes along columns, zero points along rows.

    Codes lie as they are; eight or four zero points of consecutive rows are packed into a word.
    """
    weight = problem.scheme.weight
    kind, scales = KINDS[weight.name], roles[f"{role}_scale"]
    made = {
        "weight": roles[role].contiguous().view(torch.int32),
        "weight_scale": scales if kind.scales is None else scales.view(kind.scales),
    }
    if weight.zero_point:
        made["zero_point"] = packed_zeros(roles[f"{role}_zero"], weight.bits)
    if problem.bias:
        made["bias"] = roles[f"{role}_bias"]
    return made


def packed_zeros(zeros: Tensor, bits: int) -> Tensor:
    """``[e, n * bits / 32, groups]`` int32 of zero points ``[e, n, groups]`` uint8, the first lowest."""
    e, n, groups = zeros.shape
    each = 32 // bits
    parts = zeros.view(e, n // each, each, groups).long()
    shifts = torch.arange(0, 32, bits, device=zeros.device).view(1, 1, each, 1)
    words = (parts << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def _matrix(prepared: PreparedMoE, role: str) -> HummingMatrix:
    """The matrix `role`, transformed some experts at a time.

    Its symmetric integers could become sign and magnitude where no code is the lowest one; whether one
    is depends on the weights, so that is left alone: kernels follow from the problem.
    """
    found, problem, weights = library(), prepared.problem, prepared.weights
    experts, n, k = problem.local_experts, weights[role].shape[1], _columns(problem, role)
    schema = found.schema.HummingWeightSchema(**schema_arguments(problem))

    def config(count: int) -> Any:
        return found.transform.prepare_layer_config(
            shape_n=n, shape_k=k, weight_schema=schema, num_experts=count, has_bias=problem.bias,
            pad_n_to_multiple=PAD_N, pad_k_to_multiple=PAD_K, torch_dtype=MODEL_TORCH_DTYPES[problem.dtype],
            device=prepared.device,
        )  # fmt: skip

    step = max(1, AT_ONCE // (weights[role].nbytes // experts))
    made: dict[str, Tensor] = {}
    for first in range(0, experts, step):
        last = min(experts, first + step)
        some = {name: t[first:last] for name, t in weights.items()}
        tensors = source_tensors(problem, some, role)
        for name, t in found.transform.transform_humming_tensors(config(last - first), tensors).items():
            if name not in made:
                made[name] = t.new_empty(experts, *t.shape[1:])
            made[name][first:last] = t
    whole = config(experts)
    rows = found.tune.get_heuristics_config(layer_config=whole, gemm_type=GEMM_TYPE, device=prepared.device)
    return HummingMatrix(whole, made, rows)


def _columns(problem: MoEProblem, role: str) -> int:
    return problem.dims.hidden if role == "w13" else problem.dims.intermediate


def ready(prepared: PreparedMoE) -> tuple[HummingMatrix, HummingMatrix]:
    """The layer's two matrices in Humming's layout; made once and kept with it, beside the canonical ones."""
    made: tuple[HummingMatrix, HummingMatrix] | None = prepared.derived.get(NAME)
    if made is None:
        with failing_as(NAME, prepared.device):
            made = _matrix(prepared, "w13"), _matrix(prepared, "w2")
        prepared.derived[NAME] = made
    return made


def gemm_arguments(
    matrix: HummingMatrix, x: Tensor, y: Tensor, blocks: ExpertBlocks, top_k: int, tuning: str
) -> dict[str, Any]:
    """Arguments of ``humming_forward`` by name, its record of the layer left out.

    `x` ``[rows, k]``, of which slot s takes row ``s // top_k``; rows of valid slots of `y` are written.
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
        "tuning_config": tuning,
    }


def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``[tokens, hidden]`` in x's dtype; arguments as of `FusedMoEKernel.apply`."""
    problem = prepared.problem
    check_dtype(problem, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return y
    forward, (w13, w2) = library().forward.humming_forward, ready(prepared)
    ids, weights, experts = ids.contiguous().view(-1), weights.contiguous().view(-1), problem.local_experts
    slots, dims = ids.numel(), problem.dims
    (tuning1, size1), (tuning2, size2) = w13.choice(slots), w2.choice(slots)
    with failing_as(NAME, x.device):
        # Its kernels start while the one before them ends, and read blocks before they wait for it.
        blocks1 = blocks_of(ids, experts, size1, LOCKS, whole=True)
        blocks2 = blocks1 if size2 == size1 else blocks_of(ids, experts, size2, LOCKS, whole=True)
        halves = 2 if problem.activation.gated else 1
        first = x.new_empty(slots, halves * dims.intermediate)
        forward(w13.config, **gemm_arguments(w13, x.contiguous(), first, blocks1, problem.top_k, tuning1))
        hidden = x.new_empty(slots, dims.intermediate)
        activate(first, hidden, problem)
        parts = x.new_empty(slots, dims.hidden)
        forward(w2.config, **gemm_arguments(w2, hidden, parts, blocks2, 1, tuning2))
        weighted_sum(parts, y, ids, experts, weights)
    return y


def problem_refusal(problem: MoEProblem) -> str:
    """Why it cannot compute `problem` on any GPU, in a sentence; empty when it can."""
    weight = problem.scheme.weight
    row = HUMMING.row(weight.name) if weight.block[0] == 1 else None
    if row is None:
        return f"it is given {', '.join(HUMMING.names)} weights with scales by row, the layer has {weight}"
    if not HUMMING.reads(weight):
        return f"it is given scales of whole rows and of {HUMMING.groups} columns, the layer has {weight}"
    if problem.dtype not in row.dtypes:
        return f"with {weight.name} weights it is given {' and '.join(row.dtypes)}, this is {problem.dtype}"
    if problem.act_order == "group":
        return "its scales go by columns in their order, the layer's are permuted group by group"
    if problem.routing.weight_on_input and not HUMMING.weight_on_input:
        return "it multiplies by the router's weight at the end, the layer does on its input"
    for name, size in (("hidden", problem.dims.hidden), ("intermediate", problem.dims.intermediate)):
        if size % HUMMING.multiple:
            return (
                f"its words and zero points need sizes that {HUMMING.multiple} divides, the layer's {name} "
                f"size is {size}"
            )
    return scale_refusal(problem) or HUMMING.activation_refusal(problem.activation)


def refusal(problem: MoEProblem, device: torch.device) -> str:
    """Why it cannot run `problem` on `device`, in a sentence; empty when it can."""
    return device_refusal(device, HUMMING) or problem_refusal(problem) or why_not(library)


def tactic(prepared: PreparedMoE, tokens: int) -> str:
    """Blocks of both GEMMs' kernels in its table: tokens x rows x columns."""
    slots = tokens * prepared.problem.top_k
    shapes = []
    for matrix in ready(prepared):
        row = next((row for row in matrix.rows if row[0] < slots <= row[1]), None)
        shapes.append("x".join(map(str, row[2]["block_shape"])) if row else "")
    return ", ".join(shapes)


RUNNER = Runner(NAME, CANONICAL, compute, refusal, accumulation="steps", ready=ready, tactic=tactic)
