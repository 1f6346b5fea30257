"""Servers that keep a reader waiting or send without end: a sentence in time, and nothing in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from moectl.checkpoint.source.hub_limits import VARIABLE, at_once, install, move_into_cache, seconds_allowed
from moectl.errors import UsageError
from moectl.printable import printable
from support.hub_server import COMMIT, HOSTILE, TOKEN, Hub, serve
from support.sampling import every_nth

from .test_hub import ROOT, Reader
from .test_hub import server as server

SECONDS = 1.5
"""What the reader is allowed."""

WEIGHTS = "-of-"
"""What the paths of weight files alone have."""

PLACES = ("/api/", "config.json", "index.json", WEIGHTS)


@pytest.fixture
def hub(tiny_gpt_oss: Path) -> Iterator[Hub]:
    with serve(tiny_gpt_oss) as running:
        yield running


def left(tmp_path: Path) -> list[Path]:
    """The files in the caches and in the folder of temporary files."""
    return [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize(
    # By default every third, so that each way comes up and each place with several.
    ("way", "place"),
    every_nth(product([way for way in HOSTILE if way != "elsewhere"], PLACES), 3),
)
def test_it_ends_in_time(
    server: subprocess.Popen[str], hub: Hub, tmp_path: Path, place: str, way: str
) -> None:
    hub.hostile = {place: way}
    (tmp_path / "tmp").mkdir()
    begun = time.monotonic()
    settings = {VARIABLE: str(SECONDS), "TMPDIR": str(tmp_path / "tmp")}
    refused = Reader(server, tmp_path / "home", hub.url)("org/tiny", env=settings)
    assert time.monotonic() - begun < SECONDS + 6
    assert refused["exit"] in (3, 4), refused
    assert "internal" not in refused["text"]
    if way in ("trickle", "header lines", "silent"):
        assert f"within {SECONDS} seconds" in refused["text"] and VARIABLE in refused["text"]
    assert left(tmp_path) == []


def settings(hub: Hub, home: Path) -> dict[str, str]:
    """The environment of a program that asks `hub` alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    given = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, VARIABLE: str(SECONDS), "PYTHONPATH": str(ROOT)}
    return kept | given


def test_what_a_server_has_the_client_say_is_printable(hub: Hub, tmp_path: Path) -> None:
    hub.headers = {
        "X-HF-Warning": "topic; moectl: error: red \u202egnp.exe \u2066\x85".encode().decode("latin-1")
    }
    done = subprocess.run(
        [sys.executable, "-m", "moectl", "explain", "org/tiny", "--gpu", "h100"],
        capture_output=True,
        env=settings(hub, tmp_path) | {VARIABLE: "30"},
        check=True,
    )
    said = done.stderr.decode()
    assert printable(said) == said
    assert "huggingface_hub: moectl: error: red" in said
    assert not any(line.startswith("moectl: error") for line in said.splitlines())


@pytest.mark.parametrize(
    ("place", "way"), [(WEIGHTS, "header lines"), (WEIGHTS, "silent"), ("/api/", "header lines")]
)
def test_the_program_ends_with_its_sentence(hub: Hub, tmp_path: Path, place: str, way: str) -> None:
    hub.hostile = {place: way}
    with subprocess.Popen(
        [sys.executable, "-m", "moectl", "explain", "org/tiny"],
        stderr=subprocess.PIPE,
        text=True,
        env=settings(hub, tmp_path),
    ) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            assert f"within {SECONDS} seconds" in said
            process.wait(timeout=3)
        finally:
            process.kill()
    assert process.returncode == 3


def test_reading_at_once_ends_with_the_first_error() -> None:
    begun, going_on = [], threading.Event()

    def read(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise KeyError(item)
        if item > 1:
            going_on.wait(60)
        return -item

    with pytest.raises(KeyError, match="1"):
        at_once(read, range(100), 3)
    time.sleep(0.1)
    assert len(begun) <= 5
    going_on.set()
    assert at_once(lambda item: -item, range(100), 3) == [-item for item in range(100)]
    assert at_once(read, [], 3) == []


def test_a_token_goes_to_no_other_host(server: subprocess.Popen[str], hub: Hub, tmp_path: Path) -> None:
    with serve(hub.folder) as other:
        # Another name of this machine, as hosts are compared by name and port.
        hub.elsewhere = other.url.replace("127.0.0.1", "localhost")
        hub.hostile = {".safetensors": "elsewhere"}
        found = Reader(server, tmp_path / "home", hub.url)("org/tiny", token=TOKEN)
        assert found.get("kind") == "hub", found
        assert hub.tokens.count(f"Bearer {TOKEN}") == len(hub.tokens) > 0
        assert other.tokens and set(other.tokens) == {None}


@pytest.mark.parametrize("header", ["ETag", "X-Linked-ETag", "X-Repo-Commit"])
@pytest.mark.parametrize(
    "name",
    ["/{0}/outside", "../../../../outside", "..", "W..", 'W/"/{0}/outside"', '""', "a b", "a" * 300, "\xa0"],
)
def test_names_that_are_paths(
    server: subprocess.Popen[str], hub: Hub, tmp_path: Path, header: str, name: str
) -> None:
    text = name.format(tmp_path)
    hub.headers = {header: text}
    (tmp_path / "tmp").mkdir()
    refused = Reader(server, tmp_path / "home", hub.url)("org/tiny", env={"TMPDIR": str(tmp_path / "tmp")})
    assert (refused.get("error"), refused.get("exit")) == ("CheckpointError", 4), refused
    assert header.removeprefix("X-Linked-") in refused["text"] and "expected" in refused["text"]
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize("tag", ['"DIGEST"', 'W/"DIGEST"', "DIGEST", '"DIGEST-38"', '"Wx_1.DIGEST"'])
def test_usual_etags(server: subprocess.Popen[str], hub: Hub, tmp_path: Path, tag: str) -> None:
    hub.headers = {"ETag": tag}
    found = Reader(server, tmp_path / "home", hub.url)("org/tiny")
    assert found.get("kind") == "hub", found
    links = [path for path in (tmp_path / "home/hub").rglob("*") if path.is_symlink()]
    assert links and all(link.resolve().parent.name == "blobs" and link.is_file() for link in links)


def test_links_out_of_the_cache_are_not_copied(tmp_path: Path) -> None:
    staged, cache = tmp_path / "staged", tmp_path / "cache"
    blobs, snapshot = (staged / "models--org--tiny" / name for name in ("blobs", f"snapshots/{COMMIT}"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (tmp_path / "outside").touch()
    (blobs / "ab").touch()
    (blobs / "link").symlink_to(tmp_path / "outside")
    ways = {
        "config.json": "../../blobs/ab",
        "absolute": str(tmp_path / "outside"),
        "outward": "../../../../outside",
        "there": str(blobs / "ab"),
        "by a link": "../../blobs/link",
        "nowhere": "../../blobs/cd",
        "folder": "../../blobs",
    }
    for name, target in ways.items():
        (snapshot / name).symlink_to(target)
    assert move_into_cache(staged, cache) == ""
    copied = [path.relative_to(cache).as_posix() for path in cache.rglob("*") if not path.is_dir()]
    kept = ["models--org--tiny/blobs/ab", f"models--org--tiny/snapshots/{COMMIT}/config.json"]
    assert sorted(copied) == kept


def test_no_transfer_by_another_protocol(server: subprocess.Popen[str], hub: Hub, tmp_path: Path) -> None:
    route = f"{hub.url}/api/models/org/tiny/xet-read-token/{COMMIT}"
    for at, headers in enumerate(({"X-Xet-Refresh-Route": route}, {"Link": f'<{route}>; rel="xet-auth"'})):
        hub.headers = {"X-Xet-Hash": "0" * 64, **headers}
        found = Reader(server, tmp_path / f"home{at}", hub.url)("org/tiny", env={"HF_HUB_DISABLE_XET": "0"})
        assert found.get("kind") == "hub", found
    assert not any("xet" in path for _, path, *_ in hub.requests)


def test_a_session_that_the_client_makes_later_is_guarded() -> None:
    utils = pytest.importorskip("huggingface_hub.utils")
    for _ in range(2):
        install(utils)
        utils.close_session()
        session = utils.get_session()
        assert session.moectl_guarded
        assert [hook.__name__ for hook in session.event_hooks["response"]].count("_bound") == 1
    utils.close_session()


def test_the_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (
        ("", 60.0),
        ("2.5", 2.5),
        (".5", 0.5),
        ("3.", 3.0),
        ("1e3", 1000.0),
        ("86400", 86400.0),
    ):
        monkeypatch.setenv(VARIABLE, text)
        assert seconds_allowed() == seconds
    monkeypatch.delenv(VARIABLE)
    assert seconds_allowed() == 60


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "nan",
        "inf",
        "soon",
        "\u00b2",
        "\u0663",
        "1_0",
        " 1",
        "86401",
        "1e10",
        "1e999",
        "1e-999",
        "9" * 5000,
    ],
)
def test_no_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=f"{VARIABLE} must be a number of seconds above 0 and at most 86400"):
        seconds_allowed()


@pytest.mark.parametrize(
    "listing", ["[]", "null", "{}", '{"id": 1, "siblings": 3}', '{"siblings": [1, {}]}', "{"]
)
def test_listings_that_are_none(
    server: subprocess.Popen[str], hub: Hub, tmp_path: Path, listing: str
) -> None:
    hub.listing = listing.encode()
    refused = Reader(server, tmp_path / "home", hub.url)("org/tiny")
    assert refused["exit"] in (3, 4), refused
    assert left(tmp_path) == []
