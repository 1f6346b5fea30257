"""Cases of a bench: a routing and a number of tokens, with the inputs and expected results of a layer."""

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
from .routings import RoutingSource, warm_share
from .settings import BenchSettings

MANY_CALLS, FEW_CALLS, MANY_UP_TO = 16, 4, 64
"""Calls in a graph: `MANY_CALLS` up to `MANY_UP_TO` tokens, `FEW_CALLS` above."""

CPU_CALLS = 3
"""Routings that calls on a CPU cycle through."""

CHECKED_TOKENS = 32
"""Tokens compared with the reference, summed over the calls of a case, at least one per call. The others must
only be finite."""

MAX_WARM_SHARE = 0.05
"""Largest share of the weights that calls may find in the cache and still count as cold."""

CACHES_FILLED = 16
"""Cache sizes that the copies of a layer fill together: a cache with a policy other than LRU would otherwise
hold part of every call's weights."""

MAX_COPIES = MANY_CALLS
"""Most copies of a layer: with one per call, no call finds another one's weights in the cache."""


@dataclass(frozen=True)
class BenchCase:
    """A number of tokens under a routing.

    Attributes:
        routing, tokens: as in `BenchRow`.
        calls: number of calls, with different routings, that are timed together.
        copies: copies of the weights that the calls cycle through.
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
        warm = f", at most {self.warm_share:.0%} warm" if self.warm_share >= 0.005 else ""
        return f"cold: {self.calls} calls{on_copies}, flushed before them{warm}"


def plan_cases(
    target: BenchTarget,
    routings: dict[str, RoutingSource],
    settings: BenchSettings,
    device: torch.device,
    memory: float,
) -> list[BenchCase]:
    """The cases of a layer, with as many copies of its weights as it takes to keep calls cold.

    `memory` is the number of bytes that the copies for one backend may take. If even several copies do not
    keep the calls of a case cold, as with layers that fit into the cache, its calls are timed one at a time.
    """
    cases = [BenchCase(name, tokens, 1) for name in routings for tokens in settings.tokens]
    if device.type != "cuda" or settings.warm:
        return [replace(case, calls=_call_count(case.tokens, device, settings.warm)) for case in cases]
    cache = last_level_cache(device)
    active = {case: _active_experts(target, routings[case.routing], case.tokens) for case in cases}
    most = max(1, min(MAX_COPIES, int(memory / max(1, target.nbytes))))
    fewest = min(most, max(1, -(-CACHES_FILLED * cache // max(1, target.nbytes))))
    shares = {
        copies: {
            case: warm_share(active[case], copies, target.problem.expert_bytes(), cache) for case in cases
        }
        for copies in range(fewest, most + 1)
    }
    copies = next((n for n, warm in shares.items() if max(warm.values()) <= MAX_WARM_SHARE), fewest)
    return [
        replace(case, calls=len(active[case]), copies=copies, warm_share=share)
        if share <= MAX_WARM_SHARE
        else case
        for case, share in shares[copies].items()
    ]


def _call_count(tokens: int, device: torch.device, warm: bool) -> int:
    if device.type != "cuda":
        return 1 if warm else CPU_CALLS
    return MANY_CALLS if tokens <= MANY_UP_TO else FEW_CALLS


def _active_experts(target: BenchTarget, source: RoutingSource, tokens: int) -> list[list[int]]:
    """The experts of this rank that each call of a case activates."""
    calls = _call_count(tokens, torch.device("cuda"), warm=False)
    return [
        torch.unique(ids[ids >= 0]).tolist()
        for ids in (target.experts.local_ids(r.ids) for r in source(tokens, calls))
    ]


@dataclass(frozen=True)
class CaseInputs:
    """A case's inputs on the device, and the reference's result for some tokens of each call.

    Attributes:
        inputs: one per call, with ids numbered from the rank's first expert.
        bias: the router's correction bias, for kernels that route by themselves; or None.
        work: bytes and FLOPs of a call, the mean over the calls.
        samples: indices of the tokens of each call that are compared.
        expected: the reference's rows for `samples`, ``[len(sample), hidden]`` fp32 for each call.
        agrees: whether all ids follow from the logits (`BenchRouting.agrees`).
    """

    inputs: Sequence[LayerInputs]
    bias: Tensor | None
    work: LayerWork
    samples: Sequence[Tensor]
    expected: Sequence[Tensor]
    agrees: bool


def make_case(
    target: BenchTarget,
    case: BenchCase,
    source: RoutingSource,
    settings: BenchSettings,
    device: torch.device,
    with_reference: bool = True,
) -> CaseInputs:
    """The inputs of `case`, and the reference's results unless `with_reference` is False.

    With `BenchSettings.warm` all calls share the same inputs.
    """
    problem, dtype = target.problem, MODEL_TORCH_DTYPES[target.problem.dtype]
    distinct = 1 if settings.warm else case.calls
    routings = source(case.tokens, distinct)
    generator = torch.Generator(device).manual_seed(seed_of("tokens", settings.seed, case.tokens))
    x = torch.randn(case.tokens, problem.dims.hidden, generator=generator, device=device).to(dtype)
    inputs = [
        LayerInputs(
            x if routed.x is None else routed.x.to(device).to(dtype),
            target.experts.local_ids(routed.ids).to(device).contiguous(),
            routed.weights.to(device),
            routed.logits.to(device),
        )
        for routed in routings
    ]
    inputs = inputs * (case.calls if settings.warm else 1)
    samples = [tokens.to(device) for tokens in sample_tokens(case.tokens, len(inputs))]
    sampled = list(zip(inputs, samples, strict=True))
    x, ids, weights = (
        torch.cat([getattr(call, name)[tokens] for call, tokens in sampled])
        for name in ("x", "ids", "weights")
    )
    reference = experts_on(target.experts, device)
    expected = moe_reference(x, ids, weights, reference, problem) if with_reference else x.float()
    expected_rows = torch.split(expected, [len(tokens) for tokens in samples])
    router = target.experts.router
    bias = None
    if problem.routing.correction_bias:
        by_router = case.routing == "router" and router is not None and router.correction_bias is not None
        bias = router.correction_bias if by_router and router else torch.zeros(problem.experts)
        assert bias is not None
        bias = bias.to(device).float()
    works = [work_of(problem, call.ids) for call in inputs[:distinct]]
    agrees = all(routed.agrees for routed in routings)
    return CaseInputs(inputs, bias, mean_work(works), samples, expected_rows, agrees)


def mean_work(works: Sequence[LayerWork]) -> LayerWork:
    """The mean over routings, to which a time averaged over routings is compared."""
    n = len(works)
    return LayerWork(
        sum(w.weight_bytes for w in works) // n,
        sum(w.activation_bytes for w in works) // n,
        sum(w.flops for w in works) // n,
        sum(w.assignments for w in works) / n,
        sum(w.experts for w in works) / n,
    )


def sample_tokens(tokens: int, calls: int) -> list[Tensor]:
    """The tokens of each call that are compared: spread over the batch, with its first and its last."""
    per_call = min(tokens, -(-CHECKED_TOKENS // calls))
    samples = torch.linspace(0, tokens - 1, per_call * calls).round().long()
    return [torch.unique(samples[call::calls]) for call in range(calls)]


@dataclass(frozen=True)
class CheckedOutputs:
    """The outputs of all calls, compared with the reference.

    Attributes:
        check: the verdict on the compared tokens.
        call: number of the call that the check's `worst_token` belongs to.
        tokens: number of tokens compared.
    """

    check: CheckResult
    call: int
    tokens: int


def check_outputs(outputs: Sequence[Tensor], case: CaseInputs, tolerance: Tolerance) -> CheckedOutputs:
    """Compares samples of `outputs`, those of the last calls, with the reference; NaN or infinity fails."""
    first = len(case.inputs) - len(outputs)
    samples, expected = case.samples[first:], case.expected[first:]
    compared = [(call, int(t)) for call, tokens in enumerate(samples, first) for t in tokens]
    for call, y in enumerate(outputs, first):
        nonfinite = torch.nonzero(~torch.isfinite(y).all(1)).flatten()
        if len(nonfinite):
            nan = float("nan")
            return CheckedOutputs(
                CheckResult(nan, nan, int(nonfinite[0]), nan, tolerance, False), call, len(compared)
            )
    got = torch.cat([y[tokens] for y, tokens in zip(outputs, samples, strict=True)])
    result = check(got, torch.cat(list(expected)), tolerance)
    call, token = compared[result.worst_token]
    return CheckedOutputs(replace(result, worst_token=token), call, len(compared))
