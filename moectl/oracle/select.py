"""Backend selection: one function from a problem, a machine and a policy to a decision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..cache.backend_times import MeasuredTimes, TimeRanking
from ..environment import Device, Packages
from ..environment.variables import judge_variable
from ..errors import NoBackend
from ..problem.moe_problem import MoEProblem
from ..problem.schemes import A16
from .backend import NONE, SupportQuery, is_on
from .candidates import candidates, carried, exchanged, in_order
from .decision import (
    ARGUMENTS,
    CAPABILITY,
    DEPLOYMENT,
    DTYPE,
    FROM_SOURCE,
    NAME,
    PLATFORM,
    Candidate,
    Decision,
    Failure,
    Gate,
)
from .format_keys import act_key
from .policy import Policy
from .registry import policy_named, request_note, versioned
from .route import OWN_ACT, Route
from .selection_inputs import SelectionInputs
from .server_arguments import ServerArguments
from .verdict_sentences import absent_package, makers_spelling, predicate

NOTHING = MeasuredTimes()
"""No measurements: the policy's priority order decides."""


class OutOfScope(NoBackend):
    """The policy has no rules for this checkpoint format or platform."""


def select(
    problem: MoEProblem,
    device: Device,
    packages: Packages,
    policy: Policy,
    only: str | None = None,
    allow_fallback: bool = False,
    measured: MeasuredTimes = NOTHING,
) -> Decision:
    """The decision of `policy` for one layer on one rank; equal arguments give equal decisions.

    Every candidate is checked on every question. `only` requests a backend by name. If it is not
    supported, `chosen` is None and `error` has the reasons, unless `allow_fallback` allows the automatic
    choice. If the policy `measures`, the fastest usable candidate by `measured` is chosen, and
    `Decision.ranking` has the times.

    Raises OutOfScope when the policy has no route for the format or the platform.

    Example:
        >>> from moectl.environment import find_device
        >>> from moectl.oracle import packages_from, policy_named
        >>> from moectl.problem.published_layers import model_problem
        >>> problem = model_problem("gpt-oss-120b")
        >>> decision = select(problem, find_device("h200"), packages_from("full"), policy_named("moectl"))
        >>> decision.chosen.backend.name
        'moectl'
    """
    inputs = SelectionInputs(problem, device, packages, policy.name, only, allow_fallback, measured)
    return _decided(inputs, policy)


def decide(inputs: SelectionInputs) -> Decision:
    """The decision for `inputs`, by the policy that they name.

    Raises as `select`, and UsageError for an unknown policy.
    """
    return _decided(inputs, policy_named(inputs.policy))


def _decided(inputs: SelectionInputs, policy: Policy) -> Decision:
    only = inputs.requested
    name = only.lower().replace("-", "_") if only and only != "auto" else None
    route = _route(inputs, policy, name)
    gates = _gates(_ask(inputs, policy, route, name), policy, route, name)
    taken = route.request_routes.get(name, route) if name else route
    found, refused = _settled(inputs, policy, taken, name)
    gates = (*gates, *refused)
    if name and inputs.allow_fallback and (found.chosen is None or gates):
        rest, refused = _settled(inputs, policy, taken, None)
        found = _fallen_back(found, rest, name, gates)
        gates = tuple(gate for gate in gates if gate.kind not in (NAME, ARGUMENTS)) + refused
    found, ranking = _by_time(found, policy, inputs.measured)
    chosen, failure = found.chosen, found.failure
    warnings = (
        *found.cut,
        *_runtime_failures(found.ask, chosen),
        *_without_exchange(found.ask, policy),
    )
    notes = (*warnings, *found.notes, *_variables(inputs.packages, policy), *_unrecorded(found.ask, policy))
    if chosen is not None and chosen.assigned and chosen.failed:
        notes = (*notes, _unchecked(policy, chosen))
    notes = (
        *notes,
        *_fallen(policy, taken, found),
        *_remarks(found.ask, chosen),
        *_unbalanced(policy, taken, found.ask, chosen),
    )
    sized = chosen is not None or bool(found.stand_in)
    if sized:
        late, sized = _afterwards(found, policy, taken)
        failure = late or failure
    dims = chosen.dims if chosen else carried(found.ask, policy)
    return Decision(
        inputs=inputs,
        problem=replace(inputs.problem, dims=dims) if sized else inputs.problem,
        ignored=taken.ignores(name),
        route=taken.name,
        method=taken.method,
        candidates=found.candidates,
        chosen=chosen,
        order=tuple(dict.fromkeys(backend.engine_name for backend in taken.ranking(found.ask))),
        stand_in=found.stand_in,
        sized=sized,
        gates=gates,
        error=failure.says if failure else "",
        error_kind=failure.kind if failure else "",
        refused=found.refused,
        notes=notes,
        warnings=warnings,
        ranking=ranking,
        arguments=found.arguments,
    )


def _by_time(
    found: _RouteOutcome, policy: Policy, measured: MeasuredTimes
) -> tuple[_RouteOutcome, TimeRanking | None]:
    """The outcome with the fastest usable candidate, and its times if there are any."""
    if not policy.measures or found.chosen is None:
        return found, None
    usable = [candidate for candidate in found.candidates if candidate.usable]
    ranking = measured.ranking(list(dict.fromkeys(c.backend.name for c in usable)))
    if ranking is None:
        return found, None
    return replace(found, chosen=next(c for c in usable if c.backend.name == ranking.best)), ranking


PLATFORMS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "xpu": "Intel GPUs", "cpu": "CPUs", "tpu": "TPUs"}
"""What devices of a platform are called."""


def _devices(platform: str) -> str:
    return PLATFORMS.get(platform, f"{platform} devices")


def _route(inputs: SelectionInputs, policy: Policy, name: str | None) -> Route:
    """The first route of `policy` for the problem."""
    problem, device = inputs.problem, inputs.device
    scheme = problem.scheme
    not_covered = f"the rules of {versioned(policy.name)} do not cover {_devices(device.platform)}"
    hint = f"ask about {' or '.join(map(_devices, sorted(policy.platforms)))} with --gpu"
    if device.platform not in policy.platforms:
        raise OutOfScope(not_covered, hint=hint)
    for route in policy.routes:
        if (
            route.storages.allows(problem.storage)
            and scheme.weight.name in route.weights
            and route.acts.allows(act_key(scheme.act))
            and (route.when is None or route.when.holds(_ask(inputs, policy, route, name)))
        ):
            if not route.covers.allows(device.platform):
                covered = " or ".join(_devices(p) for p in sorted(policy.platforms) if route.covers.allows(p))
                raise OutOfScope(
                    f"{not_covered} with {route.name}: their plug-in has its own",
                    hint=f"ask about {covered} with --gpu",
                )
            return route
    raise OutOfScope(
        f"the rules of {versioned(policy.name)} do not cover {scheme.weight} experts stored as "
        f"{problem.storage}",
        reason="They cover " + "; ".join(route.name for route in policy.routes) + ".",
        hint=f"ask {policy.complete}, the next release with rules for every format"
        if policy.complete
        else "use a checkpoint of one of these formats",
    )


def _ask(inputs: SelectionInputs, policy: Policy, route: Route, name: str | None = None) -> SupportQuery:
    problem, device, packages = inputs.problem, inputs.device, inputs.packages
    weight = problem.scheme.weight
    invariant = policy.invariance is not None and is_on(packages, policy.invariance)
    declared = route.declares(problem, invariant) if route.declares else problem.scheme.act
    return SupportQuery(
        problem=problem,
        device=device,
        packages=packages,
        weight=route.key(weight),
        declared=A16 if route.act == OWN_ACT else declared,
        checkpoint=route.checkpoint or problem.storage,
        zero_points=weight.zero_point and route.passes_zero_points,
        act_order=problem.act_order if route.passes_act_order else "",
        bias=problem.bias if route.may_have_bias is None else route.may_have_bias,
        pads_tiles=route.pads_tiles,
        dtype=policy.dtype(problem, device),
        sequence=policy.slices_tokens(problem),
        activation=policy.activation(problem),
        routing=policy.routing(problem),
        invariant=invariant,
        request=name or "",
        batched=name in route.batched_requests or policy.batches_tokens(problem),
        model=inputs.model,
    )


@dataclass(frozen=True, slots=True)
class _RouteOutcome:
    """The outcome of one route; `stand_in` is what the engine continues with instead of a backend."""

    ask: SupportQuery
    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None
    failure: Failure | None = None
    notes: tuple[str, ...] = ()
    stand_in: str = ""
    cut: tuple[str, ...] = ()
    arguments: ServerArguments | None = None
    refused: bool = False


def _settled(
    inputs: SelectionInputs, policy: Policy, route: Route, name: str | None
) -> tuple[_RouteOutcome, tuple[Gate, ...]]:
    """The outcome of `route` for resolved server arguments, and what those refuse."""
    if policy.arguments is None:
        return _choose(inputs, policy, route, name), ()
    made = policy.arguments(_ask(inputs, policy, route, name))
    parallel = replace(inputs.problem.parallel, all2all=made.exchange)
    settled = replace(inputs, problem=replace(inputs.problem, parallel=parallel))
    found = _choose(settled, policy, route, made.request or None)
    refused = tuple(Gate(ARGUMENTS, says) for says in made.refusals)
    return replace(found, notes=(*made.notes, *found.notes), arguments=made), refused


def _unrecorded(ask: SupportQuery, policy: Policy) -> tuple[str, ...]:
    """The note on what of the answer is from the engine's source alone."""
    what = policy.unrecorded(ask) if policy.unrecorded else ""
    return (f"{FROM_SOURCE}: {what}",) if what else ()


def _choose(inputs: SelectionInputs, policy: Policy, route: Route, name: str | None) -> _RouteOutcome:
    """Checked candidates, the first usable one or why there is none, and notes."""
    device = inputs.device
    ask = _ask(inputs, policy, route, name)
    if early := route.substitute(device, at_once=True):
        return _RouteOutcome(ask, failure=Failure(early.says, ""), stand_in=early.engine_name)
    refused: Failure | None = None
    cut: tuple[str, ...] = ()
    if route.fit_shard is not None:
        fitted = route.fit_shard(ask, route.requested_backends(name or "", ask))
        if isinstance(fitted, Failure):
            refused = fitted
        else:
            ask, cut = fitted, _cut(ask, fitted, policy)
    judged, notes = candidates(ask, policy, route, name)
    for refusal in route.refusals:
        if refused is None and refusal.holds(ask):
            refused = Failure(refusal.says(ask), refusal.kind)
    if refused is None:
        refused = _wordless(route, judged)
    chosen = next((c for c in judged if c.usable), None) if refused is None else None
    if refused or chosen:
        return _RouteOutcome(ask, judged, chosen, refused, notes, cut=cut, refused=refused is not None)
    asked_for = None if route.ignores(name) else name
    demand = None if asked_for else route.switch_request(ask)
    if demand is not None and not demand.falls_back:
        asked_for = demand.name
    late = None if asked_for else route.substitute(device, at_once=False)
    if late is not None:
        return _RouteOutcome(ask, judged, None, Failure(late.says, ""), notes, late.engine_name, cut)
    return _RouteOutcome(ask, judged, None, _nothing(policy, route, asked_for, judged), notes, cut=cut)


def _wordless(route: Route, judged: tuple[Candidate, ...]) -> Failure | None:
    """The failure of an engine that cannot word the refusal of a format, before any usable candidate."""
    if not route.wordless:
        return None
    for candidate in judged:
        if candidate.usable:
            return None
        codes = {verdict.code for verdict in candidate.failed}
        if "quant_scheme" in codes and not codes & {"device", "activation"}:
            says = f"the engine fails as it words why {candidate.variant.experts} does not support the format"
            return Failure(says, route.wordless)
    return None


def _cut(before: SupportQuery, after: SupportQuery, policy: Policy) -> tuple[str, ...]:
    """Notes on what the method does to shards that are not aligned with weight blocks."""
    notes: tuple[str, ...] = ()
    if after.weight != before.weight:
        notes = (
            f"{versioned(policy.name)} re-expands block scales to {after.weight}, because shards are not "
            "block-aligned",
        )
    if after.sliced:
        size = after.problem.dims.intermediate
        notes = (*notes, f"{versioned(policy.name)} pads one rank's shard from {after.sliced} to {size}")
    return notes


def _fallen_back(
    asked: _RouteOutcome, rest: _RouteOutcome, name: str, gates: tuple[Gate, ...]
) -> _RouteOutcome:
    """The automatic choice, with the candidates of an unsupported request before its own."""
    why = asked.failure.says if asked.failure and not asked.candidates else "; ".join(map(str, gates))
    note = f"{name} was requested but is not supported{': ' if why else ''}{why}"
    more = tuple(replace(c, rank=c.rank + len(asked.candidates)) for c in rest.candidates)
    return replace(
        rest,
        candidates=(*asked.candidates, *more),
        chosen=next((c for c in more if rest.chosen and c.usable), None),
        notes=(*asked.notes, note, *rest.notes),
    )


def _afterwards(found: _RouteOutcome, policy: Policy, route: Route) -> tuple[Failure | None, bool]:
    """What fails after the choice, and whether padded sizes were set by then."""
    ask, chosen = found.ask, found.chosen
    if exchanged(ask, policy) is None:
        return _too_large(ask, policy), False
    for failure in route.late_failures:
        if failure.holds(ask, chosen):
            return Failure(failure.says(ask, chosen), failure.kind), failure.sized
    return None, True


def _remarks(ask: SupportQuery, chosen: Candidate | None) -> tuple[str, ...]:
    """What the user should know of the chosen experts class."""
    remarks = chosen.variant.capability.remarks if chosen else ()
    return tuple(filter(None, (remark(ask) for remark in remarks)))


def _runtime_failures(ask: SupportQuery, chosen: Candidate | None) -> tuple[str, ...]:
    """A note for each failure of the chosen kernels at run time, which the choice does not consider."""
    if chosen is None:
        return ()
    return tuple(
        f"{chosen.variant.experts} fails {failure.at} ({failure.kind}): it {failure.says}"
        for failure in chosen.variant.capability.runtime_failures
        if failure.when(ask)
    )


def _fallen(policy: Policy, route: Route, found: _RouteOutcome) -> tuple[str, ...]:
    """The warning that the engine falls back to the chosen backend, with what the nearest class lacks."""
    if found.chosen is None or found.chosen.backend not in route.warned_fallbacks:
        return ()
    before = [c for c in found.candidates if c.rank < found.chosen.rank and in_order(c)]
    if not before:
        return ()
    taken = f"{versioned(policy.name)} warns and falls back to {found.chosen.variant.experts}"
    return (f"{taken}: {_reasons([min(before, key=lambda c: len(c.failed))])}",)


def _unbalanced(policy: Policy, route: Route, ask: SupportQuery, chosen: Candidate | None) -> tuple[str, ...]:
    """A note if EPLB is requested and the method does not support it."""
    if chosen is None or not policy.balancing or not ask.problem.parallel.eplb:
        return ()
    if policy.balancing.get(route.method, NONE).allows(chosen.engine_name):
        return ()
    return (f"{versioned(policy.name)} does not support EPLB with {route.method} and {chosen.backend.name}",)


def _without_exchange(ask: SupportQuery, policy: Policy) -> tuple[str, ...]:
    """A note if the all-to-all backend's package is not installed."""
    package = policy.exchange_packages.get(ask.exchange)
    if package is None or ask.packages.has(package):
        return ()
    option = policy.serve.exchange.format(ask.exchange)
    return (f"{option} {absent_package(package)}: {versioned(policy.name)} stops at start",)


def _variables(packages: Packages, policy: Policy) -> tuple[str, ...]:
    """A note for each environment variable whose value has no effect or another one than expected."""
    variables = policy.variables
    findings = (
        judge_variable(variables[name], value, versioned(policy.name))
        for name, value in packages.env.items()
        if name in variables
    )
    return tuple(finding.remark for finding in findings if finding.remark)


def _gates(ask: SupportQuery, policy: Policy, route: Route, name: str | None) -> tuple[Gate, ...]:
    """What the engine refuses before any backend is checked."""
    gates = []
    capability = ask.device.capability
    if not route.platforms.allows(ask.device.platform):
        says = f"{versioned(policy.name)} does not accept {route.name} on {ask.device.platform}"
        gates.append(Gate(PLATFORM, says))
    if ask.device.platform == "cuda" and capability < route.minimum:
        arch = makers_spelling(ask.device.arch)
        says = f"{route.method} needs SM{route.minimum} or newer; this device is {arch}"
        gates.append(Gate(CAPABILITY, says))
    if not route.dtypes.allows(ask.dtype):
        says = f"{route.method} computes in {route.dtypes}; model runs in {ask.dtype}"
        gates.append(Gate(DTYPE, says))
    for refusal in policy.refusals:
        if refusal.holds(ask):
            error = "" if refusal.name == DEPLOYMENT else refusal.kind
            gates.append(Gate(refusal.name, refusal.says(ask), error))
    if name and not policy.accepted_names.allows(name):
        note = request_note(policy.name, name)
        gates.append(Gate(NAME, f"{versioned(policy.name)} does not accept {name} as a backend name{note}"))
    return tuple(gates)


def _too_large(ask: SupportQuery, policy: Policy) -> Failure:
    sizes = policy.exchange_sizes[ask.exchange]
    says = (
        f"{ask.exchange} supports hidden sizes up to {sizes.sizes[-1]}; model has {ask.problem.dims.hidden}"
    )
    return Failure(says, sizes.fails)


def _reasons(candidates: Iterable[Candidate]) -> str:
    return "; ".join(f"{c.variant.experts} {', and '.join(map(predicate, c.failed))}" for c in candidates)


def _nothing(policy: Policy, route: Route, name: str | None, candidates: tuple[Candidate, ...]) -> Failure:
    """Why no candidate is chosen, in one sentence."""
    raised = _raised(route, candidates)
    if not name:
        kind = raised or (route.fails_by_name if any(c.last_resort for c in candidates) else route.fails)
        says = f"no backend of {versioned(policy.name)} supports this deployment ({route.name})"
        return Failure(says, kind)
    asked = [candidate for candidate in candidates if in_order(candidate)] or candidates
    says = f"backend {name} does not support this deployment: {_reasons(asked)}"
    if not candidates:
        names = ", ".join(route.names) or "none"
        engine = versioned(policy.name)
        says = f"backend {name} is not available for {route.name} in {engine}; available: {names}"
        return Failure(says, route.fails_unknown or route.fails_by_name)
    return Failure(says, raised or route.fails_by_name)


def _raised(route: Route, candidates: tuple[Candidate, ...]) -> str:
    """The exception class that the checks of the foremost backend raise; empty if the route has none."""
    foremost = [c for c in candidates if c.backend is candidates[0].backend]
    here = [c for c in foremost if all(verdict.question != "device" for verdict in c.failed)]
    codes = {verdict.code for candidate in here or foremost for verdict in candidate.failed}
    return next((kind for kind in route.raises if kind in codes), "")


def _unchecked(policy: Policy, chosen: Candidate) -> str:
    engine, experts = versioned(policy.name), chosen.variant.experts
    return f"{engine} assigns {experts} without checks, although {_reasons([chosen])}"
