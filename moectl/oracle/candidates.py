"""Every backend of a route as checked candidates, in the engine's priority order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..problem.moe_problem import Dims
from ..problem.schemes import A16
from .backend import Backend, SupportQuery
from .checks import Verdict, judge
from .decision import Candidate
from .format_keys import act_key
from .policy import Policy
from .registry import versioned
from .route import DECLARED_ACT, MATCHED_ACT, OWN_ACT, RANKED_ACT, Assignment, Route

Judged = tuple[tuple[Candidate, ...], tuple[str, ...]]
"""Candidates, and notes on how the list was made."""


def candidates(ask: SupportQuery, policy: Policy, route: Route, name: str | None) -> Judged:
    """Every candidate with its verdicts, in priority order, for the request `name` (None: automatic)."""
    ignored: tuple[str, ...] = ()
    if route.ignores(name):
        ignored = (f"{versioned(policy.name)} ignores the request for {name} here",)
    if route.assigned:
        note = f"{versioned(policy.name)} assigns the backend of {route.name} without checking the others"
        return _assigned(ask, policy, route, route.assigned), (note, *ignored)
    if name and not ignored:
        backends, excluded = requested(ask, route, name), route.left_out(ask, by_name=True)
        if backends and route.warned_fallbacks:
            backends = (*backends, *(b for b in route.ranking(ask) if b not in backends))
        return _judged(ask, policy, route, backends, name, left_out=excluded), ()
    ranking, notes = route.ranking(ask), (*ignored, *route.moved(ask))
    demand = route.switch_request(ask)
    if demand is not None:
        notes = (*notes, demand.why)
        demanded = requested(ask, route, demand.name)
        if not demand.falls_back:
            return _judged(ask, policy, route, demanded, demand.name), notes
        ranking = (*demanded, *(backend for backend in ranking if backend not in demanded))
    ranked = _judged(ask, policy, route, ranking, None, left_out=route.left_out(ask))
    if route.last_resorts and not any(candidate.usable for candidate in ranked):
        ranked = _with_last_resorts(ask, policy, route, ranked)
    if route.fallbacks and not any(candidate.usable for candidate in ranked):
        rows = tuple(row for row in route.fallbacks if row.fits(ask.device))[:1]
        ranked = (*ranked, *_assigned(ask, policy, route, rows, len(ranked)))
    on_request = _judged(ask, policy, route, route.on_request, None, len(ranked), _BY_NAME_ONLY)
    return (*ranked, *on_request), notes


def _with_last_resorts(
    ask: SupportQuery, policy: Policy, route: Route, ranked: tuple[Candidate, ...]
) -> tuple[Candidate, ...]:
    """`ranked`, none of which is usable, with the route's last resorts after those that were asked."""
    resorts = tuple(backend for backend in route.last_resorts if backend.on(ask.device.platform))
    judged = _judged(ask, policy, replace(route, act=OWN_ACT), resorts, None)
    asked = [candidate for candidate in ranked if in_order(candidate)]
    others = [candidate for candidate in ranked if not in_order(candidate)]
    placed = (*asked, *(replace(candidate, last_resort=True) for candidate in judged), *others)
    return tuple(replace(candidate, rank=rank) for rank, candidate in enumerate(placed, 1))


def in_order(candidate: Candidate) -> bool:
    """True when the engine asks a candidate: it is neither excluded nor filtered out."""
    return all(verdict.question not in ("order", "activation filter") for verdict in candidate.failed)


_BY_NAME_ONLY = Verdict("order", "policy", "in the automatic order", "only when asked for by name", False)


def requested(ask: SupportQuery, route: Route, name: str) -> tuple[Backend, ...]:
    """Backends that a request selects here; empty when the route does not know the name."""
    twins = dict(route.batched_twins) if ask.batched else {}
    return tuple(twins.get(backend, backend) for backend in route.requested_backends(name, ask))


def _filtered(
    ask: SupportQuery, route: Route, backends: Iterable[Backend], name: str | None
) -> list[Backend]:
    """Backends that pass the activation filter, in its order.

    With a declared activation format: backends that use it, then those with 16-bit activations if the route
    has `RANKED_ACT`.
    Without one: those with 16-bit activations, unless there are none or the request keeps all.
    """
    backends = list(backends)
    wide = [b for b in backends if b.follows_declared or b.act == A16]
    if ask.declared != A16:
        matching = [b for b in backends if b.follows_declared or act_key(b.act) == act_key(ask.declared)]
        return matching + [b for b in wide if b not in matching and route.act == RANKED_ACT]
    if not wide or name in route.unfiltered:
        return backends
    return wide


def _judged(
    ask: SupportQuery,
    policy: Policy,
    route: Route,
    backends: tuple[Backend, ...],
    name: str | None,
    start: int = 0,
    extra: Verdict | None = None,
    left_out: dict[Backend, str] | None = None,
) -> tuple[Candidate, ...]:
    """Every variant of `backends` with its verdicts, in priority order, excluded ones last."""
    kept = _filtered(ask, route, backends, name) if route.act in (RANKED_ACT, MATCHED_ACT) else list(backends)
    excluded = left_out or {}
    kept = [backend for backend in kept if backend not in excluded]
    judged: list[Candidate] = []
    for backend in (*kept, *(b for b in backends if b not in kept)):
        act = _act(ask, route, backend)
        query = ask if act == ask.act else replace(ask, act=act)
        more = () if extra is None else (extra,)
        if backend in excluded:
            more = (*more, Verdict("order", "policy", "in the automatic order", excluded[backend], False))
        elif backend not in kept:
            more = (*more, _dropped(ask, route, backend))
        dims = _dims(query, policy, route, backend)
        for variant in backend.variants:
            judged.append(
                Candidate(
                    backend=backend,
                    variant=variant,
                    rank=start + len(judged) + 1,
                    verdicts=(*judge(query, variant), *more),
                    dims=dims,
                    layout=backend.form(query).layout,
                    engine_name=backend.engine_name,
                )
            )
    return tuple(judged)


def _act(ask: SupportQuery, route: Route, backend: Backend) -> str:
    """Key of the activation format that `backend` would use."""
    follows = backend.follows_declared or route.act == DECLARED_ACT
    return act_key(ask.declared if follows else backend.act)


def _dropped(ask: SupportQuery, route: Route, backend: Backend) -> Verdict:
    wanted = "16-bit activations, as the checkpoint declares none"
    if ask.declared != A16:
        also = " or 16-bit" if route.act == RANKED_ACT else ""
        wanted = f"{act_key(ask.declared)}{also} activations"
    return Verdict("activation filter", "policy", wanted, act_key(backend.act), False, "filtered")


def _assigned(
    ask: SupportQuery, policy: Policy, route: Route, rows: tuple[Assignment, ...], start: int = 0
) -> tuple[Candidate, ...]:
    """The method's assignments: the first row for the device is taken, in most cases without checks."""
    assigned: list[Candidate] = []
    taken = False
    for row in rows:
        query = replace(ask, act=_act(ask, route, row.backend))
        verdicts = judge(query, row.variant)
        passes = not row.asks or all(verdict.holds for verdict in verdicts)
        takes = not taken and passes and row.fits(ask.device)
        taken = taken or takes
        if not takes and passes:
            elsewhere = Verdict("order", "policy", "assigned on this device", "assigned elsewhere", False)
            verdicts = (*verdicts, elsewhere)
        assigned.append(
            Candidate(
                backend=row.backend,
                variant=row.variant,
                rank=start + len(assigned) + 1,
                verdicts=verdicts,
                dims=_dims(query, policy, route, row.backend),
                layout=row.backend.form(query).layout,
                engine_name=row.engine_name,
                assigned=takes,
            )
        )
    return tuple(assigned)


def exchanged(ask: SupportQuery, policy: Policy) -> int | None:
    """Hidden size as padded by the all2all kernels; None if they do not support it."""
    hidden = ask.problem.dims.hidden
    sizes = policy.exchange_sizes.get(ask.exchange)
    return hidden if sizes is None else sizes.round(hidden)


def carried(ask: SupportQuery, policy: Policy) -> Dims:
    """Sizes with the padding of the all2all kernels and of the method's shards."""
    dims = ask.problem.dims
    return Dims(
        dims.hidden,
        ask.sliced or dims.intermediate,
        exchanged(ask, policy) or dims.hidden,
        dims.intermediate,
    )


def _dims(ask: SupportQuery, policy: Policy, route: Route, backend: Backend) -> Dims:
    """Padded sizes: first for the all2all kernels, then for the backend."""
    before = carried(ask, policy)
    if not route.rounds:
        return before
    query = ask if route.rounds_by_activation else replace(ask, activation="")
    padded = backend.align(query).apply(Dims(before.padded_hidden, before.padded_intermediate))
    return replace(before, padded_hidden=padded.padded_hidden, padded_intermediate=padded.padded_intermediate)
