"""Programs in processes of their own that need no new interpreter: forks of one that imported what they use.

To start Python and import all of it takes longer than what most of these programs do. A program is given as
to the interpreter: ``-c CODE``, ``-m MODULE`` or a file, and its arguments. A test of imports, of memory or
of variables that Python or torch reads when it starts needs a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class Program:
    """A program that was started: its process, and how it ended."""

    def __init__(self, words: Sequence[object], link: socket.socket) -> None:
        self.words, self.link = [str(word) for word in words], link
        self.answers = link.makefile("r")
        self.pid = int(self.answers.readline())

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal; kills the program when it takes longer than `timeout`."""
        self.link.settimeout(timeout)
        try:
            line = self.answers.readline()
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(self.words, timeout or 0) from None
        assert line, "the process that forks has ended; its error is on stderr"
        return int(line)


def start(
    words: Sequence[object],
    stdout: int | IO[Any],
    stderr: int | IO[Any],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    imported: str = "all",
) -> Program:
    """Starts a program that writes to open files, and reads nothing; `imported`: a key of `IMPORTED`."""
    asked = {
        "words": [str(word) for word in words],
        "folder": str(cwd or Path.cwd()),
        "environment": dict(os.environ if env is None else env),
    }
    ours, theirs = socket.socketpair()
    files = [file if isinstance(file, int) else file.fileno() for file in (stdout, stderr)]
    with theirs:
        socket.send_fds(_server(imported), [b"."], [theirs.fileno(), *files])
        ours.sendall(json.dumps(asked).encode() + b"\n")
    return Program(words, ours)


def run(
    words: Sequence[object],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    check: bool = False,
    imported: str = "all",
) -> subprocess.CompletedProcess[str]:
    """What a program writes, and its exit status, as `subprocess.run` returns them."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        program = start(words, stdout, stderr, cwd, env, imported)
        status = program.wait(timeout)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read())
    done = subprocess.CompletedProcess(program.words, status, *texts)
    if check and status:
        raise AssertionError(f"{program.words} ended with {status}:\n{done.stderr}")
    return done


@cache
def _server(imported: str) -> socket.socket:
    """The connection to the process that forks, which ends with this one."""
    ours, theirs = socket.socketpair()
    kept = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.python_forks", imported, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**kept, "PYTHONPATH": path},
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(asking: socket.socket) -> None:
    """Forks for each request; tells each program's process, and later how it ended."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as events:
        events.register(asking, selectors.EVENT_READ)
        while events.get_map():
            for key, _ in events.select():
                if key.fileobj is asking:
                    data, fds, _, _ = socket.recv_fds(asking, 1, 3)
                    if not data:  # the tests are over
                        events.unregister(asking)
                        for process, _ in running.values():
                            os.kill(process, signal.SIGKILL)
                        continue
                    link = socket.socket(fileno=fds[0])
                    with link.makefile("r") as lines:
                        asked = json.loads(lines.readline())
                    process = os.fork()
                    if not process:
                        events.close()
                        asking.close()
                        link.close()
                        for _, other in running.values():
                            other.close()
                        _become(asked, *fds[1:])
                    for fd in fds[1:]:
                        os.close(fd)
                    _tell(link, process)
                    end = os.pidfd_open(process)
                    running[end] = process, link
                    events.register(end, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, int)
                    events.unregister(key.fileobj)
                    process, link = running.pop(key.fileobj)
                    os.close(key.fileobj)
                    with link:
                        _tell(link, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _tell(link: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # which says that nobody waits for it
        link.sendall(f"{number}\n".encode())


def _become(asked: dict[str, Any], stdout: int, stderr: int) -> None:
    """Runs the program in this process, as Python would, and ends."""
    code: object = 1
    try:
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for fd, stream in ((stdout, 1), (stderr, 2)):
            os.dup2(fd, stream)
            os.close(fd)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
        sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PLAIN_PATH]
        code = _run(asked["words"])
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(int(code or 0))


def _run(words: list[str]) -> int:
    kind, *arguments = words
    if kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
    return 0


PLAIN_PATH = [
    folder for folder in sys.path if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]
"""Where modules are without `PYTHONPATH`, when this process was started."""

IMPORTED = {
    "commands": ("moectl.cli.main",),
    "all": ("torch", "moectl.cli.main", "moectl.convert.execute.convert", "moectl.layer.prepare"),
}
"""What a program finds imported: what every command imports by itself, or torch and more of moectl, too."""


def main() -> None:
    imported, fd = sys.argv[1:]
    for name in IMPORTED[imported]:
        importlib.import_module(name)
    # These read variables when they are imported.
    assert sys.modules.keys().isdisjoint({"huggingface_hub", "typer.rich_utils"})
    assert imported == "all" or "torch" not in sys.modules
    atexit._clear()  # what this process does at its end, its programs need not
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(fd)))
    os._exit(0)


if __name__ == "__main__":
    main()
