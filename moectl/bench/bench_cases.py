"""A case: a layer, a routing and a number of tokens, with the inputs and expected result of all backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.layer_inputs import LayerInputs, work_of
from ..kernels.reference import moe_reference
from ..kernels.timing.cold_calls import last_level_cache
from ..kernels.tolerance import CheckResult, Tolerance, check
from ..problem.roofline import LayerWork
from ..run.layer_variants import experts_on
from ..seeds import seed_of
from ..torch_dtypes import MODEL_TORCH_DTYPES
from .bench_targets import BenchTarget
from .routings import Sets, warm_share
from .settings import BenchSettings

MANY_SETS, FEW_SETS, FEW_ABOVE = 16, 4, 64
"""Calls in a graph: `MANY_SETS` up to `FEW_ABOVE` tokens, `FEW_SETS` above."""

CPU_SETS = 3
"""Routings that calls on a CPU cycle through."""

CHECKED_TOKENS = 32
"""Tokens compared with the reference, over all calls, but at least one per call; the others are only checked
to be finite."""

STILL_COLD = 0.05
"""Largest share of the weights that calls may find in the cache and still count as cold."""

CACHES = 16
"""Cache sizes that the copies of a layer fill together: a cache with a policy other than LRU would otherwise
hold part of every call's weights."""

MOST_COPIES = MANY_SETS
"""Most copies of a layer: with one per call, no call finds another one's weights in the cache."""


@dataclass(frozen=True)
class BenchCase:
    """A number of tokens under a routing.

    Attributes:
        routing, tokens: of the row.
        calls: calls with different routings that are timed together.
        copies: copies of the weights that calls cycle through.
        warm_share: largest share of the weights that may still be in the cache.
    """

    routing: str
    tokens: int
    calls: int
    copies: int = 1
    warm_share: float = 0.0

    def caches(self, settings: BenchSettings, device: torch.device) -> str:
        """How cold the weights are, as a phrase."""
        if settings.warm:
            return "warm"
        if device.type != "cuda":
            return "cold: flushed before each call"
        if self.calls == 1:
            return "cold: one call, flushed before it"
        on_copies = f" on {self.copies} copies of the weights" if self.copies > 1 else ""
        rest = f", at most {self.warm_share:.0%} warm" if self.warm_share >= 0.005 else ""
        return f"cold: {self.calls} calls{on_copies}, flushed before them{rest}"


def plan_cells(
    target: BenchTarget,
    routings: dict[str, Sets],
    settings: BenchSettings,
    device: torch.device,
    room: float,
) -> list[BenchCase]:
    """The cases of a layer, with as many copies of its weights as it takes to keep calls cold.

    `room` is the memory in bytes that copies for one backend may take. Calls that even several copies do
    not keep cold, such as those of layers that fit the cache, are timed one at a time.
    """
    cases = [BenchCase(name, tokens, 1) for name in routings for tokens in settings.tokens]
    if device.type != "cuda" or settings.warm:
        return [replace(cell, calls=_calls(cell.tokens, device, settings.warm)) for cell in cases]
    cache = last_level_cache(device)
    hits = {cell: _active_experts(target, routings[cell.routing], cell.tokens) for cell in cases}
    most = max(1, min(MOST_COPIES, int(room / max(1, target.nbytes))))
    fewest = min(most, max(1, -(-CACHES * cache // max(1, target.nbytes))))
    shares = {
        copies: {cell: warm_share(hits[cell], copies, target.problem.expert_bytes(), cache) for cell in cases}
        for copies in range(fewest, most + 1)
    }
    copies = next((n for n, warm in shares.items() if max(warm.values()) <= STILL_COLD), fewest)
    return [
        replace(cell, calls=len(hits[cell]), copies=copies, warm_share=share) if share <= STILL_COLD else cell
        for cell, share in shares[copies].items()
    ]


def _calls(tokens: int, device: torch.device, warm: bool) -> int:
    if device.type != "cuda":
        return 1 if warm else CPU_SETS
    return MANY_SETS if tokens <= FEW_ABOVE else FEW_SETS


def _active_experts(target: BenchTarget, sets: Sets, tokens: int) -> list[list[int]]:
    """The experts of this rank that each call of a case activates."""
    calls = _calls(tokens, torch.device("cuda"), warm=False)
    return [
        torch.unique(ids[ids >= 0]).tolist()
        for ids in (target.experts.local_ids(r.ids) for r in sets(tokens, calls))
    ]


@dataclass(frozen=True)
class CaseInputs:
    """A case's inputs on the device, and the reference's result for some tokens of each call.

    Attributes:
        inputs: one per call, with ids counted from the rank's first expert.
        bias: the router's correction bias, for kernels that route by themselves; or None.
        work: the mean over calls.
        samples: per call the tokens that are compared; `expected`: ``[len(sample), hidden]`` fp32.
        agrees: ids follow from the logits (`BenchRouting.agrees`).
    """

    inputs: Sequence[LayerInputs]
    bias: Tensor | None
    work: LayerWork
    samples: Sequence[Tensor]
    expected: Sequence[Tensor]
    agrees: bool


def make_case(
    target: BenchTarget,
    cell: BenchCase,
    sets: Sets,
    settings: BenchSettings,
    device: torch.device,
    judged: bool = True,
) -> CaseInputs:
    """The inputs of `cell` (a warm bench's calls share them); with the reference's result if `judged`."""
    problem, dtype = target.problem, MODEL_TORCH_DTYPES[target.problem.dtype]
    distinct = 1 if settings.warm else cell.calls
    drawn = sets(cell.tokens, distinct)
    generator = torch.Generator(device).manual_seed(seed_of("tokens", settings.seed, cell.tokens))
    x = torch.randn(cell.tokens, problem.dims.hidden, generator=generator, device=device).to(dtype)
    inputs = [
        LayerInputs(
            x if routed.x is None else routed.x.to(device).to(dtype),
            target.experts.local_ids(routed.ids).to(device).contiguous(),
            routed.weights.to(device),
            routed.logits.to(device),
        )
        for routed in drawn
    ]
    inputs = inputs * (cell.calls if settings.warm else 1)
    samples = [tokens.to(device) for tokens in spread(cell.tokens, len(inputs))]
    sampled = list(zip(inputs, samples, strict=True))
    x, ids, weights = (
        torch.cat([getattr(call, name)[tokens] for call, tokens in sampled])
        for name in ("x", "ids", "weights")
    )
    reference = experts_on(target.experts, device)
    expected = moe_reference(x, ids, weights, reference, problem) if judged else x.float()
    parts = torch.split(expected, [len(tokens) for tokens in samples])
    router = target.experts.router
    bias = None
    if problem.routing.correction_bias:
        by_router = cell.routing == "router" and router is not None and router.correction_bias is not None
        bias = router.correction_bias if by_router and router else torch.zeros(problem.experts)
        assert bias is not None
        bias = bias.to(device).float()
    works = [work_of(problem, call.ids) for call in inputs[:distinct]]
    return CaseInputs(inputs, bias, mean_work(works), samples, parts, all(routed.agrees for routed in drawn))


def mean_work(works: Sequence[LayerWork]) -> LayerWork:
    """The mean over routings, as a time averaged over routings must be compared with it."""
    n = len(works)
    return LayerWork(
        sum(w.weight_bytes for w in works) // n,
        sum(w.activation_bytes for w in works) // n,
        sum(w.flops for w in works) // n,
        sum(w.experts for w in works) / n,
    )


def spread(tokens: int, calls: int) -> list[Tensor]:
    """The tokens of each call that are compared: dealt out along the batch, including its first and last."""
    each = min(tokens, -(-CHECKED_TOKENS // calls))
    places = torch.linspace(0, tokens - 1, each * calls).round().long()
    return [torch.unique(places[call::calls]) for call in range(calls)]


@dataclass(frozen=True)
class CheckedOutputs:
    """The outputs of all calls against the reference.

    Attributes:
        check: over the compared tokens; `worst_token` belongs to call number `call`.
        tokens: number of tokens compared.
    """

    check: CheckResult
    call: int
    tokens: int


def judge(outputs: Sequence[Tensor], case: CaseInputs, tolerance: Tolerance) -> CheckedOutputs:
    """Checks the samples of `outputs`, those of the last calls; any non-finite value fails."""
    first = len(case.inputs) - len(outputs)
    samples, expected = case.samples[first:], case.expected[first:]
    places = [(call, int(t)) for call, tokens in enumerate(samples, first) for t in tokens]
    for call, y in enumerate(outputs, first):
        bad = torch.nonzero(~torch.isfinite(y).all(1)).flatten()
        if len(bad):
            nan = float("nan")
            return CheckedOutputs(
                CheckResult(nan, nan, int(bad[0]), nan, tolerance, False), call, len(places)
            )
    got = torch.cat([y[tokens] for y, tokens in zip(outputs, samples, strict=True)])
    result = check(got, torch.cat(list(expected)), tolerance)
    call, token = places[result.worst_token]
    return CheckedOutputs(replace(result, worst_token=token), call, len(places))
