"""Verdicts in plain sentences: what a candidate needs, and what there is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...environment import PROBES
from ...oracle.checks import Verdict
from ...oracle.decision import Candidate

SENTENCES: Mapping[str, str] = {
    "device": "needs {offered}, this device is {wanted}",
    "number formats": "computes {offered}; the checkpoint has {wanted}",
    "activation function": "computes {offered}, the model has {wanted}",
    "gating": "takes {offered} experts only, these are {wanted}",
    "checkpoint storage": "takes {offered} storage, this is {wanted}",
    "activation order": "takes {offered}, the checkpoint is ordered {wanted}",
    "zero points": "takes no zero points, the checkpoint has them",
    "expert bias": "takes no expert bias; has one: {wanted}",
    "routing method": "routes {offered}, the model routes {wanted}",
    "model dtype": "computes in {offered}, the model runs in {wanted}",
    "scale dtype": "takes {offered} scales, these are {wanted}",
    "token exchange": "serves the token exchange {offered}, this deployment has {wanted}",
    "expert parallel": "does not serve expert parallelism",
    "data parallel ranks": "serves one data-parallel rank, this deployment has {wanted}",
    "expert balancing": "does not serve expert load balancing (EPLB)",
    "token format": "takes {offered} tokens, this deployment hands over {wanted} ones",
    "activation filter": "computes {offered} activations, this policy keeps {wanted}",
    "order": "is taken {offered}",
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
    template = SENTENCES.get(verdict.question, "{question}: takes {offered}, this is {wanted}")
    text = template.format(question=verdict.question, wanted=verdict.wanted, offered=verdict.offered)
    return _ARCH.sub(lambda found: f"SM{found[1]}", text)


def _package(verdict: Verdict, name: str) -> str:
    known = PROBES.get(name)
    also = f" ({known.distribution})" if known and known.distribution not in ("", name) else ""
    if verdict.offered == "not installed":
        return f"needs {verdict.wanted}, which is not installed{also}"
    return f"needs {verdict.wanted}, there is {verdict.offered}"


def reasons(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    """(group, sentence) of every failing question; equal needs of one package are one sentence."""
    return tuple(
        dict.fromkeys(
            (group, sentence(verdict))
            for group, verdicts in candidate.reasons().items()
            for verdict in verdicts
        )
    )
