"""Random command lines of every command, over small checkpoints, converted directories and other files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from .changes import HOSTILE
from .outcomes import command
from .search import Reader

LEFT_OUT = ("peers", "warm")
"""Commands that fetch from an index of packages, or compile for minutes."""

_SLOW = (
    "--deep",
    "--ask-engine",
    "--device",
    "--stress",
    "--warm",
    "--repeats",
    "--with",
    "--jobs",
    "--debug",
)
"""Options that take long by what they are for, choose a device, or ask for tracebacks."""

_NUMBERS = (
    "0", "1", "2", "3", "8", "-1", "1.5", "1e3", "0x1", "\u0663", "", "x", "9" * 30, str(1 << 63), "nan",
    "1,2", "1-3", "3-1", "1/2", "0,0", "2/1", "1,,2",
)  # fmt: skip
_WORDS = (
    "marlin", "moectl", "trtllm", "humming", "nvfp4", "int4-g128", "int8", "h100", "h200,b200", "mi300x",
    "vllm", "sglang", "transformers", "all", "torch", "cpu", "auto", "a16", "silu", "swigluoai:limit=7",
    "softmax,bias", "groups=8/4", "act=fp8", "hidden=64", "VLLM_USE_FLASHINFER_MOE_FP4=1", "=", "a=b=c",
    "openai/gpt-oss-20b", "gpt-oss-120b", "rtn", "gptq", "uniform", "trace:rows.jsonl", "zipf:1.1", "md",
    "csv", "json", "always", "never", "models", "layouts",
    "vllm==0.28.0", "0.28.0", "none", "triton", "8GB", "10s", "bf16", "explain",
)  # fmt: skip
_PATHS = (
    "small", "converted", "ranks", "portable", "rows.jsonl", "answer.json", "new", "new/deep/er", ".", "..",
    "small/config.json", "small/model.safetensors", "/dev/null", "/nonexistent", "/proc/self/mem",
    "~nobody/x", "converted/moectl.json", "ranks/rank-00", "pipe",
)  # fmt: skip


def command_line_readers(work: Path) -> Iterator[Reader]:
    """The reader of command lines; its inputs are JSON of words and of environment variables."""
    good = work / "good"
    _make_good(good)
    here = work / "here"

    def read(data: bytes) -> str:
        try:
            asked = json.loads(data)
            words, variables = list(map(str, asked["words"])), dict(asked["environment"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return ""
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(good, here)
        os.mkfifo(here / "pipe")
        with mock.patch.dict(os.environ, variables), _inside(here):
            return command(*words)

    seeds = [
        _spelled(words)
        for words in (["list", "gpus"], ["explain", "small", "--gpu", "h100"], ["verify", "converted"])
    ]
    yield Reader("command lines", seeds, read, share=2, change=made_command_line)


def _make_good(good: Path) -> None:
    """The files that command lines name."""
    good.mkdir()
    sizes = ("--layers", 1, "--experts", 4, "--hidden", 128, "--intermediate", 128)
    for words in (
        ("synth", "openai/gpt-oss-20b", good / "small", *sizes),
        ("convert", good / "small", good / "converted", "--to", "marlin"),
        ("convert", good / "small", good / "ranks", "--to", "marlin", "--tp-size", 2),
        ("convert", good / "small", good / "portable", "--to", "int8", "--requantize"),
    ):
        said = command(*words)
        assert Path(str(words[2])).exists(), said
    answer = command("explain", "openai/gpt-oss-20b", "--offline", "--gpu", "h200", "--json")
    (good / "answer.json").write_text(answer)
    rows = Path(__file__).resolve().parents[3] / "docs" / "bench_h200.jsonl"
    (good / "rows.jsonl").write_bytes(b"".join(rows.read_bytes().splitlines(True)[:6]))


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _spelled(words: Sequence[str], environment: Mapping[str, str] = {}) -> bytes:
    return json.dumps({"words": list(words), "environment": dict(environment)}).encode()


@cache
def _parameters() -> Mapping[str, Sequence[Any]]:
    """The parameters of each command."""
    import typer

    from moectl.cli.main import app

    group: Any = typer.main.get_command(app)
    return {name: each.params for name, each in group.commands.items() if name not in LEFT_OUT}


def _kind(parameter: Any) -> str:
    """The type of a parameter's values, in lower case."""
    return str(parameter.type_descriptor.annotation).lower()


def _value(dice: random.Random, kind: str) -> str:
    """A value for a parameter of a type, now and then of another one."""
    choice = dice.randrange(10)
    if choice == 0:
        return dice.choice(HOSTILE[:9]).replace("\0", "") or "\x1b"
    if choice == 1:
        kind = dice.choice(("path", "integer", "text"))
    if "path" in kind:
        return dice.choice(_PATHS)
    return dice.choice(_NUMBERS if "int" in kind or "float" in kind else (*_WORDS, *_NUMBERS, *_PATHS[:6]))


def made_command_line(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A command with some of its options, mostly with values of their type."""
    name = dice.choice(sorted(_parameters()))
    words, environment = [name], {"HF_HUB_OFFLINE": "1"}
    for each in _parameters()[name]:
        required = each.param_type_name == "argument"
        if any(option in _SLOW for option in each.opts) or not (required or dice.random() < 0.15):
            continue
        value = dice.choice(_PATHS) if required and dice.random() < 0.8 else _value(dice, _kind(each))
        if required:
            words.append(value)
        elif getattr(each, "is_flag", False):
            words.append(dice.choice(each.opts))
        elif dice.random() < 0.1 and "\0" not in value and each.envvar:
            spelled = each.envvar if isinstance(each.envvar, str) else dice.choice(each.envvar)
            environment[spelled] = value.encode("utf-8", "replace").decode()
        else:
            words += [dice.choice(each.opts), value]
    words += _small(name)
    if dice.random() < 0.1:
        words.insert(
            dice.randrange(len(words) + 1),
            dice.choice((*HOSTILE[:9], "--", "-", "--no-such", "-v", "--json")),
        )
    return _spelled(words, environment)


def _small(name: str) -> list[str]:
    """Options that keep a command's work small."""
    if name == "synth":
        return ["--layers", "1", "--experts", "4", "--hidden", "128", "--intermediate", "128"]
    if name == "bench":
        return ["-m", "1", "--repeats", "1", "--device", "cpu"]
    return ["--tokens", "1", "--device", "cpu", "--backend", "torch"] if name == "run" else []
