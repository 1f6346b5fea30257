"""Bytes of a wheel on a package index, in ranges where the server has them."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

from .. import __version__
from ..errors import Unavailable, UsageError

TIMEOUT = 30.0
"""Seconds without a byte after which a connection is given up."""

ATTEMPTS = 4
"""Connections in a row that bring no byte before it is given up."""

PAUSE = 1.0
"""Seconds before the second attempt; later ones wait longer."""

CHUNK = 1 << 18
LARGEST_PAGE = 32 << 20
"""Maximum size of a project's page on an index, bytes."""

_SIMPLE = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))
_LOCAL = ("localhost", "127.0.0.1", "::1")


class _Retry(Exception):
    """A failure that another attempt may not have."""


class WholeFileNeeded(Unavailable):
    """The server does not send parts of a file of `size` bytes, and reading all of it was not allowed."""

    def __init__(self, host: str, name: str, size: int) -> None:
        super().__init__(
            f"{host} does not send parts of {name}, and the whole file has {size / 1e6:.0f} MB",
            hint="moectl peers NAME --yes reads all of it",
        )
        self.size = size


def check_url(url: str, what: str) -> None:
    """Raises UsageError unless `url` is one of HTTPS, or of HTTP on this machine, without a user name."""
    try:
        parts = urllib.parse.urlsplit(url)
        local = parts.scheme == "http" and parts.hostname in _LOCAL
        good = bool(parts.hostname) and (parts.scheme == "https" or local)
        login = "@" in parts.netloc
    except ValueError:
        good = login = False
    if login:
        # Without the address, which may have a password in it.
        raise UsageError(
            f"{what} has a user name in its address, and moectl logs in nowhere",
            hint="give an address that needs no login, or bring a directory that `moectl peers` has filled",
        )
    if not good:
        raise UsageError(f"{what} must be an https:// address, got {url!r}")


def find_wheel(index: str, project: str, wheel: str) -> str:
    """Address of the file `wheel` on the page of `project` of a simple index (PEP 503, PEP 691).

    Raises Unavailable if the index has no such file.
    """
    check_url(index, "the package index")
    page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', project).lower()}/"

    def read(response: Any) -> tuple[bytes, str, str]:
        return response.read(LARGEST_PAGE + 1), response.headers.get("Content-Type", ""), response.geturl()

    body, kind, address = _attempted(lambda: _request(page, {"Accept": _SIMPLE}, page, read), page)
    if len(body) > LARGEST_PAGE:
        raise Unavailable(f"{page} is larger than a package index's page can be")
    try:
        if "json" in kind:
            links = [(str(file["filename"]), str(file["url"])) for file in json.loads(body)["files"]]
        else:
            links = _links(body.decode("utf-8"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unavailable(f"{page} is not a page of a package index") from error
    for name, url in links:
        if name == wheel:
            try:
                found: str = urllib.parse.urljoin(address, url.partition("#")[0])
            except ValueError as error:
                raise Unavailable(f"{page} has no address of {wheel}, but {url!r}") from error
            check_url(found, f"the link to {wheel}")
            return found
    raise Unavailable(
        f"{page} does not have {wheel}", hint="leave --index-url out, or name an index that has it"
    )


def _links(page: str) -> list[tuple[str, str]]:
    class PageLinks(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            url = dict(attributes).get("href") if tag == "a" else None
            if url:
                path = urllib.parse.urlsplit(url).path
                found.append((urllib.parse.unquote(path.rpartition("/")[2]), url))

    found: list[tuple[str, str]] = []
    PageLinks().feed(page)
    return found


class WheelStream:
    """Reads ranges of a file over HTTP, in ascending order; an interrupted connection is resumed.

    Args:
        url: its address.
        name, size: for errors, and the size that the server must state.
        spans: the ranges that will be read, first byte and end.
        allow_whole: whether everything up to the last byte needed is transferred if the server does not send
            ranges; otherwise that raises WholeFileNeeded.
        progress: called with the bytes transferred so far.

    Attributes:
        whole: True once the server has not sent a range.
        received: bytes transferred.
    """

    def __init__(
        self,
        url: str,
        name: str,
        size: int,
        spans: Sequence[tuple[int, int]],
        *,
        allow_whole: bool,
        progress: Callable[[int], None],
    ) -> None:
        self.whole = False
        self.received = 0
        self._url, self._name, self._size, self._spans = url, name, size, spans
        self._allow_whole, self._progress = allow_whole, progress
        self._response: Any = None
        self._at = self._end = 0

    def __enter__(self) -> WheelStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, first: int, nbytes: int) -> Iterator[bytes]:
        """Yields the `nbytes` from `first` on, in chunks; `first` is not before an earlier call's end."""
        at, end, failures = first, first + nbytes, 0
        while at < end:
            try:
                self._seek(at)
                chunk = self._receive(end - at)
            except _Retry as error:
                self._close()
                failures += 1
                if failures >= ATTEMPTS:
                    raise Unavailable(str(error), hint=RETRY) from error
                time.sleep(PAUSE * failures)
                continue
            failures = 0
            at += len(chunk)
            yield chunk

    def _seek(self, at: int) -> None:
        """Lets the next byte received be number `at`."""
        inside = next((end for first, end in self._spans if first <= at < end), self._size)
        if self._response is not None and (self.whole or self._at <= at < self._end):
            while self._at < at:
                self._receive(at - self._at)
            return
        self._close()
        self._end = inside
        try:
            self._open(at, inside)
        except BaseException:
            self._close()
            raise
        while self._at < at:
            self._receive(at - self._at)

    def _open(self, at: int, end: int) -> None:
        headers = {"Range": f"bytes={at}-{end - 1}"} if not self.whole else {}
        self._response = _request(self._url, headers, self._name)
        stated = self._response.headers.get("Content-Range", "")
        if self._response.status == 206:
            if stated != f"bytes {at}-{end - 1}/{self._size}":
                raise Unavailable(
                    f"{_host(self._url)} sent {stated or 'no range'} of {self._name}, expected bytes "
                    f"{at}-{end - 1}/{self._size}"
                )
            self._at = at
            return
        length = self._response.headers.get("Content-Length")
        if length is not None and length != str(self._size):
            raise Unavailable(
                f"{_host(self._url)} has another file {self._name}: {length} bytes, expected {self._size}"
            )
        if not self._allow_whole:
            raise WholeFileNeeded(_host(self._url), self._name, self._size)
        self.whole, self._at, self._end = True, 0, self._size

    def _receive(self, most: int) -> bytes:
        try:
            chunk: bytes = self._response.read(min(CHUNK, most))
        except (OSError, http.client.HTTPException) as error:
            raise _Retry(f"the connection to {_host(self._url)} broke: {_words(error)}") from error
        if not chunk:
            raise _Retry(f"{_host(self._url)} ended {self._name} early, after {self._at} bytes")
        self._at += len(chunk)
        self.received += len(chunk)
        self._progress(self.received)
        return chunk

    def _close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None


RETRY = "check the network (HTTPS_PROXY, --index-url for a mirror), then repeat the command"


def _attempted(attempt: Callable[[], Any], what: str) -> Any:
    for failures in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except _Retry as error:
            if failures == ATTEMPTS:
                raise Unavailable(str(error), hint=RETRY) from error
            time.sleep(PAUSE * failures)
    raise AssertionError(what)


def _request(url: str, headers: dict[str, str], name: str, read: Callable[[Any], Any] | None = None) -> Any:
    """The response of a GET, or what `read` makes of it. Raises _Retry, or Unavailable if it is final."""
    agent = {"User-Agent": f"moectl/{__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**agent, **headers})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
        if read is None:
            return response
        with response:
            return read(response)
    except urllib.error.HTTPError as error:
        error.close()
        says = f"{_host(url)} answered {error.code} ({error.reason}) for {name}"
        if error.code in _TRANSIENT:
            raise _Retry(says) from error
        raise Unavailable(says, hint=RETRY) from error
    except (ValueError, http.client.InvalidURL) as error:
        # Not ASCII, blanks in it, a host name or port that nothing can have.
        raise Unavailable(f"{name} has an address that cannot be asked for: {error}", hint=RETRY) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Retry(f"cannot reach {_host(url)}: {_words(error)}") from error


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or url


def _words(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    inner = reason if isinstance(reason, OSError) else error
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
