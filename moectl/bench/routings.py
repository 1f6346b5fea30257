"""Routings of a case: drawn at random, read from a trace, or chosen by the layer's own router."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError
from ..files.safe_reading import open_given, unreadable
from ..files.strict_json import parse_value
from ..kernels.layer_inputs import check_ids, check_tokens, inputs_from, no_bias, random_logits
from ..kernels.routing import route_by
from ..layer.experts import ExpertLayer
from ..problem.moe_problem import MAX_TOKENS, MoEProblem
from ..run.workload import load_tensors, random_token_ids
from ..seeds import seed_of
from .settings import ROUTER, TRACE, BenchSettings

LARGEST_WEIGHT = 1e30
"""Largest absolute value of a weight in a trace: in fp32 sums of them are finite."""

LONGEST_LINE = 1 << 16
"""Longest line of a trace, in characters."""

UNSELECTED_LOGIT = -1e4
"""Logit of experts that are not selected."""


@dataclass(frozen=True)
class BenchRouting:
    """One routing, on any device.

    Attributes:
        ids: ``[tokens, top_k]`` int32, numbered over all of the layer's experts.
        weights: ``[tokens, top_k]`` fp32.
        logits: ``[tokens, experts]`` fp32.
        x: ``[tokens, hidden]`` that were routed; None if any tokens will do.
        agrees: ids and weights follow from the logits, so that kernels that route by themselves compute the
            same.
    """

    ids: Tensor
    weights: Tensor
    logits: Tensor
    x: Tensor | None = None
    agrees: bool = True


RoutingSource = Callable[[int, int], list[BenchRouting]]
"""(tokens, count) -> `count` routings of `tokens` tokens each."""


def routing_of(
    name: str, layer: ExpertLayer, settings: BenchSettings, device: torch.device = torch.device("cpu")
) -> RoutingSource:
    """The source of the routings called `name`; random logits are drawn on the CPU and routed on `device`.

    Raises UsageError if the layer has no router, a trace is too short or has other experts, or a file
    cannot be read.
    """
    if name == ROUTER:
        return _router_source(layer, settings)
    if name.startswith(TRACE):
        return _trace_source(Path(name[len(TRACE) :]), layer.problem)
    return lambda tokens, count: [
        _random_routing(layer.problem, tokens, name, seed_of("routing", settings.seed, i), device)
        for i in range(count)
    ]


def _random_routing(
    problem: MoEProblem, tokens: int, distribution: str, seed: int, device: torch.device
) -> BenchRouting:
    generator = torch.Generator().manual_seed(seed)
    return _routed_by_logits(problem, random_logits(problem, tokens, distribution, generator).to(device))


def _routed_by_logits(problem: MoEProblem, logits: Tensor) -> BenchRouting:
    """The routing that follows from `logits` alone, without a router's bias, table or factors."""
    bias = no_bias(problem)
    inputs = inputs_from(problem, logits, logits, None if bias is None else bias.to(logits.device))
    return BenchRouting(inputs.ids, inputs.weights, logits, agrees=_follows_from_logits(problem))


def _follows_from_logits(problem: MoEProblem) -> bool:
    """Whether logits and a bias determine ids and weights; a table or factors per expert prevent it."""
    return not (problem.routing.hashed or problem.routing.expert_scale)


def _router_source(layer: ExpertLayer, settings: BenchSettings) -> RoutingSource:
    router, problem = layer.router, layer.problem
    if router is None:
        raise UsageError(
            "the layer has no router",
            hint="give a checkpoint with its router, or another --routing",
        )
    if problem.model_hidden != problem.dims.hidden:
        raise UsageError(
            f"the router takes tokens of width {problem.model_hidden}, its experts of {problem.dims.hidden}",
            hint="give another --routing",
        )
    stored = _read_tokens(Path(settings.input), problem) if settings.input else None

    def source(tokens: int, count: int) -> list[BenchRouting]:
        routings = []
        for i in range(count):
            if stored is None:
                generator = torch.Generator().manual_seed(seed_of("tokens", settings.seed, i))
                x = torch.randn(tokens, problem.dims.hidden, generator=generator)
            else:
                x = _window(stored, tokens, i, f"--input {settings.input}")
            token_ids = random_token_ids(router, tokens, settings.seed, i)
            ids, weights, logits = route_by(router, x, problem, token_ids)
            routings.append(BenchRouting(ids, weights, logits, x, _follows_from_logits(problem)))
        return routings

    return source


def _read_tokens(path: Path, problem: MoEProblem) -> Tensor:
    x = load_tensors(path, f"--input {path}").get("x")
    check_tokens(x, problem, f"x in --input {path}")
    assert x is not None
    return x.float()


def _window(rows: Tensor, tokens: int, number: int, what: str) -> Tensor:
    """The `number`-th run of `tokens` consecutive rows, wrapping around at the end."""
    if len(rows) < tokens:
        raise UsageError(
            f"{what} has {len(rows)} tokens, and {tokens} were requested",
            hint=f"request at most {len(rows)} with -m, or give a longer file",
        )
    return rows[(number * tokens + torch.arange(tokens)) % len(rows)]


def _trace_source(path: Path, problem: MoEProblem) -> RoutingSource:
    ids, weights = read_trace(path, problem)

    def source(tokens: int, count: int) -> list[BenchRouting]:
        routings = []
        for i in range(count):
            window_ids = _window(ids, tokens, i, f"trace {path}")
            window_weights = None if weights is None else _window(weights, tokens, i, f"trace {path}")
            routings.append(_traced_routing(window_ids, window_weights, problem))
        return routings

    return source


def _traced_routing(ids: Tensor, weights: Tensor | None, problem: MoEProblem) -> BenchRouting:
    """The routing of a trace, with logits from which it follows if there are such."""
    descending = torch.linspace(1.0, 0.5, problem.top_k).expand(ids.shape)
    logits = torch.full((len(ids), problem.experts), UNSELECTED_LOGIT).scatter_(1, ids.long(), descending)
    routed = _routed_by_logits(problem, logits)
    agrees = routed.agrees and weights is None and torch.equal(routed.ids, ids)
    if weights is None:
        weights = routed.weights if agrees else torch.full(ids.shape, problem.routing.scale / problem.top_k)
    return BenchRouting(ids, weights, logits, agrees=agrees)


def read_trace(path: Path, problem: MoEProblem) -> tuple[Tensor, Tensor | None]:
    """Expert ids ``[tokens, top_k]`` int32 of a trace, and their fp32 weights or None.

    A .safetensors file holds ``ids`` and optionally ``weights``; a .jsonl file has one token per line, a
    list of ids or an object with ``ids`` and optionally ``weights``. Every token has `top_k` different
    experts of the layer, and weights are finite.

    Raises UsageError if the file cannot be read or is not a trace of this layer.
    """
    ids, weights = _READERS.get(path.suffix.lower(), _refuse_suffix)(path)
    if ids.ndim != 2 or ids.shape[1] != problem.top_k or not len(ids):
        raise UsageError(
            f"ids in trace {path} must be [tokens, {problem.top_k}], of at least one token, "
            f"got {list(ids.shape)}",
            hint="a trace holds the experts of each token, as many as this layer's top-k",
        )
    if weights is not None and (
        weights.shape != ids.shape or weights.is_complex() or not bool(torch.isfinite(weights.float()).all())
    ):
        raise UsageError(f"weights in trace {path} must be finite numbers {list(ids.shape)}")
    check_ids(ids, problem, f"ids in trace {path}")
    return ids.int(), None if weights is None else weights.float()


def _refuse_suffix(path: Path) -> tuple[Tensor, Tensor | None]:
    raise UsageError(
        f"the suffix of trace {path} is not that of a trace", hint="give a .safetensors or .jsonl file"
    )


def _trace_tensors(path: Path) -> tuple[Tensor, Tensor | None]:
    tensors = load_tensors(path, f"trace {path}")
    if "ids" not in tensors:
        raise UsageError(f"trace {path} must hold a tensor ids, got {', '.join(sorted(tensors)) or 'none'}")
    return tensors["ids"], tensors.get("weights")


def _trace_lines(path: Path) -> tuple[Tensor, Tensor | None]:
    ids: list[list[int]] = []
    weights: list[list[float]] = []
    kind = "a UTF-8 text file"
    try:
        with open_given(path, f"trace {path}", kind) as opened, TextIOWrapper(opened, "utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), ""), 1):
                if number > MAX_TOKENS:
                    raise UsageError(f"trace {path} has more than {MAX_TOKENS} tokens")
                token_ids, token_weights = _token(line, f"line {number} of trace {path}")
                ids.append(token_ids)
                if token_weights is not None:
                    weights.append(token_weights)
    except UnicodeDecodeError as error:
        raise unreadable(f"trace {path}", path, error, kind) from error
    if weights and len(weights) != len(ids):
        raise UsageError(
            f"trace {path} has weights for {len(weights)} of {len(ids)} tokens, expected all or none"
        )
    lengths = set(map(len, ids)) | set(map(len, weights))
    if len(lengths) > 1:
        raise UsageError(f"tokens of trace {path} have different numbers of experts: {sorted(lengths)}")
    return torch.tensor(ids, dtype=torch.long), torch.tensor(weights) if weights else None


def _token(line: str, where: str) -> tuple[list[int], list[float] | None]:
    """Ids of one line, and weights if it has some."""
    data = parse_value(line, where, UsageError)
    ids, weights = (data.get("ids"), data.get("weights")) if isinstance(data, dict) else (data, None)
    if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 1 << 31 for i in ids):
        raise UsageError(f"{where} must be a list of expert ids, or an object with ids")
    if weights is not None and not (isinstance(weights, list) and all(map(_is_weight, weights))):
        raise UsageError(f"{where}: weights must be a list of numbers of at most {LARGEST_WEIGHT:g}")
    return ids, weights


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_WEIGHT


_READERS = {".safetensors": _trace_tensors, ".jsonl": _trace_lines}


def warm_share(sets: Sequence[Sequence[int]], copies: int, expert_bytes: int, cache: int) -> float:
    """The share of the weights read that a cache of `cache` bytes may still hold from earlier calls.

    `sets` are the active experts of each call; calls cycle through `copies` copies of the weights and start
    with a flushed cache. The cache is modelled as LRU with whole experts as entries.

    Example:
        >>> warm_share([[0, 1], [1, 2]], copies=1, expert_bytes=10, cache=20)
        0.25
    """
    room = cache // max(1, expert_bytes)
    cached: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = reads = 0
    for number, experts in enumerate(sets):
        for expert in experts:
            entry = (number % copies, expert)
            reads += 1
            hits += entry in cached
            cached[entry] = None
            cached.move_to_end(entry)
            while len(cached) > room:
                cached.popitem(last=False)
    return hits / reads if reads else 0.0
