"""Verdicts in plain sentences: what a candidate needs, and what there is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .checks import Verdict
from .decision import Candidate
from .registry import known_packages

SENTENCES: Mapping[str, str] = {
    "device": "needs {offered}, this device is {wanted}",
    "activation function": "computes {offered}, the model has {wanted}",
    "activation clamp": "clamps {offered}, the model clamps {wanted}",
    "gating": "takes {offered} experts only, these are {wanted}",
    "checkpoint storage": "takes {offered} storage, this is {wanted}",
    "activation order": "takes {offered}, the checkpoint is ordered {wanted}",
    "zero points": "takes no zero points, the checkpoint has them",
    "expert bias": "takes no expert bias; has one: {wanted}",
    "routing method": "routes {offered}, the model routes {wanted}",
    "model dtype": "computes in {offered}, the model runs in {wanted}",
    "scale dtype": "takes {offered} scales, these are {wanted}",
    "token exchange": "takes as token exchange {offered}; here it is {wanted}",
    "expert parallel": "does not serve expert parallelism",
    "experts over ranks": "serves only with expert parallelism",
    "token sequence": "takes tokens {offered}, here they are {wanted}",
    "data parallel ranks": "serves one data-parallel rank, this deployment has {wanted}",
    "expert balancing": "does not serve expert load balancing (EPLB)",
    "token format": "takes its tokens {offered}, here they come {wanted}",
    "hash routing": "routes {offered} only, the model routes {wanted}",
    "router dtype": "takes {offered} router logits, these are {wanted}",
    "batch invariance": "gives results that depend on the batch, which this deployment rules out",
    "adapters on experts": "serves no LoRA adapters on experts",
    "activation filter": "computes {offered} activations, this policy keeps {wanted}",
    "order": "{offered}",
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

_ARCH = re.compile(r"\bsm(\d{2,3})\b")


def sentence(verdict: Verdict) -> str:
    """The failing `verdict` as a sentence without a subject, which is the candidate."""
    kind, _, name = verdict.question.partition(" ")
    if kind == "package":
        return _package(verdict, name)
    if kind == "switch":
        return f"needs {name}={verdict.wanted}, it is {verdict.offered}"
    if verdict.question == "number formats":
        return _shown(_formats(verdict))
    template = SENTENCES.get(verdict.question, "{question}: takes {offered}, this is {wanted}")
    wanted, offered = (_WORDS.get(text, text) for text in (verdict.wanted, verdict.offered))
    return _shown(template.format(question=verdict.question, wanted=wanted, offered=offered))


_WORDS = {"standard": "in their own order"}


def _shown(text: str) -> str:
    """`text` with architectures as their makers spell them."""
    return _ARCH.sub(lambda found: f"SM{found[1]}", text)


def _formats(verdict: Verdict) -> str:
    """What is offered for the checkpoint's weights, and where; that there is nothing, where that is so."""
    weight, asked, _ = _parts(verdict.wanted)
    offers = [
        (acts, where)
        for names, acts, where in map(_parts, verdict.offered.split("; "))
        if any(_named(weight, name) for name in names.split("/"))
    ]
    if not offers:
        return f"does not compute {weight}"
    elsewhere = [where for acts, where in offers if asked in acts.split(", ") and where]
    if elsewhere:
        return f"computes {weight} with {asked} activations only{' or'.join(elsewhere)}"
    served = " or ".join(f"with {acts} activations{where}" for acts, where in offers)
    return f"computes {weight} {served}, here it is asked for {asked} activations"


def _parts(text: str) -> tuple[str, str, str]:
    """Weights, activations and devices of ``mxfp4 group 32 with a16 activations on sm90``."""
    head, _, where = text.partition(" activations")
    weights, _, acts = head.rpartition(" with ")
    return weights, acts, where


def _named(weight: str, name: str) -> bool:
    return weight == name or (name.endswith("*") and weight.startswith(name[:-1]))


def _package(verdict: Verdict, name: str) -> str:
    """What is missing; the package alone where all of it is, so that its symbols are said once."""
    if verdict.offered != "not installed":
        return f"needs {verdict.wanted}, there is {verdict.offered}"
    known = known_packages().get(name)
    get = f" ({known.get})" if known and known.get else ""
    _, *instead = verdict.wanted.split(" or ")
    if instead:
        return f"needs {name} or {' or '.join(instead)}, none of which is there{get}"
    return f"needs {name}, which is not installed{get}"


def reasons(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    """(group, sentence) of every failing question; equal needs of one package are one sentence."""
    return tuple(
        dict.fromkeys(
            (group, sentence(verdict))
            for group, verdicts in candidate.reasons().items()
            for verdict in verdicts
        )
    )
