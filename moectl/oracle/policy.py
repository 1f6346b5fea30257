"""What an engine prefers, as versioned data: routes from checkpoints to rankings of backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..environment import Device
from ..errors import UsageError
from ..problem import MoEProblem
from ..schemes import WeightFormat
from .backend import ANY, Archs, Ask, Backend, Choice, Variant, exact_key
from .decision import Candidate

OWN_ACT, RANKED_ACT, DECLARED_ACT = "own", "ranked", "declared"


@dataclass(frozen=True, slots=True)
class Condition:
    """A named statement about a problem, with an engine's sentence and exception class when it holds."""

    name: str
    holds: Callable[[Ask], bool]
    says: Callable[[Ask], str]
    kind: str = "ValueError"


@dataclass(frozen=True, slots=True)
class Aftermath:
    """A failure after a backend was chosen, of the exception class `kind`.

    `sized` is True when the engine had already fixed the padded sizes by then.
    """

    name: str
    holds: Callable[[Ask, Candidate], bool]
    says: Callable[[Ask, Candidate], str]
    kind: str
    sized: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """Backends in order of preference on some devices; None is every device."""

    backends: tuple[Backend, ...]
    where: Archs | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A change of every order on some devices: `backend` directly before or after `anchor`.

    Nothing moves where `backend` already stands on that side.
    """

    backend: Backend
    where: Archs
    before: Backend | None = None
    after: Backend | None = None
    why: str = ""

    def apply(self, order: tuple[Backend, ...], device: Device) -> tuple[Backend, ...]:
        """`order` with the move made, where it applies."""
        anchor = self.before or self.after
        if anchor not in order or self.backend not in order:
            return order
        if not any(arch.fits(device) for arch in self.where):
            return order
        if self.before and order.index(self.backend) < order.index(self.before):
            return order
        rest = [backend for backend in order if backend is not self.backend]
        rest.insert(rest.index(anchor) + (0 if self.before else 1), self.backend)
        return tuple(rest)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variant that a method takes without asking it anything, on some devices."""

    backend: Backend
    variant: Variant
    engine_name: str
    where: Archs | None = None

    def fits(self, device: Device) -> bool:
        """True when the method takes it on `device`."""
        return self.where is None or any(arch.fits(device) for arch in self.where)


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
            16 bits are kept; `DECLARED_ACT`, what the checkpoint declares.
        checkpoint: storage as the method states it; empty for the checkpoint's own.
        orders, moves: the ranking. `assigned`: instead of a ranking.
        on_request: backends that are taken only when asked for by name.
        names: requests understood, with the backends they mean, in order.
        unfiltered: requests that keep every variant when the checkpoint declares no activation.
        twins: backends and their counterpart for batched tokens, taken for a request.
        detours: requests that leave this route for another one; `ignores_names`: others do nothing.
        rounds: the method rounds sizes up to what the chosen backend wants; `rounds_by_activation`: it
            tells the rounding which activation function there is.
        platforms: platforms on which the engine accepts the method; `minimum`: lowest CUDA capability;
            `dtypes`: 16-bit model dtypes.
        refusals: what the method refuses before it asks; `aftermath`: what fails afterwards.
        fails: exception class when no backend of the automatic order serves, empty where the engine
            goes on without one; `fails_by_name`: when one that was asked for does not serve.
    """

    name: str
    method: str
    storages: Choice
    weights: frozenset[str]
    acts: Choice = ANY
    when: Condition | None = None
    key: Callable[[WeightFormat], str] = exact_key
    passes_zero_points: bool = True
    may_have_bias: bool | None = None
    pads_tiles: bool = False
    act: str = OWN_ACT
    checkpoint: str = ""
    orders: tuple[Order, ...] = ()
    moves: tuple[Move, ...] = ()
    assigned: tuple[Assignment, ...] = ()
    on_request: tuple[Backend, ...] = ()
    names: Mapping[str, tuple[Backend, ...]] = field(default_factory=dict, hash=False)
    unfiltered: frozenset[str] = frozenset()
    twins: tuple[tuple[Backend, Backend], ...] = ()
    detours: Mapping[str, Route] = field(default_factory=dict, hash=False)
    ignores_names: bool = False
    rounds: bool = False
    rounds_by_activation: bool = True
    platforms: Choice = ANY
    minimum: int = 0
    dtypes: Choice = ANY
    refusals: tuple[Condition, ...] = ()
    aftermath: tuple[Aftermath, ...] = ()
    fails: str = "NotImplementedError"
    fails_by_name: str = "ValueError"

    def backends(self) -> frozenset[Backend]:
        """Every backend that this route may name."""
        ranked = {backend for order in self.orders for backend in order.backends}
        asked = {backend for named in self.names.values() for backend in named}
        taken = {row.backend for row in self.assigned}
        return frozenset(ranked | asked | taken | set(self.on_request))

    def ranking(self, device: Device) -> tuple[Backend, ...]:
        """Every backend of the automatic choice on `device`, best first."""
        for order in self.orders:
            if order.where is None or any(arch.fits(device) for arch in order.where):
                ranked = order.backends
                for move in self.moves:
                    ranked = move.apply(ranked, device)
                return ranked
        return ()


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Hidden sizes that exchange kernels carry: multiples of some bytes, or a list.

    `fails` is the engine's exception class for a size above the list.
    """

    multiple_bytes: int = 0
    sizes: tuple[int, ...] = ()
    fails: str = "ValueError"

    def round(self, hidden: int, item_bytes: int = 2) -> int | None:
        """The next hidden size that is carried; None when `hidden` is above the largest."""
        if self.sizes:
            return next((size for size in self.sizes if size >= hidden), None)
        step = self.multiple_bytes // item_bytes
        return -(-hidden // step) * step


@dataclass(frozen=True, slots=True)
class Policy:
    """One engine's preferences, versioned by its name.

    Attributes:
        routes: rows, the first that takes a problem wins.
        platforms: platforms for which the rows are complete.
        accepted_names: requests that the engine's command line accepts.
        dtype: the engine's 16-bit dtype for a model dtype on a device.
        activation, routing: the engine's names for an activation function and a routing method.
        exchanges: all2all names that the engine's command line accepts.
        exchange_sizes: by all2all name.
        retired: switches of earlier releases that this one ignores, with what to use instead.
    """

    name: str
    routes: tuple[Route, ...]
    platforms: frozenset[str]
    accepted_names: Choice
    dtype: Callable[[MoEProblem, Device], str]
    activation: Callable[[MoEProblem], str]
    routing: Callable[[MoEProblem], str]
    exchanges: frozenset[str]
    exchange_sizes: Mapping[str, ExchangeSizes] = field(default_factory=dict, hash=False)
    retired: Mapping[str, str] = field(default_factory=dict, hash=False)

    def request_names(self) -> tuple[str, ...]:
        """Backend names that may be asked for: those the engine's command line accepts, and those of rows.

        A row's name that the command line does not accept is refused by the decision, with the reason.
        """
        known = {name for route in self.routes for name in route.names}
        return tuple(sorted(known | (self.accepted_names.only or frozenset())))

    def switches(self) -> frozenset[str]:
        """Every environment switch that a row reads, or that the engine once had."""
        read = {
            name
            for route in self.routes
            for backend in route.backends()
            for variant in backend.variants
            for name in variant.offers.switch_names()
        }
        return frozenset(read | set(self.retired))

    def only_route(self, name: str) -> Policy:
        """This policy with one route that takes every problem and refuses none: a direct question."""
        for route in self.routes:
            if route.name == name:
                bare = replace(
                    route,
                    storages=ANY,
                    acts=ANY,
                    when=None,
                    refusals=(),
                    aftermath=(),
                    minimum=0,
                    dtypes=ANY,
                )
                return replace(self, routes=(bare,))
        raise UsageError(f"policy {self.name} has no route {name!r}; it has {[r.name for r in self.routes]}")
