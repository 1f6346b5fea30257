"""Everything about an explanation as blocks, from which both text and markdown are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...environment import Device
from ...explain import Explanation, GroupExplanation, OtherAnswer, StepTimes, WeightMemory, source_of
from ...explain.decision_words import fallback_words, refusals, slower_words, verification_words
from ...explain.explanation import stages_of
from ...explain.fallback import serves_request
from ...integrations.served_engines import SERVED_ENGINES
from ...oracle.backend import GROUPS
from ...oracle.decision import Decision
from ...oracle.registry import policy_named, versioned
from ...oracle.verdict_sentences import sentence
from ...problem.layer_ranges import layers_of
from ...problem.layouts import LAYOUTS, loads_folder
from ...problem.moe_problem import MoEProblem, Parallel
from ...problem.schemes import scheme_words
from ..output import duration, gib
from ..text_blocks import Block, Heading, LabelledValues, TableBlock, TextLine
from .environment import environment_blocks, environment_document, notes_of
from .summary import predicted_words
from .text import candidate_blocks, layers_words

UNITS_OF = {"cuda": "SMs", "cpu": "cores"}


def sections(explanation: Explanation, measured: bool = False) -> Iterator[Block]:
    """Everything about an explanation, in order; with `measured`, also times of this device."""
    yield from _head(explanation)
    for group in explanation.groups:
        yield from _choice(group)
        yield from _others(group)
        if measured:
            yield from _measured(group)
        yield from _notes(group)
        yield from _facts(group)
        yield from _candidates(group)
    yield from environment_blocks(explanation)


def measured_blocks(explanation: Explanation) -> Iterator[Block]:
    """Measured times and kernel configs of this device for every layer group."""
    for group in explanation.groups:
        yield Heading(f"{layers_words(group.layers)}: {shape_words(group.problem)}")
        yield from _measured(group)


def document(explanation: Explanation, gpu: str = "") -> dict[str, Any]:
    """The explanation as one JSON document; `gpu` is the device's name as requested."""
    return {**explanation.to_json(gpu), "environment": environment_document(explanation)}


def shape_words(problem: MoEProblem) -> str:
    """Experts, sizes and number format in one phrase."""
    dims = problem.dims
    local = "" if problem.local_experts == problem.experts else f" ({problem.local_experts} on this rank)"
    return (
        f"{problem.experts} experts{local}, top-{problem.top_k}, hidden {dims.hidden}, "
        f"intermediate {dims.intermediate}, {problem.scheme.words}"
    )


def parallel_words(parallel: Parallel) -> str:
    """``TP 8, PP 2, DP 2, EP 16 through deepep_low_latency``; empty for one rank."""
    if parallel.ranks == parallel.pp == 1:
        return ""
    parts = [f"TP {parallel.tp}", *([f"PP {parallel.pp}"] if parallel.pp > 1 else [])]
    parts += [f"DP {parallel.dp}"] if parallel.dp > 1 else []
    exchange = f" through {parallel.all2all}" if parallel.exchanges else ""
    parts += [f"EP {parallel.ep_size}{exchange}"] if parallel.ep else []
    return ", ".join([*parts, *(["EPLB"] if parallel.eplb else [])])


def device_words(device: Device) -> str:
    """Name, architecture and the known properties of a GPU."""
    properties = {
        f"{device.sms} {UNITS_OF.get(device.platform, 'CUs')}": device.sms,
        gib(device.memory_bytes): device.memory_bytes,
        f"{device.bandwidth / 1e12:.3g} TB/s": device.bandwidth,
        f"{device.bf16_flops / 1e12:.4g} bf16 TFLOP/s": device.bf16_flops,
        f"{device.fp8_flops / 1e12:.4g} fp8 TFLOP/s": device.fp8_flops,
        f"{device.fp4_flops / 1e12:.4g} fp4 TFLOP/s": device.fp4_flops,
    }
    return ", ".join([device.name, device.arch, *(text for text, value in properties.items() if value)])


def _head(explanation: Explanation) -> Iterator[Block]:
    origin, packages = explanation.origin, explanation.packages
    yield Heading(f"{origin.name} on {explanation.device.name} under {versioned(explanation.policy)}", 1)
    revision = f", revision {origin.revision}" if origin.revision else ""
    switches = " ".join(f"{key}={value}" for key, value in packages.env.items())
    yield LabelledValues(
        (
            ("checkpoint", f"{origin.name} (read from: {origin.kind}{revision})"),
            ("device", device_words(explanation.device)),
            ("parallel", parallel_words(explanation.parallel)),
            ("stages", _stages(explanation)),
            ("packages", ", ".join(sorted(packages.versions)) or "none"),
            ("env", switches),
            ("loading", _loading(explanation)),
        )
    )


def _stages(explanation: Explanation) -> str:
    """The layers of each pipeline stage; empty without pipeline parallelism."""
    if explanation.parallel.pp == 1:
        return ""
    stages = stages_of(explanation.groups)
    return ", ".join(layers_of(stage) if stage else "no layers" for stage in stages)


def _loading(explanation: Explanation) -> str:
    """Peak and final bytes of expert weights per rank; empty where they are used as loaded."""
    peak, experts = explanation.loading_bytes, explanation.expert_bytes
    return (
        f"up to {gib(peak)} of expert weights per rank, {gib(experts)} afterwards" if peak > experts else ""
    )


def _choice(group: GroupExplanation) -> Iterator[Block]:
    decision, memory, layers = group.decision, group.memory, len(group.layers)
    yield Heading(f"{layers_words(group.layers)}: {shape_words(group.problem)}")
    chosen, dims = decision.chosen, decision.problem.dims
    if chosen is None or not decision.usable:
        for reason in refusals(decision):
            text = reason if reason.startswith("no backend") else f"no backend: {reason}"
            yield TextLine(text, strong=True)
        return
    kind = "router logits (monolithic)" if chosen.variant.monolithic else "top-k ids and weights (modular)"
    layout, engine = chosen.layout, decision.inputs.policy.partition("-")[0]
    served = SERVED_ENGINES.get(engine)
    refused = served.refuses(group.problem, layout) if served else ""
    if layout in LAYOUTS and loads_folder(engine, layout) and not refused:
        layout = f"{layout}: moectl convert CKPT OUT --to {LAYOUTS[layout].target}"
    yield LabelledValues(
        (
            ("backend", ", ".join(filter(None, (chosen.backend.name, verification_words(decision, chosen))))),
            ("because", because(decision)),
            ("fallback", fallback_words(group)),
            ("experts", f"{chosen.variant.experts}, takes {kind}"),
            ("route", f"{decision.route} ({decision.method})"),
            (
                "padding",
                f"hidden {dims.hidden} -> {dims.padded_hidden}, "
                f"intermediate {dims.intermediate} -> {dims.padded_intermediate}",
            ),
            ("layout", layout),
            ("weights", weights_words(memory, layers)),
            ("roofline", roofline_words(group.roofline)),
        ),
        strong=frozenset({"backend"}),
    )


def weights_words(memory: WeightMemory, layers: int) -> str:
    """Bytes as stored, as padded, and while they are repacked."""
    padded = "" if memory.padded == memory.stored else f" as stored, {gib(memory.padded * layers)} as padded"
    extra = f"; {gib(memory.repacking)} more while loading ({memory.why})" if memory.repacking else ""
    return f"{gib(memory.stored * layers)}{padded} per rank, {gib(memory.padded)} a layer{extra}"


def roofline_words(times: StepTimes) -> str:
    """Roofline times of decode and prefill; ``unknown`` if a rate is not published."""
    if all(step.roofline is None for step in (*times.decode, times.prefill)):
        return "unknown: no bandwidth is known for this device"
    decode = ", ".join(
        f"{duration(step.roofline.seconds)} at M={step.tokens}" for step in times.decode if step.roofline
    )
    bounds = "/".join(dict.fromkeys(step.roofline.bound for step in times.decode if step.roofline))
    prefill = "unknown: no matrix rate is known for this device"
    if times.prefill.roofline:
        at = f"at M={times.prefill.tokens} ({times.prefill.roofline.bound})"
        prefill = f"{duration(times.prefill.roofline.seconds)} {at}"
    return f"per layer at least {decode} ({bounds}); prefill: {prefill}"


def because(decision: Decision) -> str:
    """Why the chosen candidate was chosen."""
    chosen = decision.chosen
    assert chosen is not None
    higher = [c for c in decision.candidates if c.rank < chosen.rank]
    note = f" {chosen.backend.note}" if chosen.backend.note else ""
    if chosen.assigned:
        return f"the method assigns it on this device without checking the others.{note}"
    if serves_request(decision, policy_named(decision.inputs.policy)):
        return f"requested by name; all checks pass.{note}"
    if decision.ranking is not None:
        return f"{decision.ranking}.{note}"
    if not higher:
        return f"highest priority; all checks pass.{note}"
    failed_groups: dict[str, list[str]] = {}
    for candidate in higher:
        failed_groups.setdefault(candidate.backend.name, []).extend(candidate.reasons())
    rejected = ", ".join(
        f"{name} ({', '.join(group for group in GROUPS if group in groups)})"
        for name, groups in failed_groups.items()
    )
    return f"highest priority that passes all checks. Higher priority, rejected: {rejected}.{note}"


def _notes(group: GroupExplanation) -> Iterator[Block]:
    notes = (slower_words(group.decision), *notes_of(group.decision), *group.notes)
    rows = tuple(("note", note) for note in notes if note)
    if rows:
        yield LabelledValues(rows)


def _others(group: GroupExplanation) -> Iterator[Block]:
    rows = tuple((other.policy, other_words(other)) for other in group.others)
    if rows:
        yield LabelledValues(rows)


def other_words(other: OtherAnswer) -> str:
    """The backend of another policy, or why it has none."""
    if other.decision is None:
        return f"none: {other.refusal}"
    chosen = other.decision.chosen
    if chosen is not None and other.decision.usable:
        layout = f", layout {chosen.layout}" if chosen.layout else ""
        why = f": {other.decision.ranking}" if other.decision.ranking else ""
        predicted = predicted_words(other.decision)
        times = f"; predicted {predicted}" if predicted else ""
        return f"{chosen.backend.name} ({chosen.variant.experts}{layout}){why}{times}"
    closest = min(other.decision.candidates, key=lambda c: len(c.failed), default=None)
    if closest is None or not closest.failed:
        return f"none: {other.decision.error}"
    return f"none: {closest.backend.name} {'; '.join(map(sentence, closest.failed))}"


TIMES = ("backend", "M", "routing", "us", "+-", "caches", "error", "tactic", "when")


def _measured(group: GroupExplanation) -> Iterator[Block]:
    """Measured times and kernel configs of this device."""
    evidence = group.evidence
    yield Heading("measured on this device", 3)
    if evidence.measured.rows:
        rows = sorted(evidence.measured.rows, key=lambda row: (row.cell, row.us))
        yield TableBlock(
            TIMES,
            tuple(
                (
                    *(row.backend, str(row.tokens), row.routing, f"{row.us:.1f}", f"{row.spread_us:.1f}"),
                    *("cold" if row.cold else "warm", f"{row.error:.1e}", row.tactic, row.when),
                )
                for row in rows
            ),
        )
        yield TextLine(f"times of {', '.join(dict.fromkeys(row.source for row in rows))}")
    else:
        yield TextLine("no backend times: moectl bench --save records them")
    tuned = ", ".join(f"M={row.tokens} {row.family} {row.us:.1f} us" for row in evidence.tuned)
    when = max((row.when for row in evidence.tuned), default="")
    yield TextLine(
        f"kernel configs of the moectl backend: {tuned} (moectl tune, {when})"
        if tuned
        else "no kernel configs of the moectl backend: moectl tune finds them"
    )


def _facts(group: GroupExplanation) -> Iterator[Block]:
    yield Heading("what the layers are", 3)
    rows = (
        (fact, scheme_words(value), source_of(fact, group.sources)) for fact, value in group.facts.items()
    )
    yield LabelledValues(
        tuple((fact, f"{value} ({source})" if source else value) for fact, value, source in rows)
    )


def _candidates(group: GroupExplanation) -> Iterator[Block]:
    if group.decision.candidates:
        yield Heading("candidates, in priority order", 3)
        yield from candidate_blocks(group.decision)
