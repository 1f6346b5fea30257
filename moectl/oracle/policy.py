"""What an engine prefers, as versioned data: routes, and the terms in which it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..environment import Device
from ..environment.variables import Variable
from ..errors import UsageError
from ..problem.moe_problem import MoEProblem
from ..problem.schemes import WeightFormat
from .backend import ANY, NameSet, WeightForm
from .route import Condition, Route


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
class ServeOptions:
    """The engine's command line, option by option, with ``{}`` for the value.

    Attributes:
        backend: the command that asks for a backend by name.
        tensor, data: ranks of tensor and of data parallelism.
        expert: whole experts, spread over so many ranks; `exchange` names the all2all kernels.
        dtype: the model's dtype, as torch spells it.
    """

    backend: str
    tensor: str
    data: str
    expert: str
    exchange: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Policy:
    """One engine's preferences, versioned by its name.

    Attributes:
        routes: rows, the first that takes a problem wins.
        platforms: platforms for which the rows are complete.
        accepted_names: requests that the engine's command line accepts.
        dtype: the engine's 16-bit dtype for a model dtype on a device.
        activation, routing: the engine's names for an activation function and a routing method.
        exchanges: all2all names that the engine's command line accepts, `default_exchange` without one.
        serve: how a deployment is asked for on that command line.
        exchange_sizes: by all2all name.
        batching_exchanges: all2all names that hand tokens over expert by expert.
        sequence_exchanges: all2all names that slice tokens over tensor-parallel ranks first.
        default_forms: by weight format name, what sizes are rounded up to for a backend without a rule.
        variables: environment variables that concern experts, also those that it no longer reads.
        refusals: what the engine refuses with every method.
        balancing: by method, the backends (by the engine's names) with which it moves experts between
            ranks; the engine refuses the deployment with others. Empty: nothing is said.
        invariance: the switch that asks for results which do not depend on the rest of the batch.
        measures: times that were measured decide among backends that can serve; else the order alone.
    """

    name: str
    routes: tuple[Route, ...]
    platforms: frozenset[str]
    accepted_names: NameSet
    dtype: Callable[[MoEProblem, Device], str]
    activation: Callable[[MoEProblem], str]
    routing: Callable[[MoEProblem], str]
    exchanges: frozenset[str]
    default_exchange: str
    serve: ServeOptions
    exchange_sizes: Mapping[str, ExchangeSizes] = field(default_factory=dict, hash=False)
    batching_exchanges: frozenset[str] = frozenset()
    sequence_exchanges: frozenset[str] = frozenset()
    default_forms: Mapping[str, tuple[WeightForm, ...]] = field(default_factory=dict, hash=False)
    variables: Mapping[str, Variable] = field(default_factory=dict, hash=False)
    invariance: Variable | None = None
    refusals: tuple[Condition, ...] = ()
    balancing: Mapping[str, NameSet] = field(default_factory=dict, hash=False)
    measures: bool = False

    def slices_tokens(self, problem: MoEProblem) -> bool:
        """True when tokens of tensor-parallel ranks are sliced over them before they are exchanged."""
        parallel = problem.parallel
        return parallel.exchanges and parallel.tp > 1 and parallel.all2all in self.sequence_exchanges

    def batches_tokens(self, problem: MoEProblem) -> bool:
        """True when the exchange hands tokens over expert by expert."""
        return problem.parallel.exchanges and problem.parallel.all2all in self.batching_exchanges

    def forms(self, weight: WeightFormat) -> tuple[WeightForm, ...]:
        """What sizes of `weight` are rounded up to for a backend without a rule of its own."""
        return self.default_forms.get(weight.name, ())

    def request_names(self) -> tuple[str, ...]:
        """Backend names that may be asked for: those the engine's command line accepts, and those of rows.

        A row's name that the command line does not accept is refused by the decision, with the reason.
        """
        known = {name for route in self.routes for name in route.names}
        return tuple(sorted(known | (self.accepted_names.only or frozenset())))

    def rows(self) -> tuple[Route, ...]:
        """Every route, and those that requests leave them for."""
        return tuple(row for route in self.routes for row in (route, *route.detours.values()))

    def meant(self, name: str) -> frozenset[str]:
        """Names of the backends that the request `name` means in any row, their twins included."""
        name, rows = name.lower().replace("-", "_"), self.rows()
        found = {backend.name for row in rows for backend in row.names.get(name, ())}
        found |= {backend.name for row in rows for backend in row.backends()} & {name}
        return frozenset(found | {b.name for row in rows for a, b in row.twins if a.name in found})

    def switches(self) -> frozenset[str]:
        """Every environment switch that a row reads."""
        read = {name for route in self.routes for name in route.switches()}
        return frozenset(read | ({self.invariance.name} if self.invariance else set()))

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
