"""One route of a policy: its checkpoints, the priority order of its backends, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..environment import Device
from ..problem.moe_problem import MoEProblem
from ..problem.schemes import ActFormat, WeightFormat
from .backend import ANY, NONE, Backend, ExpertsClass, NameSet, SupportQuery, but
from .decision import Candidate, Failure
from .format_keys import exact_key
from .gpu_archs import Archs

OWN_ACT, RANKED_ACT, MATCHED_ACT, DECLARED_ACT = "own", "ranked", "matched", "declared"
PLUG_INS_APART = but("tpu", "out-of-tree")
"""Every platform except those whose plug-ins have separate methods."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A named condition on a problem, with the engine's message and exception class when it holds."""

    name: str
    holds: Callable[[SupportQuery], bool]
    says: Callable[[SupportQuery], str]
    kind: str = "ValueError"


@dataclass(frozen=True, slots=True)
class LateFailure:
    """A failure after the choice, of the exception class `kind`.

    The candidate is None if the engine continues without a backend. `sized`: the padded sizes are already
    set by then.
    """

    name: str
    holds: Callable[[SupportQuery, Candidate | None], bool]
    says: Callable[[SupportQuery, Candidate | None], str]
    kind: str
    sized: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """Backends in priority order, on some devices (None: every device)."""

    backends: tuple[Backend, ...]
    where: Archs | None = None


@dataclass(frozen=True, slots=True)
class OrderMove:
    """A change of every priority order: `backend` moves directly before or after another, first, or last.

    It applies on the devices in `where` (None: every device) while `when` holds, and only if `backend` is
    not yet on that side.
    """

    backend: Backend
    where: Archs | None = None
    before: Backend | None = None
    after: Backend | None = None
    first: bool = False
    last: bool = False
    when: Callable[[SupportQuery], bool] | None = None
    why: str = ""

    def apply(self, order: tuple[Backend, ...], ask: SupportQuery) -> tuple[Backend, ...]:
        """`order`, with the move made if it applies."""
        if self.backend not in order or not _anywhere(self.where, ask.device):
            return order
        if self.when is not None and not self.when(ask):
            return order
        others = [backend for backend in order if backend is not self.backend]
        if self.first or self.last:
            others.insert(0 if self.first else len(others), self.backend)
            return tuple(others)
        anchor = self.before or self.after
        if anchor not in order or (self.before and order.index(self.backend) < order.index(self.before)):
            return order
        others.insert(others.index(anchor) + (0 if self.before else 1), self.backend)
        return tuple(others)


def _anywhere(where: Archs | None, device: Device) -> bool:
    return where is None or any(arch.fits(device) for arch in where)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Backends that a method excludes from the automatic order while `when` holds (None: always).

    `why` completes "is used" if it begins with "only", or else "is". `switches` are the environment variables
    that `when` reads. `by_name`: requests for them are refused, too.
    """

    backends: tuple[Backend, ...]
    why: str
    when: Callable[[SupportQuery], bool] | None = None
    switches: frozenset[str] = frozenset()
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class SwitchRequest:
    """An environment variable that has the effect of the request `name` while `when` holds.

    With `falls_back` the automatic order follows after the requested backends.
    """

    name: str
    when: Callable[[SupportQuery], bool]
    why: str
    falls_back: bool = False
    switches: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EngineSubstitute:
    """What an engine continues with if it has no kernel, by the engine's name.

    `at_once`: without checking any backend first.
    """

    engine_name: str
    where: Archs
    says: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variant that a method uses on some devices, without checks unless `asks`."""

    backend: Backend
    variant: ExpertsClass
    engine_name: str
    where: Archs | None = None
    asks: bool = False

    def fits(self, device: Device) -> bool:
        """True when it is assigned on `device`."""
        return _anywhere(self.where, device)


@dataclass(frozen=True, slots=True)
class Route:
    """One route of a policy: its checkpoints, its checks, and its priority order.

    Attributes:
        name: as shown to users.
        method: the engine's quantization method.
        storages, weights, acts: checkpoint storages, weight format names and keys of declared
            activation formats that it applies to; `when` narrows further. The first matching route applies.
        key: the key of a weight format, as coarse as the engine's.
        passes_zero_points: zero points of the checkpoint are passed to backends.
        passes_act_order: so is its activation order.
        may_have_bias: whether the method may pass expert biases; None: if the model has them.
        pads_tiles: the method pads weights to kernel tiles.
        act: the activation format that backends are checked with: `OWN_ACT`, each backend's own;
            `RANKED_ACT`, the same, but only backends with the declared format or 16-bit activations are
            kept; `MATCHED_ACT`, the same, but without 16-bit ones if the checkpoint declares another format;
            `DECLARED_ACT`, what the checkpoint declares. `declares`: what the method considers
            declared, if it differs from the checkpoint.
        act_overrides: activation formats that the engine's command line sets for checkpoints that declare
            none, by key: the engine's names.
        checkpoint: storage as the method sees it; empty: the checkpoint's own.
        orders, moves, exclusions: the priority order; `assigned`: assignments instead of an order.
        fallbacks: assignments, without checks, if none of the automatic order is supported.
        on_request: backends that are used only on request by name.
        last_resorts: backends that are asked with 16-bit activations on their platforms if none of the
            automatic order is supported, whatever the activation filter says; they fail as requested ones do.
        names: accepted requests with the backends they select, in order; `adapter_names`: those that select
            other backends with LoRA adapters.
        unfiltered: requests that keep every backend if the checkpoint declares no activation format.
        batched_twins: backends and their counterparts for the batched activation format, for requests.
        request_routes: requests that use another route; `ignored`: requests without effect;
            `batched_requests`: requests that use the batched activation format; `switch_requests`:
            environment variables that act as requests.
        fit_shard: aligns weight blocks and one rank's shard, given the requested backends.
        rounds: the method pads sizes for the chosen backend; `rounds_by_activation`: the padding depends
            on the activation function.
        covers: platforms that the route has rules for.
        platforms: platforms on which the engine accepts the method; `minimum`: lowest CUDA capability;
            `dtypes`: 16-bit model dtypes.
        refusals: what the method refuses before the checks; `late_failures`: what fails after the choice.
        fails: exception class if no backend of the automatic order is supported; `fails_by_name`: if a
            requested one is not; `fails_unknown`: if a request names none (empty: the same). `raises`: the
            exception classes of the engine's checks, which are their reason codes, in the order in which
            they are raised; the first one of the foremost backend is the failure's then.
        wordless: exception class if a backend is refused for its number formats, as the engine fails to word
            that refusal; empty: it does not fail.
        substitutes: devices where the engine continues without a backend instead.
        warned_fallbacks: backends that the engine takes, with a warning, where those before them are not
            supported; with them, a request by name is followed by the rest of the order, less what is
            excluded by name.
        replaces: names of the routes whose checkpoints this one takes over when `when` holds, with fewer
            backends to choose from.
    """

    name: str
    method: str
    storages: NameSet
    weights: frozenset[str]
    acts: NameSet = ANY
    when: Condition | None = None
    key: Callable[[WeightFormat], str] = exact_key
    passes_zero_points: bool = True
    passes_act_order: bool = True
    may_have_bias: bool | None = None
    pads_tiles: bool = False
    act: str = OWN_ACT
    declares: Callable[[MoEProblem, bool], ActFormat] | None = None
    act_overrides: Mapping[str, str] = field(default_factory=dict, hash=False)
    checkpoint: str = ""
    orders: tuple[Order, ...] = ()
    moves: tuple[OrderMove, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    assigned: tuple[Assignment, ...] = ()
    fallbacks: tuple[Assignment, ...] = ()
    on_request: tuple[Backend, ...] = ()
    last_resorts: tuple[Backend, ...] = ()
    names: Mapping[str, tuple[Backend, ...]] = field(default_factory=dict, hash=False)
    adapter_names: Mapping[str, tuple[Backend, ...]] = field(default_factory=dict, hash=False)
    unfiltered: frozenset[str] = frozenset()
    batched_twins: tuple[tuple[Backend, Backend], ...] = ()
    request_routes: Mapping[str, Route] = field(default_factory=dict, hash=False)
    ignored: NameSet = NONE
    batched_requests: frozenset[str] = frozenset()
    switch_requests: tuple[SwitchRequest, ...] = ()
    fit_shard: Callable[[SupportQuery, tuple[Backend, ...]], SupportQuery | Failure] | None = None
    rounds: bool = False
    rounds_by_activation: bool = True
    covers: NameSet = PLUG_INS_APART
    platforms: NameSet = ANY
    minimum: int = 0
    dtypes: NameSet = ANY
    refusals: tuple[Condition, ...] = ()
    late_failures: tuple[LateFailure, ...] = ()
    fails: str = "NotImplementedError"
    fails_by_name: str = "ValueError"
    fails_unknown: str = ""
    wordless: str = ""
    raises: tuple[str, ...] = ()
    substitutes: tuple[EngineSubstitute, ...] = ()
    warned_fallbacks: tuple[Backend, ...] = ()
    replaces: tuple[str, ...] = ()

    def backends(self) -> frozenset[Backend]:
        """Every backend that this route may select."""
        ranked = {backend for order in self.orders for backend in order.backends}
        requests = (*self.names.values(), *self.adapter_names.values())
        requested = {backend for backends in requests for backend in backends}
        assigned = {row.backend for row in (*self.assigned, *self.fallbacks)}
        return frozenset(ranked | requested | assigned | set(self.on_request))

    def ranking(self, ask: SupportQuery) -> tuple[Backend, ...]:
        """The method's priority order of backends for `ask`, including those that it then excludes."""
        return self._ranked(ask)[0]

    def moved(self, ask: SupportQuery) -> tuple[str, ...]:
        """Why the priority order for `ask` differs from the usual one."""
        return self._ranked(ask)[1]

    def _ranked(self, ask: SupportQuery) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
        for order in self.orders:
            if _anywhere(order.where, ask.device):
                ranked, reasons = order.backends, list[str]()
                for move in self.moves:
                    moved = move.apply(ranked, ask)
                    if moved != ranked and move.why:
                        reasons.append(move.why)
                    ranked = moved
                return ranked, tuple(dict.fromkeys(reasons))
        return (), ()

    def left_out(self, ask: SupportQuery, by_name: bool = False) -> dict[Backend, str]:
        """Backends that the method excludes from the automatic order, or refuses by name, with the reason."""
        return {
            backend: exclusion.why
            for exclusion in self.exclusions
            if (exclusion.by_name or not by_name) and (exclusion.when is None or exclusion.when(ask))
            for backend in exclusion.backends
        }

    def ignores(self, name: str | None) -> bool:
        """True when the request `name` has no effect here."""
        return (
            name is not None and name not in self.names and (bool(self.assigned) or self.ignored.allows(name))
        )

    def requested_backends(self, name: str, ask: SupportQuery) -> tuple[Backend, ...]:
        """Backends that the request `name` selects, before batched twins; empty for an unknown name."""
        if ask.problem.lora and name in self.adapter_names:
            return self.adapter_names[name]
        return self.names.get(name, ())

    def switch_request(self, ask: SupportQuery) -> SwitchRequest | None:
        """The first environment variable that requests a backend."""
        return next((request for request in self.switch_requests if request.when(ask)), None)

    def substitute(self, device: Device, at_once: bool) -> EngineSubstitute | None:
        """What the engine continues with on `device`, before any check or after all fail."""
        return next(
            (s for s in self.substitutes if s.at_once == at_once and _anywhere(s.where, device)), None
        )

    def switches(self) -> frozenset[str]:
        """Environment variables that this route or one of its backends reads."""
        read = {
            name
            for backend in self.backends()
            for variant in backend.variants
            for name in variant.capability.switch_names()
        }
        excluding = {name for exclusion in self.exclusions for name in exclusion.switches}
        requesting = {name for request in self.switch_requests for name in request.switches}
        return frozenset(read | excluding | requesting)
