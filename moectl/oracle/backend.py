"""What a backend offers, as data: records that hold no tensor and read nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from ..environment import Device, Packages
from ..environment.variables import Variable
from ..problem.moe_problem import Align, MoEProblem
from ..problem.schemes import A16, ActFormat, WeightFormat
from .gpu_archs import Archs

GROUPS = ("arch", "package", "scheme", "shape", "parallel", "policy")
"""The groups that questions belong to, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class NameSet:
    """A set of names: `only` these (None is any, empty is none), and `never` those."""

    only: frozenset[str] | None = None
    never: frozenset[str] = frozenset()

    def allows(self, name: str) -> bool:
        """True when `name` is in the set."""
        return name not in self.never and (self.only is None or name in self.only)

    def __str__(self) -> str:
        if self.only is not None:
            return ", ".join(sorted(self.only - self.never)) or "none"
        return f"any but {', '.join(sorted(self.never))}" if self.never else "any"


ANY, NONE = NameSet(), NameSet(frozenset())


def only(*names: str) -> NameSet:
    """Exactly these names."""
    return NameSet(frozenset(names))


def but(*names: str) -> NameSet:
    """Every name but these."""
    return NameSet(never=frozenset(names))


A16_ONLY = only("a16")


@dataclass(frozen=True, slots=True)
class FormatSupport:
    """Weight formats with the activation formats they are computed with, on some devices.

    A name that ends in ``*`` stands for every format that begins like it.
    """

    weights: frozenset[str]
    acts: NameSet = A16_ONLY
    where: Archs | None = None

    def serves(self, weight: str, act: str, device: Device) -> bool:
        """True when the pair is served on `device`."""
        named = weight in self.weights or any(
            weight.startswith(name[:-1]) for name in self.weights if name.endswith("*")
        )
        return (
            named
            and self.acts.allows(act)
            and (self.where is None or any(a.fits(device) for a in self.where))
        )

    def __str__(self) -> str:
        where = "" if self.where is None else f" on {', '.join(map(str, self.where))}"
        return f"{'/'.join(sorted(self.weights))} with {self.acts} activations{where}"


@dataclass(frozen=True, slots=True)
class PackageNeed:
    """An importable package, with a symbol where one is needed.

    `instead` are packages or tools that together do as well, `switch` an environment switch that says
    the same. `code` is the engine's own reason when the need is not met.
    """

    package: str
    symbol: str = ""
    instead: tuple[str, ...] = ()
    switch: Variable | None = None
    code: str = "device"

    def met(self, packages: Packages) -> bool:
        """True when the package, or what stands for it, is there."""
        return (
            packages.has(self.package, self.symbol)
            or (bool(self.instead) and all(packages.has(name) for name in self.instead))
            or (self.switch is not None and is_on(packages, self.switch))
        )

    def __str__(self) -> str:
        text = f"{self.package}.{self.symbol}" if self.symbol else self.package
        return " or ".join([text, *([" and ".join(self.instead)] if self.instead else [])])


@dataclass(frozen=True, slots=True)
class EnvironmentSwitch:
    """An environment switch of the engine that must be on or off."""

    variable: Variable
    wanted: bool = True
    code: str = "device"


def is_on(packages: Packages, switch: Variable) -> bool:
    """True when `switch` is on: as the engine reads its value, by its default when it is not set."""
    return switch.is_on(packages.env.get(switch.name))


@dataclass(frozen=True, slots=True)
class ParallelSupport:
    """Deployments over several ranks that are served.

    `exchange` names the all2all kernels, or ``none`` where tokens stay on their rank. `sequence` is
    tokens sliced over the tensor-parallel ranks, `alone` a deployment without expert parallelism.
    """

    exchange: NameSet = ANY
    eplb: bool = True
    dp: bool = True
    ep: bool = True
    sequence: bool = True
    alone: bool = True


ALONE = ParallelSupport(exchange=only("none"), eplb=False, dp=False)
"""No exchange of tokens, no data parallelism, no dynamic balancing: fused routers."""


@dataclass(frozen=True, slots=True)
class SupportQuery:
    """One problem as a policy's route puts it to backends: every check is a function of this.

    Attributes:
        weight: the weight format's key, as coarse as the engine's own.
        declared: the activation format that the checkpoint declares and the route passes on.
        act: key of the activation format that the judged backend is asked to compute with.
        checkpoint: the checkpoint storage, as the engine's method sees it.
        zero_points, bias: whether the method may hand over zero points or expert biases.
        pads_tiles: whether the method pads weights up to a kernel tile.
        dtype: the engine's 16-bit dtype on this device.
        sequence: tokens are sliced over the tensor-parallel ranks before they are exchanged.
        activation: the activation function, with the engine's suffixes for row order and gating.
        routing: the engine's name of the routing method.
        invariant: results must not depend on the rest of the batch.
        request: the backend asked for by name.
        batched: tokens are handed over expert by expert, as the exchange does or a request asks.
        sliced: one rank's intermediate size in the checkpoint, where the method pads that slice before
            it asks (`problem` then has the padded size); 0 where it does not.
    """

    problem: MoEProblem
    device: Device
    packages: Packages
    weight: str
    declared: ActFormat = A16
    act: str = "a16"
    checkpoint: str = ""
    zero_points: bool = False
    bias: bool = False
    pads_tiles: bool = False
    dtype: str = "bf16"
    sequence: bool = False
    activation: str = "silu"
    routing: str = ""
    invariant: bool = False
    request: str = ""
    batched: bool = False
    sliced: int = 0

    @property
    def parametrized(self) -> bool:
        """True when the activation function has parameters that a kernel must be told."""
        activation = self.problem.activation
        return self.activation != "swigluoai" and (
            activation.limit is not None or activation.alpha is not None
        )

    @property
    def clamped(self) -> bool:
        """True when the engine asks for a clamp; that of gpt-oss is part of its activation function."""
        return self.activation != "swigluoai" and self.problem.activation.limit is not None

    @property
    def exchange(self) -> str:
        """All2all kernels in use, or ``none``."""
        parallel = self.problem.parallel
        return parallel.all2all if parallel.exchanges else "none"

    @property
    def logits(self) -> str:
        """Dtype of the router's logits: that of its weights where they are wider than the model's."""
        return "fp32" if self.problem.router_dtype == "fp32" else self.dtype


@dataclass(frozen=True, slots=True)
class BackendRule:
    """A question that no field of `Capability` can say; `switch` is one that it reads, if any."""

    question: str
    group: str
    code: str
    holds: Callable[[SupportQuery], bool]
    wanted: Callable[[SupportQuery], str]
    offered: str
    switch: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeFailure:
    """What kernels stop on when they run, `kind` being the engine's exception; its choice ignores that."""

    when: Callable[[SupportQuery], bool]
    says: str
    kind: str


def weighted_input(kind: str) -> RuntimeFailure:
    """Kernels that do not take tokens already multiplied by the router's weight, as Llama 4 does it."""
    return RuntimeFailure(
        lambda ask: ask.problem.routing.weight_on_input,
        "does not take the router's weight on the experts' input",
        kind,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """What one experts implementation serves: a constant, which equals nothing but itself.

    None is "any", an empty set is "never".
    `clamps` tells that the activation function's limit is applied.
    `dtypes` are the model's 16-bit dtypes, `logits` the router's, `scales` the storage dtypes of weight
    scales. `hashed` concerns fused routers alone: whether they look experts up by token id.
    `lora` is adapters on experts, `invariant` results that do not depend on the rest of the batch.
    `codes` overrides the engine's reason for a question that its own check files elsewhere.
    """

    arch: Archs | None = None
    needs: tuple[PackageNeed, ...] = ()
    switches: tuple[EnvironmentSwitch, ...] = ()
    offers: tuple[FormatSupport, ...] | None = None
    activations: NameSet = ANY
    ungated: bool = True
    clamps: bool = True
    routing: NameSet = ANY
    spread: ParallelSupport = ParallelSupport()
    checkpoints: NameSet = ANY
    act_order: bool = True
    zero_points: bool = True
    bias: bool = True
    dtypes: NameSet = ANY
    logits: NameSet = ANY
    scales: NameSet = ANY
    hashed: bool = False
    lora: bool = False
    invariant: bool = False
    rules: tuple[BackendRule, ...] = ()
    stops: tuple[RuntimeFailure, ...] = ()
    codes: Mapping[str, str] = field(default_factory=dict, hash=False)

    def switch_names(self) -> frozenset[str]:
        """Environment switches that any question reads."""
        named = [switch.variable.name for switch in self.switches]
        named += [need.switch.name for need in self.needs if need.switch]
        named += [rule.switch for rule in self.rules if rule.switch]
        return frozenset(named)


@cache
def spell_archs(offers: Capability) -> str:
    """The devices that are served, in words."""
    if offers.arch is None:
        return "any device"
    return ", ".join(str(arch) for arch in offers.arch) or "no device"


@cache
def spell_offers(offers: Capability) -> str:
    """The pairs of number formats that are served, in words."""
    return "any" if offers.offers is None else "; ".join(map(str, offers.offers)) or "none"


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsClass:
    """One experts class of a backend: a constant, which equals nothing but itself.

    `monolithic` takes router logits, otherwise top-k ids and weights; `batched` takes tokens sorted
    into one block per expert, otherwise in their own order.
    """

    experts: str
    offers: Capability
    monolithic: bool = False
    batched: bool = False


NO_ALIGN = Align()


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a backend wants weights: one row of a table, of which the first that fits a problem holds.

    `layout` names the weight layout; `align` is what sizes are rounded up to when the weights are
    created, by weight format where that differs. `scaled`: weights by their whole key.
    `dtypes` are the model's 16-bit dtypes.
    `up_to`: only intermediate sizes up to this one. An engine may round less than the layout's own
    padding, and pad the rest when it repacks.
    """

    layout: str = ""
    align: Align | Callable[[WeightFormat], Align] = NO_ALIGN
    where: Archs | None = None
    weights: frozenset[str] | None = None
    activations: NameSet = ANY
    scaled: NameSet = ANY
    dtypes: NameSet = ANY
    up_to: int = 0

    def fits(self, ask: SupportQuery) -> bool:
        """True when this row speaks of `ask`'s device, weights and activation."""
        return (
            (self.where is None or any(arch.fits(ask.device) for arch in self.where))
            and (self.weights is None or ask.problem.scheme.weight.name in self.weights)
            and self.activations.allows(ask.activation)
            and self.scaled.allows(ask.weight)
            and self.dtypes.allows(ask.dtype)
            and (not self.up_to or ask.problem.dims.intermediate <= self.up_to)
        )


UNTRIED = "not verified on hardware"
"""What is said of a backend that was never run on such a device."""


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """One fused-MoE backend: a constant, which equals nothing but itself.

    Attributes:
        name: the user's spelling (`--moe-backend`).
        engine_name: the engine's own, for comparison only.
        variants: experts classes in the order in which they are asked.
        act: the activation format it computes with; `follows_declared` takes the checkpoint's instead.
        forms: weight layouts and what the engine rounds sizes up to; none that fits: any layout, no rounding.
        runner: name of the runner that executes it here, empty where there is none.
        note: why a policy ranks it where it does, in a sentence.
        verified: devices of a kind on which its runner was run and its results were checked.
    """

    name: str
    engine_name: str
    variants: tuple[ExpertsClass, ...]
    act: ActFormat = A16
    follows_declared: bool = False
    forms: tuple[WeightForm, ...] = ()
    runner: str = ""
    note: str = ""
    verified: Archs = ()

    def untried(self, device: Device) -> bool:
        """True when this tool would run it on `device`, where nobody has checked what it computes."""
        return bool(self.runner) and not any(arch.fits(device) for arch in self.verified)

    def align(self, ask: SupportQuery) -> Align:
        """Multiples that sizes are rounded up to for `ask`."""
        align = self.form(ask).align
        return align if isinstance(align, Align) else align(ask.problem.scheme.weight)

    def form(self, ask: SupportQuery) -> WeightForm:
        """The row of `forms` that speaks of `ask`."""
        return next((form for form in self.forms if form.fits(ask)), WeightForm())
