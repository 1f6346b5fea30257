"""The bench of `search` for an engine's tuned files: both GEMMs of a layer with the plain grouped GEMM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.choice.launch import Launch
from ..kernels.timing.cold_calls import time_calls
from ..kernels.tolerance import Tolerance, check
from ..layer.random_layer import routings
from ..oracle.tuned_files import TunedKernel
from ..problem.moe_problem import MoEProblem
from ..seeds import seed_of
from .gpu_bench import FEW_TOKENS, ROUTINGS, broken
from .grouped_gemm import SPAN, GemmConfig, PaddedAssignments, plain_gemm, sort
from .launch_search import WrongResult
from .tuning_cases import TuningCase

FAMILY = "fused_moe"

AGREE = Tolerance(0.05, 5e-3, "sums in fp32 rounded to bf16 once, on both sides: 1.7e-3 each")
ROWS_AT_ONCE = 8192

ROWS, COLUMNS, STAGES = (16, 32, 64, 128, 256), (32, 64, 128, 256), (2, 3, 4, 5)
DEPTHS: Mapping[bool, tuple[int, ...]] = {False: (64, 128, 256), True: (64, 128)}
"""K block sizes by whether there are scales, whose blocks a K block must not cut across."""
MAX_BLOCK_ROWS = {False: math.inf, True: 90}
"""Approximate limit on a block's rows by whether there are scales, which double the accumulators."""
SHARED = 227 << 10
"""Bytes of shared memory of one program, if torch does not report it."""
ACCUMULATED = range(8, 129)
"""Accumulators that a thread may keep in registers."""


def blocks_for(cell: TuningCase, form: TunedKernel, shared: int) -> list[GemmConfig]:
    """Every configuration that can be launched and is worth measuring.

    Row blocks near the tokens per expert; grouped row blocks only if an expert has several; no
    pipelines that are too short to hide latency or longer than the loop needs.
    """
    per_expert, size = cell.tokens_per_expert, 1 if form.scaled else 2
    ideal = min(max(1.5 * per_expert, 16), MAX_BLOCK_ROWS[form.scaled])
    rows = sorted(ROWS, key=lambda m: abs(math.log2(m / ideal)))[: 1 if per_expert <= 8 else 2]
    columns = COLUMNS if per_expert <= 8 else COLUMNS[1:]
    groups = (1, 16) if per_expert > max(16, min(rows)) else (1,)
    configs = []
    for m, n, k, group, warps, stages in itertools.product(
        sorted(rows), columns, DEPTHS[form.scaled], groups, (4, 8), STAGES
    ):
        sums = m * n // (32 * warps)
        legal = (m + n) * k * size * stages <= shared and sums in ACCUMULATED
        if legal and 192 <= k * stages <= 640 and not (warps == 8 and sums < 16):
            configs.append(GemmConfig(m, n, k, group, warps, stages))
    return configs


@dataclass(frozen=True)
class EngineProduct:
    """One of a layer's two GEMMs: rows, weights, scales of FP8 operands, and the expected results."""

    x: Tensor
    weight: Tensor
    scales: tuple[Tensor, Tensor] | None
    expected: Tensor


@dataclass
class EngineBench:
    """Measures `GemmConfig` on `device` for layers whose kernels have the form `form(cell)`."""

    device: torch.device
    form: Callable[[TuningCase], TunedKernel]
    _cell: TuningCase | None = field(default=None, repr=False)
    _weights: tuple[MoEProblem, list[tuple[Tensor, Tensor | None]]] | None = field(default=None, repr=False)
    _ids: list[Tensor] = field(default_factory=list, repr=False)
    _products: list[EngineProduct] = field(default_factory=list, repr=False)
    _sorted: dict[tuple[int, int], PaddedAssignments] = field(default_factory=dict, repr=False)

    def candidates(self, cell: TuningCase) -> Sequence[Launch]:
        """Every configuration that is worth measuring."""
        return [Launch(FAMILY, blocks) for blocks in blocks_for(cell, self.form(cell), self._shared())]

    def current(self, cell: TuningCase) -> Launch:
        """The engine's default configuration."""
        return Launch(FAMILY, GemmConfig(*self.form(cell).default(cell.tokens, cell.problem.local_experts)))

    def error(self, cell: TuningCase, launch: Launch) -> float:
        """The larger relative RMS error of the two GEMMs; `WrongResult` when it exceeds `AGREE`."""
        self._open(cell)
        worst = 0.0
        try:
            for product in self._products:
                y = torch.full_like(product.expected, math.nan)
                y[self._ids[0].flatten() < 0] = 0.0  # experts of other ranks: rows that are never written
                self._run(product, launch.tile, 0, y)
                for first in range(0, len(y), ROWS_AT_ONCE):
                    rows = slice(first, first + ROWS_AT_ONCE)
                    result = check(y[rows], product.expected[rows], AGREE)
                    if not result.ok:
                        raise WrongResult(
                            f"differs from torch by {result.rms:.1e} (RMS) and {result.max:.1e} at most"
                        )
                    worst = max(worst, result.rms)
        except RuntimeError as error:
            raise broken(error, launch) from error
        return worst

    def time(self, cell: TuningCase, launch: Launch, repeats: int) -> float:
        """Microseconds of both GEMMs: a graph runs them once per routing, after a flush of the cache."""
        self._open(cell)
        outputs = [torch.empty_like(product.expected) for product in self._products]

        def both(routing: int) -> None:
            for product, y in zip(self._products, outputs, strict=True):
                self._run(product, launch.tile, routing, y)

        for routing in range(len(self._ids)):
            self._rows(routing, launch.tile.block_m)
        calls = [lambda r=r: both(r) for r in range(len(self._ids))]
        try:
            return time_calls(calls, self.device, repeats=repeats, settled=True).median_us
        except RuntimeError as error:
            raise broken(error, launch) from error

    def _run(self, product: EngineProduct, blocks: GemmConfig, routing: int, y: Tensor) -> None:
        rows = self._rows(routing, blocks.block_m)
        swapped = product.scales is not None and self._swaps(blocks)
        plain_gemm(y, product.x, product.weight, rows, blocks, product.scales, swapped)

    def _swaps(self, blocks: GemmConfig) -> bool:
        """Whether the engine's FP8 kernel has the weights as left operand: on SM90, with few rows."""
        hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9
        return hopper and blocks.block_m < 64 <= blocks.block_n

    def _rows(self, routing: int, block_m: int) -> PaddedAssignments:
        key = routing, block_m
        if key not in self._sorted:
            experts = len(self._products[0].weight)
            self._sorted[key] = sort(self._ids[routing], experts, block_m)
        return self._sorted[key]

    def _open(self, cell: TuningCase) -> None:
        """Prepares the cell: weights, routings, input rows of both GEMMs and their expected results."""
        if self._cell == cell:
            return
        problem, form = cell.problem, self.form(cell)
        self._cell, self._ids, self._products, self._sorted = None, [], [], {}
        if self._weights is None or self._weights[0] != problem:
            self._weights = None
            self._weights = problem, [_weight(shape, form, self.device) for shape in shapes(problem)]
        count = ROUTINGS[cell.tokens <= FEW_TOKENS]
        self._ids = [routed.ids for routed in routings(problem, cell.tokens, "uniform", count, self.device)]
        for rows, (weight, scale) in zip(
            (cell.tokens, cell.tokens * problem.top_k), self._weights[1], strict=True
        ):
            self._products.append(_product(rows, weight, scale, self._ids[0]))
        self._cell = cell

    def _shared(self) -> int:
        if self.device.type != "cuda":
            return SHARED
        about = torch.cuda.get_device_properties(self.device)
        return int(getattr(about, "shared_memory_per_block_optin", SHARED))


def shapes(problem: MoEProblem) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """``[experts, n, k]`` of both GEMMs with the engine's padding."""
    dims, experts = problem.dims, problem.local_experts
    gates = 2 if problem.activation.gated else 1
    inter, hidden = dims.padded_intermediate, dims.padded_hidden
    return (experts, gates * inter, hidden), (experts, hidden, inter)


def _weight(
    shape: tuple[int, int, int], form: TunedKernel, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Random weights, with scales if FP8; results of the GEMM have a variance of about one."""
    experts, n, k = shape
    generator = torch.Generator(device).manual_seed(seed_of("weights", n))
    dtype = torch.float8_e4m3fn if form.scaled else torch.bfloat16
    size = 1.0 if form.scaled else k**-0.5
    weight = torch.empty(shape, dtype=dtype, device=device)
    for expert in weight:
        drawn = torch.randn(n, k, generator=generator, device=device)
        expert.copy_((drawn * size).to(dtype))
    if not form.scaled:
        return weight, None
    spans = (experts, -(-n // SPAN), -(-k // SPAN))
    drawn = torch.rand(spans, generator=generator, device=device)
    return weight, (drawn + 0.5) * k**-0.5


def _product(rows: int, weight: Tensor, scale: Tensor | None, ids: Tensor) -> EngineProduct:
    """Random rows, and torch's result of every assignment; zeros for those without an expert."""
    experts, n, k = weight.shape
    device = weight.device
    generator = torch.Generator(device).manual_seed(seed_of("tokens", rows))
    x = torch.randn(rows, k, generator=generator, device=device).to(weight.dtype)
    x_scale = (
        None if scale is None else torch.rand(rows, scale.shape[2], generator=generator, device=device) + 0.5
    )
    plain = x.float()
    if x_scale is not None:
        plain = plain * x_scale.repeat_interleave(SPAN, 1)[:, :k]
    flat = ids.flatten().long()
    expected = torch.zeros(len(flat), n, dtype=torch.bfloat16, device=device)
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten()
        dense = weight[expert].float()
        if scale is not None:
            dense *= scale[expert].repeat_interleave(SPAN, 0)[:n].repeat_interleave(SPAN, 1)[:, :k]
        expected[mine] = (plain[mine // (len(flat) // rows)] @ dense.T).bfloat16()
    scales = None if scale is None or x_scale is None else (x_scale, scale)
    return EngineProduct(x, weight, scales, expected)
