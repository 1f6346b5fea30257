"""Options of `moectl explain`, and the questions that they ask."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import UsageError
from ...whole_numbers import whole_number
from ..checkpoint_argument import pick_backend
from ..options import ActivationOption, Offline, RoutingOption, option, pick, split_names

if TYPE_CHECKING:
    from ...environment.python_environments import PythonEnvironment
    from ...explain.assumed_machines import AssumedMachine
    from ...explain.explanation import Question
    from ...oracle.engine import Engine
    from ...oracle.policy import Policy
    from ...problem.moe_problem import Parallel

Names = Callable[[], Iterable[str]]


def completed(names: Names) -> Callable[[str], list[str]]:
    """Completion of the last name of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last.lower())]

    return complete


def gpu_names() -> list[str]:
    """Values of --gpu."""
    from ...environment import device_names

    return [*device_names(), ALL]


def backend_names() -> list[str]:
    """Values of --backend and --why, for any policy."""
    from ...oracle.registry import ENGINES

    return sorted({name for engine in ENGINES.values() for name in engine.policy.request_names()})


def exchange_names() -> list[str]:
    """Values of --all2all."""
    from ...oracle.registry import ENGINES

    return sorted({name for engine in ENGINES.values() for name in engine.policy.exchanges})


def policy_called(name: str) -> str:
    """The policy called `name`, ignoring case and dashes. UsageError says whose rules there are."""
    from ...oracle.registry import engine_named, known_releases

    key = name.lower().replace("_", "-")
    if key[:1].isdigit():
        key = f"{engine_named().family}=={key}"
    if "==" in key:
        engine_named(key)
        return key
    known = [name for name in policy_names() if name != ALL]
    if key in known:
        return key
    near = difflib.get_close_matches(key, known, n=1)
    raise UsageError(
        f"moectl has no rules for {name!r}; it has those of {known_releases()}",
        hint=f"did you mean --engine {near[0]}?"
        if near and not any(letter.isdigit() for letter in key)
        else "name one of them, or --engine all",
    )


def policy_names() -> list[str]:
    """Values of --policy."""
    from ...oracle.registry import engine_names

    return [*engine_names(), ALL]


ALL = "all"

MOST_CELLS = 2000
"""Maximum cells of all matrices: checkpoints times GPUs times deployments."""

MOST_PAGE_CELLS = 5000
"""Maximum cells of a page, which a browser has to draw at once."""

PAGE_GPUS, PAGE_TP = "h100,h200,b200,mi300x", "1,2,4,8"
"""GPUs and tensor-parallel sizes of a page for which none are given."""

ExplainedCheckpoints = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CKPT",
        help="Directories, config.json files, Hub ids org/name[@revision], built-in models.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class DecisionOptions:
    """Options that determine the decision; a --json document records them."""

    gpu: Annotated[
        str | None,
        option(
            "--gpu",
            help="h200, sm90, cpu, a list, or all; default: this machine's.",
            autocompletion=completed(gpu_names),
        ),
    ] = None
    tp: Annotated[
        str, option("--tp", "-tp", "--tensor-parallel-size", help="Tensor-parallel ranks; a list: 1,2,4.")
    ] = "1"
    dp: Annotated[str, option("--dp", "-dp", "--data-parallel-size", help="Data-parallel ranks; a list.")] = (
        "1"
    )
    pp: Annotated[str, option("--pp", "-pp", "--pipeline-parallel-size", help="Pipeline stages; a list.")] = (
        "1"
    )
    ep: Annotated[
        bool,
        option("--ep", "-ep", "--enable-expert-parallel", help="Whole experts on ranks; also --ep 8."),
    ] = False
    ep_size: Annotated[
        int | None,
        option("--ep-size", help="--ep with the number of ranks, tp x dp: also --ep 8.", min=1, hidden=True),
    ] = None
    all2all: Annotated[
        str | None,
        option(
            "--all2all",
            "--all2all-backend",
            help="Exchange kernels for --dp with --ep.",
            autocompletion=completed(exchange_names),
        ),
    ] = None
    eplb: Annotated[bool, option("--eplb", "--enable-eplb", help="Expert load balancing.")] = False
    packages: Annotated[
        str | None, option("--packages", help="A profile (full, bare), installed, a,b=1.2.")
    ] = None
    python: Annotated[str | None, option("--python", help="Another environment: PATH/bin/python.")] = None
    env: Annotated[list[str] | None, option("--env", help="Engine environment variable K=V; repeatable.")] = (
        None
    )
    backend: Annotated[
        str | None,
        option(
            "--backend",
            "--moe-backend",
            own=True,
            help="Request a backend by its engine's name.",
            autocompletion=completed(backend_names),
        ),
    ] = None
    allow_fallback: Annotated[
        bool, option("--allow-fallback", help="Choose another if --backend cannot.")
    ] = False
    policy: Annotated[
        str | None,
        option(
            "--policy",
            "--engine",
            "--to",
            help="An engine, NAME==VERSION, moectl, or all.",
            autocompletion=completed(policy_names),
        ),
    ] = None
    assume: Annotated[
        list[str] | None,
        option("--assume", help="hidden=, act=, dtype=, lora=, ... of the checkpoint."),
    ] = None
    lora: Annotated[
        bool,
        option(
            "--enable-lora", "--lora", help="With LoRA adapters on experts: --assume lora=yes.", hidden=True
        ),
    ] = False
    activation: ActivationOption = None
    routing: RoutingOption = None

    @property
    def switches(self) -> dict[str, str]:
        """Engine variables."""
        return pairs(self.env or [], "--env", self.engine.env_example)

    @property
    def engine(self) -> "Engine":
        """The policy's engine, by default in the installed release. Raises UsageError for an unknown name."""
        from ...oracle.machine_packages import default_engine
        from ...oracle.registry import engine_named

        return engine_named(policy_called(self.policy)) if self.policy else default_engine(self.where)

    @property
    def every_engine(self) -> bool:
        """True for ``--engine all``."""
        return (self.policy or "").lower() == ALL

    @property
    def where(self) -> "PythonEnvironment | None":
        """The environment of --python. Raises UsageError if there is none."""
        from ...environment.python_environments import python_environment

        return None if self.python is None else python_environment(self.python)

    def policies(self) -> "tuple[Policy, tuple[Policy, ...]]":
        """The policy, and further ones to compare it with."""
        from ...oracle.registry import answering_engines

        first = self.engine
        others = answering_engines() if self.policy is None else ()
        return first.policy, tuple(engine.policy for engine in others if engine.family != first.family)

    def parallels(self, policy: "Policy") -> "tuple[Parallel, ...]":
        """Every deployment. Raises UsageError for invalid ranks and unknown exchanges."""
        from ...oracle.registry import versioned
        from ...problem.moe_problem import Parallel

        exchange = self.all2all and pick(self.all2all, policy.exchanges, "exchange")
        ep = self.ep or (self.ep_size or 1) > 1
        tensor = str(self.ep_size) if self.implied_tp else self.tp
        deployments = tuple(
            Parallel(tp, dp, ep, exchange or policy.default_exchange, self.eplb, pp)
            for pp in numbers(self.pp, "--pp")
            for dp in numbers(self.dp, "--dp")
            for tp in numbers(tensor, "--tp")
        )
        for parallel in deployments:
            if self.ep_size not in (None, parallel.ep_size):
                raise UsageError(
                    f"{versioned(policy.name)} distributes experts over all tp x dp ranks, "
                    f"{parallel.tp} x {parallel.dp} here, not over {self.ep_size}",
                    hint=f"use --ep without a number, or --tp and --dp with the product {self.ep_size}",
                )
        return deployments

    @property
    def implied_tp(self) -> bool:
        """True when only the expert-parallel ranks are given: they are tensor-parallel ranks of attention."""
        return self.ep_size is not None and self.tp == self.dp == "1"

    def machines(self) -> "tuple[AssumedMachine, ...]":
        """Every machine. Raises UsageError for unknown names."""
        from ...environment import device_names
        from ...explain.assumed_machines import machine

        names: list[str | None] = [None]
        if self.gpu is not None:
            names = [*device_names()] if self.gpu == ALL else [*split_names(self.gpu, "--gpu")]
        engine, switches, where = self.engine, self.switches, self.where
        return tuple(machine(name, self.packages, switches, engine, where) for name in dict.fromkeys(names))

    def stated(self) -> dict[str, str]:
        """Properties stated because the config lacks them, by option."""
        options = {"--activation": self.activation, "--routing": self.routing}
        return {name: text for name, text in options.items() if text is not None}

    def question(
        self, policy: "Policy", parallel: "Parallel", others: "tuple[Policy, ...]", measured: bool
    ) -> "Question":
        """The question for every layer group; with times of the user's cache if `measured`."""
        from ...explain.explanation import Question
        from ...explain.measured_evidence import cached, nothing

        name = self.backend and pick_backend(self.backend, policy)
        assumptions = {"lora": "yes"} if self.lora else {}
        assumptions |= pairs(self.assume or [], "--assume", "act=mxfp8")
        requested = None if name in (None, "", "auto") else name
        return Question(
            policy,
            parallel,
            backend=requested,
            allow_fallback=self.allow_fallback,
            assumptions=assumptions,
            others=others,
            known=cached if measured else nothing,
        )

    def remarks(self, policy: "Policy", parallels: "tuple[Parallel, ...]") -> list[str]:
        """Notes on options without effect."""
        from ...oracle.registry import answered_by, versioned

        notes = list(filter(None, [answered_by(self.policy or "")]))
        if self.implied_tp and parallels[0].ep:
            notes.append(f"--ep-size {self.ep_size} is taken as --tp {self.ep_size} --ep")
        if self.all2all is not None and not any(
            parallel.exchanges or parallel.states_exchange(policy.default_exchange) for parallel in parallels
        ):
            notes.append("--all2all has no effect: tokens are exchanged only with --ep and --dp above 1")
        for name in self.switches:
            if name not in policy.variables:
                near = difflib.get_close_matches(name, policy.variables, n=1, cutoff=0.6)
                also = f"; did you mean {near[0]}?" if near else ""
                notes.append(
                    f"no rule of {versioned(policy.name)} reads the environment variable {name}{also}"
                )
        return notes


@dataclass(frozen=True)
class AnswerOptions:
    """Options that select the answer and its format."""

    why: Annotated[
        str | None,
        option(
            "--why",
            "--why-not",
            own=True,
            help="What would have to change for this backend to be chosen.",
            autocompletion=completed(backend_names),
        ),
    ] = None
    measured: Annotated[
        bool | None,
        option(
            "--measured/--no-measured",
            own=True,
            help="Show or ignore measured times.",
            show_default=False,
        ),
    ] = None
    replay: Annotated[
        Path | None,
        option("--replay", own=True, help="Decide again from a --json document."),
    ] = None
    diff: Annotated[
        Path | None, option("--diff", own=True, help="What changed since this --json document.")
    ] = None
    since: Annotated[
        str | None,
        option(
            "--from",
            own=True,
            help="What changed since this release, up to --to's.",
            autocompletion=completed(policy_names),
        ),
    ] = None
    html: Annotated[
        Path | None,
        option("--html", own=True, help="Write a page; without CKPT of all models."),
    ] = None
    ask_engine: Annotated[
        bool, option("--ask-engine", own=True, help="Also ask the installed engine's own code.")
    ] = False
    strict: Annotated[bool, option("--strict", own=True, help="Exit code 1 on a fallback.")] = False
    md: Annotated[bool, option("--md", own=True, help="Print markdown, for an issue.")] = False
    verbose: Annotated[bool, option("--verbose", "-v", help="Every fact and every candidate.")] = False
    offline: Offline = False


MOST_RANKS = 1 << 16
"""Ranks of one kind at most."""


def numbers(text: str, name: str) -> list[int]:
    """The numbers of a list such as ``1,2,4``, each once. Raises UsageError for anything else.

    Example:
        >>> numbers("1,2,4", "--tp")
        [1, 2, 4]
    """
    ranks = [whole_number(part.strip()) or 0 for part in text.split(",")]
    if not all(0 < number <= MOST_RANKS for number in ranks):
        raise UsageError(f"{name} takes numbers from 1 to {MOST_RANKS}, such as 8 or 1,2,4,8, got {text!r}")
    return list(dict.fromkeys(ranks))


def pairs(arguments: list[str], name: str, example: str) -> dict[str, str]:
    """``K=V`` arguments as a mapping. Raises UsageError for one without a name or an equals sign."""
    values = {}
    for pair in arguments:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{name} takes K=V, got {pair!r}", hint=f"for example `{name} {example}`")
        values[key] = value
    return values
