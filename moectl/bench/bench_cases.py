"""One cell: a layer, a routing and a number of tokens, and the inputs and the right result that all share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.layer_inputs import LayerInputs
from ..kernels.reference import moe_reference
from ..kernels.roofline import work_of
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
"""Calls in a graph, and fewer of them above so many tokens."""

CPU_SETS = 3
"""Routings that calls on a CPU take in turn."""

CHECKED_TOKENS = 32
"""Tokens whose result is compared with the reference, of all calls together, but at least one of each; the
others are checked to be finite."""

STILL_COLD = 0.05
"""Largest part of the weights that may be found in the cache by calls that count as cold."""

CACHES = 16
"""Times the cache that the copies of a layer fill together: a cache that does not forget the oldest first
would else serve a part of every call."""

MOST_COPIES = MANY_SETS
"""With a copy for each call none finds anything of another's."""


@dataclass(frozen=True)
class BenchCase:
    """A number of tokens under a routing.

    Attributes:
        routing, tokens: of the row.
        calls: how many, of different routings, are timed together.
        copies: of the weights, that calls use in turn.
        warm_share: what of the weights may be in the cache all the same.
    """

    routing: str
    tokens: int
    calls: int
    copies: int = 1
    warm_share: float = 0.0

    def caches(self, settings: BenchSettings, device: torch.device) -> str:
        """How cold the weights are, in words."""
        if settings.warm:
            return "warm"
        if device.type != "cuda":
            return "cold: flushed before each call"
        if self.calls == 1:
            return "cold: one call, flushed before it"
        of = f" on {self.copies} copies of the weights" if self.copies > 1 else ""
        rest = f", at most {self.warm_share:.0%} warm" if self.warm_share >= 0.005 else ""
        return f"cold: {self.calls} calls{of}, flushed before them{rest}"


def plan_cells(
    target: BenchTarget,
    routings: dict[str, Sets],
    settings: BenchSettings,
    device: torch.device,
    room: float,
) -> list[BenchCase]:
    """The cells of a layer, and how its calls stay cold: as many copies of the weights as that takes.

    `room` is the memory in bytes that copies for one backend may take. Calls that even several copies do
    not keep cold, as of layers that fit the cache, are timed one at a time.
    """
    wanted = [BenchCase(name, tokens, 1) for name in routings for tokens in settings.tokens]
    if device.type != "cuda" or settings.warm:
        return [replace(cell, calls=_calls(cell.tokens, device, settings.warm)) for cell in wanted]
    cache = last_level_cache(device)
    hits = {cell: _hits(target, routings[cell.routing], cell.tokens) for cell in wanted}
    most = max(1, min(MOST_COPIES, int(room / max(1, target.nbytes))))
    fewest = min(most, max(1, -(-CACHES * cache // max(1, target.nbytes))))
    shares = {
        copies: {
            cell: warm_share(hits[cell], copies, target.problem.expert_bytes(), cache) for cell in wanted
        }
        for copies in range(fewest, most + 1)
    }
    copies = next((n for n, found in shares.items() if max(found.values()) <= STILL_COLD), fewest)
    return [
        replace(cell, calls=len(hits[cell]), copies=copies, warm_share=share) if share <= STILL_COLD else cell
        for cell, share in shares[copies].items()
    ]


def _calls(tokens: int, device: torch.device, warm: bool) -> int:
    if device.type != "cuda":
        return 1 if warm else CPU_SETS
    return MANY_SETS if tokens <= FEW_ABOVE else FEW_SETS


def _hits(target: BenchTarget, sets: Sets, tokens: int) -> list[list[int]]:
    """The experts here that each call of a cell hits."""
    calls = _calls(tokens, torch.device("cuda"), warm=False)
    return [
        torch.unique(ids[ids >= 0]).tolist()
        for ids in (target.experts.local_ids(r.ids) for r in sets(tokens, calls))
    ]


@dataclass(frozen=True)
class CaseInputs:
    """A cell's inputs on the device, and what the reference makes of some tokens of each call.

    Attributes:
        inputs: of each call, ids counted from the first expert here.
        bias: the router's, for kernels that choose experts by themselves; None where there is none.
        work: of a call, the mean.
        samples: of each call the tokens that are compared, and `expected` ``[len(sample), hidden]`` fp32.
        agrees: ids follow from the logits (`Routed.agrees`).
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
    """The inputs of `cell`; in a warm bench every call has the same. Without `judged` nothing is expected."""
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
    samples = [one.to(device) for one in spread(cell.tokens, len(inputs))]
    chosen = list(zip(inputs, samples, strict=True))
    x, ids, weights = (
        torch.cat([getattr(one, name)[some] for one, some in chosen]) for name in ("x", "ids", "weights")
    )
    reference = experts_on(target.experts, device)
    expected = moe_reference(x, ids, weights, reference, problem) if judged else x.float()
    parts = torch.split(expected, [len(some) for some in samples])
    router = target.experts.router
    bias = None
    if problem.routing.correction_bias:
        own = cell.routing == "router" and router is not None and router.correction_bias is not None
        bias = router.correction_bias if own and router else torch.zeros(problem.experts)
        assert bias is not None
        bias = bias.to(device).float()
    works = [work_of(problem, one.ids) for one in inputs[:distinct]]
    return CaseInputs(inputs, bias, mean_work(works), samples, parts, all(routed.agrees for routed in drawn))


def mean_work(works: Sequence[LayerWork]) -> LayerWork:
    """The average over routings, which is what a time averaged over routings has to be held against."""
    n = len(works)
    return LayerWork(
        sum(w.weight_bytes for w in works) // n,
        sum(w.activation_bytes for w in works) // n,
        sum(w.flops for w in works) // n,
        sum(w.experts for w in works) / n,
    )


def spread(tokens: int, calls: int) -> list[Tensor]:
    """The tokens of each call that are compared: in turn along the batch, its first and last among them."""
    each = min(tokens, -(-CHECKED_TOKENS // calls))
    places = torch.linspace(0, tokens - 1, each * calls).round().long()
    return [torch.unique(places[call::calls]) for call in range(calls)]


@dataclass(frozen=True)
class CheckedOutputs:
    """The outputs of all calls against the reference.

    Attributes:
        check: of the compared tokens together; `worst_token` is one of call `call`.
        tokens: how many were compared.
    """

    check: CheckResult
    call: int
    tokens: int


def judge(outputs: Sequence[Tensor], case: CaseInputs, tolerance: Tolerance) -> CheckedOutputs:
    """Samples of all `outputs`, which are of the last calls; it fails with a value that is not finite."""
    first = len(case.inputs) - len(outputs)
    samples, expected = case.samples[first:], case.expected[first:]
    places = [(call, int(t)) for call, some in enumerate(samples, first) for t in some]
    for call, y in enumerate(outputs, first):
        bad = torch.nonzero(~torch.isfinite(y).all(1)).flatten()
        if len(bad):
            nan = float("nan")
            return CheckedOutputs(
                CheckResult(nan, nan, int(bad[0]), nan, tolerance, False), call, len(places)
            )
    got = torch.cat([y[some] for y, some in zip(outputs, samples, strict=True)])
    result = check(got, torch.cat(list(expected)), tolerance)
    call, token = places[result.worst_token]
    return CheckedOutputs(replace(result, worst_token=token), call, len(places))
