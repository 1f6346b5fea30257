"""What a backend supports, as data: plain records without tensors or I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from ..environment import Device, Packages
from ..environment.package_probes import release_numbers
from ..environment.variables import Variable
from ..problem.model_shape import UNKNOWN_MODEL, ModelShape
from ..problem.moe_problem import Align, MoEProblem
from ..problem.schemes import A16, ActFormat, Scheme, WeightFormat
from .format_keys import act_key
from .gpu_archs import Archs

GROUPS = ("arch", "package", "scheme", "shape", "parallel", "policy")
"""Groups of questions, in display order."""


@dataclass(frozen=True, slots=True)
class NameSet:
    """A set of names: `only` these (None is any, empty is none), except those in `never`.

    Example:
        >>> only("bf16", "fp16").allows("fp16")
        True
        >>> str(but("moe_wna16"))
        'any but moe_wna16'
    """

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
    """Every name except these."""
    return NameSet(never=frozenset(names))


A16_ONLY = only("a16")


@dataclass(frozen=True, slots=True)
class FormatSupport:
    """Weight formats with the activation formats supported for them, on some devices.

    A name that ends in ``*`` is a prefix of several formats.
    """

    weights: frozenset[str]
    acts: NameSet = A16_ONLY
    where: Archs | None = None

    def supports(self, weight: str, act: str, device: Device) -> bool:
        """True when the pair is supported on `device`."""
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
    """A required package, optionally with a symbol in it, or of certain versions.

    `instead` are packages or tools that together replace it, `switch` an environment variable that
    overrides the check. `code` is the engine's reason code for an unmet need. `oldest` and `below`: the
    first version that will do, and the first that will not any more; an unknown version does.
    """

    package: str
    symbol: str = ""
    instead: tuple[str, ...] = ()
    switch: Variable | None = None
    code: str = "device"
    oldest: str = ""
    below: str = ""

    def met(self, packages: Packages) -> bool:
        """True when the package or its replacement is available."""
        return (
            (packages.has(self.package, self.symbol) and self._fits(packages.versions[self.package]))
            or (bool(self.instead) and all(packages.has(name) for name in self.instead))
            or (self.switch is not None and is_on(packages, self.switch))
        )

    def _fits(self, version: str) -> bool:
        numbers = release_numbers(version)
        return not numbers or (
            numbers >= release_numbers(self.oldest)
            and (not self.below or numbers < release_numbers(self.below))
        )

    def __str__(self) -> str:
        text = f"{self.package}.{self.symbol}" if self.symbol else self.package
        text += f" from {self.oldest}" if self.oldest else ""
        text += f", before {self.below}" if self.below else ""
        return " or ".join([text, *([" and ".join(self.instead)] if self.instead else [])])


@dataclass(frozen=True, slots=True)
class EnvironmentSwitch:
    """An environment variable of the engine that must be on or off."""

    variable: Variable
    wanted: bool = True
    code: str = "device"


def is_on(packages: Packages, switch: Variable) -> bool:
    """True when `switch` is on, as the engine parses its value, or by default if it is not set."""
    return switch.is_on(packages.env.get(switch.name))


@dataclass(frozen=True, slots=True)
class ParallelSupport:
    """Supported deployments over several ranks.

    `exchange` names the all2all kernels (``none``: tokens stay on their rank). `sequence` is sequence
    parallelism (tokens sliced over the tensor-parallel ranks), `alone` no expert parallelism.
    """

    exchange: NameSet = ANY
    eplb: bool = True
    dp: bool = True
    ep: bool = True
    sequence: bool = True
    alone: bool = True


ALONE = ParallelSupport(exchange=only("none"), eplb=False, dp=False)
"""No all2all exchange, no data parallelism, no EPLB: kernels with fused routing."""


@dataclass(frozen=True, slots=True)
class SupportQuery:
    """One problem as a policy's route asks backends about it: the input of every check.

    Attributes:
        weight: key of the weight format, as coarse as the engine's own.
        declared: the activation format that the checkpoint declares and the route passes on.
        act: key of the activation format that the backend would use.
        checkpoint: the checkpoint storage, as the engine's method sees it.
        zero_points, bias: whether the method may pass zero points or expert biases.
        act_order: the activation order that the method passes on, as `MoEProblem.act_order`.
        pads_tiles: whether the method pads weights to whole kernel tiles.
        dtype: the engine's 16-bit dtype on this device.
        sequence: sequence parallelism: tokens are sliced over tensor-parallel ranks before the exchange.
        activation: the activation function, with the engine's suffixes for row order and gating.
        routing: the engine's name of the routing method.
        invariant: results must not depend on the rest of the batch.
        request: the backend asked for by name.
        batched: tokens come in the batched activation format, by the exchange or by request.
        sliced: one rank's intermediate size in the checkpoint if the method pads that shard before the
            checks (`problem` then has the padded size); otherwise 0.
        model: sizes of the model outside its experts.
    """

    problem: MoEProblem
    device: Device
    packages: Packages
    weight: str
    declared: ActFormat = A16
    act: str = "a16"
    checkpoint: str = ""
    zero_points: bool = False
    act_order: str = ""
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
    model: ModelShape = UNKNOWN_MODEL

    @property
    def parametrized(self) -> bool:
        """True when the activation function has parameters that the kernel needs."""
        activation = self.problem.activation
        return self.activation != "swigluoai" and (
            activation.limit is not None or activation.alpha is not None
        )

    @property
    def clamped(self) -> bool:
        """True when the engine asks for a clamp; gpt-oss' clamp is part of its activation function."""
        return self.activation != "swigluoai" and self.problem.activation.limit is not None

    @property
    def exchange(self) -> str:
        """The all2all kernels in use, or ``none``."""
        parallel = self.problem.parallel
        return parallel.all2all if parallel.exchanges else "none"

    @property
    def logits(self) -> str:
        """Dtype of the router logits: that of the router's weights if wider than the model's."""
        return "fp32" if self.problem.router_dtype == "fp32" else self.dtype


@dataclass(frozen=True, slots=True)
class BackendRule:
    """A check that no field of `Capability` expresses; `switch`: the environment variable it reads."""

    question: str
    group: str
    code: str
    holds: Callable[[SupportQuery], bool]
    wanted: Callable[[SupportQuery], str]
    offered: str
    switch: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeFailure:
    """A failure after the choice, with exception class `kind`; the engine's choice does not depend on it.

    `at` says when: on the first token, when kernels run, or `LOADING` weights.
    """

    when: Callable[[SupportQuery], bool]
    says: str
    kind: str
    at: str = "on the first token"


LOADING = "on loading weights"


def weighted_input(kind: str) -> RuntimeFailure:
    """A failure of kernels without support for router weights on the input, as in Llama 4."""
    return RuntimeFailure(
        lambda ask: ask.problem.routing.weight_on_input,
        "does not support router weights on the experts' input",
        kind,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """What one experts class supports; a constant, compared by identity.

    None means any, an empty set never.
    `dtypes` are the model's 16-bit dtypes, `logits` those of router logits, `scales` the storage dtypes of
    weight scales. `hashed`, for fused routing only: experts can be looked up by token id.
    `lora`: LoRA adapters on experts; `invariant`: results do not depend on the rest of the batch.
    `codes` overrides the engine's reason code of a question. `remarks` are sentences for the user when the
    class is chosen, without a full stop; empty ones are left out.
    """

    arch: Archs | None = None
    needs: tuple[PackageNeed, ...] = ()
    switches: tuple[EnvironmentSwitch, ...] = ()
    formats: tuple[FormatSupport, ...] | None = None
    activations: NameSet = ANY
    ungated: bool = True
    routing: NameSet = ANY
    parallel: ParallelSupport = ParallelSupport()
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
    runtime_failures: tuple[RuntimeFailure, ...] = ()
    remarks: tuple[Callable[[SupportQuery], str], ...] = ()
    codes: Mapping[str, str] = field(default_factory=dict, hash=False)

    def switch_names(self) -> frozenset[str]:
        """Environment variables that any check reads."""
        named = [switch.variable.name for switch in self.switches]
        named += [need.switch.name for need in self.needs if need.switch]
        named += [rule.switch for rule in self.rules if rule.switch]
        return frozenset(named)


@cache
def spell_archs(capability: Capability) -> str:
    """The supported devices, in words."""
    if capability.arch is None:
        return "any device"
    return ", ".join(str(arch) for arch in capability.arch) or "no device"


@cache
def spell_formats(capability: Capability) -> str:
    """The supported pairs of number formats, in words."""
    return "any" if capability.formats is None else "; ".join(map(str, capability.formats)) or "none"


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsClass:
    """One experts class of a backend; a constant, compared by identity.

    `monolithic`: takes router logits, otherwise top-k ids and weights. `batched`: takes tokens in the
    batched activation format (one block per expert), otherwise in the standard one.
    """

    experts: str
    capability: Capability
    monolithic: bool = False
    batched: bool = False


NO_ALIGN = Align()


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The weight layout and padding of a backend: a row of a table, the first that matches a problem applies.

    `layout` names the weight layout; `align` is what sizes are padded to when the weights are created,
    by weight format if it differs. `scaled`: keys of weight formats; `declared`: of the activation formats
    that checkpoints declare. `dtypes` are the model's 16-bit dtypes. `up_to`: only intermediate sizes up to
    this one (0: any). An engine may pad less than the layout needs, and pad the rest when it repacks.
    """

    layout: str = ""
    align: Align | Callable[[WeightFormat], Align] = NO_ALIGN
    where: Archs | None = None
    weights: frozenset[str] | None = None
    activations: NameSet = ANY
    scaled: NameSet = ANY
    declared: NameSet = ANY
    dtypes: NameSet = ANY
    up_to: int = 0

    def fits(self, ask: SupportQuery) -> bool:
        """True when this row applies to the device, weights and activation of `ask`."""
        return (
            (self.where is None or any(arch.fits(ask.device) for arch in self.where))
            and (self.weights is None or ask.problem.scheme.weight.name in self.weights)
            and self.activations.allows(ask.activation)
            and self.scaled.allows(ask.weight)
            and self.declared.allows(act_key(ask.problem.scheme.act))
            and self.dtypes.allows(ask.dtype)
            and (not self.up_to or ask.problem.dims.intermediate <= self.up_to)
        )


UNTRIED = "not verified on hardware"
"""The remark on a backend that was never run on such a device."""


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """One fused-MoE backend; a constant, compared by identity.

    Attributes:
        name: the user's spelling (`--moe-backend`).
        engine_name: the engine's own, for comparison only.
        variants: experts classes in priority order.
        act: the activation format it uses; with `follows_declared`, the checkpoint's instead.
        forms: weight layouts and what the engine pads sizes to; no match: any layout, no padding.
        runner: name of the moectl runner that executes it; empty if there is none.
        note: why a policy ranks it this way, in a sentence.
        verified: devices that its runner was run and checked on.
        untried_with: whether it never was with layers of a scheme.
        dequantizes: weights are dequantized to the model's 16-bit dtype on loading, and kept so.
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
    untried_with: Callable[[Scheme], bool] = lambda scheme: False
    dequantizes: bool = False

    def untried(self, device: Device, scheme: Scheme | None = None) -> bool:
        """True when moectl has a runner that was never verified on such a `device`, or with such a layer."""
        return bool(self.runner) and not any(arch.fits(device) for arch in self.verified_with(scheme))

    def verified_with(self, scheme: Scheme | None) -> Archs:
        """The devices that its runner was run and checked on, with layers of `scheme` (None: of any)."""
        return () if scheme is not None and self.untried_with(scheme) else self.verified

    def on(self, platform: str) -> bool:
        """True when an experts class is for devices of `platform`."""
        archs = [variant.capability.arch for variant in self.variants]
        return any(arch is None or any(one.platform == platform for one in arch) for arch in archs)

    def align(self, ask: SupportQuery) -> Align:
        """Multiples that sizes are padded to for `ask`."""
        align = self.form(ask).align
        return align if isinstance(align, Align) else align(ask.problem.scheme.weight)

    def form(self, ask: SupportQuery) -> WeightForm:
        """The row of `forms` that applies to `ask`."""
        return next((form for form in self.forms if form.fits(ask)), WeightForm())
