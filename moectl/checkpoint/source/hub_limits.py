"""Limits on what a Hub server can make a reader do: seconds, bytes of an answer, and names of files.

The Hub's client limits none of them: an answer that trickles, never ends or unpacks to gigabytes is read to
its end, a server that is busy is waited for as long as it says, and the file of a download is named by a
header of the answer, whatever path that is.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from ...errors import CheckpointError, Unavailable, UsageError
from ...files.atomic import replace_file
from ...files.safe_reading import read_bounded
from ...files.safetensors_header import HEADER_LIMIT
from ...files.strict_json import shown

VARIABLE = "MOECTL_HUB_TIMEOUT"
"""The environment variable with the seconds that reading a checkpoint's headers may take."""

SECONDS = 60.0
MOST_SECONDS = 86400.0
"""Maximum of the variable: a day. Systems cannot wait for any number of seconds."""

_NUMBER = re.compile(r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?|[0-9]+\.")

LISTING_LIMIT = 16 << 20
"""Maximum size of a repository's list of files, bytes; one of 10,000 files has 2 MB."""

ANSWER_LIMIT = HEADER_LIMIT + (1 << 20)
"""Maximum size of any other answer, bytes."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""What a commit looks like."""

_BLOB = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
"""What an ETag may look like, which names a file in the Hub's cache: mostly a SHA-1 or SHA-256."""

_XET = ("X-Xet-Hash", "X-Xet-Refresh-Route")
"""Headers that have the client fetch a file by another protocol, whose answers nothing here bounds."""

Found = TypeVar("Found")
Item = TypeVar("Item")


class HubUnreachable(Unavailable):
    """The Hub does not answer, or requires a login."""


class HubTooSlow(HubUnreachable):
    """The Hub was not done within the time that it has."""


def seconds_allowed() -> float:
    """The seconds in `VARIABLE`, else `SECONDS`; UsageError unless they are in (0, `MOST_SECONDS`]."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return SECONDS
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise UsageError(
            f"{VARIABLE} must be a number of seconds above 0 and at most {MOST_SECONDS:g}, got {shown(text)}",
            hint=f"Leave it unset for {SECONDS:g} seconds.",
        )
    return seconds


class HubGuard:
    """Bounds the answers to one reader's requests; an answer that is read after `stop` raises HubTooSlow."""

    def __init__(self, repo: str, seconds: float) -> None:
        self.repo, self.seconds = repo, seconds
        self._stopped = threading.Event()

    def stop(self) -> HubTooSlow:
        """Ends all reading; returns the error that explains it."""
        self._stopped.set()
        return HubTooSlow(
            f"the Hub did not send the config and headers of {self.repo} within {self.seconds:g} seconds.",
            hint=f"Try again, set {VARIABLE} to more seconds, or download the checkpoint.",
        )

    def wait(self, seconds: float) -> None:
        """Sleeps; raises HubTooSlow as soon as reading is stopped."""
        if self._stopped.wait(seconds):
            raise self.stop()

    def pieces(self, raw: Iterator[bytes], url: str) -> Iterator[bytes]:
        """The pieces of an answer, as long as it is within the limits."""
        limit = LISTING_LIMIT if "/api/" in url else ANSWER_LIMIT
        taken = 0
        for piece in raw:
            taken += len(piece)
            if self._stopped.is_set():
                raise self.stop()
            if taken > limit:
                raise CheckpointError(
                    f"an answer of the Hub about {self.repo} has more than {limit} bytes.",
                    hint="Check HF_ENDPOINT, or download the checkpoint and give its folder.",
                )
            yield piece


_guards = threading.local()


@contextmanager
def guarded_by(guard: HubGuard) -> Iterator[None]:
    """This thread's requests to the Hub are bounded by `guard`."""
    _guards.current = guard
    try:
        yield
    finally:
        _guards.current = None


def install(client: Any) -> None:
    """Makes the sessions of the Hub's client obey the guard of the thread that uses them.

    Those that it makes later too: it does so when a server cannot be connected to.
    """
    _guard_session(client.get_session())
    module = sys.modules.get(client.get_session.__module__)
    make = getattr(module, _FACTORY, None)
    if make is not None and not hasattr(make, "moectl_guarded"):

        def make_guarded() -> Any:
            session = make()
            _guard_session(session)
            return session

        make_guarded.moectl_guarded = True  # type: ignore[attr-defined]
        setattr(module, _FACTORY, make_guarded)


_FACTORY = "_GLOBAL_CLIENT_FACTORY"
"""Where the Hub's client keeps the function that makes its sessions."""


def _guard_session(session: Any) -> None:
    if not hasattr(session, "event_hooks") or getattr(session, "moectl_guarded", False):
        return
    hooks = session.event_hooks
    session.event_hooks = {
        "request": [*hooks.get("request", ()), _ask_plainly],
        "response": [*hooks.get("response", ()), _bound],
    }
    session.moectl_guarded = True


def _ask_plainly(request: Any) -> None:
    if getattr(_guards, "current", None) is not None:
        request.headers["Accept-Encoding"] = "identity"


def _bound(response: Any) -> None:
    guard: HubGuard | None = getattr(_guards, "current", None)
    if guard is None:
        return
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise CheckpointError(
            f"the Hub answers about {guard.repo} in the encoding {shown(encoding)}, which was not asked for.",
            hint="Check HF_ENDPOINT, or download the checkpoint and give its folder.",
        )
    _check_names(response, guard.repo)
    for name in _XET:
        response.headers.pop(name, None)
    response.stream = _bounded_stream(response.stream, guard, str(response.request.url))


def _check_names(response: Any, repo: str) -> None:
    """Raises CheckpointError for headers that the client would make paths of, unless they are plain names."""
    headers = response.headers
    commit = headers.get("X-Repo-Commit")
    if commit is not None and COMMIT.fullmatch(commit) is None:
        raise CheckpointError(
            f"the Hub's answer about {repo} has the X-Repo-Commit {shown(commit)}, expected a commit of 40 "
            "hexadecimal digits.",
            hint="Check HF_ENDPOINT, or download the checkpoint and give its folder.",
        )
    tag = headers.get("X-Linked-ETag") or headers.get("ETag")
    if response.request.method != "HEAD" or response.status_code >= 400 or tag is None:
        return  # the client takes no name from it
    if _BLOB.fullmatch(tag.lstrip("W/").strip('"')) is None:
        raise CheckpointError(
            f"the Hub's answer about {repo} has the ETag {shown(tag)}, expected a checksum or another name "
            "of at most 128 letters, digits, dots and dashes.",
            hint="Check HF_ENDPOINT, or download the checkpoint and give its folder.",
        )


def _bounded_stream(stream: Any, guard: HubGuard, url: str) -> Any:
    """The stream of an answer, within the guard's limits; of the type that the client's library wants."""
    wanted = next((kind for kind in type(stream).__mro__ if kind.__name__ == "SyncByteStream"), object)

    def pieces(_: Any) -> Iterator[bytes]:
        return guard.pieces(iter(stream), url)

    return type("BoundedStream", (wanted,), {"__iter__": pieces, "close": lambda _: stream.close()})()


def within(guard: HubGuard, read: Callable[[], Found]) -> Found:
    """The result of `read`, which runs in a thread of its own; HubTooSlow after the guard's seconds.

    A thread that a server keeps waiting then ends with its next answer, or with the program.
    """
    results: list[Found] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with guarded_by(guard):
                results.append(read())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="moectl-hub", daemon=True)
    thread.start()
    thread.join(guard.seconds)
    if thread.is_alive():
        raise guard.stop()
    if errors:
        raise errors[0]
    return results[0]


def at_once(read: Callable[[Item], Found], items: Sequence[Item], workers: int) -> list[Found]:
    """`read` of every item, of so many at a time; the first error in their order ends all further reading.

    The threads do not keep the program from ending, as those of a ThreadPoolExecutor do.
    """
    futures: list[Future[Found]] = [Future() for _ in items]
    left = iter(list(zip(items, futures, strict=True)))
    taking, ended = threading.Lock(), threading.Event()

    def run() -> None:
        while not ended.is_set():
            with taking:
                item, future = next(left, (None, None))
            if future is None:
                return
            try:
                future.set_result(read(cast(Item, item)))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(workers, len(items))):
        threading.Thread(target=run, name="moectl-hub", daemon=True).start()
    try:
        return [future.result() for future in futures]
    finally:
        ended.set()


@contextmanager
def staged_cache() -> Iterator[Path]:
    """A folder in the place of the Hub's cache for a download that may fail; it is removed at the end."""
    folder = tempfile.mkdtemp(prefix="moectl-hub-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_into_cache(staged: Path, cache: Path) -> str:
    """Copies the blobs, links and references of a staged cache into the real one; existing files stay.

    Links that lead anywhere but to the blobs of their repository are left out.

    Returns the system's reason if something could not be written, which only affects speed.
    """
    order = {"blobs": 0, "snapshots": 1, "refs": 2}
    found = [path for path in staged.glob("models--*/*/**/*") if path.is_symlink() or path.is_file()]
    try:
        for path in sorted(found, key=lambda path: order.get(path.relative_to(staged).parts[1], 3)):
            relative = path.relative_to(staged)
            if relative.parts[1] not in order or path.suffix in (".incomplete", ".lock"):
                continue
            target = cache / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                if _leads_to_blob(path, staged / relative.parts[0] / "blobs"):
                    with suppress(FileExistsError):
                        target.symlink_to(path.readlink())
            elif relative.parts[1] == "refs" or not target.exists():
                replace_file(target, read_bounded(path, ANSWER_LIMIT, path.name))
    except OSError as error:
        return error.strerror or str(error)
    except CheckpointError as error:
        return error.what
    return ""


def _leads_to_blob(link: Path, blobs: Path) -> bool:
    """True for a relative link straight to a regular file in `blobs`."""
    stated = link.readlink()
    target = Path(os.path.normpath(link.parent / stated))
    return (
        not stated.is_absolute() and target.parent == blobs and target.is_file() and not target.is_symlink()
    )
