"""The questions that every candidate is checked on, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..environment import Device, Packages
from .backend import Capability, ExpertsClass, SupportQuery, is_on, spell_archs, spell_formats


class Verdict(NamedTuple):
    """One answered question: whether it `holds`, what was `wanted`, and what the candidate `offered`.

    `code` is the engine's reason code for such a rejection, as in recorded decisions.
    """

    question: str
    group: str
    wanted: str
    offered: str
    holds: bool
    code: str = "other"

    def __str__(self) -> str:
        return f"{self.question}: wanted {self.wanted}, offered {self.offered}"


Answer = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Check:
    """A named question; `answer` returns wanted, offered and whether it holds."""

    question: str
    group: str
    code: str
    answer: Callable[[SupportQuery, Capability, ExpertsClass], Answer]


def _fits(device: Device, capability: Capability) -> Answer:
    holds = capability.arch is None or any(arch.fits(device) for arch in capability.arch)
    features = " and ".join(sorted(device.features))
    wanted = f"{device.arch} with {features}" if features else device.arch
    return wanted, spell_archs(capability), holds


def _device(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    return _fits(ask.device, capability)


def _gating(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    gated = ask.problem.activation.gated
    return (
        "gated" if gated else "not gated",
        "any" if capability.ungated else "gated",
        gated or capability.ungated,
    )


def _activation(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    return ask.activation, str(capability.activations), capability.activations.allows(ask.activation)


def _formats(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    holds = capability.formats is None or any(
        offer.supports(ask.weight, ask.act, ask.device) for offer in capability.formats
    )
    return f"{ask.weight} with {ask.act} activations", spell_formats(capability), holds


def _checkpoint(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    return ask.checkpoint, str(capability.checkpoints), capability.checkpoints.allows(ask.checkpoint)


def _act_order(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    order = ask.act_order == "group"
    offered = "any order" if capability.act_order else "none, or by weight"
    return "by group" if order else "none", offered, capability.act_order or not order


def _zero_points(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    wanted = "yes" if ask.zero_points else "no"
    return wanted, "yes" if capability.zero_points else "no", capability.zero_points or not ask.zero_points


def _bias(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    possible = "yes" if ask.problem.bias else "possible with this method"
    wanted = possible if ask.bias else "no"
    return wanted, "yes" if capability.bias else "no", capability.bias or not ask.bias


def _dtype(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    return ask.dtype, str(capability.dtypes), capability.dtypes.allows(ask.dtype)


def _scales(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    stored = ask.problem.scheme.weight.scale_dtype or {"fp16": "F16"}.get(ask.problem.dtype, "BF16")
    return stored, str(capability.scales), capability.scales.allows(stored)


def _routing(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    return ask.routing, str(capability.routing), capability.routing.allows(ask.routing)


def _hashed(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    hashed = ask.problem.routing.hashed
    serves = capability.hashed or not variant.monolithic
    return "by token id" if hashed else "by score", "any" if serves else "by score", serves or not hashed


def _logits(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    return ask.logits, str(capability.logits), capability.logits.allows(ask.logits)


def _lora(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    lora = ask.problem.lora
    return "yes" if lora else "no", "yes" if capability.lora else "no", capability.lora or not lora


def _invariant(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    wanted = ask.invariant
    return (
        "yes" if wanted else "no",
        "yes" if capability.invariant else "no",
        capability.invariant or not wanted,
    )


def _exchange(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    return ask.exchange, str(capability.parallel.exchange), capability.parallel.exchange.allows(ask.exchange)


def _experts_spread(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    ep = ask.problem.parallel.ep_size > 1
    return str(ep).lower(), "any" if capability.parallel.ep else "false", capability.parallel.ep or not ep


def _data_parallel(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    dp = ask.problem.parallel.dp
    return str(dp), "any" if capability.parallel.dp else "1", capability.parallel.dp or dp <= 1


def _balancing(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    eplb = ask.problem.parallel.eplb
    return (
        "on" if eplb else "off",
        "any" if capability.parallel.eplb else "off",
        capability.parallel.eplb or not eplb,
    )


def _token_format(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    names = {True: "batched by expert", False: "standard"}
    return names[ask.batched], names[variant.batched], ask.batched == variant.batched


def _alone(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    ep = ask.problem.parallel.ep_size > 1
    return str(ep).lower(), "any" if capability.parallel.alone else "true", capability.parallel.alone or ep


def _sequence(ask: SupportQuery, capability: Capability, variant: ExpertsClass) -> Answer:
    wanted = "sliced over ranks" if ask.sequence else "whole on each rank"
    offered = "any" if capability.parallel.sequence else "whole on each rank"
    return wanted, offered, capability.parallel.sequence or not ask.sequence


CHECKS: tuple[Check, ...] = (
    Check("device", "arch", "device", _device),
    Check("number formats", "scheme", "quant_scheme", _formats),
    Check("activation function", "scheme", "activation", _activation),
    Check("gating", "scheme", "activation", _gating),
    Check("checkpoint storage", "scheme", "layout", _checkpoint),
    Check("activation order", "scheme", "act_order", _act_order),
    Check("zero points", "scheme", "zero_points", _zero_points),
    Check("expert bias", "scheme", "bias", _bias),
    Check("routing method", "scheme", "routing_method", _routing),
    Check("hash routing", "scheme", "other", _hashed),
    Check("router dtype", "scheme", "other", _logits),
    Check("model dtype", "scheme", "other", _dtype),
    Check("scale dtype", "scheme", "quant_scheme", _scales),
    Check("token exchange", "parallel", "parallel", _exchange),
    Check("expert parallel", "parallel", "parallel", _experts_spread),
    Check("experts over ranks", "parallel", "parallel", _alone),
    Check("token sequence", "parallel", "parallel", _sequence),
    Check("data parallel ranks", "parallel", "parallel", _data_parallel),
    Check("expert balancing", "parallel", "parallel", _balancing),
    Check("token format", "parallel", "activation_format", _token_format),
    Check("batch invariance", "policy", "other", _invariant),
    Check("adapters on experts", "policy", "other", _lora),
)
"""Every question about a field of `Capability`; needs, switches and rules add their own."""


def judge(ask: SupportQuery, variant: ExpertsClass) -> tuple[Verdict, ...]:
    """The answers to all questions for one experts class, also after one has failed."""
    capability = variant.capability
    return (
        *(
            Verdict(
                check.question,
                check.group,
                *check.answer(ask, capability, variant),
                capability.codes.get(check.question, check.code),
            )
            for check in CHECKS
        ),
        *_installed(ask.packages, capability),
        *(
            Verdict(rule.question, rule.group, rule.wanted(ask), rule.offered, rule.holds(ask), rule.code)
            for rule in capability.rules
        ),
    )


def judge_machine(device: Device, packages: Packages, variant: ExpertsClass) -> tuple[Verdict, ...]:
    """The answers that depend on no problem: device, packages, environment variables, any format at all."""
    capability = variant.capability
    wanted, offered, holds = _fits(device, capability)
    verdicts = [
        Verdict("device", "arch", wanted, offered, holds, "device"),
        *_installed(packages, capability),
    ]
    if holds and capability.formats is not None and not formats_on(device, capability):
        spelled = spell_formats(capability)
        verdicts.append(Verdict("number formats", "scheme", f"any on {device.arch}", spelled, False))
    return tuple(verdicts)


def formats_on(device: Device, capability: Capability) -> frozenset[str]:
    """Keys of the weight formats supported on `device`; empty also if every format is."""
    return frozenset(
        weight
        for offer in capability.formats or ()
        if offer.where is None or any(arch.fits(device) for arch in offer.where)
        for weight in offer.weights
    )


def _installed(packages: Packages, capability: Capability) -> Iterator[Verdict]:
    """The answers about packages and environment variables."""
    for need in capability.needs:
        met = need.met(packages)
        offered = "installed" if met else "not installed"
        if not met and need.symbol and packages.has(need.package):
            offered = f"{need.package} without it"
        elif not met and need.package in packages.versions:
            offered = f"{need.package} {packages.versions[need.package]}"
        yield Verdict(f"package {need.package}", "package", str(need), offered, met, need.code)
    for switch in capability.switches:
        value = is_on(packages, switch.variable)
        on = {True: "1", False: "0"}
        yield Verdict(
            f"switch {switch.variable.name}",
            "policy",
            on[switch.wanted],
            on[value],
            value == switch.wanted,
            switch.code,
        )
