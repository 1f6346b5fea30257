"""Engines and libraries that load moectl's experts: their releases, plug-ins, limits and command lines.

Their adapters refuse what stands in the same tables; nothing here imports an engine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..convert.rank_slice import RankShard
from ..problem.layouts import FOLDER_READERS, DirectoryReader, loads_folder
from ..problem.moe_problem import MoEProblem
from . import sglang, vllm
from .engine_names import ENGINE_NAMES
from .limits import ONE_RANK, Limit, limits_met
from .sglang import limits as sglang_limits
from .vllm import limits as vllm_limits
from .vllm.engine_layouts import ENGINE_LAYOUTS, untaken

RELAID = "laid out again while loading"
"""What becomes of a directory in a layout that is for other kernels than those that are to compute it."""

Options = Mapping[str, object]


@dataclass(frozen=True)
class Deployed:
    """Sizes of a deployment as an engine counts them, and its other options by their full names.

    Attributes:
        unclear: a sentence for every size that is no number, or is given in two ways that differ.
    """

    tp: int
    ep: int
    options: Options
    unclear: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServedEngine:
    """What a check before a start needs to know of an engine.

    Attributes:
        name: as on moectl's command line; `title`: its official spelling.
        package: its Python package; `extra`: moectl's extra that installs it.
        releases: of which there is an adapter, as leading numbers of versions; the last may end in ``+``,
            for that number and higher ones.
        group: entry points by which it finds moectl; empty if a program imports moectl itself.
        allowed: environment variable with the plug-ins that it loads; empty if it has none.
        own_only: moectl's own kernels alone compute in it, others are left to the engine.
        refusals: the limits that a deployment with options meets.
        shards: the ranks that share a layer's experts, for TP and EP sizes and options; a sentence for sizes
            that it does not take.
        program: what loads a path, converted or published, where no command serves it.
        own_kernels: the value of MOECTL_BACKEND that leaves experts to the engine's own kernels; empty if
            there is none.
        own_layouts: layouts of converted directories that are left to the engine's own kernels; `untaken`:
            why these do not take layers in one of them; empty if they do.
        sizes: its options for the sizes of tensor and expert parallelism, by ``tp`` and ``ep``; `spread`: the
            one that distributes experts over all ranks, where no number is given.
        aliases: other names of its options, with two dashes.
        negated: how an option is spelled that is to be off; empty if it is left out then.
    """

    name: str
    title: str
    package: str
    extra: str
    releases: tuple[str, ...]
    group: str
    allowed: str
    own_only: bool
    refusals: Callable[[Options], tuple[Limit, ...]]
    shards: Callable[[int, int, Options], tuple[RankShard, ...] | str]
    program: Callable[[str, bool], str] | None = None
    own_kernels: str = ""
    own_layouts: Collection[str] = ()
    untaken: Callable[[str, MoEProblem], str] = lambda layout, problem: ""
    sizes: Mapping[str, str] = field(default_factory=dict)
    spread: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    negated: str = ""

    @property
    def reader(self) -> DirectoryReader:
        """How it loads converted directories."""
        return next(reader for reader in FOLDER_READERS if reader.program == self.title)

    def refuses(self, problem: MoEProblem, layout: str = "") -> str:
        """Why its plug-in takes no layers such as `problem` on any GPU; empty if it may.

        Args:
            layout: of the converted directory that they are in; empty if they are as published.
        """
        if problem.routing.weight_on_input:
            return "router weights are applied to their input, which moectl's experts in engines do not do"
        return self.untaken(layout, problem) if layout in self.own_layouts else ""

    def relays(self, problem: MoEProblem, layout: str) -> bool:
        """Whether it lays out a directory in `layout` again while loading, for moectl's kernels."""
        as_it_is = layout in self.own_layouts or loads_folder(self.title, layout)
        return self.own_only and not as_it_is and not self.refuses(problem, layout)

    def deployed(self, tp: int, ep: int, options: Options) -> Deployed:
        """The deployment that sizes and `options` come to together.

        Example:
            >>> SERVED_ENGINES["vllm"].deployed(2, 1, {"--ep": True, "--dp": "2", "--seed": "7"})
            Deployed(tp=2, ep=4, options={'--data-parallel-size': '2', '--seed': '7'}, unclear=())
        """
        given, unclear = dict[str, object](), list[str]()
        for name, value in options.items():
            name = self.aliases.get(name, name)
            if name in given:
                unclear.append(f"{name} is given twice")
            given[name] = value
        sizes = {"tp": tp, "ep": ep}
        for size, name in self.sizes.items():
            if name in given:
                number = _count(value := given.pop(name))
                if not number:
                    unclear.append(f"{name} must be a number from 1, got {value}")
                elif sizes[size] not in (1, number):
                    unclear.append(f"--{size} {sizes[size]} and {name} {number} are not the same")
                else:
                    sizes[size] = number
        if self.spread in given:
            spread = given.pop(self.spread)
            if not isinstance(spread, bool):
                unclear.append(f"{self.spread} takes no value, got {spread}")
            elif spread and sizes["ep"] == 1:
                sizes["ep"] = sizes["tp"] * _number(given, "--data-parallel-size")
            elif not spread and sizes["ep"] > 1:
                unclear.append(f"--ep {sizes['ep']} and no {self.spread} are not the same")
        return Deployed(sizes["tp"], sizes["ep"], given, tuple(unclear))

    def attention_ranks(self, tp: int, options: Options) -> int:
        """Among how many of `tp` ranks attention heads are divided: SGLang may have groups of them."""
        groups = _number(options, "--dp-size") if options.get("--enable-dp-attention") else 1
        return max(tp // groups, 1)

    def has_adapter(self, release: str) -> bool:
        """Whether there is an adapter for a version.

        Example:
            >>> [SERVED_ENGINES["sglang"].has_adapter(version) for version in ("0.5.23.post1", "0.5.3")]
            [True, False]
            >>> [SERVED_ENGINES["transformers"].has_adapter(version) for version in ("5.23.0", "5.9", "6.0")]
            [True, False, False]
        """
        numbers = [int(number) for number in re.findall(r"\d+", release)]
        for known in self.releases:
            *same, last = (int(number) for number in known.rstrip("+").split("."))
            found = numbers[len(same)] if len(numbers) > len(same) and numbers[: len(same)] == same else -1
            if found == last or (known.endswith("+") and found > last):
                return True
        return False

    def command(self, path: str, tp: int, ep: int, options: Options, converted: bool) -> str:
        """The command that serves `path`, or loads it; sizes as the engine counts.

        Example:
            >>> SERVED_ENGINES["sglang"].command("./out", 4, 2, {"--enable-eplb": True}, True)
            'sglang serve --model-path ./out --tp-size 4 --ep-size 2 --enable-eplb'
        """
        if self.program:
            return self.program(path, converted)
        words = [] if converted else [self.reader.take_over]
        for name, value in options.items():
            if value is False:
                words += [self.negated.format(name.lstrip("-"))] if self.negated else []
            else:
                words.append(name if value is True else f"{name} {shlex.quote(str(value))}")
        return " ".join([self.reader.spelled(path, tp, ep), *words])


def _all_ranks(tp: int, ep: int) -> tuple[RankShard, ...]:
    return tuple(RankShard(tp, i, ep, j) for j in range(ep) for i in range(tp))


def _count(value: object) -> int:
    """`value` as a positive number; 0 if it is none."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _number(options: Options, name: str) -> int:
    return _count(options.get(name, 1)) or 1


def _vllm_shards(tp: int, ep: int, options: Options) -> tuple[RankShard, ...] | str:
    ranks = tp * _number(options, "--data-parallel-size")
    if ep in (1, ranks):
        return _all_ranks(1, ranks) if ep > 1 else _all_ranks(ranks, 1)
    return f"vLLM distributes experts over all of its {ranks} ranks or none, not {ep}"


def _sglang_shards(tp: int, ep: int, options: Options) -> tuple[RankShard, ...] | str:
    groups = ep * _number(options, "--moe-dp-size")
    if tp % groups:
        return f"SGLang divides its {tp} tensor-parallel ranks by the {groups} groups of experts"
    return _all_ranks(tp // groups, ep)


TRANSFORMERS_LIMITS = (
    Limit("--tp-plan", "tensor parallelism", "leave tp_plan out"),
    Limit("--distributed-config", "parallelism", "leave distributed_config out"),
)


def _transformers_shards(tp: int, ep: int, options: Options) -> tuple[RankShard, ...] | str:
    return ONE_RANK if tp * ep > 1 else _all_ranks(1, 1)


def _transformers_program(path: str, converted: bool) -> str:
    """A program: transformers imports no plug-ins by itself."""
    config = "" if converted else f", config=moectl.moectl_config({json.dumps(path)})"
    code = (
        "import moectl.integrations.transformers as moectl, transformers; "
        f'transformers.AutoModelForCausalLM.from_pretrained({json.dumps(path)}{config}, device_map="cuda")'
    )
    return f"python -c {shlex.quote(code)}"


_VLLM, _SGLANG, _TRANSFORMERS = ENGINE_NAMES

_ENGINES = (
    ServedEngine(
        name=_VLLM,
        title="vLLM",
        package="vllm",
        extra="vllm",
        releases=tuple(vllm.ADAPTERS),
        group="vllm.general_plugins",
        allowed="VLLM_PLUGINS",
        own_only=True,
        refusals=vllm_limits.refusals,
        shards=_vllm_shards,
        own_kernels=vllm.OWN_KERNELS,
        own_layouts=ENGINE_LAYOUTS,
        untaken=untaken,
        sizes={"tp": "--tensor-parallel-size"},
        spread="--enable-expert-parallel",
        aliases={
            "--tp": "--tensor-parallel-size",
            "--ep": "--enable-expert-parallel",
            "--dp": "--data-parallel-size",
            "--pp": "--pipeline-parallel-size",
            "--q": "--quantization",
        },
        negated="--no-{}",
    ),
    ServedEngine(
        name=_SGLANG,
        title="SGLang",
        package="sglang",
        extra="sglang",
        releases=tuple(sglang.ADAPTERS),
        group="sglang.srt.plugins",
        allowed="SGLANG_PLUGINS",
        own_only=True,
        refusals=sglang_limits.refusals,
        shards=_sglang_shards,
        sizes={"tp": "--tp-size", "ep": "--ep-size"},
        aliases={
            **dict.fromkeys(("--tp", "--tensor-parallel-size"), "--tp-size"),
            **dict.fromkeys(("--ep", "--expert-parallel-size"), "--ep-size"),
            **dict.fromkeys(("--dp", "--data-parallel-size"), "--dp-size"),
            "--moe-data-parallel-size": "--moe-dp-size",
        },
    ),
    ServedEngine(
        name=_TRANSFORMERS,
        title="transformers",
        package="transformers",
        extra="transformers",
        releases=("5.17+",),
        group="",
        allowed="",
        own_only=False,
        refusals=lambda options: limits_met(TRANSFORMERS_LIMITS, options),
        shards=_transformers_shards,
        program=_transformers_program,
    ),
)

SERVED_ENGINES: Mapping[str, ServedEngine] = {engine.name: engine for engine in _ENGINES}
"""By name."""


def _servers(problems: Iterable[MoEProblem], layout: str = "") -> tuple[ServedEngine, ...]:
    """The engines with a command that serves, whose plug-ins may take all `problems`."""
    kinds = tuple(problems)
    return tuple(
        engine
        for engine in SERVED_ENGINES.values()
        if engine.reader.serve and not any(engine.refuses(problem, layout) for problem in kinds)
    )


def take_over_commands(path: str, problems: Iterable[MoEProblem], tp: int, ep: int) -> tuple[str, ...]:
    """The commands that serve a published checkpoint with moectl's experts; sizes as engines count."""
    return tuple(engine.command(path, tp, ep, {}, converted=False) for engine in _servers(problems))


def directory_commands(
    path: str, layout: str, problems: Iterable[MoEProblem], tp_size: int, ep_size: int
) -> tuple[str, ...]:
    """The commands that serve a directory in `layout` as it is, of ranks as `convert` counts them."""
    servers = [engine for engine in _servers(problems, layout) if loads_folder(engine.title, layout)]
    return tuple(filter(None, (engine.reader.command(path, tp_size, ep_size) for engine in servers)))
