"""The fields of a decision that an engine's own code made, as recorded, that are compared with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .decision import Candidate, Decision
from .engine import Engine
from .registry import engine_named

Record = Mapping[str, Any]
"""A recorded decision: what the engine's own code chose, refused and padded, and its errors."""


@dataclass(frozen=True, slots=True)
class DecisionPair:
    """One recorded decision and ours. A `direct` question has no layer, and so no padded sizes."""

    record: Record
    decision: Decision
    direct: bool = False


@dataclass(frozen=True, slots=True)
class ComparedField:
    """A compared field: the `recorded` value, `ours`, and whether the record states the field."""

    name: str
    recorded: Callable[[DecisionPair], object]
    ours: Callable[[DecisionPair], object]
    stated: Callable[[DecisionPair], bool] = lambda pair: True


def _usable(pair: DecisionPair) -> bool:
    record = pair.record
    stopped = any(record.get(name) for name in ("error", "gates", "create_weights_error"))
    return record["selected"] not in (None, "NONE") and not stopped


def _unbuilt(pair: DecisionPair) -> str:
    """The class of the exception with which a layer is refused before its method is chosen; or empty."""
    return next((gate.error for gate in pair.decision.gates if gate.error and not pair.direct), "")


def _selected(pair: DecisionPair) -> str | None:
    """The engine's name of the chosen backend, or of its stand-in; None if selection fails."""
    decision = pair.decision
    if _unbuilt(pair):
        return None
    if decision.chosen is not None:
        return decision.chosen.engine_name
    return decision.stand_in or None


def _experts(pair: DecisionPair) -> str | None:
    chosen = None if _unbuilt(pair) else pair.decision.chosen
    return chosen.variant.experts if chosen else None


def _monolithic(pair: DecisionPair) -> bool | None:
    chosen = None if _unbuilt(pair) else pair.decision.chosen
    return chosen.variant.monolithic if chosen else None


def _classed(pair: DecisionPair) -> bool:
    """False for a backend whose class was unknown when it was recorded: made after the weights are loaded."""
    return pair.record["experts_cls"] is not None or pair.record["selected"] is None


def _recorded_sizes(pair: DecisionPair) -> tuple[int, int] | None:
    padded = pair.record["padded"]
    return None if padded is None else (padded["hidden"], padded["intermediate_per_partition"])


def _our_sizes(pair: DecisionPair) -> tuple[int, int] | None:
    dims = pair.decision.problem.dims
    sized = pair.decision.sized and not pair.direct and not _unbuilt(pair)
    return (dims.padded_hidden, dims.padded_intermediate) if sized else None


def gate_kind(text: str, engine: Engine) -> str:
    """Our kind for the text of a gate that `engine` recorded; the text itself if it is unknown."""
    known = engine.recordings.gates if engine.recordings else {}
    return next((kind for words, kind in known.items() if words in text), text)


def _recorded_gates(pair: DecisionPair) -> list[str]:
    engine = engine_named(pair.decision.inputs.policy)
    return sorted(gate_kind(text, engine) for text in pair.record["gates"])


def _our_gates(pair: DecisionPair) -> list[str]:
    return [] if pair.direct else sorted(gate.kind for gate in pair.decision.gates if not gate.error)


def _exception(text: str | None) -> str:
    return (text or "").split(":")[0]


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _asked(pair: DecisionPair) -> list[str]:
    """Backends in the order in which the engine refused them."""
    return _distinct(refusal["backend"] for refusal in pair.record["rejected"])


def _kept(pair: DecisionPair) -> list[str]:
    """Our backends in priority order, without those that the activation filter drops."""
    return _distinct(
        c.engine_name
        for c in pair.decision.candidates
        if not any(v.code == "filtered" for v in c.failed)
        and not any(v.question == "order" for v in c.failed)
        and not c.last_resort
    )


def _recorded_order(pair: DecisionPair) -> dict[str, object]:
    record = pair.record
    found: dict[str, object] = {"asked": _asked(pair)}
    if record["priority"] is not None:
        found["priority"] = record["priority"]
    # For a request the record lists what the name means, before batched tokens change it.
    if "candidates" in record and record["forced"] is None:
        found["candidates"] = record["candidates"]
    return found


def _our_order(pair: DecisionPair) -> dict[str, object]:
    """The full order and the remaining candidates, as far as the record states them."""
    stated = _recorded_order(pair)
    asked = _distinct(c.engine_name for c in pair.decision.candidates)
    ours: dict[str, object] = {
        "asked": asked[: len(_asked(pair))],
        "priority": list(pair.decision.order),
        "candidates": _kept(pair),
    }
    return {name: ours[name] for name in stated}


def _recorded_refusals(pair: DecisionPair) -> list[tuple[str, str | None, str]]:
    return [(r["backend"], r["experts_cls"], r["code"]) for r in pair.record["rejected"]]


def _our_refusals(pair: DecisionPair) -> list[tuple[str, str | None, str]]:
    """The recorded rejections that are among our failed checks, and our codes for the others."""
    found = []
    for backend, experts, code in _recorded_refusals(pair):
        same: list[Candidate] = [
            c
            for c in pair.decision.candidates
            if c.engine_name == backend and experts in (None, c.variant.experts)
        ]
        codes = [{verdict.code for verdict in c.failed} for c in same]
        agree = codes and all(code in ours for ours in codes)
        found.append((backend, experts, code if agree else f"ours {[sorted(ours) for ours in codes]}"))
    return found


FIELDS: tuple[ComparedField, ...] = (
    ComparedField("selected", lambda pair: pair.record["selected"], _selected),
    ComparedField("experts_cls", lambda pair: pair.record["experts_cls"], _experts, _classed),
    ComparedField("monolithic", lambda pair: pair.record["monolithic"], _monolithic, _classed),
    ComparedField("padded", _recorded_sizes, _our_sizes),
    ComparedField("usable", _usable, lambda pair: pair.decision.usable),
    ComparedField(
        "order",
        _recorded_order,
        _our_order,
        lambda pair: bool(pair.record["rejected"] or pair.record["priority"] is not None),
    ),
    ComparedField("gates", _recorded_gates, _our_gates),
    ComparedField(
        "error",
        lambda pair: _exception(pair.record["error"]),
        lambda pair: _unbuilt(pair) or ("" if pair.decision.sized else pair.decision.error_kind),
    ),
    ComparedField(
        "create_weights_error",
        lambda pair: _exception(pair.record.get("create_weights_error")),
        lambda pair: pair.decision.error_kind if pair.decision.sized and not _unbuilt(pair) else "",
    ),
    ComparedField("rejected", _recorded_refusals, _our_refusals, lambda pair: bool(pair.record["rejected"])),
)
"""The compared fields, in display order."""
