"""An engine's selection rules, as versioned data: routes, and its names for what a model has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..environment import Device
from ..environment.variables import Variable
from ..errors import UsageError
from ..problem.moe_problem import MoEProblem
from ..problem.schemes import WeightFormat
from .backend import ANY, Backend, NameSet, SupportQuery, WeightForm
from .route import Condition, Route
from .server_arguments import ServerArguments


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Hidden sizes that all2all kernels support: multiples of some bytes, or a list.

    `fails` is the engine's exception class for a size above the list.

    Example:
        >>> ExchangeSizes(multiple_bytes=512).round(2880), ExchangeSizes(sizes=(2048, 4096)).round(2880)
        (3072, 4096)
    """

    multiple_bytes: int = 0
    sizes: tuple[int, ...] = ()
    fails: str = "ValueError"

    def round(self, hidden: int, item_bytes: int = 2) -> int | None:
        """The next supported hidden size; None if `hidden` is above the largest."""
        if self.sizes:
            return next((size for size in self.sizes if size >= hidden), None)
        step = self.multiple_bytes // item_bytes
        return -(-hidden // step) * step


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the engine's command line, with ``{}`` for the value.

    Attributes:
        command: the command for a checkpoint.
        backend: the command that requests a backend by name.
        tensor, data: tensor-parallel and data-parallel ranks.
        expert: expert parallelism over so many ranks; `exchange`: the all2all kernels.
        dtype: the model's dtype, as torch spells it.
        pipeline: pipeline stages; adapters: LoRA adapters; activation: the activation format of experts, by
            the engine's name (`Route.act_overrides`). Empty for a command without them.
        tensor_spans_all: the number of tensor-parallel ranks counts those of data parallelism, too.
        spelling: how the command line spells a backend's name.
        spelled: requests that are other options than `backend`.
        separator, end: what stands between options and after the last, for a Python call.
    """

    command: str
    backend: str
    tensor: str
    data: str
    expert: str
    exchange: str
    dtype: str
    pipeline: str = ""
    adapters: str = ""
    activation: str = ""
    tensor_spans_all: bool = False
    spelling: Callable[[str], str] = str
    spelled: Mapping[str, str] = field(default_factory=dict, hash=False)
    separator: str = " "
    end: str = ""

    def request(self, name: str) -> str:
        """The command that requests a backend by name, or the argument of a Python call."""
        return self.spelled.get(name) or self.backend.format(self.spelling(name))

    def request_option(self, name: str) -> str:
        """The option of that command: what it adds to the words that `command` begins with."""
        words = self.request(name).split(" ")
        for word in self.command.split(" "):
            if words[0] != word:
                break
            words.pop(0)
        return " ".join(words)

    def whole(self, words: Iterable[str]) -> str:
        """The command of `words`: the one for a checkpoint, and options."""
        return self.separator.join(words) + self.end


@dataclass(frozen=True, slots=True)
class Policy:
    """One engine's selection rules, versioned by its name.

    Attributes:
        routes: the first that matches a problem applies.
        platforms: platforms that the routes cover completely.
        accepted_names: backend names that the engine's command line accepts.
        dtype: the engine's 16-bit dtype for a model dtype on a device.
        activation, routing: the engine's names for an activation function and a routing method.
        exchanges: all2all names that the engine's command line accepts; `default_exchange`: its default.
        serve: the options of that command line.
        exchange_sizes: supported hidden sizes, by all2all name.
        batching_exchanges: all2all names with the batched activation format.
        sequence_exchanges: all2all names with sequence parallelism over tensor-parallel ranks.
        default_forms: by weight format name, the padding for a backend without its own rule.
        variables: environment variables for experts, including removed ones.
        arguments: how server arguments are resolved before a layer is created; None: they are as stated.
        unrecorded: what of an answer was never compared with the engine's own, in words; empty if all was.
        refusals: what the engine refuses with every method.
        balancing: by method, the backends (by the engine's names) with EPLB support; the engine refuses
            EPLB with others. Empty: unknown.
        invariance: the environment variable for batch-invariant results.
        complete: for a release with rules for some formats only, the next one with rules for all, as
            ``FAMILY==VERSION``.
        measures: measured times decide among usable backends; otherwise only the priority order.
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
    arguments: Callable[[SupportQuery], ServerArguments] | None = None
    unrecorded: Callable[[SupportQuery], str] | None = None
    refusals: tuple[Condition, ...] = ()
    balancing: Mapping[str, NameSet] = field(default_factory=dict, hash=False)
    complete: str = ""
    measures: bool = False

    def slices_tokens(self, problem: MoEProblem) -> bool:
        """True when tokens are sliced over tensor-parallel ranks before the exchange."""
        parallel = problem.parallel
        return parallel.exchanges and parallel.tp > 1 and parallel.all2all in self.sequence_exchanges

    def batches_tokens(self, problem: MoEProblem) -> bool:
        """True when the exchange uses the batched activation format."""
        return problem.parallel.exchanges and problem.parallel.all2all in self.batching_exchanges

    def forms(self, weight: WeightFormat) -> tuple[WeightForm, ...]:
        """The padding for `weight` and a backend without its own rule."""
        return self.default_forms.get(weight.name, ())

    def request_names(self) -> tuple[str, ...]:
        """Backend names for requests: those that the engine's command line accepts, and those of routes.

        A route's name that the command line does not accept is refused by the decision, with the reason.
        """
        names = {name for route in self.routes for name in route.names}
        return tuple(sorted(names | (self.accepted_names.only or frozenset())))

    def rows(self) -> tuple[Route, ...]:
        """Every route, including those used for certain requests only."""
        return tuple(row for route in self.routes for row in (route, *route.request_routes.values()))

    def backends(self) -> tuple[Backend, ...]:
        """Every backend of its routes, without repeats, by name."""
        found = {id(backend): backend for row in self.rows() for backend in row.backends()}
        return tuple(sorted(found.values(), key=lambda backend: (backend.name, backend.engine_name)))

    def act_overrides(self, problem: MoEProblem) -> Mapping[str, str]:
        """Activation formats that the command line sets for such a checkpoint, by key: the engine's names."""
        scheme = problem.scheme
        for route in self.routes:
            if route.storages.allows(problem.storage) and scheme.weight.name in route.weights:
                return route.act_overrides
        return {}

    def requested_backends(self, name: str) -> frozenset[str]:
        """Names of the backends that the request `name` selects in any route, with their batched twins.

        A route that replaces the backend of that very name by others does not count.
        """
        name, rows = name.lower().replace("-", "_"), self.rows()
        itself = {backend.name for row in rows for backend in row.backends()} & {name}
        by_route = [{backend.name for backend in row.names.get(name, ())} for row in rows]
        selected = itself.union(*(names for names in by_route if itself <= names))
        twins = {batched.name for row in rows for a, batched in row.batched_twins if a.name in selected}
        return frozenset(selected | twins)

    def switches(self) -> frozenset[str]:
        """Every environment variable that a route reads."""
        read = {name for route in self.routes for name in route.switches()}
        return frozenset(read | ({self.invariance.name} if self.invariance else set()))

    def replaced(self, name: str, problem: MoEProblem) -> tuple[Route, ...]:
        """The routes that route `name` replaces for checkpoints stored as that of `problem`."""
        replaced = {other for row in self.rows() if row.name == name for other in row.replaces}
        return tuple(
            route
            for route in self.routes
            if route.name in replaced and route.storages.allows(problem.storage)
        )

    def only_route(self, name: str) -> Policy:
        """This policy with one route only, which applies to every problem and refuses none."""
        for route in self.routes:
            if route.name == name:
                bare = replace(
                    route,
                    storages=ANY,
                    acts=ANY,
                    when=None,
                    refusals=(),
                    late_failures=(),
                    minimum=0,
                    dtypes=ANY,
                )
                return replace(self, routes=(bare,))
        raise UsageError(f"policy {self.name} has no route {name!r}; it has {[r.name for r in self.routes]}")
