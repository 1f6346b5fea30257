"""`moectl explain`: which backend a checkpoint gets, and every reason against the others."""

import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checkpoint.layers import ranges
from ..errors import ExitCode, UsageError
from .options import Activation, Offline, Routing, framed, option, pick
from .output import Output

if TYPE_CHECKING:
    from ..explain import Explanation
    from ..explain.matrix import Matrix
    from ..explain.situation import Situation
    from ..oracle.policy import Policy
    from ..problem import Parallel
    from .blocks import Block
    from .explaining.commands import Asked

EXAMPLES = (
    "moectl explain openai/gpt-oss-120b --gpu h200",
    "moectl explain moonshotai/Kimi-K2-Thinking --gpu h100,b200 --tp 1,2,4,8",
    "moectl explain openai/gpt-oss-120b --gpu h200 --why flashinfer_trtllm",
    "moectl explain ./ckpt --dp 8 --ep --all2all deepep_low_latency --json > a.json",
    "moectl explain --replay a.json    moectl explain ./ckpt --diff a.json",
)

MOST_CELLS = 2000
"""Decisions in one matrix at most."""

Names = Callable[[], Iterable[str]]


def completed(names: Names) -> Callable[[str], list[str]]:
    """Completion of the last name of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last.lower())]

    return complete


def _gpus() -> list[str]:
    from ..environment import device_names

    return [*device_names(), "all"]


def _backends() -> list[str]:
    from ..oracle.registry import POLICIES

    return sorted({name for policy in POLICIES.values() for name in policy.request_names()})


def _exchanges() -> list[str]:
    from ..oracle.registry import policy_named

    return sorted(policy_named().exchanges)


def _policies() -> list[str]:
    from ..oracle.registry import POLICIES

    return [*POLICIES]


@framed("explain")
def explain(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CKPT]",
            help="A folder, a config.json, a Hub id org/name[@revision], or a built-in model.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        option(
            "--gpu",
            help="h200, b200, ..., sm90, gfx942, cpu; a list; all. Default: this one.",
            autocompletion=completed(_gpus),
        ),
    ] = None,
    tp: Annotated[
        str, option("--tp", "-tp", "--tensor-parallel-size", help="Tensor-parallel ranks; a list: 1,2,4.")
    ] = "1",
    dp: Annotated[
        str, option("--dp", "-dp", "--data-parallel-size", help="Data-parallel ranks; a list.")
    ] = "1",
    ep: Annotated[
        bool, option("--ep", "-ep", "--enable-expert-parallel", help="Spread whole experts over all ranks.")
    ] = False,
    all2all: Annotated[
        str | None,
        option(
            "--all2all",
            "--all2all-backend",
            help="Exchange kernels for --dp with --ep.",
            autocompletion=completed(_exchanges),
        ),
    ] = None,
    eplb: Annotated[bool, option("--eplb", "--enable-eplb", help="Expert load balancing.")] = False,
    packages: Annotated[
        str | None, option("--packages", help="Profiles (full, bare, ...), a,b=1.2, or installed.")
    ] = None,
    env: Annotated[list[str] | None, option("--env", help="Engine switch K=V; repeatable.")] = None,
    backend: Annotated[
        str | None,
        option(
            "--backend",
            "--moe-backend",
            own=True,
            help="Ask for a backend by its engine's name.",
            autocompletion=completed(_backends),
        ),
    ] = None,
    allow_fallback: Annotated[
        bool, option("--allow-fallback", help="Take the automatic order if --backend cannot serve.")
    ] = False,
    policy: Annotated[
        str | None,
        option(
            "--policy",
            help="One of vllm-0.33.0 and moectl (what this tool runs); default: both, vLLM's first.",
            autocompletion=completed(_policies),
        ),
    ] = None,
    assumed: Annotated[
        list[str] | None,
        option("--assume", help="hidden=, intermediate=, act=, dtype=, ... instead of the checkpoint's."),
    ] = None,
    why: Annotated[
        str | None,
        option(
            "--why",
            own=True,
            help="What would have to change for this backend to be chosen.",
            autocompletion=completed(_backends),
        ),
    ] = None,
    replay: Annotated[
        Path | None, option("--replay", own=True, help="Decide again from a --json document, without CKPT.")
    ] = None,
    diff: Annotated[
        Path | None, option("--diff", own=True, help="What changed since this --json document.")
    ] = None,
    strict: Annotated[
        bool, option("--strict", own=True, help="Exit code 1 on a fallback: see docs/explain.md.")
    ] = False,
    markdown: Annotated[bool, option("--md", own=True, help="Print markdown, for an issue.")] = False,
    verbose: Annotated[
        bool, option("--verbose", "-v", help="Every fact with its source, and every candidate.")
    ] = False,
    activation: Activation = None,
    routing: Routing = None,
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Say which fused-MoE backend a checkpoint gets, and why.

    With every reason against each other candidate, from config and tensor headers alone: no weights, no
    GPU, no engine.
    """
    from ..checkpoint import open_checkpoint
    from ..checkpoint.stated import parse_stated
    from ..environment import INSTALLED, device_names
    from ..environment.gpus import visibility_set
    from ..explain import explain as library
    from ..explain.explanation import Question
    from ..explain.machines import machine
    from ..explain.matrix import matrix
    from ..oracle.registry import NEWEST, POLICIES, policy_named
    from ..problem import Parallel
    from .explaining.commands import Asked

    shown = Shown(out, markdown, verbose, strict)
    if replay is not None:
        if checkpoint is not None:
            raise UsageError("--replay takes its inputs from the document", hint="leave CKPT out")
        return replayed(replay, diff, why, shown)
    if checkpoint is None:
        raise UsageError("CKPT is missing", hint="moectl explain openai/gpt-oss-120b --gpu h200")
    chosen = policy_named(pick(policy, (*POLICIES, NEWEST), "policy") if policy else NEWEST)
    others = () if policy else tuple(p for p in POLICIES.values() if p is not chosen)
    env_given = pairs(env or [], "--env", "VLLM_USE_DEEP_GEMM=0")
    if backend is not None:
        backend = None if backend == "auto" else pick(backend, chosen.request_names(), "backend")
    if why is not None:
        why = pick(why, chosen.request_names(), "backend")
    if all2all is not None:
        all2all = pick(all2all, chosen.exchanges, "exchange")
    parallels = [
        Parallel(t, d, ep, all2all or Parallel().all2all, eplb)
        for d in numbers(dp, "--dp")
        for t in numbers(tp, "--tp")
    ]
    names = [*device_names()] if gpu == "all" else [n.strip() for n in gpu.split(",")] if gpu else [None]
    machines = [machine(name, packages, env_given) for name in dict.fromkeys(names)]
    question = Question(
        chosen, parallels[0], backend, allow_fallback, pairs(assumed or [], "--assume", "act=mxfp8"), others
    )
    source = open_checkpoint(checkpoint, offline=offline, stated=parse_stated(activation, routing))
    for spec in dict.fromkeys(found.spec for found in machines if found.assumed):
        out.note(f"packages assumed: profile {spec}; --packages {INSTALLED} takes those found here")
    if any(not found.key for found in machines):
        for variable, value in visibility_set(os.environ).items():
            out.note(f"with {variable}={value} this machine's device is {machines[0].device.name}")
    for note in remarks(chosen, parallels, all2all, env_given):
        out.note(note)
    if len(machines) * len(parallels) > 1:
        if why or diff:
            raise UsageError(
                f"{'--why' if why else '--diff'} takes one GPU and one deployment",
                hint="give one value each to --gpu, --tp and --dp",
            )
        if len(machines) * len(parallels) > MOST_CELLS:
            raise UsageError(f"a matrix has at most {MOST_CELLS} cells", hint="ask for fewer values")
        return shown.matrix(matrix(source.origin, source.groups, machines, parallels, question))
    explanation = library(source, machines[0].device, machines[0].packages, question)
    if why:
        told = {"--activation": activation, "--routing": routing}
        stated = tuple((name, text) for name, text in told.items() if text is not None)
        asked = Asked(checkpoint, machines[0], question, tuple(env_given.items()), policy or "", stated)
        situations = [
            question.situation(group.problem, machines[0].device, machines[0].packages)
            for group in source.groups
        ]
        return shown.why(explanation, situations, asked, why)
    if diff:
        return shown.diff(explanation, diff)
    return shown.explanation(explanation)


def replayed(path: Path, diff: Path | None, why: str | None, shown: "Shown") -> ExitCode:
    """The explanation or matrix in the document at `path`, decided again."""
    from ..explain.explanation import Question
    from ..explain.machines import Machine
    from ..explain.replay import read_document, replay, replay_matrix
    from .explaining.commands import Asked

    document = read_document(path)
    if "rows" in document:
        if why or diff:
            raise UsageError("--why and --diff take the document of one GPU and one deployment")
        return shown.matrix(replay_matrix(document))
    explanation, situations = replay(document)
    if why:
        first = situations[0]
        question = Question(first.policy, first.problem.parallel, first.requested, first.allow_fallback)
        machine = Machine(first.device, first.packages, first.device.name, "installed", True)
        asked = Asked(explanation.origin.name, machine, question, tuple(first.packages.env.items()))
        name = pick(why, first.policy.request_names(), "backend")
        return shown.why(explanation, situations, asked, name)
    return shown.diff(explanation, diff) if diff else shown.explanation(explanation)


class Shown:
    """Results in the form asked for, with their exit codes."""

    def __init__(self, out: Output, markdown: bool, verbose: bool, strict: bool) -> None:
        self.out, self.markdown, self.verbose, self.strict = out, markdown, verbose, strict

    def show(self, document: dict[str, Any], blocks: "Iterable[Block]", brief: list[str]) -> None:
        """JSON, one line each, markdown, or text."""
        from . import blocks as drawing

        made = list(blocks)
        if self.markdown and not (self.out.as_json or self.out.quiet):
            self.out.text(drawing.markdown(made))
        else:
            self.out.result(document, lambda console: drawing.draw(made, console), brief)

    def code(self, explanation: "Explanation") -> ExitCode:
        """1 where nothing serves, or under --strict a fallback does."""
        fallback = self.strict and any(group.fallback for group in explanation.groups)
        return ExitCode.DONE if explanation.usable and not fallback else ExitCode.FOUND

    def explanation(self, found: "Explanation") -> ExitCode:
        from .explaining.sections import View, document, sections

        self.show(document(found), sections(found, View(self.verbose)), brief(found))
        return self.code(found)

    def matrix(self, found: "Matrix") -> ExitCode:
        from .blocks import columns_here
        from .explaining.grid import matrix_blocks, matrix_lines

        width = 10_000 if self.markdown else columns_here()
        self.show(found.to_json(), matrix_blocks(found, width), matrix_lines(found))
        good = found.clean if self.strict else found.usable
        return ExitCode.DONE if good else ExitCode.FOUND

    def why(
        self, explanation: "Explanation", situations: "Iterable[Situation]", asked: "Asked", name: str
    ) -> ExitCode:
        """What would have to change; 1 where nothing helps some layers."""
        from ..explain.why import why
        from .explaining.counterfactual import why_blocks, why_document, why_lines
        from .explaining.sections import document

        found = tuple(
            (group.layers, why(situation, name))
            for group, situation in zip(explanation.groups, situations, strict=True)
        )
        whole = {**document(explanation), "why": why_document(asked, found)}
        self.show(whole, why_blocks(asked, found), why_lines(asked, found))
        helped = all(answer.chosen or answer.answers for _, answer in found)
        return ExitCode.DONE if helped else ExitCode.FOUND

    def diff(self, explanation: "Explanation", path: Path) -> ExitCode:
        """What changed since the document at `path`; 1 when a choice did."""
        import json

        from ..explain.diff import diff
        from ..explain.replay import read_document
        from .explaining.changes import difference_blocks
        from .explaining.sections import document

        now = document(explanation)
        found = diff(read_document(path), json.loads(json.dumps(now, default=list)))
        changed = "changed" if found.chosen_otherwise else "same"
        self.show({**now, "diff": found.to_json()}, difference_blocks(found), [changed])
        return ExitCode.FOUND if found.chosen_otherwise else self.code(explanation)


def remarks(
    policy: "Policy", parallels: "list[Parallel]", all2all: str | None, env: dict[str, str]
) -> list[str]:
    """What a user should know of options that change nothing."""
    found = []
    if all2all is not None and not any(parallel.exchanges for parallel in parallels):
        found.append("--all2all changes nothing here: tokens travel only with --ep and --dp above 1")
    for name in env:
        if name not in policy.variables:
            near = difflib.get_close_matches(name, policy.variables, n=1, cutoff=0.6)
            also = f"; did you mean {near[0]}?" if near else ""
            found.append(f"no rule of {policy.name} reads the switch {name}{also}")
    return found


def numbers(text: str, name: str) -> list[int]:
    """Ranks of a list such as ``1,2,4``, each once; UsageError for anything else."""
    found = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if not all(0 < number <= 1 << 16 for number in found):
        raise UsageError(f"{name} takes positive numbers such as 8 or 1,2,4,8, got {text!r}")
    return list(dict.fromkeys(found))


def pairs(given: list[str], name: str, example: str) -> dict[str, str]:
    """``K=V`` arguments as a mapping; UsageError for one without a name or an equals sign."""
    found = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{name} takes K=V, got {pair!r}", hint=f"for example {name} {example}")
        found[key] = value
    return found


def brief(explanation: "Explanation") -> list[str]:
    """One line a group: layers and the backend's name."""
    lines = []
    for group in explanation.groups:
        chosen = group.decision.chosen if group.decision.usable else None
        lines.append(f"{ranges(group.layers)}\t{chosen.backend.name if chosen else 'none'}")
    return lines
