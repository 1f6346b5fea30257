"""`moectl explain`: which backend a checkpoint gets, and every reason against the others."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import ExitCode, UsageError
from .explaining.given import (
    MOST_CELLS,
    All2all,
    AllowFallback,
    Assumed,
    BackendOption,
    Ckpt,
    Diff,
    Dp,
    Env,
    Ep,
    Eplb,
    Given,
    Gpu,
    Markdown,
    MeasuredOption,
    PackagesOption,
    PolicyOption,
    Replay,
    Strict,
    Tp,
    Verbose,
    WhyOption,
)
from .options import Activation, Offline, Routing, framed, pick, typed
from .output import Output

if TYPE_CHECKING:
    from ..explain.machines import Machine
    from .explaining.shown import Shown

EXAMPLES = (
    "moectl explain openai/gpt-oss-120b --gpu h200",
    "moectl explain moonshotai/Kimi-K2-Thinking --gpu h100,b200 --tp 1,2,4,8",
    "moectl explain openai/gpt-oss-120b --gpu h200 --why flashinfer_trtllm",
    "moectl explain ./ckpt --dp 8 --ep --all2all deepep_low_latency --json > a.json",
    "moectl explain --replay a.json    moectl explain ./ckpt --diff a.json",
)


INPUTS = (
    *("gpu", "tp", "dp", "ep", "all2all", "eplb", "packages", "env", "backend", "allow_fallback"),
    *("policy", "assume", "activation", "routing", "measured"),
)
"""Options that say what is decided; a document of --json holds them."""


@framed("explain")
def explain(
    context: typer.Context,
    checkpoint: Ckpt = None,
    gpu: Gpu = None,
    tp: Tp = "1",
    dp: Dp = "1",
    ep: Ep = False,
    all2all: All2all = None,
    eplb: Eplb = False,
    packages: PackagesOption = None,
    env: Env = None,
    backend: BackendOption = None,
    allow_fallback: AllowFallback = False,
    policy: PolicyOption = None,
    assume: Assumed = None,
    activation: Activation = None,
    routing: Routing = None,
    why: WhyOption = None,
    measured: MeasuredOption = None,
    replay: Replay = None,
    diff: Diff = None,
    strict: Strict = False,
    md: Markdown = False,
    verbose: Verbose = False,
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Say which fused-MoE backend a checkpoint gets, and why.

    With every reason against each other candidate, from config and tensor headers alone: no weights, no
    GPU, no engine.
    """
    from .explaining.shown import Shown

    shown = Shown(out, md, verbose, strict, bool(measured))
    if replay is not None:
        if checkpoint is not None:
            raise UsageError("--replay takes its inputs from the document", hint="leave CKPT out")
        if stated_here := typed(context, INPUTS):
            names = ", ".join(stated_here)
            raise UsageError("--replay takes its inputs from the document", hint=f"leave {names} out")
        return replayed(replay, diff, why, shown)
    if checkpoint is None:
        raise UsageError("CKPT is missing", hint="moectl explain openai/gpt-oss-120b --gpu h200")
    told = (gpu, tp, dp, ep, all2all, eplb, packages, env, backend, allow_fallback, policy, assume)
    given = Given(*told, measured)
    stated = {"--activation": activation, "--routing": routing}
    return answered(checkpoint, given, stated, diff, why, offline, shown)


def answered(
    checkpoint: str,
    given: Given,
    stated: dict[str, str | None],
    diff: Path | None,
    why: str | None,
    offline: bool,
    shown: "Shown",
) -> ExitCode:
    """The explanation of a checkpoint, the matrix, what would have to change, or what did."""
    from ..checkpoint import open_checkpoint
    from ..checkpoint.stated import parse_stated
    from ..explain import explain as library
    from ..explain.matrix import matrix
    from .explaining.commands import Asked

    policy, others = given.policies()
    parallels = given.parallels(policy)
    question = given.question(policy, parallels[0], others)
    backend = why and pick(why, policy.request_names(), "backend")
    machines = given.machines()
    cells = len(machines) * len(parallels)
    if cells > 1 and (why or diff):
        raise UsageError(
            f"{'--why' if why else '--diff'} takes one GPU and one deployment",
            hint="give one value each to --gpu, --tp and --dp",
        )
    if cells > MOST_CELLS:
        raise UsageError(f"a matrix has at most {MOST_CELLS} cells, this has {cells}", hint="ask for fewer")
    source = open_checkpoint(checkpoint, offline=offline, stated=parse_stated(*stated.values()))
    for note in (*assumed_of(machines), *given.remarks(policy, parallels)):
        shown.out.note(note)
    if cells > 1:
        return shown.matrix(matrix(source.origin, source.groups, machines, parallels, question))
    machine = machines[0]
    explanation = library(source, machine.device, machine.packages, question)
    if backend:
        told = tuple((name, text) for name, text in stated.items() if text is not None)
        switches = tuple(given.switches.items())
        asked = Asked(checkpoint, machine, question, switches, given.policy or "", told)
        inputs = [group.decision.inputs for group in explanation.groups]
        return shown.why(explanation, inputs, asked, backend)
    return shown.diff(explanation, diff) if diff else shown.explanation(explanation)


def assumed_of(machines: "tuple[Machine, ...]") -> list[str]:
    """What is assumed of `machines`, and what hides some of this machine's GPUs."""
    from ..environment import INSTALLED
    from ..environment.gpus import visibility_set

    found = [
        f"packages assumed: profile {spec}; --packages {INSTALLED} takes those found here"
        for spec in dict.fromkeys(machine.spec for machine in machines if machine.assumed)
    ]
    here = next((machine for machine in machines if not machine.key), None)
    if here is not None:
        for variable, value in visibility_set(os.environ).items():
            found.append(f"with {variable}={value} this machine's device is {here.device.name}")
    return found


def replayed(path: Path, diff: Path | None, why: str | None, shown: "Shown") -> ExitCode:
    """The explanation or matrix in the document at `path`, decided again."""
    from ..explain.explanation import Question
    from ..explain.machines import Machine
    from ..explain.replay import read_document, replay, replay_matrix
    from ..oracle.registry import policy_named
    from .explaining.commands import Asked

    document = read_document(path)
    if "rows" in document:
        if why or diff:
            raise UsageError("--why and --diff take the document of one GPU and one deployment")
        return shown.matrix(replay_matrix(document))
    explanation, recorded = replay(document)
    if why:
        first, policy = recorded[0], policy_named(recorded[0].policy)
        question = Question(policy, first.problem.parallel, first.requested, first.allow_fallback)
        machine = Machine(first.device, first.packages, first.device.name, "installed", True)
        asked = Asked(explanation.origin.name, machine, question, tuple(first.packages.env.items()))
        name = pick(why, policy.request_names(), "backend")
        return shown.why(explanation, recorded, asked, name)
    return shown.diff(explanation, diff) if diff else shown.explanation(explanation)
