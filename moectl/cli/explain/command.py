"""`moectl explain`: which backend a checkpoint gets, and why the others are rejected."""

import os
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...errors import ExitCode, MoectlError, Unavailable, UsageError
from ..checkpoint_argument import pick_backend
from ..options import TYPED, framed, typed_options
from ..output import Output
from ..output_paths import check_writable
from .options import (
    MOST_CELLS,
    MOST_PAGE_CELLS,
    PAGE_GPUS,
    PAGE_TP,
    AnswerOptions,
    DecisionOptions,
    ExplainedCheckpoints,
)

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint
    from ...explain.assumed_machines import AssumedMachine
    from ...explain.decision_matrix import Unopened
    from ...explain.engine_answer import EngineAnswer
    from ...explain.release_changes import DecisionChange
    from .output import AnswerOutput

EXAMPLES = (
    "moectl explain openai/gpt-oss-120b --gpu h200",
    "moectl explain ./ckpt --dp 8 --ep --engine all",
    "moectl explain --from 0.31.0 --gpu h100 --tp 1,8",
)


DEPLOYMENT = ("tp", "dp", "ep_size")
"""Options that say how many ranks there are."""

INPUTS = (*(field.name for field in fields(DecisionOptions)), "measured")
"""Options that a --json document records."""


@framed("explain")
def explain(
    context: typer.Context,
    checkpoints: ExplainedCheckpoints = None,
    *,
    options: DecisionOptions,
    answer: AnswerOptions,
    out: Output,
) -> ExitCode:
    """Show which fused-MoE backend checkpoints get, and why. Reads config and tensor headers alone."""
    from .output import AnswerOutput

    answers = AnswerOutput(out, answer, shlex.join(["moectl", "explain", *context.meta[TYPED]]))
    if answer.html is not None:
        if answer.why or answer.diff or answer.md:
            raise UsageError("--html takes no --why, --diff or --md", hint="give one of them")
        check_writable(answer.html, [*(checkpoints or ()), *([answer.replay] if answer.replay else [])])
    if answer.ask_engine:
        _refuse_beside_asking(options, answer)
    if answer.replay is not None:
        if checkpoints:
            raise UsageError("--replay takes its inputs from the document", hint="omit CKPT")
        if recorded := typed_options(context, INPUTS):
            names = ", ".join(recorded)
            raise UsageError("--replay takes its inputs from the document", hint=f"omit {names}")
        return replayed(answer.replay, answer, answers)
    if answer.since is not None:
        _refuse_beside_from(answer)
        if not checkpoints:
            options = page_options(context, options, out)
        return changed(list(dict.fromkeys(checkpoints or ())), options, answer, answers)
    if options.every_engine and answer.html is None:
        return under_every_engine(list(dict.fromkeys(checkpoints or ())), options, answer, answers)
    if answer.html is not None:
        options = page_options(context, options, out)
    elif not checkpoints:
        raise UsageError("CKPT is missing", hint="moectl explain openai/gpt-oss-120b --gpu h200")
    return answered(list(dict.fromkeys(checkpoints or ())), options, answer, answers)


def page_options(context: typer.Context, options: DecisionOptions, out: Output) -> DecisionOptions:
    """`options` with common GPUs and tensor-parallel sizes where none are given; they are printed."""
    sources = map(context.get_parameter_source, DEPLOYMENT)
    given = any(source is not None and source.name != "DEFAULT" for source in sources)
    tp = options.tp if given else PAGE_TP
    gpu = PAGE_GPUS if options.gpu is None else options.gpu
    taken = [f"--gpu {gpu}"] if options.gpu is None else []
    taken += [f"--tp {tp}"] if not given else []
    if taken:
        out.note(f"taking {' '.join(taken)}")
    return replace(options, gpu=gpu, tp=tp)


def answered(
    names: list[str], options: DecisionOptions, answer: AnswerOptions, answers: "AnswerOutput"
) -> ExitCode:
    """Show the explanation of a checkpoint, a matrix of some, the answer to --why, or a --diff.

    Without `names`, of all built-in models.
    """
    from ...checkpoint.source.catalogue import model_names
    from ...explain import explain as explain_checkpoint
    from ...explain.decision_matrix import matrix
    from .command_line import ExplainCommand

    if answer.ask_engine:
        options = askable(options)
    whole = answer.html is not None and (options.policy is None or options.every_engine)
    if options.every_engine:
        options = replace(options, policy=None)
    policy, others = options.policies()
    parallels = options.parallels(policy)
    question = options.question(policy, parallels[0], others, measured=answer.measured is not False)
    backend = answer.why and pick_backend(answer.why, policy)
    machines = options.machines()
    built_in = not names
    names = names or list(model_names())
    cells = len(names) * len(machines) * len(parallels)
    most = MOST_PAGE_CELLS if answer.html else MOST_CELLS
    if cells > 1 and (answer.why or answer.diff or answer.ask_engine):
        name = "--why" if answer.why else "--diff" if answer.diff else "--ask-engine"
        raise UsageError(
            f"{name} takes one checkpoint, one GPU and one deployment",
            hint="give one CKPT, and one value each to --gpu, --tp and --dp",
        )
    if cells > most:
        raise UsageError(
            f"a {'page' if answer.html else 'matrix'} has at most {most} cells, this has {cells}",
            hint="use fewer checkpoints, GPUs or deployments",
        )
    opened = _opener(options, built_in, answer.offline)

    if len(names) > 1:
        sources, unopened = opened_of(names, opened, answers.out)
    else:
        sources, unopened = [opened(names[0])], []
    answers.look_at(machines)
    for note in (*machine_notes(machines), *options.remarks(policy, parallels)):
        answers.out.note(note)
    command = ExplainCommand(
        names[0],
        machines[0],
        question,
        tuple(options.switches.items()),
        options.policy or "",
        tuple(options.stated().items()),
    )
    answers.stated = command.besides()
    if cells > 1 or answer.html:
        matrices = [matrix(source, machines, parallels, question) for source in sources]
        if whole and not (options.backend or options.all2all):
            answers.beside = further_documents(sources, options, answers.out)
        return answers.matrices(matrices, question, unopened, several=len(names) > 1)
    (source,), (machine,) = sources, machines
    explanation = explain_checkpoint(source, machine.device, machine.packages, question)
    if answer.ask_engine:
        from ...explain.engine_answer import ask_engine

        asked: EngineAnswer | MoectlError
        try:
            asked = ask_engine(explanation, source, options.engine, options.where)
        except Unavailable as error:
            asked = error
        return answers.explanation(explanation, machine.key, asked)
    if backend:
        return answers.why(explanation, command, backend)
    return (
        answers.diff(explanation, answer.diff)
        if answer.diff
        else answers.explanation(explanation, machine.key)
    )


def askable(options: DecisionOptions) -> DecisionOptions:
    """`options` with the packages that a complete installation of the engine finds itself.

    Raises UsageError for an engine that cannot be asked, and for other packages than those.
    """
    from ...environment import INSTALLED
    from ...explain.engine_answer import complete

    if not complete(options.engine, options.where):
        return options
    if options.packages not in (None, INSTALLED):
        raise UsageError(
            "--ask-engine asks the engine with the packages that are installed",
            hint="leave --packages out, or name another environment with --python",
        )
    return replace(options, packages=INSTALLED)


def under_every_engine(
    names: list[str], options: DecisionOptions, answer: AnswerOptions, answers: "AnswerOutput"
) -> ExitCode:
    """Show what every engine chooses for a checkpoint, a line for each."""
    from ...checkpoint import open_checkpoint
    from ...checkpoint.config.user_assumptions import parse_assumptions
    from ...oracle.machine_packages import engines_of_families
    from .sides import assumptions_of, sides_of

    others = {"--why": answer.why, "--diff": answer.diff, "--backend": options.backend}
    if not names:
        raise UsageError("CKPT is missing", hint="moectl explain openai/gpt-oss-120b --engine all")
    given = [name for name, value in {**others, "--all2all": options.all2all}.items() if value is not None]
    if given:
        raise UsageError(
            f"--engine all takes no {' or '.join(given)}: backends and exchanges have other names in "
            "other engines",
            hint="name one engine with --engine",
        )
    sides = sides_of(options, engines_of_families(options.where))
    if len(names) != 1 or sides[0].decisions > 1:
        raise UsageError(
            "--engine all takes one checkpoint, one GPU and one deployment",
            hint="give one CKPT, and one value each to --gpu, --tp and --dp; --html takes more of each",
        )
    assumptions = parse_assumptions(options.activation, options.routing)
    source = open_checkpoint(names[0], offline=answer.offline, assumptions=assumptions)
    notes = assumptions_of(sides)
    for note in notes:
        answers.out.note(note)
    answers.look_at([machine for side in sides for machine in side.machines], notes)
    return answers.engines([side.matrix(source) for side in sides])


def further_documents(
    sources: "list[Checkpoint]", options: DecisionOptions, out: Output
) -> "list[dict[str, Any]]":
    """The documents of every other engine and release that can be asked what `options` ask."""
    from ...explain.decision_matrix import matrix_document
    from ...oracle.registry import ENGINES
    from .sides import assumptions_of, side_of

    documents, first = [], options.engine
    others = [engine for engine in ENGINES.values() if engine is not first]
    with out.progress("deciding", unit="engines") as update:
        for number, engine in enumerate(others):
            update(number, len(others), engine.versioned)
            try:
                side = side_of(options, engine.name)
            except UsageError as error:
                out.note(f"the page is without {engine.versioned}: {error.what}")
                continue
            document = matrix_document([side.matrix(source) for source in sources], side.question)
            documents.append({**document, "assumptions": assumptions_of([side]), "warnings": []})
    return documents


def _refuse_beside_asking(options: DecisionOptions, answer: AnswerOptions) -> None:
    """Raises UsageError for options that --ask-engine does not go with."""
    others = {
        "--why": answer.why,
        "--diff": answer.diff,
        "--from": answer.since,
        "--html": answer.html,
        "--replay": answer.replay,
        "--engine all": options.every_engine or None,
    }
    if given := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"--ask-engine takes no {' or '.join(given)}", hint="give one of them")


def _refuse_beside_from(answer: AnswerOptions) -> None:
    """Raises UsageError for options that say something else to show."""
    others = {"--why": answer.why, "--diff": answer.diff, "--html": answer.html, "--replay": answer.replay}
    if given := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"--from takes no {' or '.join(given)}", hint="give one of them")


def changed(
    names: list[str], options: DecisionOptions, answer: AnswerOptions, answers: "AnswerOutput"
) -> ExitCode:
    """Show which decisions of checkpoints (without `names`, of all built-in models) two releases make
    differently."""
    from ...checkpoint.source.catalogue import model_names
    from ...explain.release_changes import decision_changes, uncovered
    from ...oracle.registry import versioned
    from .sides import side_of

    if options.every_engine:
        raise UsageError("--from compares two releases", hint="name the second with --to")
    older, newer = side_of(options, answer.since), side_of(options, options.policy)
    before, after = older.question, newer.question
    if before.policy.name == after.policy.name:
        raise UsageError(
            f"--from and --to are the same release, {versioned(after.policy.name)}",
            hint="name another one, such as --from 0.31.0",
        )
    built_in, names = not names, names or list(model_names())
    if len(names) * newer.decisions > MOST_PAGE_CELLS:
        raise UsageError(
            f"at most {MOST_PAGE_CELLS} decisions are compared",
            hint="use fewer checkpoints, GPUs or deployments",
        )
    opened = _opener(options, built_in, answer.offline)

    sources, unopened = opened_of(names, opened, answers.out)
    answers.look_at(newer.machines)
    remarks = replace(options, policy=answer.since).remarks(before.policy, newer.parallels)
    for note in (*machine_notes(newer.machines), *remarks):
        answers.out.note(note)
    changes: list[DecisionChange] = []
    decisions = left_out = 0
    with answers.out.progress("deciding", unit="checkpoints") as update:
        for number, source in enumerate(sources):
            update(number, len(sources), source.origin.name)
            was, now = older.matrix(source), newer.matrix(source)
            ruleless = uncovered([was], [now])
            decisions, left_out = decisions + len(now.cells) - ruleless, left_out + ruleless
            changes += decision_changes([was], [now])
    return answers.releases(before, after, changes, decisions, left_out, unopened)


def _opener(options: "DecisionOptions", built_in: bool, offline: bool) -> Callable[[str], "Checkpoint"]:
    """Opens a checkpoint by name with the user's assumptions; the built-in models by what is built in."""
    from ...checkpoint import open_checkpoint
    from ...checkpoint.config.user_assumptions import parse_assumptions
    from ...checkpoint.source.open_checkpoint import open_built_in

    assumptions = parse_assumptions(options.activation, options.routing)
    if built_in:
        return lambda name: open_built_in(name, assumptions)
    return lambda name: open_checkpoint(name, offline=offline, assumptions=assumptions)


def opened_of(
    names: list[str], opened: Callable[[str], "Checkpoint"], out: Output
) -> "tuple[list[Checkpoint], list[Unopened]]":
    """The checkpoints, each once and with a name of its own, and those that cannot be opened.

    Different ones of one name, such as two revisions, have the names that the user gave. Errors and
    repetitions are printed.
    """
    from ...explain.decision_matrix import Unopened

    sources: dict[str, Checkpoint] = {}
    unopened = []
    with out.progress("reading", unit="checkpoints") as update:
        for number, name in enumerate(names):
            update(number, len(names), name)
            try:
                source = opened(name)
            except MoectlError as error:
                unopened.append(Unopened(name, error))
                out.complain(error)
            else:
                place = replace(source.origin, note="")
                known = [given for given, other in sources.items() if replace(other.origin, note="") == place]
                if known:
                    out.note(f"{name} and {known[0]} are the same checkpoint")
                else:
                    sources[name] = source
    counts = Counter(source.origin.name for source in sources.values())
    return [
        source
        if counts[source.origin.name] == 1
        else replace(source, origin=replace(source.origin, name=name))
        for name, source in sources.items()
    ], unopened


def machine_notes(machines: "tuple[AssumedMachine, ...]") -> list[str]:
    """Notes on what is assumed of `machines`, and on variables that hide some of this machine's GPUs."""
    from ...environment.gpus import visibility_set

    notes = list(dict.fromkeys(note for machine in machines for note in machine.notes))
    local = next((machine for machine in machines if not machine.key), None)
    if local is not None:
        for variable, value in visibility_set(os.environ).items():
            notes.append(f"with {variable}={value} this machine's device is {local.device.name}")
    return notes


def replayed(path: Path, answer: AnswerOptions, answers: "AnswerOutput") -> ExitCode:
    """Decide the document at `path` again, and show the explanation or matrix."""
    from ...explain.assumed_machines import AssumedMachine
    from ...explain.explanation import Question
    from ...explain.replay import read_document, replay, replay_engines, replay_matrices, requested_gpu
    from ...oracle.registry import policy_named
    from .command_line import ExplainCommand

    document = read_document(path)
    answers.keep(document)
    if "engines" in document and answer.html is None:
        if answer.why or answer.diff:
            raise UsageError("--why and --diff need a document of one engine")
        return answers.engines(replay_engines(document))
    if "groups" not in document:
        if answer.why or answer.diff:
            raise UsageError("--why and --diff need a document of one checkpoint, GPU and deployment")
        matrices = replay_matrices(document)
        return answers.matrices(matrices, matrices[0].question, several=len(matrices) > 1)
    explanation = replay(document)
    if answer.why:
        first = explanation.groups[0].decision.inputs
        policy = policy_named(first.policy)
        question = Question(policy, first.problem.parallel, first.requested, first.allow_fallback)
        machine = AssumedMachine(first.device, first.packages, first.device.name, "installed", True)
        switches = tuple(first.packages.env.items())
        command = ExplainCommand(explanation.origin.name, machine, question, switches)
        return answers.why(explanation, command, pick_backend(answer.why, policy))
    if answer.diff:
        return answers.diff(explanation, answer.diff)
    return answers.explanation(explanation, requested_gpu(document))
