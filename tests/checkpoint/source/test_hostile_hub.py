"""Servers that keep a reader waiting or send without end: a sentence in time, and nothing in the cache."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moectl.checkpoint.source.hub_limits import VARIABLE, seconds_allowed
from moectl.errors import UsageError
from support.hub_server import HOSTILE, TOKEN, Hub, serve

from .test_hub import Reader
from .test_hub import server as server

SECONDS = 1.5
"""What the reader is allowed."""

PLACES = ("/api/", "config.json", ".safetensors")


@pytest.fixture
def hub(tiny_gpt_oss: Path) -> Iterator[Hub]:
    with serve(tiny_gpt_oss) as running:
        yield running


def left(tmp_path: Path) -> list[Path]:
    """The files in the caches and in the folder of temporary files."""
    return [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", [way for way in HOSTILE if way != "elsewhere"])
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


def test_a_token_goes_to_no_other_host(server: subprocess.Popen[str], hub: Hub, tmp_path: Path) -> None:
    with serve(hub.folder) as other:
        # Another name of this machine, as hosts are compared by name and port.
        hub.elsewhere = other.url.replace("127.0.0.1", "localhost")
        hub.hostile = {".safetensors": "elsewhere"}
        found = Reader(server, tmp_path / "home", hub.url)("org/tiny", token=TOKEN)
        assert found.get("kind") == "hub", found
        assert hub.tokens.count(f"Bearer {TOKEN}") == len(hub.tokens) > 0
        assert other.tokens and set(other.tokens) == {None}


def test_the_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert seconds_allowed() == 60
    monkeypatch.setenv(VARIABLE, "2.5")
    assert seconds_allowed() == 2.5
    for text in ("0", "-1", "nan", "inf", "soon", "\u00b2"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(UsageError, match=VARIABLE):
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
