"""A layer of `run` and `bench`: the policy decides once, and measured times and files are read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moectl.checkpoint import open_checkpoint
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from support.invoking import moectl

ON_CPU = ("--device", "cpu")
BENCH = ("bench", *ON_CPU, "-m", "1,3", "--repeats", "2")


@pytest.fixture(scope="module")
def folder(tiny_gpt_oss: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder of two layers, with the tensors that were not converted."""
    checkpoint, out = open_checkpoint(tiny_gpt_oss), tmp_path_factory.mktemp("once") / "out"
    layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight)
    convert(plan_conversion(checkpoint, layout), out, threads=1)
    return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the policy decided, measured times, the manifest and each safetensors header were read."""
    counts: Counter[str] = Counter()

    def counted(path: str, name: Callable[..., str]) -> None:
        module, _, function = path.rpartition(".")
        real = getattr(__import__(module, fromlist=[function]), function)

        def call(*given: Any, **named: Any) -> Any:
            counts[name(*given)] += 1
            return real(*given, **named)

        monkeypatch.setattr(path, call)

    counted("moectl.run.run_machine.select", lambda *given: "decisions")
    counted("moectl.cache.backend_times_file.known", lambda *given: "times")
    counted("moectl.convert.manifest.manifest.load_manifest", lambda *given: "manifest")
    counted("moectl.convert.manifest.checked_files.read_header", lambda file, size, name: f"header of {name}")
    return counts


COMMANDS = [
    (("run", *ON_CPU), 1, 1),
    (("run", *ON_CPU, "--layers", "all"), 2, 1),
    (("run", *ON_CPU, "--backend", "torch"), 1, 1),
    (("run", *ON_CPU, "--backend", "all"), 1, 1),
    (("run", *ON_CPU, "--backend", "torch,emulation"), 1, 2),
    (("run", *ON_CPU, "--backend", "torch", "--allow-fallback"), 1, 2),
    (BENCH, 1, 1),
    ((*BENCH, "--backend", "torch"), 1, 1),
    ((*BENCH, "--backend", "torch,emulation"), 1, 2),
]


@pytest.mark.parametrize(
    ("stored", "command", "layers", "questions"),
    # By default each command with one of the two; both have one of each kind.
    [
        pytest.param(stored, *case, marks=() if turn % 2 == place else pytest.mark.slow)
        for turn, case in enumerate(COMMANDS)
        for place, stored in enumerate(("checkpoint", "converted"))
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else str(given),
)
def test_everything_is_asked_once(
    stored: str,
    command: tuple[str, ...],
    layers: int,
    questions: int,
    calls: Counter[str],
    tiny_gpt_oss: Path,
    folder: Path,
) -> None:
    """`questions`: one for each backend asked for, and one for the policy's own order."""
    name, *options = command
    moectl(name, folder if stored == "converted" else tiny_gpt_oss, *options, "--json")
    assert calls.pop("decisions") == layers * questions
    assert calls.pop("times") == layers
    if stored == "converted":
        assert calls.pop("manifest") == 1
        assert len([file for file in calls if "layer" in file]) == layers
        assert len(calls) > layers, "the router lies in a file of its own"
    assert set(calls.values()) <= {1}, calls
