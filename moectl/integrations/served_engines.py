"""Engines and libraries that load moectl's experts: their releases, plug-ins, limits and command lines.

Their adapters refuse what stands in the same tables; nothing here imports an engine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..convert.rank_slice import RankShard
from ..problem.layouts import FOLDER_READERS
from . import sglang, vllm
from .engine_names import ENGINE_NAMES
from .limits import ONE_RANK, Limit, limits_met
from .sglang import limits as sglang_limits
from .vllm import limits as vllm_limits

Options = Mapping[str, object]


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
        reader = next(reader for reader in FOLDER_READERS if reader.program == self.title)
        words = [] if converted else [reader.take_over]
        for name, value in options.items():
            words.append(name if value is True else f"{name} {shlex.quote(str(value))}")
        return " ".join([reader.spelled(path, tp, ep), *words])


def _all_ranks(tp: int, ep: int) -> tuple[RankShard, ...]:
    return tuple(RankShard(tp, i, ep, j) for j in range(ep) for i in range(tp))


def _number(options: Options, *names: str) -> int:
    texts = [str(options[name]) for name in names if name in options]
    return int(texts[0]) if texts and texts[0].isdecimal() and int(texts[0]) else 1


def _vllm_shards(tp: int, ep: int, options: Options) -> tuple[RankShard, ...] | str:
    ranks = tp * _number(options, "--data-parallel-size", "-dp")
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
