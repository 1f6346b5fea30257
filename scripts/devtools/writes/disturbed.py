"""A writing command that is disturbed at one call: what it leaves, and what running it again makes of it."""

from __future__ import annotations

import pickle
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from .child_process import Ended, Fork, files_below, import_all
from .power_cuts import CUTS, after, cut, lay_out
from .watched_disk import KINDS, DiskFault, DiskLog, WatchedDisk
from .writing_commands import COMMANDS, WritingCommand, environment_of, make_inputs, result_of

UNFINISHED = "/.unfinished-"
"""In names of files that a later download removes."""

PASSING = ("ENOSPC", "EDQUOT", "EIO")
"""Faults after which the system does what it is asked to."""


@dataclass(frozen=True)
class Undisturbed:
    """What a command does when nothing disturbs it: the log of its changes, and the files in the end."""

    log: DiskLog
    files: Mapping[str, bytes]

    @cached_property
    def versions(self) -> Mapping[str, set[bytes | None]]:
        """What each file may hold at any time, by its name in the case's directory; None if it is not there.

        A file that grows in place may end anywhere.
        """
        found: dict[str, set[bytes | None]] = {}
        for step in range(len(self.log.changes) + 1):
            now = {
                path.removeprefix(self.log.root): data
                for path, data in after(self.log, step).items()
                if isinstance(data, bytes) and not path.endswith("/")
            }
            for name in {*found, *now}:
                found.setdefault(name, {None} if step else set()).add(now.get(name))
        return found


class Workshop:
    """Inputs, results and cases below a directory.

    Attributes:
        cases: how many there were, by kind.
        defects: what was wrong, by kind.
    """

    def __init__(self, work: Path, names: Iterable[str], report: Callable[[str], None] = print) -> None:
        self.work, self.inputs, self.case = work, work / "inputs", work / "case"
        self.cases, self.defects, self._report = Counter[str](), list[tuple[str, str, str]](), report
        self.undisturbed: dict[str, Undisturbed] = {}
        self.inputs.mkdir(exist_ok=True)
        self._expect_well(Fork(lambda: make_inputs(self.inputs), work / "said"), "making inputs")
        for name in names:
            self.prepare(name)

    @cached_property
    def _pinned(self) -> Mapping[str, tuple[int, int, int]]:
        """Sizes, times and numbers of the files of checkpoints, which nothing changes."""
        return self._identities()

    def _identities(self) -> Mapping[str, tuple[int, int, int]]:
        files = (p for name in ("source", "newer", "bf16") for p in (self.inputs / name).rglob("*"))
        return {str(p): (s.st_size, s.st_mtime_ns, s.st_ino) for p in files for s in (p.stat(),)}

    def _expect_well(self, fork: Fork, what: str) -> Ended:
        ended = fork.ended()
        if ended.status:
            raise SystemExit(f"{what} ended with {ended.status}: {ended.stderr}")
        return ended

    def prepare(self, name: str) -> None:
        """Runs a command undisturbed, after those that it needs."""
        if name in self.undisturbed:
            return
        command = COMMANDS[name]
        for other in command.needs:
            self.prepare(other)
        self._begin(command)
        target = self.work / "log"

        def recorded() -> None:
            disk = WatchedDisk(self.case, record=True)
            environment_of(self.case, self.inputs)
            disk.install()
            command.run(self.inputs, self.case, False)
            target.write_bytes(pickle.dumps((disk.log(), [*sys.modules])))

        self._expect_well(Fork(recorded, self.work / "said"), name)
        log, modules = pickle.loads(target.read_bytes())
        import_all(modules)
        self.undisturbed[name] = Undisturbed(log, files_below(self.case))
        if not log.changes:
            raise SystemExit(f"{name} writes nothing")
        shutil.copytree(self.case, result_of(self.inputs, name))

    def _begin(self, command: WritingCommand) -> None:
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        command.begin(self.inputs, self.case)

    def start(
        self, name: str, again: bool = False, fault: DiskFault | None = None, said: str = "said"
    ) -> Fork:
        """A fork that runs a command in the directory of the case."""

        def run() -> None:
            environment_of(self.case, self.inputs)
            WatchedDisk(self.case, fault).install()
            COMMANDS[name].run(self.inputs, self.case, again)

        return Fork(run, self.work / said)

    def defect(self, kind: str, case: str, what: str) -> None:
        """Notes that something was wrong."""
        self.defects.append((kind, case, what))
        self._report(f"DEFECT {case}: {what}")

    def fault(self, name: str, fault: DiskFault) -> None:
        """A command that is disturbed by `fault`, and run again."""
        command, case = COMMANDS[name], f"{name}: {fault} of {self.calls(name)}"
        self._begin(command)
        ended = self.start(name, fault=fault).ended()
        self.cases[f"{fault.kind}"] += 1
        if fault.kind.startswith("kill"):
            if ended.status != -signal.SIGKILL:
                self.defect("killed", case, f"ended with {ended.status}: {ended.stderr[-300:]}")
        elif ended.unexplained:
            self.defect("error", case, ended.unexplained)
        elif ended.status not in (0, 3):
            self.defect("error", case, f"ended with {ended.status}: {ended.stderr[-300:]}")
        elif not ended.status and command.lasting and self._other(name):
            self.defect("silent", case, f"ended well, but with {self._other(name)}")
        call = self.undisturbed[name].log.changes[fault.step - 1].name
        if fault.kind in PASSING and call not in ("unlink", "rmdir"):
            left = [file for file in files_below(self.case) if file.endswith(".partial")]
            if left:
                self.defect("temporary", case, f"leaves {left}")
        self._judge_and_repeat(name, case)

    def cut(self, name: str, kind: str, step: int, seed: int) -> None:
        """A command during which the power is cut, and which is run again."""
        command, known = COMMANDS[name], self.undisturbed[name]
        case = f"{name}: {kind} behind change {step} of {len(known.log.changes)}, seed {seed}"
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        lay_out(cut(known.log, step, kind, random.Random(case)))
        self.cases[kind] += 1
        if step == len(known.log.changes) and command.lasting and self._other(name):
            self.defect("lost", case, f"was done, and is not: {self._other(name)}")
        self._judge_and_repeat(name, case)

    def calls(self, name: str) -> int:
        """Changes that a command makes."""
        return len(self.undisturbed[name].log.changes)

    def _other(self, name: str) -> list[str]:
        now, wanted = files_below(self.case), self.undisturbed[name].files
        files = (file for file in {*now, *wanted} if UNFINISHED not in file)
        return sorted(file for file in files if now.get(file) != wanted.get(file))[:6]

    def _judge_and_repeat(self, name: str, case: str) -> None:
        command = COMMANDS[name]
        self._judge(name, case)
        out = self.case / command.out
        begun = bool(command.out) and bool(files_below(out))
        if begun and not command.resumes and self._other(name):
            ended = self.start(name).ended()
            if ended.status != 2 or ended.unexplained:
                self.defect("refusal", case, f"then ended with {ended.status}: {ended.stderr[-300:]}")
            shutil.rmtree(out)
        if command.resumes or self._other(name):
            ended = self.start(name, begun or not command.out).ended()
            if ended.status:
                self.defect("rerun", case, f"cannot be completed ({ended.status}): {ended.stderr[-400:]}")
            elif self._other(name):
                self.defect("rerun", case, f"completed otherwise, in {self._other(name)}")
        if self._identities() != self._pinned:
            raise SystemExit(f"{case}: a checkpoint was changed")

    def _judge(self, name: str, case: str) -> None:
        """What is left is whole, or is not taken for it."""
        command, known, now = COMMANDS[name], self.undisturbed[name], files_below(self.case)
        if command.out:
            if (self.case / command.out / command.mark).exists():
                left = {file: data for file, data in now.items() if "progress" not in file}
                left = {file: data for file, data in left.items() if not file.endswith((".partial", "/"))}
                if command.mark != "READY":
                    left = {file: data for file, data in left.items() if "report-part" not in file}
                begin = {p.removeprefix(known.log.root): data for p, (_, data) in known.log.begin.items()}
                if left not in (dict(known.files), begin):
                    self.defect("whole", case, f"{command.mark} beside other files: {self._other(name)}")
            return
        for file, data in now.items():
            if not file.endswith((".partial", "/")) and not _is_version(file, data, known.versions):
                self.defect("whole", case, f"{file} is neither the earlier nor the new one")
        for file, versions in known.versions.items():
            if None not in versions and file not in now:
                self.defect("whole", case, f"{file} is gone")


def _is_version(file: str, data: bytes, versions: Mapping[str, set[bytes | None]]) -> bool:
    known = versions.get(file, set())
    if file.endswith(".jsonl"):  # grows in place
        return any(version is not None and version.startswith(data) for version in known)
    return data in known or UNFINISHED in file


def fault_cases(workshop: Workshop, names: Iterable[str]) -> Iterator[Callable[[], None]]:
    """Every fault at every call of these commands, and every power cut, with each kind of loss."""
    for name in names:
        for step in range(1, workshop.calls(name) + 1):
            for kind in KINDS:
                yield partial(workshop.fault, name, DiskFault(kind, step))
            for kind in CUTS:
                for seed in range(3 if kind == "cut, some" else 1):
                    yield partial(workshop.cut, name, kind, step, seed)
