"""Checkpoints that are changed or replaced while they are converted, at every read and every write.

What comes of it is refused, or all of it is of the checkpoint before the change, or after it.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .child_process import Fork, files_below
from .disturbed import Workshop
from .watched_disk import WatchedDisk
from .writing_commands import COMMANDS, environment_of

Change = Callable[[Path], None]


def replaced(name: str) -> Change:
    """Another file with one other byte gets the name of a file."""

    def change(source: Path) -> None:
        data = bytearray((source / name).read_bytes())
        data[-1] ^= 1
        (source / "new").write_bytes(data)
        (source / "new").replace(source / name)

    return change


def written(name: str) -> Change:
    """A byte is written in place, and the time of modification set back."""

    def change(source: Path) -> None:
        path = source / name
        status, data = path.stat(), path.read_bytes()
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, bytes([data[-1] ^ 1]), len(data) - 1)
        os.close(fd)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return change


def shortened(name: str) -> Change:
    """A file is cut."""
    return lambda source: os.truncate(source / name, (source / name).stat().st_size - 40)


def renamed(source: Path) -> None:
    """The directory gives its name to one of another revision."""
    other = source.with_name("other")
    shutil.copytree(source, other)
    written("model-00001-of-00003.safetensors")(other)
    source.rename(source.with_name("old"))
    other.rename(source)


def removed(name: str) -> Change:
    """A file is removed."""
    return lambda source: (source / name).unlink()


CHANGES: Mapping[str, Change] = {
    "a file replaced": replaced("model-00001-of-00003.safetensors"),
    "a file of other tensors replaced": replaced("model-00003-of-00003.safetensors"),
    "a byte written": written("model-00002-of-00003.safetensors"),
    "a file cut": shortened("model-00001-of-00003.safetensors"),
    "the directory replaced": renamed,
    "the config": replaced("config.json"),
    "the index": replaced("model.safetensors.index.json"),
    "the tokenizer": replaced("tokenizer.json"),
    "the tokenizer removed": removed("tokenizer.json"),
    "the tokenizer written": written("tokenizer.json"),
}

CHANGED = ("marlin", "experts only", "ranks", "parts", "int8", "refit")
"""Commands that read a checkpoint all the while."""


class ChangedSources:
    """Conversions of a copy of the checkpoint, which changes before one call of the conversion."""

    def __init__(self, workshop: Workshop) -> None:
        self.shop, self.inputs = workshop, workshop.work / "changing"
        workshop.prepare("marlin")
        self._known: dict[str, tuple[int, Mapping[str, bytes]]] = {}
        self._after: dict[tuple[str, str], Mapping[str, bytes]] = {}

    def known(self, name: str) -> tuple[int, Mapping[str, bytes]]:
        """The calls of a command that nothing disturbs, and what it leaves."""
        if name not in self._known:
            fork = self._start(name, 0, lambda source: None)
            ended = fork.ended()
            if ended.status:
                raise SystemExit(f"{name} ended with {ended.status}: {ended.stderr}")
            calls = int(ended.stdout.rsplit("calls: ", 1)[1])
            self._known[name] = calls, files_below(self.shop.case)
        return self._known[name]

    def _changed(self, name: str, kind: str) -> Mapping[str, bytes]:
        """What a command leaves that reads the changed checkpoint from the beginning."""
        if (name, kind) not in self._after:
            ended = self._start(name, 1, CHANGES[kind]).ended()
            self._after[name, kind] = {} if ended.status else files_below(self.shop.case)
        return self._after[name, kind]

    def _start(self, name: str, step: int, change: Change) -> Fork:
        shutil.rmtree(self.inputs, ignore_errors=True)
        shutil.copytree(self.shop.inputs / "source", self.inputs / "source")
        shutil.copytree(self.shop.inputs / "newer", self.inputs / "newer")
        command, case, inputs = COMMANDS[name], self.shop.case, self.inputs
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        command.begin(self.shop.inputs, case)
        source = inputs / ("newer" if name == "refit" else "source")

        def run() -> None:
            environment_of(case, inputs)
            steps = _CallCounter(step, partial(change, source))
            WatchedDisk(case, each=steps.next).install()
            steps.count_reads()
            command.run(inputs, case, False)
            os.write(1, f"calls: {steps.count}".encode())

        return Fork(run, self.shop.work / "said")

    def change(self, name: str, kind: str, step: int) -> None:
        """A conversion whose checkpoint changes before a call."""
        (calls, before), after = self.known(name), self._changed(name, kind)
        case = f"{name}: {kind} before call {step} of {calls}"
        ended = self._start(name, step, CHANGES[kind]).ended()
        self.shop.cases["source changed"] += 1
        out = self.shop.case / COMMANDS[name].out
        if ended.status == 0:
            if (now := files_below(self.shop.case)) not in (before, after):
                other = sorted(f for f in {*now, *before} if now.get(f) != before.get(f))[:6]
                self.shop.defect("source", case, f"ended well, of neither checkpoint: {other} differ")
        elif ended.status not in (2, 4) or ended.unexplained:
            self.shop.defect("source", case, f"ended with {ended.status}: {ended.stderr[-300:]}")
        elif (out / COMMANDS[name].mark).exists() and name != "refit":
            self.shop.defect("source", case, f"refused, and left {COMMANDS[name].mark}")


class _CallCounter:
    """Counts calls, and makes a change before the one with number `step`."""

    def __init__(self, step: int, change: Callable[[], None]) -> None:
        self.count, self._step, self._change, self._busy = 0, step, change, False

    def next(self, *_: object) -> None:
        """One more call."""
        if self._busy:
            return
        self.count += 1
        if self.count == self._step:
            self._busy = True
            self._change()
            self._busy = False

    def count_reads(self) -> None:
        """Counts reads of files, too, and what opens them."""
        for name in ("preadv", "open", "readv", "stat"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.next()
            return plain(*arguments, **options)

        return counted


def change_cases(sources: ChangedSources, dice: random.Random, count: int) -> Iterator[Callable[[], None]]:
    """That many changes, each at a call drawn at random."""
    for _ in range(count):
        name, kind = dice.choice(CHANGED), dice.choice([*CHANGES])
        step = dice.randrange(1, sources.known(name)[0] + 1)
        yield partial(sources.change, name, kind, step)
