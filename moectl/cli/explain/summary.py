"""The first lines of an explanation: the choice, its reason, memory, what else is possible, what to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from ...checkpoint.checkpoint import Origin
from ...environment import Device
from ...environment.variables import SET
from ...explain import Explanation, GroupExplanation, RankMemory
from ...explain.decision_words import (
    failure,
    fallback_words,
    reason_words,
    refusals,
    slower_words,
    usual_name,
    verification_words,
)
from ...explain.explanation import ASSUMED, with_expert_parallel
from ...explain.predicted_time import RUNNER, predicted_of
from ...explain.rank_memory import TENSOR_PARALLEL
from ...integrations.served_engines import take_over_commands
from ...oracle.decision import Candidate, Decision
from ...oracle.format_keys import act_key
from ...oracle.policy import Policy
from ...oracle.registry import engine_named, policy_named, versioned
from ...oracle.verdict_sentences import INVARIANCE
from ...problem.layer_ranges import layers_of
from ...problem.moe_problem import Parallel
from ...problem.schemes import A16, Scheme
from ...run.run_plan import POLICY
from ..output import count, duration, gib
from ..text_blocks import Block, Heading, LabelledValues
from .environment import finding_words, notes_of, package_sentences, untuned_words, variables
from .text import lacking, next_higher

MOST_NAMES = 6
"""Other supported backends to name."""
SAME_SIZE = 0.01
"""Relative difference below which two sizes of experts are the same."""


def summary_blocks(explanation: Explanation, alone: bool = True) -> Iterator[Block]:
    """Heading, choice for each kind of layer, memory, what else is possible, what to run: about ten lines.

    `alone`: nothing follows, so that warnings and notes are here, and how to see more.
    """
    engine = engine_named(explanation.policy)
    deployment = deployment_words(explanation.parallel, explanation.device)
    head = (explanation.origin.name, deployment, versioned(explanation.policy))
    # Each part stays on one line.
    yield Heading("   ".join(part.replace(" ", "\u00a0") for part in head), 1)
    by_answer: dict[object, list[GroupExplanation]] = {}
    for group in explanation.groups:
        by_answer.setdefault(_answer_key(group), []).append(group)
    total = sum(len(group.layers) for group in explanation.groups)
    for groups in by_answer.values():
        layers = tuple(sorted(number for group in groups for number in group.layers))
        yield _choice(groups, f"all {total} MoE layers" if len(layers) == total else layers_of(layers))
    memory = explanation.memory
    rows = [("memory", memory_words(memory, explanation.parallel.tp, engine.memory_option))]
    rows += _other_experts(explanation)
    if explanation.usable and memory.fits is not False:
        rows += [("run", unbroken_options(run_command(explanation)))]
        rows += [("serve", unbroken_options(command)) for command in plug_in_commands(explanation)]
    yield LabelledValues(tuple(rows), tones={"memory": "wrong"} if memory.fits is False else {})
    if not alone:
        return
    notes = dict.fromkeys(note for group in explanation.groups for note in (*_remarks(group), *group.notes))
    yield LabelledValues(
        (
            *(("warning", text) for text in warnings(explanation)),
            ("tuned", untuned_words(explanation)),
            *(("note", note) for note in notes),
            ("more", _more(explanation)),
        ),
        tones={"warning": "warning", "more": "dim"},
    )


def deployment_words(parallel: Parallel, device: Device) -> str:
    """``16x NVIDIA H100, TP 8, PP 2``."""
    parts = [f"TP {parallel.tp}"] if parallel.tp > 1 else []
    parts += [f"PP {parallel.pp}"] if parallel.pp > 1 else []
    parts += [f"DP {parallel.dp}"] if parallel.dp > 1 else []
    parts += [f"EP {parallel.ep_size}"] if parallel.ep else []
    # Drivers of AMD put underscores where their products have blanks.
    return ", ".join([f"{parallel.ranks * parallel.pp}x {device.name.replace('_', ' ')}", *parts])


def _answer_key(group: GroupExplanation) -> object:
    """Equal for layers of which one choice can tell: format, backend, why it or none, what else is possible.

    Times are told of each kind of layer; of checks that a rejected backend fails, those of the first.
    """
    decision = group.decision
    chosen = decision.chosen if decision.usable else None
    scheme = decision.problem.scheme
    if chosen is None:
        return (scheme, *refusals(decision))
    why = (reason_words(decision), fallback_words(group))
    return (scheme, chosen.backend.name, chosen.variant.experts, why, _also(decision, chosen))


def _choice(groups: Sequence[GroupExplanation], which: str) -> LabelledValues:
    """The choice of `groups`, which have the same answer; `which` names their layers."""
    group, decision = groups[0], groups[0].decision
    chosen = decision.chosen if decision.usable else None
    formats = format_words(decision.problem.scheme)
    if chosen is None:
        reasons = [("because", reason) for reason in refusals(decision)]
        if not (decision.gates or decision.inputs.requested or decision.chosen or decision.refused):
            reasons.append(("nearest", failure(decision)))
        return LabelledValues(
            (("backend", f"none for {which} ({formats})"), *reasons), tones={"backend": "wrong"}
        )
    rejected = next_higher(decision, chosen)
    title = f"{backend_title(decision, chosen)}, {which} ({formats})"
    return LabelledValues(
        (
            ("backend", ", ".join(filter(None, (title, verification_words(decision, chosen))))),
            ("tokens", _tokens(group)),
            ("because", reason_words(decision)),
            ("fallback", fallback_words(group)),
            ("not", f"{rejected.backend.name}: {lacking(rejected)}" if rejected else ""),
            ("predicted", _predicted(groups)),
            ("also", _also(decision, chosen)),
            ("env", _ruled_out(decision, chosen)),
        ),
        tones={"backend": "good", "fallback": "warning", "not": "dim"},
    )


def format_words(scheme: Scheme) -> str:
    """``mxfp4 group 32 weights, 16-bit activations``."""
    act = "16-bit" if scheme.act == A16 else str(scheme.act)
    return f"{scheme.weight} weights, {act} activations"


def _tokens(group: GroupExplanation) -> str:
    """That moectl's own kernels, if they are chosen, keep tokens in 16 bits that are declared otherwise."""
    decision = group.decision
    found = predicted_of(decision) if decision.chosen and decision.chosen.backend.runner == RUNNER else None
    act = decision.problem.scheme.act
    if found is None or found.act == str(act):
        return ""
    said = "assumed" if group.sources.get("act") == ASSUMED else "declared"
    return f"stay in 16 bits; kernels for these weights do not use the {said} {act} activations"


def _predicted(groups: Sequence[GroupExplanation]) -> str:
    """What moectl's own kernels should take for each kind of layer; empty if they are no answer."""
    by_words: dict[str, list[int]] = {}
    for group in groups:
        if words := predicted_words(group.decision):
            by_words.setdefault(words, []).extend(group.layers)
    if len(by_words) < 2:
        return next(iter(by_words), "")
    return "; ".join(f"{layers_of(it)}: {words}" for words, it in by_words.items())


def predicted_words(decision: Decision) -> str:
    """``28 us at 1 token, 172 us at 64 a layer (...)``; empty if moectl is no candidate."""
    found = predicted_of(decision)
    if found is None:
        return ""
    own = decision.chosen is not None and decision.chosen.backend.runner == RUNNER
    name = "" if own else f"{RUNNER}: "
    if not found.times:
        return f"{name}no times: {found.reason}"
    first, *rest = found.times
    parts = [f"{duration(first.us / 1e6)} at {count(first.tokens, 'token')}"]
    parts += [f"{duration(time.us / 1e6)} at {time.tokens}" for time in rest]
    error = found.median_error
    known = "not measured on this GPU" if error is None else f"median error {error:.0%} on this GPU"
    return f"{name}{', '.join(parts)} a layer ({known})"


def backend_title(decision: Decision, candidate: Candidate) -> str:
    """``triton (OpenAI triton_kernels)``: the engine's name, and the field's where it says more."""
    name, usual = candidate.backend.name, usual_name(decision, candidate)
    return name if usual.lower() == name else f"{name} ({usual})"


def _also(decision: Decision, chosen: Candidate) -> str:
    """Names of other supported backends, as an option requests them."""
    names = [
        c.backend.name for c in decision.candidates if c.usable and c.backend.name != chosen.backend.name
    ]
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more} (--backend NAME)" if names else ""


def _ruled_out(decision: Decision, chosen: Candidate) -> str:
    """Backends that only the engine's variable for batch-invariant results rules out."""
    variable = policy_named(decision.inputs.policy).invariance
    names = dict.fromkeys(
        c.backend.name
        for c in decision.candidates
        if c.failed and {verdict.question for verdict in c.failed} == {INVARIANCE}
    )
    names.pop(chosen.backend.name, None)
    return f"{variable.name}=1 rules out {', '.join(names)}" if variable and names else ""


def _remarks(group: GroupExplanation) -> Iterator[str]:
    """Other notes of the decision: warnings, and what was assumed; not special orders."""
    decision = group.decision
    rows = policy_named(decision.inputs.policy).rows()
    orders = {move.why for row in rows if row.name == decision.route for move in row.moves}
    assigned = decision.chosen is not None and decision.chosen.assigned
    if slower := slower_words(decision):
        yield slower
    for note in notes_of(decision):
        if note not in orders and not (assigned and " assigns the backend of " in note):
            yield note


def memory_words(memory: RankMemory, tp: int, option: str) -> str:
    """Weights of one GPU against its memory, what remains, and the smallest TP that fits."""
    text = f"experts {gib(memory.experts)}"
    if memory.others is not None:
        estimated = " (estimated from config)" if memory.source == "config" else ""
        text += f" + other weights {gib(memory.others)}{estimated}"
    unlisted = " (other weights are not listed here)" if memory.others is None else ""
    if memory.device is None or memory.usable is None or memory.left is None:
        return f"{text} per GPU{unlisted}"
    smallest = memory.smallest_tp
    needs = f"needs TP {smallest}" if smallest else f"fits at no TP up to {TENSOR_PARALLEL[-1]}"
    of = f"{text} of {gib(memory.device)} per GPU{unlisted}"
    if memory.left <= 0:
        return f"does not fit: {of}; {needs}"
    share = f" at {option} {memory.usable / memory.device:.2g}" if option else ""
    least = "" if tp == 1 else f"; {needs} or more" if smallest == tp else f"; fits from TP {smallest} on"
    return f"{of}; {gib(memory.left)} left for KV cache{share}{least}"


def serve_command(policy: Policy, checkpoint: str, parallel: Parallel, requested: str | None = None) -> str:
    """The engine's command for `checkpoint`, a name or path, in a deployment; with a `requested` backend."""
    serve = policy.serve
    words = [serve.command.format(shlex.quote(checkpoint))]
    tensor = parallel.ranks if serve.tensor_spans_all else parallel.tp
    words += [serve.tensor.format(tensor)] if tensor > 1 else []
    words += [serve.pipeline.format(parallel.pp)] if parallel.pp > 1 and serve.pipeline else []
    words += [serve.data.format(parallel.dp)] if parallel.dp > 1 else []
    words += [serve.expert.format(parallel.ep_size)] if parallel.ep else []
    if parallel.states_exchange(policy.default_exchange):
        words.append(serve.exchange.format(parallel.all2all))
    if requested and requested != "auto":
        words.append(serve.request(requested) if serve.end else serve.request_option(requested))
    return serve.whole(words)


def _other_experts(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """What expert parallelism would change, or what it changes if it is used; nothing for one rank."""
    ep = explanation.parallel.ep
    other = with_expert_parallel(explanation, not ep) if explanation.parallel.ranks > 1 else None
    if other is None or not other.usable:
        return
    here, there = (_backends(each) for each in (explanation, other))
    instead = f"{', '.join(there)} instead of {', '.join(here) or 'none'}"
    parts = ["the same backend" if here == there else instead]
    group = (explanation if ep else other).groups[0]
    experts, ranks = group.problem.experts, group.problem.parallel.ep_size
    whole = f"{group.problem.local_experts} of {experts} experts"
    parts.append(
        f"1/{ranks} of each expert per GPU instead of {whole}"
        if ep
        else f"{whole} per GPU instead of 1/{ranks} of each"
    )
    sizes = [each.memory.experts for each in (explanation, other)]
    if abs(sizes[1] - sizes[0]) < sizes[0] * SAME_SIZE:
        parts.append("the same memory")
    else:
        parts.append(f"{gib(sizes[1])} of experts instead of {gib(sizes[0])}")
    # Of the most frequent kind of layer.
    at = max(range(len(other.groups)), key=lambda index: len(other.groups[index].layers))
    steps = [each.groups[at].roofline.decode[-1] for each in (explanation, other)]
    times = [duration(step.roofline.seconds) for step in steps if step.roofline]
    if len(times) == len(steps):
        parts.append(f"roofline at M={steps[0].tokens} {times[1]} a layer instead of {times[0]}")
    yield "without EP" if ep else "with EP", "; ".join(parts)


def _backends(explanation: Explanation) -> tuple[str, ...]:
    """The chosen backends, each once; none if some layers have none."""
    chosen = [group.decision.chosen for group in explanation.groups if explanation.usable]
    return tuple(dict.fromkeys(candidate.backend.name for candidate in chosen if candidate))


def plug_in_commands(explanation: Explanation) -> tuple[str, ...]:
    """Commands of engines that compute the checkpoint's experts with the chosen kernels, as plug-ins.

    None where another program's choice is explained, or layers have other backends.
    """
    parallel, chosen = explanation.parallel, [group.decision.chosen for group in explanation.groups]
    if explanation.policy != POLICY or parallel.dp > 1 or parallel.pp > 1:
        return ()
    if not all(found and found.backend.name.startswith(POLICY) for found in chosen):
        return ()
    groups = parallel.ep_size if parallel.ep else 1
    problems = {group.problem for group in explanation.groups}
    return take_over_commands(local_name(explanation.origin), problems, parallel.tp, groups)


def run_command(explanation: Explanation) -> str:
    """The engine's command for what is explained: with the variables, adapters and activations asked for."""
    policy, inputs = policy_named(explanation.policy), explanation.groups[0].decision.inputs
    words = [f"{name}={shlex.quote(value)}" for name, value in stated_variables(explanation).items()]
    words.append(
        serve_command(policy, local_name(explanation.origin), explanation.parallel, inputs.requested)
    )
    if policy.serve.adapters and any(group.problem.lora for group in explanation.groups):
        words.append(policy.serve.adapters)
    for group in explanation.groups:
        act = policy.act_overrides(group.problem).get(act_key(group.problem.scheme.act))
        if act and group.sources.get("act") == ASSUMED:
            return " ".join([*words, policy.serve.activation.format(act)])
    return " ".join(words)


def stated_variables(explanation: Explanation) -> dict[str, str]:
    """The engine's variables that its default installation does not set, and that it reads."""
    engine, packages = engine_named(explanation.policy), explanation.packages
    name = engine.default_profiles.get(explanation.device.platform, "")
    usual = engine.profiles()[name].env if name else {}
    read = {finding.name for finding in variables(explanation.policy, packages) if finding.verdict == SET}
    return {name: value for name, value in packages.env.items() if name in read and usual.get(name) != value}


def unbroken_options(command: str) -> str:
    """`command` with no-break spaces between options and their values, so that both are on one line."""
    return re.sub(r"(--\S+) (?!-)", "\\1\u00a0", command)


def local_name(origin: Origin) -> str:
    """What commands call a checkpoint: the path of a local one, or its name."""
    return str(origin.path) if origin.kind in ("folder", "config") and origin.path else origin.name


def warnings(explanation: Explanation) -> Iterator[str]:
    """What may make the answer another one: variables without effect or misspelled, broken packages."""
    for finding in variables(explanation.policy, explanation.packages):
        if finding.verdict != SET:
            yield f"{finding.verdict}: {finding_words(finding)}"
    yield from package_sentences(explanation)


def _more(explanation: Explanation) -> str:
    count = max(len(group.decision.candidates) for group in explanation.groups)
    listed = f"-v: all {count} candidates" if count > 1 else "-v: every fact"
    return f"{listed}, with reasons; --why NAME: what NAME would need"
