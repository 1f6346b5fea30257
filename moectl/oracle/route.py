"""One row of a policy: the checkpoints it takes, the order of its backends, and what it refuses."""

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

OWN_ACT, RANKED_ACT, DECLARED_ACT = "own", "ranked", "declared"
PLUG_INS_APART = but("tpu", "out-of-tree")
"""Every platform but those whose plug-ins bring methods of their own."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A named statement about a problem, with an engine's sentence and exception class when it holds."""

    name: str
    holds: Callable[[SupportQuery], bool]
    says: Callable[[SupportQuery], str]
    kind: str = "ValueError"


@dataclass(frozen=True, slots=True)
class LateFailure:
    """A failure after the choice, of the exception class `kind`.

    The candidate is None where the engine goes on without a backend.
    `sized` is True when the engine had already fixed the padded sizes by then.
    """

    name: str
    holds: Callable[[SupportQuery, Candidate | None], bool]
    says: Callable[[SupportQuery, Candidate | None], str]
    kind: str
    sized: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """Backends in order of preference on some devices; None is every device."""

    backends: tuple[Backend, ...]
    where: Archs | None = None


@dataclass(frozen=True, slots=True)
class OrderMove:
    """A change of every order: `backend` goes directly before or after another, first, or last.

    It is made on the devices in `where` (None is every device) while `when` holds. Nothing moves where
    `backend` already stands on that side.
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
        """`order` with the move made, where it applies."""
        if self.backend not in order or not _anywhere(self.where, ask.device):
            return order
        if self.when is not None and not self.when(ask):
            return order
        rest = [backend for backend in order if backend is not self.backend]
        if self.first or self.last:
            rest.insert(0 if self.first else len(rest), self.backend)
            return tuple(rest)
        anchor = self.before or self.after
        if anchor not in order or (self.before and order.index(self.backend) < order.index(self.before)):
            return order
        rest.insert(rest.index(anchor) + (0 if self.before else 1), self.backend)
        return tuple(rest)


def _anywhere(where: Archs | None, device: Device) -> bool:
    return where is None or any(arch.fits(device) for arch in where)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Backends that a method leaves out of the automatic order while `when` holds (None is always).

    `why` completes "is taken ...". `switches` are those that `when` reads. `by_name`: a
    request for them is refused too.
    """

    backends: tuple[Backend, ...]
    why: str
    when: Callable[[SupportQuery], bool] | None = None
    switches: frozenset[str] = frozenset()
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class SwitchRequest:
    """A switch that asks for backends as the request `name` does, while `when` holds.

    With `falls_back` the automatic order follows after them.
    """

    name: str
    when: Callable[[SupportQuery], bool]
    why: str
    falls_back: bool = False
    switches: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EngineSubstitute:
    """What an engine goes on with where it has no kernel of its own, by its own name.

    `at_once`: it asks no backend first.
    """

    engine_name: str
    where: Archs
    says: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variant that a method takes on some devices, without asking it anything unless `asks`."""

    backend: Backend
    variant: ExpertsClass
    engine_name: str
    where: Archs | None = None
    asks: bool = False

    def fits(self, device: Device) -> bool:
        """True when the method takes it on `device`."""
        return _anywhere(self.where, device)


@dataclass(frozen=True, slots=True)
class Route:
    """One row of a policy: which checkpoints it takes, how it asks, and in which order.

    Attributes:
        name: in a user's words.
        method: the engine's quantization method.
        storages, weights, acts: checkpoint storages, weight format names and keys of declared
            activation formats that it takes; `when` narrows further, and the first fitting route wins.
        key: turns the weight format into the key that the engine compares.
        passes_zero_points: zero points of the checkpoint reach the backends.
        may_have_bias: what the method says of expert biases; None: whether the model has them.
        pads_tiles: the method pads weights to kernel tiles.
        act: the activation format that backends are asked for: `OWN_ACT`, each backend's own;
            `RANKED_ACT`, its own too, but only backends that match the declared format or compute in
            16 bits are kept; `DECLARED_ACT`, what the checkpoint declares. `declares`: what the method
            takes for declared, where it is not what the checkpoint says.
        checkpoint: storage as the method states it; empty for the checkpoint's own.
        orders, moves, exclusions: the ranking. `assigned`: instead of a ranking.
        on_request: backends that are taken only when asked for by name.
        names: requests understood, with the backends they mean, in order; `adapter_names`: those that mean
            others where adapters are served.
        unfiltered: requests that keep every variant when the checkpoint declares no activation.
        twins: backends and their counterpart for batched tokens, taken for a request.
        detours: requests that leave this route for another one; `ignored`: requests that do nothing;
            `sorts`: requests that hand tokens over expert by expert; `demands`: switches that ask.
        slices: fits blocks of the weights to one rank's slice, given the backends asked for by name.
        rounds: the method rounds sizes up to what the chosen backend wants; `rounds_by_activation`: it
            tells the rounding which activation function there is.
        covers: platforms about which the row has a verdict.
        platforms: platforms on which the engine accepts the method; `minimum`: lowest CUDA capability;
            `dtypes`: 16-bit model dtypes.
        refusals: what the method refuses before it asks; `aftermath`: what fails afterwards.
        fails: exception class when no backend of the automatic order serves; `fails_by_name`: when one
            that was asked for does not; `fails_unknown`: when a request names none (empty: the same).
        stand_ins: devices where the engine goes on without a backend instead.
    """

    name: str
    method: str
    storages: NameSet
    weights: frozenset[str]
    acts: NameSet = ANY
    when: Condition | None = None
    key: Callable[[WeightFormat], str] = exact_key
    passes_zero_points: bool = True
    may_have_bias: bool | None = None
    pads_tiles: bool = False
    act: str = OWN_ACT
    declares: Callable[[MoEProblem, bool], ActFormat] | None = None
    checkpoint: str = ""
    orders: tuple[Order, ...] = ()
    moves: tuple[OrderMove, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    assigned: tuple[Assignment, ...] = ()
    on_request: tuple[Backend, ...] = ()
    names: Mapping[str, tuple[Backend, ...]] = field(default_factory=dict, hash=False)
    adapter_names: Mapping[str, tuple[Backend, ...]] = field(default_factory=dict, hash=False)
    unfiltered: frozenset[str] = frozenset()
    twins: tuple[tuple[Backend, Backend], ...] = ()
    detours: Mapping[str, Route] = field(default_factory=dict, hash=False)
    ignored: NameSet = NONE
    sorts: frozenset[str] = frozenset()
    demands: tuple[SwitchRequest, ...] = ()
    slices: Callable[[SupportQuery, tuple[Backend, ...]], SupportQuery | Failure] | None = None
    rounds: bool = False
    rounds_by_activation: bool = True
    covers: NameSet = PLUG_INS_APART
    platforms: NameSet = ANY
    minimum: int = 0
    dtypes: NameSet = ANY
    refusals: tuple[Condition, ...] = ()
    aftermath: tuple[LateFailure, ...] = ()
    fails: str = "NotImplementedError"
    fails_by_name: str = "ValueError"
    fails_unknown: str = ""
    stand_ins: tuple[EngineSubstitute, ...] = ()

    def backends(self) -> frozenset[Backend]:
        """Every backend that this route may name."""
        ranked = {backend for order in self.orders for backend in order.backends}
        means = (*self.names.values(), *self.adapter_names.values())
        asked = {backend for named in means for backend in named}
        taken = {row.backend for row in self.assigned}
        return frozenset(ranked | asked | taken | set(self.on_request))

    def ranking(self, ask: SupportQuery) -> tuple[Backend, ...]:
        """Every backend of the method's order for `ask`, best first, with those that it then leaves out."""
        return self._ranked(ask)[0]

    def moved(self, ask: SupportQuery) -> tuple[str, ...]:
        """Why the order for `ask` is not the usual one."""
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
        """Backends that the method leaves out of the automatic order, or refuses by name, with the reason."""
        return {
            backend: exclusion.why
            for exclusion in self.exclusions
            if (exclusion.by_name or not by_name) and (exclusion.when is None or exclusion.when(ask))
            for backend in exclusion.backends
        }

    def ignores(self, name: str | None) -> bool:
        """True when the request `name` does nothing here."""
        return (
            name is not None and name not in self.names and (bool(self.assigned) or self.ignored.allows(name))
        )

    def meant(self, name: str, ask: SupportQuery) -> tuple[Backend, ...]:
        """Backends that a request means, before batched tokens change it; empty for an unknown name."""
        if ask.problem.lora and name in self.adapter_names:
            return self.adapter_names[name]
        return self.names.get(name, ())

    def demand(self, ask: SupportQuery) -> SwitchRequest | None:
        """The first switch that asks for a backend."""
        return next((demand for demand in self.demands if demand.when(ask)), None)

    def stand_in(self, device: Device, at_once: bool) -> EngineSubstitute | None:
        """What the engine goes on with on `device`, before it asks or after nothing serves."""
        return next((s for s in self.stand_ins if s.at_once == at_once and _anywhere(s.where, device)), None)

    def switches(self) -> frozenset[str]:
        """Environment switches that this row or one of its backends reads."""
        read = {
            name
            for backend in self.backends()
            for variant in backend.variants
            for name in variant.capability.switch_names()
        }
        left_out = {name for exclusion in self.exclusions for name in exclusion.switches}
        asked = {name for demand in self.demands for name in demand.switches}
        return frozenset(read | left_out | asked)
