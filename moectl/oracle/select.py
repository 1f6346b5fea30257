"""The oracle: one function from a problem, a machine and a policy to a decision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..environment import Device, Packages
from ..errors import NoBackend
from ..problem import Dims, MoEProblem
from ..schemes import A16
from .backend import Ask, Backend, act_key
from .checks import Verdict, judge
from .decision import CAPABILITY, DTYPE, NAME, PLATFORM, Candidate, Decision, Failure, Gate
from .policy import DECLARED_ACT, OWN_ACT, RANKED_ACT, Policy, Route


class OutOfScope(NoBackend):
    """The policy has no row for this checkpoint format or platform, so nothing can be said."""


def select(
    problem: MoEProblem,
    device: Device,
    packages: Packages,
    policy: Policy,
    only: str | None = None,
    allow_fallback: bool = False,
) -> Decision:
    """The decision of `policy` for one layer on one rank; equal arguments give equal decisions.

    Every candidate is asked every question. `only` is a request by name: it picks candidates and
    leaves the judging alone. A request that cannot be served leaves `chosen` empty with the reasons in
    `error`, unless `allow_fallback` lets the automatic order take over.

    Raises OutOfScope when the policy has no row for the format or the platform.
    """
    name = only.lower().replace("-", "_") if only and only != "auto" else None
    route = _route(problem, device, packages, policy)
    ask = _ask(problem, device, packages, policy, route)
    gates = _gates(ask, policy, route, name)
    taken = route.detours.get(name, route) if name else route
    if taken is not route:
        ask = _ask(problem, device, packages, policy, taken)
    candidates, chosen, failure, notes = _choose(ask, policy, taken, name)
    notes = (*notes, *_retired(packages, policy))
    if name and allow_fallback and (chosen is None or gates):
        problem_of_name = failure.says if failure else "; ".join(map(str, gates))
        rest, chosen, failure, more = _choose(ask, policy, taken, None)
        rest = tuple(replace(c, rank=c.rank + len(candidates)) for c in rest)
        chosen = next((c for c in rest if chosen and c.usable), None)
        candidates, gates = (*candidates, *rest), _gates(ask, policy, route, None)
        notes = (*notes, f"{name} was asked for and cannot serve: {problem_of_name}", *more)
    sized = chosen is not None
    if chosen is not None:
        if chosen.assigned and chosen.failed:
            notes = (*notes, _unasked(policy, chosen))
        for aftermath in taken.aftermath:
            if aftermath.holds(ask, chosen):
                failure, sized = Failure(aftermath.says(ask, chosen), aftermath.kind), aftermath.sized
                break
        if _exchanged(ask, policy) is None:
            failure, sized = _too_large(ask, policy), False
    elif failure is not None and not failure.kind:
        problem, sized = replace(problem, dims=_carried(ask, policy)), True
    return Decision(
        problem=replace(problem, dims=chosen.dims) if chosen and sized else problem,
        device=device,
        packages=packages,
        policy=policy.name,
        requested=only,
        allow_fallback=allow_fallback,
        route=taken.name,
        method=taken.method,
        candidates=candidates,
        chosen=chosen,
        sized=sized,
        gates=gates,
        error=failure.says if failure else "",
        error_kind=failure.kind if failure else "",
        notes=notes,
    )


def _route(problem: MoEProblem, device: Device, packages: Packages, policy: Policy) -> Route:
    """The first route that takes the problem."""
    scheme = problem.scheme
    if device.platform in policy.platforms:
        for route in policy.routes:
            if (
                route.storages.allows(problem.storage)
                and scheme.weight.name in route.weights
                and route.acts.allows(act_key(scheme.act))
                and (route.when is None or route.when.holds(_ask(problem, device, packages, policy, route)))
            ):
                return route
        raise OutOfScope(
            f"the rules of {policy.name} do not cover {scheme.weight} experts stored as {problem.storage}",
            reason="They cover " + "; ".join(route.name for route in policy.routes) + ".",
            hint="use a checkpoint of one of these formats",
        )
    raise OutOfScope(
        f"the rules of {policy.name} do not cover {device.platform} devices",
        hint=f"name a device of {', '.join(sorted(policy.platforms))} with --gpu",
    )


def _ask(problem: MoEProblem, device: Device, packages: Packages, policy: Policy, route: Route) -> Ask:
    weight = problem.scheme.weight
    return Ask(
        problem=problem,
        device=device,
        packages=packages,
        weight=route.key(weight),
        declared=A16 if route.act == OWN_ACT else problem.scheme.act,
        checkpoint=route.checkpoint or problem.storage,
        zero_points=weight.zero_point and route.passes_zero_points,
        bias=problem.bias if route.may_have_bias is None else route.may_have_bias,
        pads_tiles=route.pads_tiles,
        dtype=policy.dtype(problem, device),
        activation=policy.activation(problem),
        routing=policy.routing(problem),
    )


def _choose(
    ask: Ask, policy: Policy, route: Route, name: str | None
) -> tuple[tuple[Candidate, ...], Candidate | None, Failure | None, tuple[str, ...]]:
    """Judged candidates, the first usable one, why there is none, and notes."""
    candidates, notes = _candidates(ask, policy, route, name)
    for refusal in route.refusals:
        if refusal.holds(ask):
            return candidates, None, Failure(refusal.says(ask), refusal.kind), notes
    chosen = next((candidate for candidate in candidates if candidate.usable), None)
    return candidates, chosen, None if chosen else _nothing(policy, route, name, candidates), notes


def _retired(packages: Packages, policy: Policy) -> tuple[str, ...]:
    """A note for each switch that is set and does nothing."""
    return tuple(
        f"{policy.name} ignores {name}; use {instead}"
        for name, instead in policy.retired.items()
        if name in packages.env
    )


def _act(ask: Ask, route: Route, backend: Backend) -> str:
    """Key of the activation format that `backend` is asked to compute with."""
    follows = backend.follows_declared or route.act == DECLARED_ACT
    return act_key(ask.declared if follows else backend.act)


def _gates(ask: Ask, policy: Policy, route: Route, name: str | None) -> tuple[Gate, ...]:
    """What the engine refuses before any backend is asked."""
    found = []
    capability = ask.device.capability
    if not route.platforms.allows(ask.device.platform):
        says = f"{policy.name} does not accept {route.name} on {ask.device.platform}"
        found.append(Gate(PLATFORM, says))
    if ask.device.platform == "cuda" and capability < route.minimum:
        says = f"{route.method} needs sm{route.minimum} or newer, the device is {ask.device.arch}"
        found.append(Gate(CAPABILITY, says))
    if not route.dtypes.allows(ask.dtype):
        says = f"{route.method} computes in {route.dtypes}, the model runs in {ask.dtype}"
        found.append(Gate(DTYPE, says))
    if name and not policy.accepted_names.allows(name):
        found.append(Gate(NAME, f"{policy.name} does not accept {name} as a backend name"))
    return tuple(found)


def _candidates(
    ask: Ask, policy: Policy, route: Route, name: str | None
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Every candidate in order, judged; and what to say about how the list came about."""
    if route.assigned:
        note = f"{policy.name} assigns the backend of {route.name} without asking the others"
        ignored = (f"{policy.name} ignores the request for {name} here",) if name else ()
        return _assigned(ask, policy, route), (note, *ignored)
    if name and route.ignores_names and name not in route.names:
        ignored = (f"{policy.name} ignores the request for {name} here",)
        return _judged(ask, policy, route, route.ranking(ask.device), None), ignored
    if name:
        return _judged(ask, policy, route, _requested(ask, route, name), name), ()
    ranking = route.ranking(ask.device)
    found = _judged(ask, policy, route, ranking, None)
    moved = tuple(move.why for move in route.moves if move.why and _made(move.why, route, ask))
    extra = _judged(ask, policy, route, route.on_request, None, len(found), _BY_NAME_ONLY)
    return (*found, *extra), moved


_BY_NAME_ONLY = Verdict("order", "policy", "in the automatic order", "only when asked for by name", False)


def _made(why: str, route: Route, ask: Ask) -> bool:
    """True when the move with this reason changes the order on the device."""
    return any(move.why == why and any(arch.fits(ask.device) for arch in move.where) for move in route.moves)


def _requested(ask: Ask, route: Route, name: str) -> tuple[Backend, ...]:
    """Backends that a request means here; empty when the route does not know the name."""
    twins = dict(route.twins) if ask.batched else {}
    return tuple(twins.get(backend, backend) for backend in route.names.get(name, ()))


def _filtered(ask: Ask, route: Route, backends: Iterable[Backend], name: str | None) -> list[Backend]:
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
    ask: Ask,
    policy: Policy,
    route: Route,
    backends: tuple[Backend, ...],
    name: str | None,
    start: int = 0,
    extra: Verdict | None = None,
) -> tuple[Candidate, ...]:
    """Every variant of `backends`, judged, in the route's order, dropped ones last."""
    kept = _filtered(ask, route, backends, name) if route.act == RANKED_ACT else list(backends)
    found: list[Candidate] = []
    for backend in (*kept, *(b for b in backends if b not in kept)):
        asked = replace(ask, act=_act(ask, route, backend))
        more = () if extra is None else (extra,)
        if backend not in kept:
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


def _dropped(ask: Ask, backend: Backend) -> Verdict:
    wanted = "16-bit activations, as the checkpoint declares none"
    if ask.declared != A16:
        wanted = f"{act_key(ask.declared)} or 16-bit activations"
    return Verdict("activation filter", "policy", wanted, act_key(backend.act), False, "filtered")


def _assigned(ask: Ask, policy: Policy, route: Route) -> tuple[Candidate, ...]:
    """The method's own table: the first row that fits the device is taken unasked."""
    found: list[Candidate] = []
    taken = False
    for row in route.assigned:
        asked = replace(ask, act=_act(ask, route, row.backend))
        takes = not taken and row.fits(ask.device)
        taken = taken or takes
        verdicts = judge(asked, row.variant)
        if not takes:
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


def _exchanged(ask: Ask, policy: Policy) -> int | None:
    """Hidden size after the exchange kernels' rounding; None when they cannot carry it."""
    hidden = ask.problem.dims.hidden
    sizes = policy.exchange_sizes.get(ask.exchange)
    return hidden if sizes is None else sizes.round(hidden)


def _carried(ask: Ask, policy: Policy) -> Dims:
    """Sizes with the padding that the exchange needs."""
    logical = ask.problem.dims
    return replace(logical, padded_hidden=_exchanged(ask, policy) or logical.hidden)


def _dims(ask: Ask, policy: Policy, route: Route, backend: Backend) -> Dims:
    """Sizes with padding: first what the exchange carries, then what the backend wants."""
    carried = _carried(ask, policy)
    if not route.rounds:
        return carried
    known = ask if route.rounds_by_activation else replace(ask, activation="")
    padded = backend.align(known).apply(Dims(carried.padded_hidden, carried.intermediate))
    return replace(
        carried, padded_hidden=padded.padded_hidden, padded_intermediate=padded.padded_intermediate
    )


def _too_large(ask: Ask, policy: Policy) -> Failure:
    carried = policy.exchange_sizes[ask.exchange]
    says = (
        f"{ask.exchange} carries hidden sizes up to {carried.sizes[-1]}, "
        f"the model has {ask.problem.dims.hidden}"
    )
    return Failure(says, carried.fails)


def _reasons(candidates: Iterable[Candidate]) -> str:
    return "; ".join(
        f"{c.variant.experts} ({', '.join(str(verdict) for verdict in c.failed)})" for c in candidates
    )


def _nothing(policy: Policy, route: Route, name: str | None, candidates: tuple[Candidate, ...]) -> Failure:
    """Why no candidate is chosen, as one sentence."""
    if not name:
        says = f"no backend of policy {policy.name} serves this deployment ({route.name})"
        return Failure(says, route.fails)
    says = f"backend {name} cannot serve this deployment: {_reasons(candidates)}"
    if not candidates:
        known = ", ".join(route.names) or "none"
        says = f"backend {name} does not serve {route.name} under policy {policy.name}; it knows {known}"
    return Failure(says, route.fails_by_name)


def _unasked(policy: Policy, chosen: Candidate) -> str:
    return f"{policy.name} takes {chosen.variant.experts} unasked, though it fails: {_reasons([chosen])}"
