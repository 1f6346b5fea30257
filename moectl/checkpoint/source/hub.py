"""Checkpoints on the Hugging Face Hub: JSON files are downloaded, safetensors headers read by HTTP range.

Headers are requested concurrently and cached by commit (`hub_cache`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...files.safetensors_header import LENGTH_BYTES, Budget, header_length, read_header
from ...files.strict_json import shown
from ...files.tensor_table import TensorTable
from .hub_cache import HeaderCache
from .hub_limits import (
    COMMIT,
    HubGuard,
    HubUnreachable,
    at_once,
    guarded_by,
    install,
    move_into_cache,
    seconds_allowed,
    staged_cache,
    within,
)
from .shards import CONFIG, INDEX, check_document_size, index_files, join_tensors, parse_document, shard_names

FIRST_BYTES = 128 << 10
"""Size of the first range request of a file, bytes; most headers are shorter."""

WORKERS = 8
"""Maximum number of concurrent header requests."""

TIMEOUT = 10.0
ATTEMPTS = 4
"""Maximum number of requests when the server is busy or the connection breaks."""

PAUSE = 0.5
"""Seconds before the second attempt; doubled for each further one unless the server sends Retry-After."""

LONGEST_PAUSE = 30.0
_RETRY_STATUSES = (429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class NotOnHub(CheckpointError):
    """The Hub has no such model or revision, or hides it."""


class _CutShort(CheckpointError):
    """A response body ended too soon."""


@dataclass(frozen=True)
class HubCheckpoint:
    """A Hub repository at one commit: its JSON documents by file name, its tensors and its file names.

    `tensors` is None without safetensors files. `note` reports a problem that only affects speed.
    """

    revision: str
    documents: Mapping[str, Mapping[str, Any]]
    tensors: TensorTable | None
    files: frozenset[str]
    note: str = ""


def hub_is_offline() -> bool:
    """True when the environment (HF_HUB_OFFLINE) forbids the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def cached_folder(repo: str, revision: str | None) -> Path | None:
    """The snapshot of `repo` at `revision` (default: main) in the Hub cache, if it has a config.json."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, CONFIG, revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def read_hub(repo: str, revision: str | None, token: str | None, optional: tuple[str, ...]) -> HubCheckpoint:
    """Config, `optional` documents and all tensor headers of `repo`, every file at one commit.

    JSON files go through the Hub cache; of weight files only the headers are downloaded, once per commit.

    Raises:
        NotOnHub: no such model, revision or config.json.
        HubUnreachable: no network, no answer, or no permission.
        HubTooSlow: all of it takes longer than `hub_limits.SECONDS`, or MOECTL_HUB_TIMEOUT.
        CheckpointError: a file is damaged.
    """
    guard = HubGuard(repo, seconds_allowed())
    with staged_cache() as staged:
        found = within(guard, lambda: _read(repo, revision, token, optional, guard, staged))
        if refused := move_into_cache(staged, _cache()):
            found = replace(found, note=found.note or f"documents could not be cached: {refused}")
    return found


def download_files(repo: str, commit: str, files: Sequence[str], cache: str | None = None) -> Path:
    """The snapshot of `repo` at `commit` in the Hub's cache, with those of `files` that it lacked downloaded.

    Nothing is asked of the Hub for files that are there. Takes as long as it takes: the limits of
    `hub_limits` are for headers.

    Args:
        cache: another folder in the place of the Hub's cache.

    Raises:
        NotOnHub: no such model, revision or file.
        HubUnreachable: no network, no answer, or no permission; or HF_HUB_OFFLINE, and a file is missing.
    """
    from huggingface_hub import hf_hub_download

    def download(name: str) -> Path:
        return Path(hf_hub_download(repo, name, revision=commit, cache_dir=cache))

    with _explained(repo, commit):
        first, *_ = at_once(download, files, WORKERS)
    return first.parents[len(Path(files[0]).parts) - 1]


def _read(
    repo: str,
    revision: str | None,
    token: str | None,
    optional: tuple[str, ...],
    guard: HubGuard,
    staged: Path,
) -> HubCheckpoint:
    from huggingface_hub import HfApi

    install(_client())
    with _explained(repo, revision):
        # First, because it fails at once without a network; a download would retry for half a minute.
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, token=token, timeout=TIMEOUT)
        sizes = {item.rfilename: item.size for item in info.siblings or []}
        commit = _commit(info.sha, repo)
        if CONFIG not in sizes:
            raise NotOnHub(
                f"{repo} on the Hub has no config.json.",
                hint="Give a repository of a whole model, with a config.json and safetensors files.",
            )
        for name in (CONFIG, *optional):
            check_document_size(sizes.get(name) or 0, name)
        # By the requested revision, so that the cache records the commit it refers to.
        if _download(repo, CONFIG, revision, token, staged).parent.name != commit:
            _download(repo, CONFIG, commit, token, staged)
        documents = {
            name: parse_document(_download(repo, name, commit, token, staged), name)
            for name in (CONFIG, *optional)
            if name in sizes
        }
        index = index_files(documents[INDEX]) if INDEX in documents else None
        names = shard_names(sizes, index)
        cache = HeaderCache(repo, commit)
        read = partial(_header, repo, commit, token, Budget(), cache, guard)
        shards = at_once(lambda name: read(name, sizes[name]), names, WORKERS)
    tensors = join_tensors([shard.tensors for shard in shards], index) if names else None
    guard.wait(0)
    for name, shard in zip(names, shards, strict=True):
        if shard.start is not None:
            cache.write(name, shard.start, shard.size)
    if names:
        cache.write_listing({name: shard.size for name, shard in zip(names, shards, strict=True)})
    note = f"headers could not be cached: {cache.refused}" if cache.refused else ""
    return HubCheckpoint(commit, documents, tensors, frozenset(sizes), note)


def _commit(sha: str | None, repo: str) -> str:
    if sha is None or COMMIT.fullmatch(sha) is None:
        raise CheckpointError(
            f"the Hub names no commit for {repo}, got {shown(sha)}.",
            hint="Check HF_ENDPOINT, or download the checkpoint and give its folder.",
        )
    return sha


def _cache() -> Path:
    """The Hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _download(repo: str, name: str, revision: str | None, token: str | None, staged: Path) -> Path:
    """A file in the Hub's cache at a commit, else downloaded to the `staged` one."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if revision is not None and COMMIT.fullmatch(revision):
        cached = try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    return Path(hf_hub_download(repo, name, revision=revision, token=token, cache_dir=staged))


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Converts errors of the Hub client to moectl's."""
    from huggingface_hub import errors

    model = repo if revision is None else f"{repo}@{revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubUnreachable(
            f"the Hub shows {model} only to those whom its owner has admitted.",
            hint="Accept its terms on the Hub, then run `hf auth login` or set HF_TOKEN.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NotOnHub(
            f"the Hub has no revision {revision} of {repo}.",
            hint="Give a branch, tag or commit of it, or leave the revision out.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise NotOnHub(
            f"the Hub shows no model {model}.",
            hint="Check the name; for a private model run `hf auth login` or set HF_TOKEN.",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(model, error) from error
    except errors.EntryNotFoundError as error:
        raise NotOnHub(
            f"a file of {model} is missing on the Hub: {_first(error)}.",
            hint="Try again, as the repository may just be changing, or give another revision.",
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        hint = "Run `hf auth login` or set HF_TOKEN." if status in (401, 403) else _OFFLINE
        raise HubUnreachable(f"the Hub refuses {model}: {_first(error)}.", hint=hint) from error
    except errors.HFValidationError as error:
        raise NotOnHub(
            f"{model} is no Hub id: {_first(error)}.", hint="Give the model as org/name."
        ) from error
    except (OSError, getattr(errors, "HTTPError", OSError)) as error:
        raise _unreachable(model, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # What the client makes of an answer that is not the Hub's.
        raise CheckpointError(
            f"the Hub's answer about {model} is not understood: {_first(error)[:200]}.",
            hint="Check HF_ENDPOINT, or download the checkpoint and give its folder.",
        ) from error


_OFFLINE = "Check the network and HF_ENDPOINT, or give a folder, a config.json or a built-in model."


def _unreachable(model: str, error: BaseException) -> HubUnreachable:
    return HubUnreachable(f"the Hub cannot be reached for {model}: {_first(error)}.", hint=_OFFLINE)


def _first(error: BaseException) -> str:
    """The first line of an error message, without the final period."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


@dataclass(frozen=True)
class _Shard:
    """A weight file: its size, tensors, and its first bytes unless they were cached."""

    size: int
    tensors: TensorTable
    start: bytes | None = None


def _header(
    repo: str,
    commit: str,
    token: str | None,
    budget: Budget,
    cache: HeaderCache,
    guard: HubGuard,
    name: str,
    listed: int | None,
) -> _Shard:
    """The header of weight file `name` from the cache or the Hub; `listed` is its size in the file list."""
    cached = cache.read(name)
    if cached is not None and listed in (None, cached[1]):
        with suppress(CheckpointError):
            return _Shard(cached[1], read_header(*cached, name, budget))
    with guarded_by(guard):
        start, size = _remote_header(repo, commit, token, name, guard)
    if listed is not None and listed != size:
        raise CheckpointError(
            f"{name}: the Hub lists {listed} bytes, but serves a file of {size}.",
            hint="Try again, as the file may just be changing, or download the checkpoint.",
        )
    return _Shard(size, read_header(start, size, name, budget), start)


def _remote_header(
    repo: str, commit: str, token: str | None, name: str, guard: HubGuard
) -> tuple[bytes, int]:
    """The bytes of a weight file up to the end of its header, and the file's size."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, name, revision=commit)
    first, size = _read_range(url, 0, FIRST_BYTES, name, token, guard)
    end = LENGTH_BYTES + header_length(first, size, name)
    if end > len(first):
        rest, _ = _read_range(url, len(first), end, name, token, guard)
        first += rest
    return first[:end], size


def _client() -> Any:
    """The Hub client's HTTP layer, whose session is configured with proxies and certificates."""
    from huggingface_hub import utils

    return utils


def _read_range(
    url: str, start: int, end: int, name: str, token: str | None, guard: HubGuard
) -> tuple[bytes, int]:
    """Bytes `start` to `end` of a file, fewer at its end, and the size of the whole file.

    Raises CheckpointError when the server answers with anything but that range.
    """
    from huggingface_hub import errors

    headers: dict[str, str] = _client().build_hf_headers(token=token)
    headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    broken_off = (OSError, getattr(errors, "HTTPError", OSError), _CutShort)
    for attempt in range(ATTEMPTS):
        last, pause = attempt + 1 == ATTEMPTS, PAUSE * 2**attempt
        try:
            with _stream(url, headers) as response:
                if last or response.status_code not in _RETRY_STATUSES:
                    return _take_range(response, start, end, name)
                pause = _retry_pause(response.headers.get("Retry-After"), pause)
        except broken_off as error:
            if last or isinstance(error, errors.HfHubHTTPError):
                raise
        guard.wait(pause)
    raise AssertionError("the last attempt returns or raises")


def _retry_pause(text: str | None, usual: float) -> float:
    """Seconds from a Retry-After header, up to `LONGEST_PAUSE`; `usual` if it is not a number."""
    return min(float(text), LONGEST_PAUSE) if text is not None and text.isdecimal() else usual


@contextmanager
def _stream(url: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """A streamed response to a GET; supports both HTTP clients that huggingface_hub has used."""
    session = _client().get_session()
    if hasattr(session, "build_request"):
        opened = session.stream("GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True)
    else:
        opened = session.get(url, headers=headers, timeout=TIMEOUT, stream=True)
    with opened as response:
        yield response


def _take_range(response: Any, start: int, end: int, name: str) -> tuple[bytes, int]:
    if response.status_code >= 400 and response.status_code != 416:
        if hasattr(response, "read"):
            response.read()
        _client().hf_raise_for_status(response)
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if response.status_code != 206 or match is None or int(match[1]) != start:
        raise CheckpointError(
            f"{name}: the server answers a request for bytes {start} to {end} "
            f"with status {response.status_code} instead of that range.",
            hint="Use a Hub endpoint that serves ranges, or download the checkpoint.",
        )
    size = int(match[3])
    body, expected = bytearray(), min(end, size) - start
    for piece in response.iter_bytes() if hasattr(response, "iter_bytes") else response.iter_content(65536):
        body += piece
        if len(body) > expected:
            break
    if len(body) < expected:
        raise _CutShort(
            f"{name}: the answer breaks off: the server sends {len(body)} bytes, {expected} were asked for.",
            hint="Try again, or download the checkpoint.",
        )
    if len(body) > expected:
        raise CheckpointError(
            f"{name}: the server sends {len(body)} bytes or more, {expected} were asked for.",
            hint="Use a Hub endpoint that serves ranges, or download the checkpoint.",
        )
    return bytes(body), size
