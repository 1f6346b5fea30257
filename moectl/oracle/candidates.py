"""Every backend of a route as judged candidates, in the order in which the engine asks."""

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
from .route import DECLARED_ACT, RANKED_ACT, Route

Judged = tuple[tuple[Candidate, ...], tuple[str, ...]]
"""Candidates, and what to say about how the list came about."""


def candidates(ask: SupportQuery, policy: Policy, route: Route, name: str | None) -> Judged:
    """Every candidate in order, judged, for the request `name` or for the automatic choice."""
    ignored: tuple[str, ...] = ()
    if route.ignores(name):
        ignored = (f"{policy.name} ignores the request for {name} here",)
    if route.assigned:
        note = f"{policy.name} assigns the backend of {route.name} without checking the others"
        return _assigned(ask, policy, route), (note, *ignored)
    if name and not ignored:
        asked, out = requested(ask, route, name), route.left_out(ask, by_name=True)
        return _judged(ask, policy, route, asked, name, left_out=out), ()
    ranking, notes = route.ranking(ask), (*ignored, *route.moved(ask))
    demand = route.demand(ask)
    if demand is not None:
        notes = (*notes, demand.why)
        demanded = requested(ask, route, demand.name)
        if not demand.falls_back:
            return _judged(ask, policy, route, demanded, demand.name), notes
        ranking = (*demanded, *(backend for backend in ranking if backend not in demanded))
    found = _judged(ask, policy, route, ranking, None, left_out=route.left_out(ask))
    extra = _judged(ask, policy, route, route.on_request, None, len(found), _BY_NAME_ONLY)
    return (*found, *extra), notes


_BY_NAME_ONLY = Verdict("order", "policy", "in the automatic order", "only when asked for by name", False)


def requested(ask: SupportQuery, route: Route, name: str) -> tuple[Backend, ...]:
    """Backends that a request means here; empty when the route does not know the name."""
    twins = dict(route.twins) if ask.batched else {}
    return tuple(twins.get(backend, backend) for backend in route.meant(name, ask))


def _filtered(
    ask: SupportQuery, route: Route, backends: Iterable[Backend], name: str | None
) -> list[Backend]:
    """Backends in the order of the activation filter; those it drops are left out.

    With a declared activation format: backends that compute with it, then those with 16-bit
    activations. Without one: 16-bit ones, unless there are none or the request keeps all.
    """
    backends = list(backends)
    wide = [b for b in backends if b.follows_declared or b.act == A16]
    if ask.declared != A16:
        matching = [b for b in backends if b.follows_declared or act_key(b.act) == act_key(ask.declared)]
        return matching + [b for b in wide if b not in matching]
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
    """Every variant of `backends`, judged, in the route's order, dropped ones last."""
    kept = _filtered(ask, route, backends, name) if route.act == RANKED_ACT else list(backends)
    out = left_out or {}
    kept = [backend for backend in kept if backend not in out]
    found: list[Candidate] = []
    for backend in (*kept, *(b for b in backends if b not in kept)):
        act = _act(ask, route, backend)
        asked = ask if act == ask.act else replace(ask, act=act)
        more = () if extra is None else (extra,)
        if backend in out:
            more = (*more, Verdict("order", "policy", "in the automatic order", out[backend], False))
        elif backend not in kept:
            more = (*more, _dropped(ask, backend))
        dims = _dims(asked, policy, route, backend)
        for variant in backend.variants:
            found.append(
                Candidate(
                    backend=backend,
                    variant=variant,
                    rank=start + len(found),
                    verdicts=(*judge(asked, variant), *more),
                    dims=dims,
                    layout=backend.form(asked).layout,
                    engine_name=backend.engine_name,
                )
            )
    return tuple(found)


def _act(ask: SupportQuery, route: Route, backend: Backend) -> str:
    """Key of the activation format that `backend` is asked to compute with."""
    follows = backend.follows_declared or route.act == DECLARED_ACT
    return act_key(ask.declared if follows else backend.act)


def _dropped(ask: SupportQuery, backend: Backend) -> Verdict:
    wanted = "16-bit activations, as the checkpoint declares none"
    if ask.declared != A16:
        wanted = f"{act_key(ask.declared)} or 16-bit activations"
    return Verdict("activation filter", "policy", wanted, act_key(backend.act), False, "filtered")


def _assigned(ask: SupportQuery, policy: Policy, route: Route) -> tuple[Candidate, ...]:
    """The method's own table: the first row that fits the device is taken, most without being asked."""
    found: list[Candidate] = []
    taken = False
    for row in route.assigned:
        asked = replace(ask, act=_act(ask, route, row.backend))
        verdicts = judge(asked, row.variant)
        serves = not row.asks or all(verdict.holds for verdict in verdicts)
        takes = not taken and serves and row.fits(ask.device)
        taken = taken or takes
        if not takes and serves:
            elsewhere = Verdict("order", "policy", "assigned on this device", "assigned elsewhere", False)
            verdicts = (*verdicts, elsewhere)
        found.append(
            Candidate(
                backend=row.backend,
                variant=row.variant,
                rank=len(found),
                verdicts=verdicts,
                dims=_dims(asked, policy, route, row.backend),
                layout=row.backend.form(asked).layout,
                engine_name=row.engine_name,
                assigned=takes,
            )
        )
    return tuple(found)


def exchanged(ask: SupportQuery, policy: Policy) -> int | None:
    """Hidden size after the exchange kernels' rounding; None when they cannot carry it."""
    hidden = ask.problem.dims.hidden
    sizes = policy.exchange_sizes.get(ask.exchange)
    return hidden if sizes is None else sizes.round(hidden)


def carried(ask: SupportQuery, policy: Policy) -> Dims:
    """Sizes with the padding that the exchange and the method's slicing need."""
    dims = ask.problem.dims
    return Dims(
        dims.hidden,
        ask.sliced or dims.intermediate,
        exchanged(ask, policy) or dims.hidden,
        dims.intermediate,
    )


def _dims(ask: SupportQuery, policy: Policy, route: Route, backend: Backend) -> Dims:
    """Sizes with padding: first what the exchange carries, then what the backend wants."""
    before = carried(ask, policy)
    if not route.rounds:
        return before
    known = ask if route.rounds_by_activation else replace(ask, activation="")
    padded = backend.align(known).apply(Dims(before.padded_hidden, before.padded_intermediate))
    return replace(before, padded_hidden=padded.padded_hidden, padded_intermediate=padded.padded_intermediate)
