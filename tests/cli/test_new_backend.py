"""A backend that runs: a record, a runner, a line for each, and it is run, timed and examined."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moectl.doctor import runnable_backends
from moectl.doctor.runnable_backends import BackendStatus, backend_statuses
from moectl.environment import Packages, detect_cpu, installed_packages
from moectl.kernels import registry
from moectl.kernels.registry import RunnerEntry
from moectl.oracle.registry import policy_named
from support.fake_backends import add_record
from support.invoking import moectl

RUNNER = """
from dataclasses import replace

import toy_kernels
from moectl.kernels.registry import runner_for

RUNNER = replace(runner_for("torch"), name="toy", tactic=lambda prepared, tokens: "toy tile")
"""
RECORD = """
from moectl.oracle.gpu_archs import CPU
from moectl.oracle.backend import Backend, Capability, ExpertsClass
from moectl.oracle.engines.moectl.own import NAIVE

TOY = Backend(
    name="toy",
    engine_name="toy",
    variants=(ExpertsClass("toy", Capability(arch=(CPU,), parallel=NAIVE, act_order=False)),),
    runner="toy",
)
"""
NEEDS = ("torch", "toy_kernels")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the two files of a backend that is registered; what it imports is not there."""
    (tmp_path / "toy_runner.py").write_text(RUNNER)
    (tmp_path / "toy_record.py").write_text(RECORD)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("toy_runner", "toy_record", "toy_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    record = __import__("toy_record")
    monkeypatch.setitem(registry.RUNNERS, "toy", RunnerEntry("toy_runner:RUNNER", NEEDS))
    add_record(monkeypatch, record.TOY)
    return tmp_path


def install(folder: Path) -> None:
    (folder / "toy_kernels").mkdir()
    (folder / "toy_kernels" / "__init__.py").write_text("")


def test_it_is_run_and_timed(toy: Path, tiny_gpt_oss: Path) -> None:
    done = moectl("run", tiny_gpt_oss, "--device", "cpu", "--backend", "toy", code=1)
    assert "the toy backend needs the package toy_kernels" in done.stderr
    assert "pip install toy_kernels" in done.stderr
    install(toy)
    document = moectl("run", tiny_gpt_oss, "--device", "cpu", "--json").document
    assert document["backend"] == "toy" and document["ok"]
    document = moectl("run", tiny_gpt_oss, "--device", "cpu", "--backend", "all", "--json").document
    assert [one["backend"] for one in document["backends"]][:2] == ["toy", "torch"] and document["ok"]
    rows = moectl("bench", tiny_gpt_oss, "--device", "cpu", "-m", 1, "--repeats", 2, "--json").document[
        "rows"
    ]
    (row,) = (row for row in rows if row["backend"] == "toy")
    assert row["median_us"] > 0 and row["tactic"] == "toy tile"


def status(libraries: dict[str, str]) -> BackendStatus:
    statuses = backend_statuses(policy_named("moectl"), detect_cpu(), Packages(), libraries)
    return next(status for status in statuses if status.name == "toy")


def test_doctor_knows_what_it_needs(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_torch(name: str, where: object = None) -> Path | None:
        return None if name == "torch" else installed_packages.package_folder(name)

    monkeypatch.setattr(runnable_backends, "package_folder", without_torch)
    assert [verdict.wanted for verdict in status({}).against] == list(NEEDS)
    install(toy)
    assert not status({}).runs and [verdict.wanted for verdict in status({}).against] == ["torch"]
    assert status({"torch": "2.13.0"}).runs
    monkeypatch.undo()
    assert "toy" not in registry.RUNNERS


def test_every_record_has_a_runner_with_the_packages_that_it_imports() -> None:
    """One process for each: nothing else of moectl may have imported what an entry leaves out."""
    records = [backend for row in policy_named("moectl").rows() for backend in row.backends()]
    assert {record.runner for record in records} == set(registry.RUNNERS)
    for packages in {entry.packages for entry in registry.RUNNERS.values()}:
        paths = [entry.path for entry in registry.RUNNERS.values() if entry.packages == packages]
        code = (
            "import sys\n"
            "from moectl.kernels.registry import RUNNERS\n"
            "assert 'torch' not in sys.modules\n"
            "import torch\n"
            f"for name in {sorted({'triton', 'flashinfer', 'vllm'} - set(packages))}:\n"
            "    for module in [it for it in sys.modules if it.partition('.')[0] == name]:\n"
            "        del sys.modules[module]\n"
            "    sys.modules[name] = None\n"
            f"found = [entry.load() for entry in RUNNERS.values() if entry.path in {paths!r}]\n"
            f"print(len(found))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == len(paths)
