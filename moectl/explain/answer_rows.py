"""The rows of a document: one shape for any number of checkpoints, GPUs and deployments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..oracle.decision import Decision
from ..oracle.selection_inputs import SelectionInputs
from ..oracle.verdict_sentences import reasons
from .decision_words import because, remark, usual_name
from .rank_memory import RankMemory

if TYPE_CHECKING:
    from .explanation import GroupExplanation


def answer_row(
    checkpoint: str,
    gpu: str,
    inputs: SelectionInputs,
    layers: tuple[int, ...],
    answer: GroupExplanation | None,
    refusal: str,
    memory: RankMemory | None,
) -> dict[str, Any]:
    """One layer group on one machine in one deployment, as plain data.

    `gpu` is the device's name as requested; `refusal` says why there is no `answer`. `memory` is that of
    one GPU with all layer groups, None if one of them has no answer.
    """
    decision = answer.decision if answer else None
    chosen = decision.chosen if decision and decision.usable else None
    dims = decision.problem.dims if decision else None
    return {
        "checkpoint": checkpoint,
        "policy": inputs.policy,
        "gpu": gpu or inputs.device.name,
        "gpu_name": inputs.device.name,
        "arch": inputs.device.arch,
        **asdict(inputs.problem.parallel),
        "layers": list(layers),
        "usable": bool(decision and decision.usable),
        "refusal": refusal or None,
        "backend": chosen.backend.name if chosen else None,
        "usual_name": usual_name(decision, chosen) if decision and chosen else None,
        "experts": chosen.variant.experts if chosen else None,
        "monolithic": chosen.variant.monolithic if chosen else None,
        "because": because(decision) if decision else refusal,
        "remark": (remark(answer) if answer else refusal) or None,
        "padded_hidden": dims.padded_hidden if dims else None,
        "padded_intermediate": dims.padded_intermediate if dims else None,
        "gates": [str(gate) for gate in decision.gates] if decision else [],
        "error": decision.error or None if decision else None,
        "fallback": answer.fallback.kind if answer and answer.fallback else None,
        "bytes": answer.memory.padded * len(answer.layers) if answer else None,
        "fits": memory.fits if memory else None,
        "memory": memory.to_json() if memory else None,
        "candidates": list(_candidates(decision)) if decision else [],
        "decision": inputs.to_json(),
    }


def _candidates(decision: Decision) -> Iterator[dict[str, Any]]:
    """Every candidate in priority order, with its reasons as sentences."""
    for candidate in decision.candidates:
        yield {
            "backend": candidate.backend.name,
            "usual_name": usual_name(decision, candidate),
            "experts": candidate.variant.experts,
            "rank": candidate.rank,
            "usable": candidate.usable,
            "reasons": [sentence for _, sentence in reasons(candidate)],
        }
