"""`moectl peers` and `moectl bench --with`: fetching from an index on this machine, and finding it again."""

from pathlib import Path

import pytest

from moectl.capabilities.unpacked_libraries import LIBRARIES
from moectl.cli import peers as command
from moectl.cli.output import Output
from moectl.errors import Unavailable
from moectl.peers import pinned
from support.invoking import moectl
from support.package_index import Server, peer, server

__all__ = ["peer", "server"]  # fixtures


@pytest.fixture(autouse=True)
def one_pinned_peer(peer: pinned.PinnedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small Humming is all that is pinned, for this machine."""
    monkeypatch.delenv("MOECTL_PEERS", raising=False)
    monkeypatch.setattr(command, "LIBRARIES", {"humming": "humming"})
    monkeypatch.setattr(command, "pinned_peer", lambda name: peer)


def test_what_is_fetched_is_found_by_other_commands(user_cache: Path, server: Server) -> None:
    (before,) = moectl("peers", "--json").document["libraries"]
    assert before["state"] == "not here" and not user_cache.exists() and server.asked == []
    done = moectl("peers", "humming", "--json")
    (library,) = done.document["libraries"]
    folder = user_cache / "peers"
    assert library["state"] == "fetched" and library["path"] == str(folder / "humming")
    assert (
        done.document["folder"] == str(folder) and done.document["fetched_bytes"] == library["download_bytes"]
    )
    assert "fetching humming (humming-kernels 0.1.19)" in done.stderr
    asked = len(server.asked)
    assert moectl("peers", "all", "--json").document["fetched_bytes"] == 0 and len(server.asked) == asked
    packages = moectl("doctor", "--json", code=None).document["packages"]
    assert {"MOECTL_PEERS/humming": "0.1.19"}.items() <= {p["name"]: p["version"] for p in packages}.items()
    explained = moectl(
        "explain", "gpt-oss-20b", "--policy", "moectl", "--packages", "installed", "-v", code=None
    )
    assert "MOECTL_PEERS/humming" in explained.stdout
    assert "humming-kernels 0.1.19" in moectl("peers").stdout


def test_a_directory_that_is_named_is_told_to_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "to carry"
    done = moectl("peers", "humming", "--peers", folder)
    assert f"MOECTL_PEERS={folder}" in done.stderr and (folder / "humming/layer.py").exists()
    monkeypatch.setenv("MOECTL_PEERS", str(folder))
    assert moectl("peers", "-q").stdout == f"humming\tfetched\t{folder}/humming\n"
    (folder / "humming/layer.py").write_text("edited = 1\n")
    done = moectl("peers", "humming")
    assert (
        "another humming than humming-kernels 0.1.19: --replace" in done.stderr
        and "another version" in done.stdout
    )
    assert "fetched" in moectl("peers", "humming", "--replace", "-q").stdout


def test_bench_fetches_what_is_missing_once(server: Server, user_cache: Path) -> None:
    arguments = ("bench", "--model", "gpt-oss-20b", "--backend", "humming", "-m", "1", "--device", "cpu")
    done = moectl(*arguments, "--with", "humming", code=None)
    assert done.code == 3 and "fetched" in done.stderr and (user_cache / "peers/humming/layer.py").exists()
    asked = len(server.asked)
    moectl(*arguments, "--with", "humming", "--offline", code=3)
    assert len(server.asked) == asked


def test_bench_without_network_or_offline_ends_with_a_sentence(server: Server, user_cache: Path) -> None:
    arguments = ("bench", "--model", "gpt-oss-20b", "--with", "humming", "-m", "1")
    offline = moectl(*arguments, "--offline", code=3)
    assert "--with humming needs files that are not on this machine" in offline.stderr and server.asked == []
    server.ranges = False
    whole = moectl(*arguments, code=3)
    assert "does not send parts of" in whole.stderr and "next: moectl peers NAME --yes" in whole.stderr
    assert moectl("peers", "humming", "--yes", "-q").stdout.startswith("humming\tfetched")


def test_a_mirror_can_be_named(server: Server, monkeypatch: pytest.MonkeyPatch, user_cache: Path) -> None:
    monkeypatch.setenv("MOECTL_INDEX_URL", f"{server.url}/simple")
    done = moectl("bench", "--model", "gpt-oss-20b", "--with", "humming", "-m", "1", code=3)
    assert "answered 404" in done.stderr and server.asked == [("/simple/humming-kernels/", "")]
    assert [path.name for path in (user_cache / "peers").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("hummin", "did you mean humming?"),
        ("humming,", "one of 'humming,' is empty"),
        ("nosuch", "Known are"),
    ],
)
def test_names_that_are_wrong(typed: str, words: str) -> None:
    for arguments in (("peers", typed), ("bench", "--model", "gpt-oss-20b", "--with", typed)):
        assert words in moectl(*arguments, code=2).stderr.replace("Did", "did")


def test_the_help_names_what_with_takes() -> None:
    words = moectl("bench", "--help").words.partition("--with <str>")[2].partition("--tokens")[0]
    assert all(name in words for name in (*LIBRARIES, command.FLASHINFER)), words


def test_flashinfer_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install 'moectl[flashinfer]'" in moectl("peers", "flashinfer", code=2).stderr
    monkeypatch.setattr(
        command, "find_package", lambda name, probe: type("Missing", (), {"present": False})()
    )
    with pytest.raises(Unavailable, match="cannot be fetched into a directory"):
        command.peer_backends("flashinfer")
    monkeypatch.setattr(command, "find_package", lambda name, probe: type("Here", (), {"present": True})())
    assert command.peer_backends("flashinfer,humming") == (*command.FLASHINFER_BACKENDS, "humming")


def test_backends_in_addition_are_rows_with_their_reasons() -> None:
    from moectl.bench import BenchSettings
    from moectl.bench.open_bench import open_bench

    settings = BenchSettings(models=("gpt-oss-20b",), tokens=(1,), also=("marlin", "torch"), device="cpu")
    bench = open_bench(settings, None, measure_rates=False)
    (choice,) = bench._choices.values()
    assert set(choice.names) == {"torch", "emulation"} and set(choice.refused) == {"marlin"}
    assert bench.pending() == 3


def test_without_names_nothing_is_fetched(server: Server) -> None:
    command.fetch_missing((), offline=True, out=Output("bench"))
    assert server.asked == []
