"""The questions that every candidate is asked, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..environment import Device, Packages
from .backend import Capability, ExpertsClass, SupportQuery, is_on, spell_archs, spell_offers


class Verdict(NamedTuple):
    """One answered question: `holds`, or what was `wanted` against what is `offered`.

    `code` is the engine's own code for such a refusal, as recorded decisions have it.
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
    """A named question; `answer` gives wanted, offered and whether it holds."""

    question: str
    group: str
    code: str
    answer: Callable[[SupportQuery, Capability, ExpertsClass], Answer]


def _fits(device: Device, offers: Capability) -> Answer:
    holds = offers.arch is None or any(arch.fits(device) for arch in offers.arch)
    features = " and ".join(sorted(device.features))
    wanted = f"{device.arch} with {features}" if features else device.arch
    return wanted, spell_archs(offers), holds


def _device(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    return _fits(ask.device, offers)


def _gating(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    gated = ask.problem.activation.gated
    return "gated" if gated else "not gated", "any" if offers.ungated else "gated", gated or offers.ungated


def _activation(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    return ask.activation, str(offers.activations), offers.activations.allows(ask.activation)


def _formats(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    holds = offers.offers is None or any(
        offer.serves(ask.weight, ask.act, ask.device) for offer in offers.offers
    )
    return f"{ask.weight} with {ask.act} activations", spell_offers(offers), holds


def _checkpoint(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    return ask.checkpoint, str(offers.checkpoints), offers.checkpoints.allows(ask.checkpoint)


def _act_order(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    order = ask.problem.act_order == "group"
    offered = "any order" if offers.act_order else "none, or by weight"
    return "by group" if order else "none", offered, offers.act_order or not order


def _zero_points(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    wanted = "yes" if ask.zero_points else "no"
    return wanted, "yes" if offers.zero_points else "no", offers.zero_points or not ask.zero_points


def _bias(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    possible = "yes" if ask.problem.bias else "possible with this method"
    wanted = possible if ask.bias else "no"
    return wanted, "yes" if offers.bias else "no", offers.bias or not ask.bias


def _dtype(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    return ask.dtype, str(offers.dtypes), offers.dtypes.allows(ask.dtype)


def _scales(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    stored = ask.problem.scheme.weight.scale_dtype or {"fp16": "F16"}.get(ask.problem.dtype, "BF16")
    return stored, str(offers.scales), offers.scales.allows(stored)


def _routing(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    return ask.routing, str(offers.routing), offers.routing.allows(ask.routing)


def _hashed(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    hashed = ask.problem.routing.hashed
    serves = offers.hashed or not variant.monolithic
    return "by token id" if hashed else "by score", "any" if serves else "by score", serves or not hashed


def _logits(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    return ask.logits, str(offers.logits), offers.logits.allows(ask.logits)


def _lora(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    lora = ask.problem.lora
    return "yes" if lora else "no", "yes" if offers.lora else "no", offers.lora or not lora


def _invariant(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    wanted = ask.invariant
    return "yes" if wanted else "no", "yes" if offers.invariant else "no", offers.invariant or not wanted


def _exchange(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    return ask.exchange, str(offers.spread.exchange), offers.spread.exchange.allows(ask.exchange)


def _experts_spread(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    ep = ask.problem.parallel.ep
    return str(ep).lower(), "any" if offers.spread.ep else "false", offers.spread.ep or not ep


def _data_parallel(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    dp = ask.problem.parallel.dp
    return str(dp), "any" if offers.spread.dp else "1", offers.spread.dp or dp <= 1


def _balancing(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    eplb = ask.problem.parallel.eplb
    return "on" if eplb else "off", "any" if offers.spread.eplb else "off", offers.spread.eplb or not eplb


def _token_format(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    names = {True: "batched by expert", False: "standard"}
    return names[ask.batched], names[variant.batched], ask.batched == variant.batched


def _clamp(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    limit = ask.problem.activation.limit if ask.clamped else None
    wanted = "none" if limit is None else str(limit)
    return wanted, "any" if offers.clamps else "none", offers.clamps or limit is None


def _alone(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    ep = ask.problem.parallel.ep
    return str(ep).lower(), "any" if offers.spread.alone else "true", offers.spread.alone or ep


def _sequence(ask: SupportQuery, offers: Capability, variant: ExpertsClass) -> Answer:
    wanted = "sliced over ranks" if ask.sequence else "whole on each rank"
    offered = "any" if offers.spread.sequence else "whole on each rank"
    return wanted, offered, offers.spread.sequence or not ask.sequence


CHECKS: tuple[Check, ...] = (
    Check("device", "arch", "device", _device),
    Check("number formats", "scheme", "quant_scheme", _formats),
    Check("activation function", "scheme", "activation", _activation),
    Check("gating", "scheme", "activation", _gating),
    Check("activation clamp", "scheme", "other", _clamp),
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
"""Every question with a field in `Capability`; needs, switches and rules bring their own."""


def judge(ask: SupportQuery, variant: ExpertsClass) -> tuple[Verdict, ...]:
    """All questions, answered for one experts class; none is left out because another failed."""
    offers = variant.offers
    return (
        *(
            Verdict(
                check.question,
                check.group,
                *check.answer(ask, offers, variant),
                offers.codes.get(check.question, check.code),
            )
            for check in CHECKS
        ),
        *_installed(ask.packages, offers),
        *(
            Verdict(rule.question, rule.group, rule.wanted(ask), rule.offered, rule.holds(ask), rule.code)
            for rule in offers.rules
        ),
    )


def judge_machine(device: Device, packages: Packages, variant: ExpertsClass) -> tuple[Verdict, ...]:
    """The questions in which no problem has a part: the device, packages, switches, any format at all."""
    offers = variant.offers
    wanted, offered, holds = _fits(device, offers)
    found = [Verdict("device", "arch", wanted, offered, holds, "device"), *_installed(packages, offers)]
    if holds and offers.offers is not None and not formats_on(device, offers):
        spelled = spell_offers(offers)
        found.append(Verdict("number formats", "scheme", f"any on {device.arch}", spelled, False))
    return tuple(found)


def formats_on(device: Device, offers: Capability) -> frozenset[str]:
    """Keys of the weight formats that are served on `device`; empty also where any is."""
    return frozenset(
        weight
        for offer in offers.offers or ()
        if offer.where is None or any(arch.fits(device) for arch in offer.where)
        for weight in offer.weights
    )


def _installed(packages: Packages, offers: Capability) -> Iterator[Verdict]:
    """What packages and switches say."""
    for need in offers.needs:
        met = need.met(packages)
        offered = "installed" if met else "not installed"
        if not met and need.symbol and packages.has(need.package):
            offered = f"{need.package} without it"
        yield Verdict(f"package {need.package}", "package", str(need), offered, met, need.code)
    for switch in offers.switches:
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
