"""Two commands at once on one directory, file or cache, and a reader beside them.

What they leave must be what they leave one after the other, in either order, or one of them alone; in a
directory also something that no reader takes for finished.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path

from .child_process import Fork, files_below, moectl
from .disturbed import Workshop
from .watched_disk import WatchedDisk
from .writing_commands import (
    COMMANDS,
    Writes,
    conversion,
    environment_of,
    exported,
    fetched,
    finish,
    launches,
    part,
    refit,
    saved_times,
    tuned_file,
)

DELAYS = (0, 0, 0.01, 0.03, 0.1, 0.2)
"""Seconds after which a command starts."""

MARKS = ("READY", "config.json")


def reads(*words: object) -> Writes:
    """A command that reads the directory, or what is in it; it may find no backend, but no damage."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        paths = {"OUT": case / "out", "ROWS": case / "rows.jsonl", "PEERS": case / "peers"}
        moectl(*(paths.get(str(word), word) for word in words), "-q")

    return run


FOLDER_WRITERS: Mapping[str, Writes] = {
    **{
        name: COMMANDS[name].run
        for name in ("marlin", "trtllm", "marlin, newer", "ranks", "rank 0", "parts", "unconvert", "synth")
    },
    "rank 1": conversion("source", "marlin", "--tp-size", "2", "--rank", "1"),
    "part 1/2": part("1/2"),
    "part 2/2": part("2/2"),
    "part 1/3": part("1/3"),
    "finish": finish,
    "refit": refit,
    "int4-g128": COMMANDS["int4-g128"].run,
    "int8": COMMANDS["int8"].run,
}
FOLDER_READERS: Mapping[str, Writes] = {
    "verify": reads("verify", "OUT"),
    "explain": reads("explain", "OUT", "--gpu", "h200", "--offline"),
    "serve-check": reads("serve-check", "OUT", "--engine", "vllm", "--offline"),
    "run": reads("run", "OUT", "--backend", "torch", "--tokens", "2"),
}


def page_of(model: str) -> Writes:
    """`moectl explain --html` of a model."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        moectl("explain", model, "--gpu", "h200", "--offline", "--html", case / "page.html", "-q")

    return run


def dump_of(size: int) -> Writes:
    """A dump for `moectl parity`."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        import torch

        from moectl.parity.parameter_dump import dump_parameters

        dump_parameters({"w": torch.arange(float(size))}, case / "dump.safetensors")

    return run


FILE_WRITERS: Mapping[str, Mapping[str, Writes]] = {
    "page": {"page": page_of("openai/gpt-oss-20b"), "other page": page_of("Qwen/Qwen3-30B-A3B")},
    "dump": {"dump": dump_of(50_000), "other dump": dump_of(9)},
    "tables": {"tables": COMMANDS["tables"].run},
    "run": {"run": COMMANDS["run"].run},
    "rows": {"rows": COMMANDS["rows"].run, "compare": reads("compare", "ROWS", "ROWS")},
    "caches": {
        "times": saved_times("moectl", "triton"),
        "other times": saved_times("marlin"),
        "launches": launches(16),
        "other launches": launches(64, 256),
        "clear": COMMANDS["clear"].run,
        "list": reads("tune", "--list"),
        "measured": reads("explain", "openai/gpt-oss-20b", "--gpu", "h200", "--offline", "--measured"),
    },
    "tuned file": {"tuned": tuned_file(16, 64), "other tuned": tuned_file(32, 64, 128)},
    "kernels": {"kernels": exported("A", "B"), "other kernels": exported("B", "C")},
    "warm": {"record": COMMANDS["warm record"].run, "import": COMMANDS["warm --from"].run},
    "headers": {"headers": COMMANDS["headers"].run},
    "peers": {"peers": fetched},
}
"""Commands by what they share."""


class Races:
    """Races in a workshop, and what their commands leave one after the other."""

    def __init__(self, workshop: Workshop) -> None:
        self.shop = workshop
        for name in ("marlin", "ranks", "launches", "warm --to"):
            workshop.prepare(name)
        self._serial: dict[tuple[str, ...], Mapping[str, bytes]] = {}

    def start(self, write: Writes, said: str, delay: float = 0, again: bool = False) -> Fork:
        """A fork that runs a command after a delay."""
        case, inputs = self.shop.case, self.shop.inputs

        def late() -> None:
            environment_of(case, inputs)
            WatchedDisk(case).install()
            time.sleep(delay)
            write(inputs, case, again)

        return Fork(late, self.shop.work / said)

    def _empty(self, begun: str) -> None:
        shutil.rmtree(self.shop.case, ignore_errors=True)
        self.shop.case.mkdir()
        if begun:
            COMMANDS["refit"].begin(self.shop.inputs, self.shop.case)

    def _after(self, writes: Mapping[str, Writes], begun: str) -> Mapping[str, bytes]:
        """What these commands leave, one after the other."""
        key = (begun, *writes)
        if key not in self._serial:
            self._empty(begun)
            for write in writes.values():
                self.start(write, "said", again=bool(begun)).ended()
            self._serial[key] = finished(files_below(self.shop.case))
        return self._serial[key]

    def race(self, pair: Mapping[str, Writes], begun: str, seed: int, *, folder: bool) -> None:
        """Commands at once, then a look at what they left."""
        names = list(pair)
        case = f"{' and '.join(names)}, {begun or 'nothing'} before, seed {seed}"
        writes = [*pair.items()] * (2 if len(pair) == 1 else 1)
        allowed = [
            self._after(dict(order), begun) for order in (writes, writes[::-1], writes[:1], writes[1:])
        ]
        self._empty(begun)
        allowed.append(finished(files_below(self.shop.case)))
        delays = random.Random(case).choices(DELAYS, k=len(writes))
        forks = [
            self.start(write, f"said{number}", delay, bool(begun))
            for number, ((_, write), delay) in enumerate(zip(writes, delays, strict=True))
        ]
        self.shop.cases["race"] += 1
        for (name, _), fork in zip(writes, forks, strict=True):
            ended = fork.ended()
            if ended.unexplained:
                self.shop.defect("race, error", case, f"{name}: {ended.unexplained}")
            elif ended.status == 1 and name not in ("explain", "serve-check"):
                self.shop.defect("race, finding", case, f"{name}: {ended.stdout[-300:]}{ended.stderr[-300:]}")
        now = files_below(self.shop.case)
        if finished(now) in allowed:
            left = [file for file in now if file.endswith(".partial")]
            if left or ((self.shop.case / "out" / "READY").exists() and any("progress" in f for f in now)):
                self.shop.defect(
                    "race, leftover", case, f"leaves {[f for f in now if f not in finished(now)]}"
                )
        elif not folder or _taken_for_finished(self.shop.case / "out"):
            wanted = [sorted(f for f in {*now, *a} if now.get(f) != a.get(f))[:5] for a in allowed]
            self.shop.defect("race, mixed", case, f"differs from each in {wanted}")


def finished(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """What of these files is no log, and not about to get its name."""
    return {
        name: data
        for name, data in files.items()
        if "progress" not in name and not name.endswith((".partial", "/")) and "report-part" not in name
    }


def _taken_for_finished(out: Path) -> bool:
    if (out / "READY").exists():
        return True
    return (out / "config.json").exists() and not any(
        (out / name).exists() for name in ("moectl.json", "source.config.json", "progress.jsonl")
    )


def race_cases(races: Races, rounds: int) -> Iterator[Callable[[], None]]:
    """Every pair of commands on what they share, also twice the same, over and over."""
    for seed in range(rounds):
        for begun in ("", "marlin"):
            for one, other in combinations_with_replacement(FOLDER_WRITERS, 2):
                pair = {name: FOLDER_WRITERS[name] for name in (one, other)}
                yield partial(races.race, pair, begun, seed, folder=True)
            for writer in FOLDER_WRITERS:
                for reader in FOLDER_READERS:
                    pair = {writer: FOLDER_WRITERS[writer], reader: FOLDER_READERS[reader]}
                    yield partial(races.race, pair, begun, seed, folder=True)
        for writers in FILE_WRITERS.values():
            for one, other in combinations_with_replacement(writers, 2):
                pair = {name: writers[name] for name in (one, other)}
                yield partial(races.race, pair, "", seed, folder=False)
