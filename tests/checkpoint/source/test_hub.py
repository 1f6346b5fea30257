"""Hub checkpoints from a local server, each read in a new process: the client reads settings at import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

import certifi
import pytest

from moectl.checkpoint import open_checkpoint
from support.hub_server import COMMIT, TOKEN, Hub, serve

ROOT = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).with_name("hub_reader.py")


@pytest.fixture
def served(tiny_gpt_oss: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, for the server to serve and tests to damage."""
    return Path(shutil.copytree(tiny_gpt_oss, tmp_path / "served"))


@pytest.fixture
def hub(served: Path) -> Iterator[Hub]:
    with serve(served) as running:
        yield running


@cache
def _one_authority() -> IO[str]:
    """A file of one certificate. The client of each process reads all of them; these servers need none."""
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115
    end = "-----END CERTIFICATE-----\n"
    file.write(certifi.contents().partition(end)[0] + end)
    file.flush()
    return file


class Reader:
    """Opens references, each in a fresh process with its own Hub cache."""

    def __init__(self, server: subprocess.Popen[str], home: Path, endpoint: str) -> None:
        self.server, self.home, self.endpoint = server, home, endpoint

    def __call__(self, ref: str, env: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        settings = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
        settings["SSL_CERT_FILE"] = _one_authority().name
        asked = {"ref": ref, "options": options, "environment": {**kept, **settings, **(env or {})}}
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        found: dict[str, Any] = {}
        for line in self.server.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "status" in answer:
                assert answer["status"] == 0, "its error is on stderr"
                return found
            found = answer
        raise AssertionError("the process that reads has ended; its error is on stderr")


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that `Reader` asks."""
    with subprocess.Popen(
        [sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def read(server: subprocess.Popen[str], hub: Hub, tmp_path: Path) -> Reader:
    return Reader(server, tmp_path / "home", hub.url)


def test_headers_only_then_cache(hub: Hub, read: Reader, served: Path) -> None:
    local = open_checkpoint(served)
    found = read("org/tiny")
    assert (found["kind"], found["name"], found["revision"]) == ("hub", "org/tiny", COMMIT)
    assert found["tensors"] == {k: [i.file, i.start, i.end] for k, i in local.tensors.items()}
    assert found["problem"] == repr(local.groups[0].problem)
    assert found["folder"] == "None"
    weights = [row for row in hub.requests if row[1].endswith(".safetensors")]
    assert len(weights) == len(list(served.glob("*.safetensors")))
    assert all(method == "GET" and sent and status == 206 for method, _, sent, status, _ in weights)
    assert all(f"/resolve/{COMMIT}/" in path for _, path, *_ in weights)
    assert all(size <= 128 << 10 for *_, size in weights)

    before = len(hub.requests)
    offline = read("org/tiny", offline=True)
    assert len(hub.requests) == before
    assert (offline["kind"], offline["revision"]) == ("cache", COMMIT)
    assert offline["tensors"] == found["tensors"]
    assert offline["problem"] == found["problem"]
    assert "not its weights" in offline["note"]
    assert read("org/tiny", env={"HF_HUB_OFFLINE": "1"})["kind"] == "cache"
    assert len(hub.requests) == before
    assert read("org/tiny@other", offline=True)["error"] == "Unavailable"


def headers_of(hub: Hub) -> list[tuple[str, str, str | None, int, int]]:
    return [row for row in hub.requests if ".safetensors" in row[1] and "index" not in row[1]]


def cached(tmp_path: Path, commit: str = COMMIT) -> list[Path]:
    return sorted((tmp_path / "home/assets/moectl/models--org--tiny" / commit).iterdir())


def test_headers_are_asked_for_once(hub: Hub, read: Reader, tmp_path: Path) -> None:
    first = read("org/tiny")
    asked = len(headers_of(hub))
    assert asked == 2
    assert read("org/tiny")["tensors"] == first["tensors"]
    assert read(f"org/tiny@{COMMIT}")["tensors"] == first["tensors"]
    assert len(headers_of(hub)) == asked
    assert [path.suffix for path in cached(tmp_path)].count(".header") == asked
    assert all(path.stat().st_size < 20_000 for path in cached(tmp_path))


def test_another_commit_is_read_anew(hub: Hub, read: Reader, served: Path, tmp_path: Path) -> None:
    old = read("org/tiny")
    hub.commit = "f" * 40
    shard = min(served.glob("*.safetensors"))
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    padded = content[8 : 8 + length] + b" " * 8
    shard.write_bytes(len(padded).to_bytes(8, "little") + padded + content[8 + length :])
    new = read("org/tiny")
    assert (new["kind"], new["revision"]) == ("hub", "f" * 40)
    assert new["tensors"] != old["tensors"]
    assert len(headers_of(hub)) == 4
    assert cached(tmp_path)
    assert cached(tmp_path, "f" * 40)
    # The older commit is still there for those who name it.
    assert read(f"org/tiny@{COMMIT}", offline=True)["tensors"] == old["tensors"]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another", "gone", "folder"])
def test_damaged_cache_is_fetched_again(hub: Hub, read: Reader, tmp_path: Path, damage: str) -> None:
    sound = read("org/tiny")
    one, other = (path for path in cached(tmp_path) if path.suffix == ".header")
    data = one.read_bytes()
    damaged = {
        "cut": data[:-9],
        "changed": data[:-9] + b"012345678",
        "empty": b"",
        "another": other.read_bytes(),
    }
    one.unlink()
    if damage == "folder":
        one.mkdir()
    elif damage != "gone":
        one.write_bytes(damaged[damage])
    offline = read("org/tiny", offline=True)
    assert (offline["kind"], offline["tensors"]) == ("cache", {})
    assert "not its weights" in offline["note"]
    again = read("org/tiny")
    assert again["tensors"] == sound["tensors"]
    assert len(headers_of(hub)) == 3
    if damage == "folder":
        assert "could not be cached" in again["note"]
    else:
        assert again["note"] == ""
        assert one.read_bytes() == data


def test_cache_that_cannot_be_written_is_a_note(hub: Hub, read: Reader, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/assets").touch()
    found = read("org/tiny")
    assert (found["kind"], bool(found["tensors"])) == ("hub", True)
    assert "could not be cached" in found["note"]


def test_cache_folder_of_its_own(hub: Hub, read: Reader, tmp_path: Path) -> None:
    read("org/tiny", env={"HF_ASSETS_CACHE": str(tmp_path / "elsewhere")})
    assert list((tmp_path / "elsewhere/moectl").rglob("*.header"))
    assert not (tmp_path / "home/assets").exists()


def test_headers_are_asked_for_at_once(server: subprocess.Popen[str], tmp_path: Path) -> None:
    from moectl.synth import synthesize

    sizes = {"layers": 4, "experts": 4, "hidden": 64, "intermediate": 96}
    folder = synthesize("openai/gpt-oss-20b", tmp_path / "served", shard_bytes=1, **sizes)
    with serve(folder) as hub:
        hub.slow = 0.1
        assert len(Reader(server, tmp_path / "home", hub.url)("org/tiny")["tensors"]) == 34
        assert len(headers_of(hub)) == 34
        assert 4 <= hub.most_at_once <= 8


def test_long_header_takes_a_second_range(hub: Hub, read: Reader, served: Path) -> None:
    shard = min(served.glob("*.safetensors"))
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    padded = content[8 : 8 + length] + b" " * 200_000
    shard.write_bytes(len(padded).to_bytes(8, "little") + padded + content[8 + length :])
    found = read("org/tiny")
    assert found["tensors"] == {
        k: [i.file, i.start, i.end] for k, i in open_checkpoint(served).tensors.items()
    }
    assert sum(row[1].endswith(shard.name) for row in hub.requests) == 2


def test_whole_cache_needs_no_network(hub: Hub, read: Reader, served: Path, tmp_path: Path) -> None:
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    for at, path in enumerate(sorted(served.iterdir())):
        shutil.copy(path, repository / "blobs" / str(at))
        (snapshot / path.name).symlink_to(f"../../blobs/{at}")
    found = read("org/tiny")
    assert (found["kind"], found["folder"]) == ("cache", str(snapshot))
    assert found["tensors"]
    assert hub.requests == []


def test_revision(hub: Hub, read: Reader) -> None:
    assert read("org/tiny@v1")["revision"] == COMMIT
    missing = read("org/tiny@v2")
    assert (missing["error"], missing["exit"]) == ("NotOnHub", 4)
    assert "v2" in missing["text"]


def test_no_such_model_and_catalogue(hub: Hub, read: Reader) -> None:
    missing = read("org/other")
    assert (missing["error"], missing["exit"]) == ("NotOnHub", 4)
    assert "org/other" in missing["text"]
    built_in = read("openai/gpt-oss-20b")
    assert built_in["kind"] == "catalogue"
    assert "shows no model openai/gpt-oss-20b" in built_in["note"]
    assert read("openai/gpt-oss-20b", allow_catalogue=False)["error"] == "NotOnHub"
    assert read("openai/gpt-oss-20b@main")["error"] == "NotOnHub"
    assert read("openai/gpt-oss-20b@main", offline=True)["error"] == "Unavailable"
    before = len(hub.requests)
    assert read("openai/gpt-oss-20b", offline=True)["kind"] == "catalogue"
    assert len(hub.requests) == before


def test_private_model(hub: Hub, read: Reader) -> None:
    hub.private = True
    assert "HF_TOKEN" in read("org/tiny")["text"]
    assert read("org/tiny", env={"HF_TOKEN": TOKEN})["kind"] == "hub"


def test_gated_model(hub: Hub, read: Reader) -> None:
    hub.private = "gated"
    refused = read("org/tiny")
    assert (refused["error"], refused["exit"]) == ("HubUnreachable", 3)
    assert "hf auth login" in refused["text"]
    assert read("org/tiny", token=TOKEN)["kind"] == "hub"


def test_network_down(server: subprocess.Popen[str], tmp_path: Path) -> None:
    read = Reader(server, tmp_path / "home", "http://127.0.0.1:9")
    down = read("org/tiny")
    assert (down["error"], down["exit"]) == ("HubUnreachable", 3)
    assert "HF_ENDPOINT" in down["text"]
    built_in = read("openai/gpt-oss-120b")
    assert built_in["kind"] == "catalogue"
    assert "cannot be reached" in built_in["note"]


def test_busy_server_is_asked_again(hub: Hub, read: Reader) -> None:
    hub.failures = 2
    assert read("org/tiny")["kind"] == "hub"


def test_busy_server_says_how_long(hub: Hub, read: Reader) -> None:
    hub.failures, hub.retry_after = 1, "2"
    begun = time.monotonic()
    assert read("org/tiny")["kind"] == "hub"
    assert time.monotonic() - begun > 2


def test_a_server_that_stays_busy_is_given_up(hub: Hub, read: Reader) -> None:
    hub.failures, hub.retry_after = 1000, "0"
    refused = read("org/tiny")
    assert (refused["error"], refused["exit"]) == ("HubUnreachable", 3)
    assert "503" in refused["text"]
    assert len(headers_of(hub)) <= 2 * 4


def test_answer_that_breaks_off(hub: Hub, read: Reader, tmp_path: Path) -> None:
    hub.cut = 2
    assert read("org/tiny")["kind"] == "hub"
    assert len(headers_of(hub)) == 4
    hub.commit, hub.cut = "a" * 40, 1000
    refused = read("org/tiny")
    assert refused["exit"] == 4
    assert "breaks off" in refused["text"]
    assert not (tmp_path / "home/assets/moectl/models--org--tiny" / hub.commit).exists()


@pytest.mark.parametrize("ranges", [False, "wrong"])
def test_server_without_ranges(hub: Hub, read: Reader, ranges: bool | str) -> None:
    hub.ranges = ranges
    refused = read("org/tiny")
    assert (refused["error"], refused["exit"]) == ("CheckpointError", 4)
    assert "instead of that range" in refused["text"]


def test_damaged_files_on_the_hub(hub: Hub, read: Reader, served: Path) -> None:
    hub.add = 1
    assert "lists" in read("org/tiny")["text"]
    hub.add = 0
    shard = min(served.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes((1 << 60).to_bytes(8, "little") + content[8:])
    assert str(1 << 60) in read("org/tiny")["text"]
    shard.write_bytes(content[:-1])
    refused = read("org/tiny")
    assert (refused["error"], refused["exit"]) == ("CheckpointError", 4)
    assert shard.name in refused["text"]
    shard.unlink()
    assert "does not exist" in read("org/tiny")["text"]


def test_converted_folder_on_the_hub(hub: Hub, read: Reader, served: Path) -> None:
    (served / "moectl.json").write_text("{}")
    assert "converted folder" in read("org/tiny")["text"]


def test_long_document_is_not_fetched(hub: Hub, read: Reader, served: Path) -> None:
    with (served / "config.json").open("r+b") as file:
        file.truncate(65 << 20)
    refused = read("org/tiny")
    assert (refused["error"], refused["exit"]) == ("CheckpointError", 4)
    assert f"config.json has {65 << 20} bytes" in refused["text"]
    assert not any("config.json" in row[1] for row in hub.requests)


def test_damaged_shard_among_many_stops_the_others(hub: Hub, read: Reader, served: Path) -> None:
    (served / "model.safetensors.index.json").unlink()
    for path in served.glob("*.safetensors"):
        path.unlink()
    for at in range(200):
        (served / f"{at:03}.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused = read("org/tiny")
    assert "git lfs pull" in refused["text"]
    assert sum(".safetensors" in row[1] for row in hub.requests) < 100
