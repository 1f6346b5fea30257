"""Commands in forks of one process, which has imported and compiled everything once."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECONDS = 120
"""Within which a fork ends."""


@dataclass(frozen=True)
class Ended:
    """How a fork ended: its exit status, or minus the signal, and what it printed."""

    status: int
    stdout: str
    stderr: str

    @property
    def unexplained(self) -> str:
        """What is wrong with how it told of an error; empty if it ended well, or with one sentence."""
        if self.status == 0 or self.status == -signal.SIGKILL:
            return ""
        if self.status not in (1, 2, 3, 4):
            return f"ended with {self.status}: {self.stderr[-300:]}"
        for word in ("Traceback", "internal error", "operating system error", "cannot write the output"):
            if word in self.stderr:
                return f"{word}: {self.stderr[-400:]}"
        if self.status != 1 and self.stderr.count("moectl: error: ") != 1:
            return f"{self.status} without one error: {self.stderr[-300:]}"
        return ""


def warm_up() -> None:
    """Imports and compiles what every fork would import and compile otherwise."""
    import torch
    import typer.main

    import moectl.cli.main

    typer.main.get_command = functools.cache(typer.main.get_command)
    from moectl.convert.onepass.compose import compose
    from moectl.convert.onepass.executors import load
    from moectl.convert.steps.transforms import Rearrange, Xor
    from moectl.files.tensor_table import TensorType

    assert moectl.cli.main.app is not None
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    run = load("cpu")[0]
    for step in (Rearrange("e n k -> e k n"), Xor(1)):
        program = compose((step,), TensorType("U8", (1, 16, 16)))
        if run is not None and program is not None:
            t = torch.zeros((1, 16, 16), dtype=torch.uint8)
            run(program, t, torch.empty_like(t))


def import_all(modules: Iterable[str]) -> None:
    """Imports what a fork has imported, so that the next ones need not."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)


class Fork:
    """A fork that does `action`; its output goes to files named after `said`.

    It ends with the exit code of a command, and says of other errors what moectl's commands say of them.
    """

    def __init__(self, action: Callable[[], object], said: Path) -> None:
        self._said = said
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if not self.process:
            self._run(action)

    def _run(self, action: Callable[[], object]) -> None:
        status = 70
        try:
            signal.alarm(SECONDS)
            for fd, suffix in ((1, ".out"), (2, ".err")):
                file = os.open(f"{self._said}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(file, fd)
                os.close(file)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
            status = _explained(action)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def ended(self) -> Ended:
        """Waits for its end."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        texts = [Path(f"{self._said}{s}").read_text(errors="replace") for s in (".out", ".err")]
        return Ended(status, *texts)


def _explained(action: Callable[[], object]) -> int:
    from moectl.cli.options import as_moectl_error
    from moectl.cli.output import Output

    try:
        action()
    except SystemExit as left:
        return int(left.code or 0)
    except Exception as error:
        explained = as_moectl_error(error)
        Output("library").complain(explained)
        return int(explained.exit_code)
    return 0


def moectl(*arguments: object, may_end: tuple[int, ...] = (0,)) -> int:
    """`moectl ARGUMENTS` in this process; leaves with its exit code unless that is one of `may_end`."""
    from moectl.cli.main import run

    sys.argv = ["moectl", *map(str, arguments)]
    try:
        run()
    except SystemExit as left:
        if (code := int(left.code or 0)) not in may_end:
            raise
        return code
    return 0


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file below a directory, and empty directories, by their paths in it; links by their targets."""
    found = {}
    for path in folder.rglob("*") if folder.is_dir() else ():
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.fsencode(f"-> {path.readlink()}")
        elif path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found
