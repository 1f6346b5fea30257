"""The bench of `search` on a GPU: random layers, the portable kernels as reference, cold caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import CheckFailed
from ..kernels.choice.launch import Launch
from ..kernels.choice.launch_plan import launch_for
from ..kernels.prepared_layer import PreparedMoE
from ..kernels.timing.cold_calls import time_calls
from ..kernels.tolerance import Tolerance, check, tolerance_for
from ..kernels.triton.triton_runner import FAMILIES, choose, run_into, run_with
from ..layer.random_layer import RandomLayer, RandomRouting, routings, tokens_of
from ..problem.moe_problem import MoEProblem
from .launch_search import DeviceBroken, WrongResult
from .tuning_cases import TuningCase, candidates, promising

BACKEND = "moectl"

AGREE = Tolerance(
    0.12, 1e-2, "two families of kernels that both round to bf16 in places: 1.4 times either's error"
)
"""How much results of two kernel families may differ."""

AGREE_IN_TENSOR_CORES = Tolerance(
    0.35, 3e-2, "FP8 products summed with 14 bits bring many numbers of `h` to another code: 1.8e-2 was seen"
)
"""How much a result may, whose sums stay in the tensor cores, from one whose sums are in fp32."""


def agreement(launch: Launch) -> Tolerance:
    """How much the result of `launch` may differ from the portable kernels'."""
    return AGREE_IN_TENSOR_CORES if getattr(launch.tile, "fast_sums", 0) else AGREE


JUDGED_TOKENS = 4
"""Tokens of the portable kernels' result that are checked against the fp32 reference, in each cell."""

FEW_TOKENS = 64
ROUTINGS = {True: 12, False: 4}
"""Routings in one graph, by whether there are few tokens: together they touch more than the cache holds."""

BROKEN = ("CUDA error", "illegal memory access", "unspecified launch failure", "CUDA driver error")
"""Words of errors after which a process can no longer use the GPU."""


@dataclass
class GpuBench:
    """Measures the launches of `families` on `device`; keeps the layer and the inputs of the last cell.

    With `most` it measures at most so many of each cell, those that are predicted to be the fastest.
    """

    device: torch.device
    families: Sequence[str] = tuple(FAMILIES)
    distribution: str = "uniform"
    most: int | None = None
    _layer: PreparedMoE | None = field(default=None, repr=False)
    _problem: MoEProblem | None = field(default=None, repr=False)
    _inputs: _Inputs | None = field(default=None, repr=False)

    def candidates(self, cell: TuningCase) -> Sequence[Launch]:
        """The legal launches that are worth measuring, the most promising first."""
        return self.launches(replace(cell, problem=self.layer(cell).problem))

    def launches(self, cell: TuningCase) -> Sequence[Launch]:
        """`candidates` of a cell whose problem is that of a layer in the kernels' layout."""
        return promising(cell, candidates(cell, self.families, self.device), self.device, self.most)

    def current(self, cell: TuningCase) -> Launch:
        """The launch that the cell gets without this search."""
        return choose(self.layer(cell).problem, cell.tokens, self.device)

    def error(self, cell: TuningCase, launch: Launch) -> float:
        """Relative RMS difference from the portable kernels' result; `WrongResult` beyond its `agreement`.

        The output and the memory for intermediate results are filled with NaN before.
        """
        layer, inputs = self.layer(cell), self.inputs(cell)
        first = inputs.sets[0]
        y = torch.full_like(inputs.x, math.nan)
        _poison(layer, cell.tokens)
        try:
            run_into(y, layer, inputs.x, first.ids, first.weights, launch)
            result = check(y, inputs.expected, agreement(launch))
        except RuntimeError as error:
            raise broken(error, launch) from error
        if not result.ok:
            raise WrongResult(
                f"differs from the portable kernels by {result.rms:.1e} (RMS) and {result.max:.1e} at most, "
                f"first in token {result.worst_token}"
            )
        return result.rms

    def time(self, cell: TuningCase, launch: Launch, repeats: int) -> float:
        """Microseconds of a call: a graph runs one call per routing, after a flush of the cache."""
        layer, inputs = self.layer(cell), self.inputs(cell)
        calls = [lambda s=s: run_with(layer, inputs.x, s.ids, s.weights, launch) for s in inputs.sets]
        try:
            return time_calls(calls, self.device, repeats=repeats, settled=True).median_us
        except RuntimeError as error:
            raise broken(error, launch) from error

    def layer(self, cell: TuningCase) -> PreparedMoE:
        """The cell's layer with random weights, reused while cells have the same problem."""
        if self._layer is None or self._problem != cell.problem:
            self._layer = self._problem = self._inputs = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._layer = RandomLayer(cell.problem, self.device).experts.prepared(BACKEND, self.device)
            self._problem = cell.problem
        return self._layer

    def inputs(self, cell: TuningCase) -> _Inputs:
        """The cell's tokens and routings, and the expected result of the first."""
        if self._inputs is None or self._inputs.cell != cell:
            self._inputs = None
            self._inputs = _made(cell, self.layer(cell), self.distribution)
        return self._inputs


@dataclass(frozen=True)
class _Inputs:
    cell: TuningCase
    x: Tensor
    sets: list[RandomRouting]
    expected: Tensor


def _made(cell: TuningCase, layer: PreparedMoE, distribution: str) -> _Inputs:
    """Inputs, and the portable kernels' result, a few tokens of which are checked against the reference."""
    device = layer.device
    count = ROUTINGS[cell.tokens <= FEW_TOKENS]
    sets = routings(cell.problem, cell.tokens, distribution, count, device)
    # Results are checked on the first routing: on one of several ranks, one of few tokens may have no work.
    sets.sort(key=lambda routing: int((routing.ids < 0).sum()))
    x = tokens_of(cell.problem, cell.tokens, device)
    expected = run_with(layer, x, sets[0].ids, sets[0].weights, launch_for(layer.problem, cell.tokens))
    rows = sorted({round(i * (cell.tokens - 1) / (JUDGED_TOKENS - 1)) for i in range(JUDGED_TOKENS)})
    reference = RandomLayer(cell.problem, device).reference(x, sets[0], rows)
    judged = check(expected[rows], reference, tolerance_for(cell.problem))
    if not judged.ok:
        raise CheckFailed(
            f"the portable kernels are wrong for {cell}: they differ from the reference by {judged.rms:.1e}",
            hint="nothing can be checked against them; report it",
        )
    return _Inputs(cell, x, sets, expected)


def _poison(layer: PreparedMoE, tokens: int) -> None:
    """Fills the memory that the next allocations reuse with NaN."""
    problem = layer.problem
    rows = tokens * problem.top_k
    for width in (problem.dims.intermediate, 2 * problem.dims.intermediate, problem.dims.hidden):
        torch.full((rows, width), math.nan, dtype=torch.bfloat16, device=layer.device)


def broken(error: RuntimeError, launch: Launch) -> Exception:
    """`error` itself, or DeviceBroken if the GPU can no longer be used."""
    text = str(error)
    if any(words in text for words in BROKEN):
        return DeviceBroken(
            f"the {launch.family} kernels broke the device: {text.splitlines()[0][:160]}",
            hint="run the same command again: it goes on behind that launch",
        )
    return error
