"""Options and checkpoints that all tests share."""

from __future__ import annotations

import gc
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest_plugins = ["support.stand_in_machine"]

# Workers share the cores, and so do processes that tests start: threads beyond the cores mostly wait for one
# another, and do so spinning. It has to be said before torch is imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    SHARE = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, SHARE)))
    # Some tests set a number of threads for the whole process; those that have to wait then do it asleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples on every run, so that a change is judged by what it changed.
settings.register_profile("steady", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes or gigabytes")


FIRST = (
    "tests/kernels/test_interpreter.py",
    "tests/synth/test_every_model.py",
    "tests/developer_tools/test_bench_peers.py",
    "tests/cli/bench/test_command.py",
    "tests/kernels/triton/hopper/test_compiled_mid.py",
    "tests/kernels/triton/hopper/test_compiled_prefill.py",
)
"""Files that take longest, which workers begin with: whoever came to one last would be alone with it."""


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.interpreting import hasten

        hasten()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leaves what is there when the first test begins out of later searches for garbage.

    Commands ask for such searches; those of thousands of tests and all of torch take a second each.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_is_no_garbage() -> Iterator[None]:
    """The same for what the tests of a file have imported and keep: workers come to hold a gigabyte."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless asked for, and GPU tests where there is no GPU, each with its reason.

    Of the cases of one function that are skipped for the same reason, one stays and says how many there are:
    thousands of them would take a worker's time each. Files that take longest come first.
    """
    reasons = {}
    if not config.getoption("--slow"):
        reasons["slow"] = "takes minutes or gigabytes; run with --slow"
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            reasons["gpu"] = "needs a CUDA GPU, torch.cuda.is_available() is False"
    skipped: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                skipped[item.nodeid.partition("[")[0], reason].append(item)
                break
    for (_, reason), (item, *more) in skipped.items():
        item.add_marker(pytest.mark.skip(reason=f"{reason} ({1 + len(more)} cases)" if more else reason))
    left_out = [item for _, *more in skipped.values() for item in more]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    places = {config.rootpath / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def user_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names for the tests' cache folders, none of which is there."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def user_cache(user_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, not made yet: what a user has measured decides no test.

    It is not in `tmp_path`: to name a folder for a test, pytest looks through the folders of all before it.
    """
    folder = next(user_caches)
    monkeypatch.setenv("MOECTL_CACHE", str(folder))
    return folder


@pytest.fixture
def quick_machine() -> Iterator[None]:
    """For tests that time calls and ask for no speed, see `support.quick_timing`."""
    from support.quick_timing import quick_timing

    with quick_timing():
        yield


@pytest.fixture(scope="session")
def tiny_gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss checkpoint in two files: layers 0 and 1, 8 experts, top-4, hidden 256, intermediate 192."""
    from moectl.synth import synthesize

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-gpt-oss"
    return synthesize(
        "openai/gpt-oss-20b",
        folder,
        layers=2,
        experts=8,
        hidden=256,
        intermediate=192,
        shard_bytes=800_000,
    )


@pytest.fixture(scope="session")
def tiny_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-K2-Thinking checkpoint in three files: layers 1 and 2, 8 experts, top-4, 256 x 128."""
    from moectl.synth import synthesize

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-kimi"
    return synthesize(
        "moonshotai/Kimi-K2-Thinking",
        folder,
        layers=2,
        experts=8,
        hidden=256,
        intermediate=128,
        top_k=4,
        shard_bytes=700_000,
    )


@pytest.fixture(scope="session")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a built-in model without data into a folder whose name, like its config, does not tell it.

    Called with the model's name, and with ``layers=N`` for a model of its first N MoE layers.
    """
    from devtools.sparse_checkpoint import write_sparse

    from moectl.checkpoint.config.fields import KEYS
    from moectl.checkpoint.source.catalogue import read_entry

    def write(model: str, layers: int | None = None) -> Path:
        entry = read_entry(model)
        config: dict[str, Any] = {key: value for key, value in entry.config.items() if key != "_name_or_path"}
        if layers is not None:
            kept = entry.layers[:layers]
            counted = dict.fromkeys(KEYS["layers"], kept[-1] + 1)
            text = config.get("text_config")
            if isinstance(text, dict):
                config["text_config"] = {**text, **{key: counted[key] for key in counted if key in text}}
            config |= {key: counted[key] for key in counted if key in config}
            rows = []
            for row in entry.tensors:
                own = row.layers if row.layers is None else tuple(it for it in row.layers if it <= kept[-1])
                rows += [replace(row, layers=own)] if own is None or own else []
            entry = replace(entry, layers=kept, tensors=tuple(rows))
        folder = tmp_path_factory.mktemp("sparse") / "weights"
        write_sparse(replace(entry, config=config), folder)
        return folder

    return write
