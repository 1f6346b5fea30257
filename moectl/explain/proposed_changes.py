"""Changes that may turn a failing verdict: tables of generators, by question.

A generator only proposes: a decision on the changed inputs shows whether a proposal helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..environment import Packages, device_names, find_device
from ..oracle.checks import Verdict
from ..oracle.decision import CAPABILITY, DEPLOYMENT, DTYPE, NAME, PLATFORM, Candidate
from ..oracle.format_keys import act_key
from ..oracle.policy import Policy
from ..oracle.registry import engine_named, known_packages, policy_named
from ..oracle.selection_inputs import SelectionInputs
from ..problem.moe_problem import Parallel
from ..problem.schemes import A16
from .assumed_machines import machine
from .assumptions import ACTIVATIONS, assume, can_declare

KINDS = ("request", "variable", "launch", "package", "parallel", "padding", "checkpoint", "gpu")
"""Kinds of change, smallest first."""

NODE = 8
"""Ranks of the deployment proposed for a single rank: the GPUs of a usual node."""


@dataclass(frozen=True)
class ProposedChange:
    """One change of the inputs.

    Attributes:
        kind: one of `KINDS`.
        slot: what it changes; combinations change each slot at most once.
        text: what to do, as a sentence without a full stop.
        options: the changed options of `moectl explain`, with their values.
    """

    kind: str
    slot: str
    text: str
    options: tuple[tuple[str, str], ...]
    apply: Callable[[SelectionInputs], SelectionInputs] = field(compare=False)

    @property
    def size(self) -> int:
        return KINDS.index(self.kind)


def request(name: str, policy: Policy) -> ProposedChange:
    """Request a backend by name, with the command of the policy's engine."""
    return ProposedChange(
        "request",
        "request",
        f"request it by name ({policy.serve.request(name)})",
        (("--backend", name),),
        lambda now: replace(now, requested=name),
    )


def variable(name: str, value: str) -> ProposedChange:
    """Set an environment variable of the engine."""

    def apply(now: SelectionInputs) -> SelectionInputs:
        packages = replace(now.packages, env={**now.packages.env, name: value})
        return replace(now, packages=packages)

    return ProposedChange("variable", name, f"set {name}={value}", (("--env", f"{name}={value}"),), apply)


def package(names: tuple[str, ...]) -> ProposedChange:
    """Install packages, with all their symbols."""

    def apply(now: SelectionInputs) -> SelectionInputs:
        old = now.packages
        missing = frozenset(symbol for symbol in old.missing if symbol.split(":")[0] not in names)
        return replace(now, packages=Packages({**old.versions, **dict.fromkeys(names, "")}, missing, old.env))

    probes = known_packages()
    hints = [probes[name].get for name in names if name in probes and probes[name].get]
    also = f" ({'; '.join(hints)})" if hints else ""
    return ProposedChange(
        "package",
        "package " + names[0],
        f"install {' and '.join(names)}{also}",
        tuple(("--packages", name) for name in names),
        apply,
    )


def parallel(target: Parallel, text: str) -> ProposedChange:
    """Use another deployment."""
    options = [("--tp", str(target.tp)), ("--dp", str(target.dp)), ("--ep", "" if target.ep else "no")]
    options += [("--eplb", "" if target.eplb else "no")]
    options += [("--all2all", target.all2all if target.exchanges else "no")]
    return ProposedChange(
        "parallel",
        "parallel",
        text,
        tuple(options),
        lambda now: replace(now, problem=now.problem.on(target)),
    )


def assumption(kind: str, name: str, value: str, text: str) -> ProposedChange:
    """Use a checkpoint with another property."""
    return ProposedChange(
        kind,
        name,
        text,
        (("--assume", f"{name}={value.replace(' ', '-')}"),),
        lambda now: replace(now, problem=assume(now.problem, {name: value})),
    )


def gpu(name: str) -> ProposedChange:
    """Use another device; on another platform, with the engine's default packages there."""

    def apply(now: SelectionInputs) -> SelectionInputs:
        other = machine(name, None, now.packages.env, engine_named(now.policy))
        same = other.device.platform == now.device.platform
        return replace(now, device=other.device, packages=now.packages if same else other.packages)

    return ProposedChange("gpu", "gpu", f"use {name} ({find_device(name).arch})", (("--gpu", name),), apply)


def _switches(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    """Values of the environment variable that the failing question reads."""
    capability = candidate.variant.capability
    for switch in capability.switches:
        if verdict.question == f"switch {switch.variable.name}":
            yield variable(switch.variable.name, verdict.wanted)
    for rule in capability.rules:
        if rule.question == verdict.question and rule.switch:
            entry = policy_named(now.policy).variables.get(rule.switch)
            for value in dict.fromkeys((*(entry.choices if entry else ()), "1", "0")):
                if value != now.packages.env.get(rule.switch):
                    yield variable(rule.switch, value)


def _packages(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    """The needed package, or its alternatives; with all symbols of a package at once."""
    for need in candidate.variant.capability.needs:
        if verdict.question == f"package {need.package}" and not need.met(now.packages):
            yield package((need.package,))
            if need.instead:
                yield package(need.instead)


def _ranks(now: SelectionInputs, candidate: Candidate | None, verdict: Verdict) -> Iterator[ProposedChange]:
    """Other tensor-parallel sizes, nearest first."""
    current = now.problem.parallel
    sizes = sorted((1, 2, 4, 8, 16, 32), key=lambda tp: (abs(math.log2(tp / current.tp)), tp))
    for tp in sizes:
        if tp != current.tp:
            yield parallel(replace(current, tp=tp), f"use {policy_named(now.policy).serve.tensor.format(tp)}")
    yield from _together(now, candidate, verdict)


def _together(
    now: SelectionInputs, candidate: Candidate | None, verdict: Verdict
) -> Iterator[ProposedChange]:
    """Expert parallelism instead of sharded experts."""
    current, serve = now.problem.parallel, policy_named(now.policy).serve
    if not current.ep and current.ranks > 1:
        yield parallel(
            replace(current, ep=True), f"use expert parallelism ({serve.expert.format(current.ranks)})"
        )
    if current.ranks == 1:
        for option, target in (
            (serve.tensor, replace(current, tp=NODE, ep=True)),
            (serve.data, replace(current, dp=NODE, ep=True)),
        ):
            yield parallel(target, f"deploy with {option.format(NODE)} {serve.expert.format(NODE)}")


def _exchanged(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    """Data-parallel ranks that exchange tokens, if none are exchanged now."""
    current, serve = now.problem.parallel, policy_named(now.policy).serve
    if current.exchanges:
        return
    ranks = current.ranks if current.ranks > 1 else NODE
    policy = policy_named(now.policy)
    for name in sorted(policy.exchanges):
        flags = " ".join([serve.data.format(ranks), serve.expert.format(ranks), serve.exchange.format(name)])
        yield parallel(replace(current, tp=1, dp=ranks, ep=True, all2all=name), f"deploy with {flags}")


def _spread(now: SelectionInputs, candidate: Candidate | None, verdict: Verdict) -> Iterator[ProposedChange]:
    """Another use of the same ranks, or another all2all exchange."""
    current = now.problem.parallel
    if current.eplb:
        yield parallel(replace(current, eplb=False), "turn off expert load balancing (EPLB)")
    if current.exchanges:
        policy = policy_named(now.policy)
        for name in sorted(policy.exchanges - {current.all2all}):
            yield parallel(replace(current, all2all=name), f"use {policy.serve.exchange.format(name)}")
    if current.dp > 1:
        ranks = current.ranks
        yield parallel(
            replace(current, tp=ranks, dp=1), f"use tensor parallelism over the {ranks} ranks instead"
        )
    if current.ep:
        yield parallel(replace(current, ep=False), "turn off expert parallelism")
    if current.ep and current.dp > 1:
        yield parallel(
            replace(current, tp=current.ranks, dp=1, ep=False, eplb=False),
            f"use tensor parallelism over the {current.ranks} ranks, without expert parallelism",
        )


def _padding(now: SelectionInputs, candidate: Candidate | None, verdict: Verdict) -> Iterator[ProposedChange]:
    """Sizes padded with zeros, smallest first."""
    dims, ranks = now.problem.dims, now.problem.parallel.tp_size
    for name, size, factor in (
        ("intermediate", dims.intermediate, ranks),
        ("hidden", dims.hidden, 1),
    ):
        for padded in dict.fromkeys(-(-size // step) * step for step in (32, 64, 128, 256, 512)):
            if padded != size:
                text = f"pad the experts' {name} size with zeros from {size * factor} to {padded * factor}"
                yield assumption("padding", name, str(padded * factor), text)


def _act_formats(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    """Activation formats that are supported with the weight format: set when serving, or declared."""
    key = verdict.wanted.rpartition(" with ")[0]
    declared = {
        act
        for offer in candidate.variant.capability.formats or ()
        if any(key == name or (name.endswith("*") and key.startswith(name[:-1])) for name in offer.weights)
        for act in (offer.acts.only or ())
    }
    backend = candidate.backend
    overrides = policy_named(now.policy).act_overrides(now.problem)
    for act in sorted(declared | {act_key(backend.act)}):
        if act == act_key(now.problem.scheme.act):
            continue
        if act in overrides and now.problem.scheme.act == A16:
            flag = policy_named(now.policy).serve.activation.format(overrides[act])
            yield assumption("launch", "act", act, f"quantize activations to {act} ({flag})")
        if not can_declare(now.problem, act):
            continue
        if act == "a16":
            how = "a weight-only checkpoint (16-bit activations)"
        elif ACTIVATIONS[act].dynamic:
            how = f"a checkpoint whose config declares dynamic {act.removesuffix(' dynamic')} activations"
        else:
            how = f"a checkpoint with static activation scales ({act})"
        yield assumption("checkpoint", "act", act, f"use {how}")


def _symmetric(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    if now.problem.scheme.weight.zero_point:
        yield assumption("checkpoint", "zero_points", "no", "use a checkpoint without zero points")


def _unordered(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    if now.problem.act_order:
        yield assumption("checkpoint", "act_order", "none", "use a checkpoint without activation order")


def _dtypes(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    for dtype, flag in (("bf16", "bfloat16"), ("fp16", "float16")):
        if dtype != now.problem.dtype:
            yield assumption(
                "launch",
                "dtype",
                dtype,
                f"run the model with {policy_named(now.policy).serve.dtype.format(flag)}",
            )


def _adapters(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    yield assumption("launch", "lora", "no", "serve without LoRA adapters on experts")


def _variant(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    if switch := policy_named(now.policy).invariance:
        yield variable(switch.name, "0")


def _devices(
    now: SelectionInputs, candidate: Candidate | None, verdict: Verdict | None
) -> Iterator[ProposedChange]:
    """One device of each other architecture."""
    seen = {(now.device.arch, now.device.features)}
    for name in device_names():
        device = find_device(name)
        if (device.arch, device.features) not in seen:
            seen.add((device.arch, device.features))
            yield gpu(name)


Generator = Callable[[SelectionInputs, Candidate, Verdict], Iterable[ProposedChange]]

BY_QUESTION: Mapping[str, tuple[Generator, ...]] = {
    "device": (_devices,),
    "number formats": (_act_formats, _devices),
    "activation filter": (_act_formats,),
    "zero points": (_symmetric,),
    "activation order": (_unordered,),
    "model dtype": (_dtypes,),
    "token exchange": (_spread, _exchanged),
    "expert parallel": (_spread,),
    "data parallel ranks": (_spread,),
    "expert balancing": (_spread,),
    "experts over ranks": (_together,),
    "token sequence": (_spread,),
    "token format": (_spread,),
    "batch invariance": (_variant,),
    "adapters on experts": (_adapters,),
}
"""Generators by question."""

FIXED = {
    "activation function": "the model's activation function",
    "gating": "whether the model's experts are gated",
    "checkpoint storage": "how the checkpoint stores its experts",
    "expert bias": "the method hands over an expert bias",
    "routing method": "the model's routing",
    "hash routing": "the model's routing by token id",
    "router dtype": "the dtype of the model's router",
    "scale dtype": "the dtype of the checkpoint's scales",
}
"""Questions that no change turns: they are about the model itself."""

BY_GROUP: Mapping[str, tuple[Generator, ...]] = {
    "package": (_packages,),
    "shape": (_switches, _ranks, _padding),
    "parallel": (_switches, _spread, _ranks),
    "policy": (_switches,),
    "scheme": (_switches,),
    "arch": (_devices,),
}
"""Generators by group, for questions without an entry in `BY_QUESTION`."""


def proposals(now: SelectionInputs, candidate: Candidate, verdict: Verdict) -> Iterator[ProposedChange]:
    """Changes that may turn the failing `verdict` of `candidate`."""
    if verdict.question in FIXED:
        return
    for generator in BY_QUESTION.get(verdict.question, BY_GROUP[verdict.group]):
        yield from generator(now, candidate, verdict)


BY_GATE: Mapping[str, tuple[Generator, ...]] = {
    PLATFORM: (_devices,),
    CAPABILITY: (_devices,),
    DTYPE: (_dtypes, _devices),
    NAME: (),
    DEPLOYMENT: (_ranks, _spread),
}
"""Generators for an engine's refusal, by its kind; for other kinds, `ON_FAILURE`."""

ON_FAILURE: tuple[Generator, ...] = (_dtypes, _ranks, _padding, _spread, _symmetric, _unordered, _devices)
"""Generators for an engine's failure although a candidate passes every check."""


def proposals_for_failure(
    now: SelectionInputs, candidate: Candidate, gates: Iterable[str]
) -> Iterator[ProposedChange]:
    """Changes that may help when the engine refuses (`gates`) or fails with a usable `candidate`."""
    gates = tuple(gates)
    nothing = Verdict("", "shape", "", "", False)
    for generator in BY_GATE.get(gates[0], ON_FAILURE) if gates else ON_FAILURE:
        yield from generator(now, candidate, nothing)


def other_deployments(now: SelectionInputs) -> Iterator[ProposedChange]:
    """Other tensor-parallel sizes and uses of the ranks, for a deployment that the engine refuses."""
    yield from _ranks(now, None, Verdict("", "parallel", "", "", False))
    yield from _spread(now, None, Verdict("", "parallel", "", "", False))


def other_shards(now: SelectionInputs) -> Iterator[ProposedChange]:
    """Other deployments and sizes, for a backend of the method that the engine uses for other shards."""
    nothing = Verdict("", "shape", "", "", False)
    for generator in (_ranks, _padding):
        yield from generator(now, None, nothing)


def new_devices(now: SelectionInputs) -> Iterator[ProposedChange]:
    """Other devices, for a backend that is in no priority order here."""
    yield from _devices(now, None, None)
