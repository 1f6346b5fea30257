"""The rules of an older release, as the difference from those of the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..environment.variables import READ, REMOVED, Variable
from .backend import Backend, Capability, ExpertsClass, only
from .engine import Engine
from .name_history import ReleaseNames
from .policy import Policy
from .route import Assignment, Order, Route

Fields = Mapping[str, Any]
"""Fields of a record with their older values."""


@dataclass(frozen=True, slots=True)
class ClassChange:
    """What experts classes supported: the older values of fields of `Capability`.

    It applies to classes of these names; `of` narrows to backends by the engine's names. `renamed` is the
    older name of the class, `monolithic` whether it took router logits; empty and None: as now.
    """

    experts: tuple[str, ...]
    fields: Fields = field(default_factory=dict)
    of: frozenset[str] = frozenset()
    renamed: str = ""
    monolithic: bool | None = None

    def apply(self, backend: Backend, variant: ExpertsClass) -> ExpertsClass:
        """`variant` of `backend` as it was."""
        if variant.experts not in self.experts or (self.of and backend.engine_name not in self.of):
            return variant
        capability: Capability = replace(variant.capability, **self.fields)
        monolithic = variant.monolithic if self.monolithic is None else self.monolithic
        name = self.renamed or variant.experts
        return replace(variant, experts=name, capability=capability, monolithic=monolithic)


@dataclass(frozen=True, slots=True)
class RouteChange:
    """How methods chose: the older values of fields of `Route`.

    It applies to routes of these names, or to every route without any. Backends are meant by the engine's
    names.

    Attributes:
        fields: older values of fields of `Route`, before the changes below.
        without: backends that the method did not have.
        unranked: backends that it used on request only.
        last_resorts: backends that it asked when its order had none.
        unmoved: backends that its order did not move.
        orders: its priority order by backends' names, at the place of the order in `Route.orders`.
        names: the backends of a request; none for a request that it did not have.
        unasked: requests that used no other route.
        more: backends that only the older release had.
    """

    routes: tuple[str, ...] = ()
    fields: Fields = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    unranked: frozenset[str] = frozenset()
    unmoved: frozenset[str] = frozenset()
    unasked: frozenset[str] = frozenset()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last_resorts: tuple[str, ...] = ()
    orders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    more: tuple[Backend, ...] = ()

    def apply(self, route: Route) -> Route:
        """`route` as it was."""
        known = {backend.engine_name: backend for backend in (*route.backends(), *self.more)}
        route = replace(route, **self.fields)
        if self.orders:
            orders = list(route.orders)
            for place, ranked in self.orders.items():
                orders[place] = replace(orders[place], backends=tuple(known[name] for name in ranked))
            route = replace(route, orders=tuple(orders))
        requests = dict(route.names)
        for name, backends in self.names.items():
            requests.pop(name, None)
            if backends:
                requests[name] = tuple(known[backend] for backend in backends)
        gone = {known[name] for name in self.without if name in known}
        demoted = tuple(known[name] for name in sorted(self.unranked) if name in known)
        route = replace(
            route,
            orders=tuple(
                Order(tuple(b for b in order.backends if b not in demoted), order.where)
                for order in route.orders
            ),
            on_request=(*route.on_request, *(b for b in demoted if b not in route.on_request)),
            last_resorts=(*route.last_resorts, *(known[name] for name in self.last_resorts)),
            moves=tuple(move for move in route.moves if move.backend.engine_name not in self.unmoved),
            request_routes={
                name: other for name, other in route.request_routes.items() if name not in self.unasked
            },
        )
        route = replace(route, names=requests)
        return _mapped(route, dict[Backend, None].fromkeys(gone).get, gone) if gone else route


@dataclass(frozen=True, slots=True)
class Difference:
    """What to change in a release's rules for those of the release before it.

    Environment variables, the names of backends and exchanges, and the minimum versions of packages are those
    that the engine's history has.

    Attributes:
        version: the older release.
        classes, routes: in order; a later change sees what earlier ones made.
        without: experts classes that the older release did not have; a backend is gone with its last one.
        backends: by the engine's name, older values of fields of `Backend`.
        unknown_routes: routes that the older release did not have.
        only: routes that have rules; checkpoints of others are refused. Empty: all of them.
        split: by a route's name, another one that it had before that, made of it.
        policy: older values of other fields of `Policy`.
    """

    version: str
    classes: tuple[ClassChange, ...] = ()
    without: frozenset[str] = frozenset()
    backends: Mapping[str, Fields] = field(default_factory=dict)
    routes: tuple[RouteChange, ...] = ()
    unknown_routes: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    split: Mapping[str, Callable[[Route], Route]] = field(default_factory=dict)
    policy: Fields = field(default_factory=dict)

    def before(self, newer: Engine) -> Engine:
        """The older release of `newer`."""
        policy, history = newer.policy, newer.history
        names: dict[str, Any] = {}
        if history is not None:
            names = {
                "accepted_names": only(*history.backends.at(self.version)),
                "exchanges": policy.exchanges & history.exchanges.at(self.version),
                "variables": dict(self._variables(newer, history)),
            }
        older = replace(
            policy,
            name=f"{newer.family}-{self.version}",
            routes=self._routes(policy),
            complete=policy.complete or (f"{newer.family}=={newer.version}" if self.only else ""),
            **names,
            **self.policy,
        )
        required = history.requires.get(self.version, {}) if history else {}
        layouts = {form.layout for backend in older.backends() for form in backend.forms}
        return replace(
            newer,
            policy=older,
            repacking=tuple(
                row for row in newer.repacking if any(layout.startswith(row[0]) for layout in layouts)
            ),
            packages={
                name: replace(probe, oldest=required.get(probe.distribution, "")) if probe.oldest else probe
                for name, probe in newer.packages.items()
            },
        )

    def _variables(self, newer: Engine, history: ReleaseNames) -> Iterator[tuple[str, Variable]]:
        """The variables that the older release read, and those that were removed before it."""
        for name, row in newer.policy.variables.items():
            if history.variables.knows(name, self.version):
                deprecated = history.deprecated.knows(name, self.version)
                yield name, replace(row, status=READ, dropped="", deprecated=deprecated)
            elif name not in history.variables.spans:
                yield name, row
            elif gone := history.variables.dropped(name, self.version):
                yield name, replace(row, status=REMOVED, dropped=f"{newer.title} {gone}")

    def _routes(self, policy: Policy) -> tuple[Route, ...]:
        """The policy's routes with all changes; routes that shared a backend still share it."""
        rows = (route for route in policy.routes if route.name not in self.unknown_routes)
        rows = (route for route in rows if not self.only or route.name in self.only)
        changed = [made for route in rows for made in self._split(self._route(route))]
        made: dict[Backend, Backend | None] = {}
        for route in changed:
            for row in (route, *route.request_routes.values()):
                for backend in _named(row):
                    if backend not in made:
                        made[backend] = self._backend(backend)
        return tuple(_mapped(route, made.get, made) for route in changed)

    def _split(self, route: Route) -> tuple[Route, ...]:
        apart = self.split.get(route.name)
        return (apart(route), route) if apart else (route,)

    def _route(self, route: Route) -> Route:
        for change in self.routes:
            if not change.routes or route.name in change.routes:
                route = change.apply(route)
        asked = {name: self._route(other) for name, other in route.request_routes.items()}
        return replace(route, request_routes=asked)

    def _backend(self, backend: Backend) -> Backend | None:
        variants = [variant for variant in backend.variants if variant.experts not in self.without]
        for change in self.classes:
            variants = [change.apply(backend, variant) for variant in variants]
        fields = {"variants": tuple(variants), **self.backends.get(backend.engine_name, {})}
        if not fields["variants"]:
            return None
        return replace(backend, **fields)


def _named(route: Route) -> list[Backend]:
    """Every backend that a route mentions, in a fixed order."""
    found = [backend for order in route.orders for backend in order.backends]
    requests = (*route.names.values(), *route.adapter_names.values())
    found += [backend for named in requests for backend in named]
    found += [row.backend for row in (*route.assigned, *route.fallbacks)] + [
        *route.on_request,
        *route.last_resorts,
    ]
    found += [backend for pair in route.batched_twins for backend in pair]
    for move in route.moves:
        found += [backend for backend in (move.backend, move.before, move.after) if backend]
    return found + [backend for exclusion in route.exclusions for backend in exclusion.backends]


def _mapped(route: Route, to: Callable[[Backend], Backend | None], known: Iterable[Backend]) -> Route:
    """`route` with each of the `known` backends replaced, or left out where that is None."""
    mapped = frozenset(known)

    def one(backend: Backend | None) -> Backend | None:
        return to(backend) if backend is not None and backend in mapped else backend

    def kept(backends: Iterable[Backend]) -> tuple[Backend, ...]:
        return tuple(found for found in map(one, backends) if found is not None)

    def requests(names: Mapping[str, tuple[Backend, ...]]) -> dict[str, tuple[Backend, ...]]:
        found = {name: kept(backends) for name, backends in names.items()}
        return {name: backends for name, backends in found.items() if backends or not names[name]}

    def assignments(rows: Iterable[Assignment]) -> Iterator[Assignment]:
        for row in rows:
            backend = one(row.backend)
            if backend is not None:
                place = min(row.backend.variants.index(row.variant), len(backend.variants) - 1)
                yield replace(row, backend=backend, variant=backend.variants[place])

    moves = []
    for move in route.moves:
        backend, before, after = one(move.backend), one(move.before), one(move.after)
        anchored = (before is None, after is None) == (move.before is None, move.after is None)
        if backend is not None and anchored:
            moves.append(replace(move, backend=backend, before=before, after=after))
    twins = [(one(a), one(b)) for a, b in route.batched_twins]
    return replace(
        route,
        orders=tuple(Order(kept(order.backends), order.where) for order in route.orders),
        moves=tuple(moves),
        exclusions=tuple(
            replace(exclusion, backends=kept(exclusion.backends))
            for exclusion in route.exclusions
            if kept(exclusion.backends)
        ),
        assigned=tuple(assignments(route.assigned)),
        fallbacks=tuple(assignments(route.fallbacks)),
        on_request=kept(route.on_request),
        last_resorts=kept(route.last_resorts),
        names=requests(route.names),
        adapter_names=requests(route.adapter_names),
        batched_twins=tuple((a, b) for a, b in twins if a is not None and b is not None),
        request_routes={name: _mapped(other, to, mapped) for name, other in route.request_routes.items()},
    )
