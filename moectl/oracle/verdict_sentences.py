"""Verdicts as sentences: what a candidate supports or needs, and what this setup has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from ..capabilities.unpacked_libraries import LIBRARIES, PREFIX
from .checks import Verdict
from .decision import Candidate
from .registry import ENGINES, known_packages

INVARIANCE = "batch invariance"
"""The question that an environment variable of the engine asks."""

SENTENCES: Mapping[str, str] = {
    "device": "needs {offered}; this device is {wanted}",
    "activation function": "supports only {offered}; model uses {wanted}",
    "gating": "supports only {offered} experts; these are {wanted}",
    "quantization": "supports only {offered}; this checkpoint is {wanted}",
    "checkpoint storage": "supports only {offered} checkpoints; this one is {wanted}",
    "activation order": "does not support activation order {wanted}",
    "zero points": "does not support zero points; the checkpoint has them",
    "expert bias": "does not support expert bias",
    "routing method": "supports only {offered} routing; model uses {wanted}",
    "model dtype": "computes in {offered}; model runs in {wanted}",
    "scale dtype": "supports only {offered} scales; these are {wanted}",
    "token exchange": "needs all2all {offered}; this setup uses {wanted}",
    "expert parallel": "does not support expert parallelism",
    "experts over ranks": "needs expert parallelism",
    "token sequence": "needs tokens {offered}; in this setup they are {wanted}",
    "data parallel ranks": "does not support data parallelism; this setup has {wanted} ranks",
    "expert balancing": "does not support expert load balancing (EPLB)",
    "token format": "needs {offered} activation format; this setup uses the {wanted} one",
    "hash routing": "supports only routing {offered}; model routes {wanted}",
    "router dtype": "supports only {offered} router logits; these are {wanted}",
    INVARIANCE: "is not batch-invariant, which this setup requires",
    "adapters on experts": "does not support LoRA adapters on experts",
    "activation filter": "uses {offered} activations; policy allows only {wanted}",
    "order": "{offered}",
    "Marlin tiles": "needs {wanted}",
    **dict.fromkeys(
        (
            "activation in FlashInfer",
            "bias in FlashInfer",
            "sizes in FlashInfer",
            "model dtype in FlashInfer",
            "weight on the input in FlashInfer",
            "experts in FlashInfer",
            "routing in FlashInfer",
            "routed weight on the input in FlashInfer",
        ),
        "{wanted}",
    ),
}
"""By question; `wanted` and `offered` are those of the verdict."""

EXCLUDED: Mapping[str, str] = {
    "activation function": "does not support {wanted}",
    "checkpoint storage": "is not available for {wanted} checkpoints",
    "routing method": "does not support {wanted} routing",
    "model dtype": "does not compute in {wanted}",
    "scale dtype": "does not support {wanted} scales",
    "token exchange": "does not support all2all {wanted}",
    "router dtype": "does not support {wanted} router logits",
}
"""By question, where everything is supported but a few names, of which `wanted` is one."""

_SPECIAL: Mapping[tuple[str, str], str] = {
    ("expert bias", "possible with this method"): "does not support expert bias, which this method may pass",
    ("activation order", "by group"): "does not support activation order by group (g_idx)",
}
"""By question and what was wanted, where the usual sentence would mislead."""

_WORDS = {"batched by expert": "batched"}
_ARCH = re.compile(r"\bsm(\d{2,3})\b")


def sentence(verdict: Verdict) -> str:
    """The failing `verdict` as a sentence without a subject, which is the candidate.

    Example:
        >>> sentence(Verdict("device", "arch", "sm90", "sm100-sm109", False))
        'needs SM100-SM109; this device is SM90'
    """
    question = verdict.question
    kind, _, name = question.partition(" ")
    if kind == "package":
        return _package(verdict, name)
    if kind == "switch":
        return f"needs {name}={verdict.wanted} (currently {verdict.offered})"
    if question == "number formats":
        return makers_spelling(_formats(verdict))
    wanted, offered = (_WORDS.get(text, text) for text in (verdict.wanted, verdict.offered))
    template = _template(question, wanted, offered)
    return makers_spelling(template.format(question=question, wanted=wanted, offered=offered))


def predicate(verdict: Verdict) -> str:
    """The failing `verdict` as what follows a candidate's name in a sentence.

    Example:
        >>> predicate(Verdict("order", "policy", "in the automatic order", "only by name", False))
        'is used only by name'
    """
    said = sentence(verdict)
    if said.startswith(f"{verdict.question}: "):
        return f"is ruled out by {said}"
    if verdict.question != "order":
        return said
    return f"is {'used ' if verdict.offered.startswith('only ') else ''}{said}"


def _template(question: str, wanted: str, offered: str) -> str:
    if (question, wanted) in _SPECIAL:
        return _SPECIAL[question, wanted]
    if question in EXCLUDED and offered.startswith("any but "):
        return EXCLUDED[question]
    if question == "token exchange" and offered == "none":
        return "does not support an all2all exchange; this setup uses {wanted}"
    variable = _deciding_variables(ENGINES.made()).get(question)
    if question == INVARIANCE and variable:
        return f"is not batch-invariant, which {variable}=1 requires"
    if question in SENTENCES:
        return SENTENCES[question]
    if variable:
        return f"needs {{question}} {{offered}}; {variable} selects {{wanted}}"
    return "{question}: needs {offered}; this is {wanted}"


@cache
def _deciding_variables(engines: tuple[str, ...]) -> Mapping[str, str]:
    """The environment variable that decides a question, by the question, for these engines."""
    policies = [ENGINES[name].policy for name in engines]
    invariance = [(INVARIANCE, policy.invariance.name) for policy in policies if policy.invariance]
    return dict(invariance) | {
        rule.question: rule.switch
        for policy in policies
        for route in policy.routes
        for backend in route.backends()
        for variant in backend.variants
        for rule in variant.capability.rules
        if rule.switch
    }


def makers_spelling(text: str) -> str:
    """`text` with CUDA architectures in capitals, as NVIDIA spells them."""
    return _ARCH.sub(lambda match: f"SM{match[1]}", text)


def _formats(verdict: Verdict) -> str:
    """Which activations are supported with the checkpoint's weights, and on which devices."""
    weight, act, _ = _parts(verdict.wanted)
    supported = [
        (acts, where)
        for names, acts, where in map(_parts, verdict.offered.split("; "))
        if any(_matches(weight, name) for name in names.split("/"))
    ]
    if not supported:
        return f"does not support {weight}"
    elsewhere = [where for acts, where in supported if act in acts.split(", ") and where]
    if elsewhere:
        return f"supports {weight} with {_wide(act)} activations only{' or'.join(elsewhere)}"
    pairs = " or ".join(f"{_wide(acts)} activations{where}" for acts, where in supported)
    return f"supports {weight} only with {pairs}; this setup uses {_wide(act)} activations"


def _wide(acts: str) -> str:
    """`acts` with 16-bit activations in words."""
    return ", ".join("16-bit" if act == "a16" else act for act in acts.split(", "))


def _parts(text: str) -> tuple[str, str, str]:
    """Weights, activations and devices of ``mxfp4 group 32 with a16 activations on sm90``."""
    head, _, where = text.partition(" activations")
    weights, _, acts = head.rpartition(" with ")
    return weights, acts, where


def _matches(weight: str, name: str) -> bool:
    return weight == name or (name.endswith("*") and weight.startswith(name[:-1]))


def absent_package(name: str, versions: str = "") -> str:
    """That a package, or certain `versions` of it, is needed and not installed, and how to get it."""
    probe = known_packages().get(name)
    get = f" ({probe.get})" if probe and probe.get else ""
    return f"needs {versions or name}, which is not installed{get}"


def _package(verdict: Verdict, name: str) -> str:
    """What is missing: one symbol, a newer version, or a whole package without the list of its symbols."""
    probe = known_packages().get(name)
    version = verdict.offered.removeprefix(f"{name} ")
    if probe and probe.too_old(version):
        return f"needs {name} {probe.oldest} or newer; found {version}"
    if verdict.offered != "not installed":
        return f"needs {verdict.wanted}; found {verdict.offered}"
    _, *alternatives = verdict.wanted.split(" or ")
    if alternatives:
        fetched = [backend for backend, package in LIBRARIES.items() if PREFIX + package in alternatives]
        ways = [f"moectl peers {backend}" for backend in fetched] or ([probe.get] if probe else [])
        get = f" ({' or '.join(ways)})" if any(ways) else ""
        return f"needs {name} or {' or '.join(alternatives)}, none of which is available{get}"
    return absent_package(name, verdict.wanted if verdict.wanted.startswith(f"{name} ") else name)


def reasons(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    """(group, sentence) of every failing question, each sentence once."""
    return tuple(
        dict.fromkeys(
            (group, sentence(verdict))
            for group, verdicts in candidate.reasons().items()
            for verdict in verdicts
        )
    )
