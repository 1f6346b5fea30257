"""Where `moectl explain` finds this machine's device and packages."""

import os
import sys
from pathlib import Path

import pytest

from support.invoking import moectl

GPT = "openai/gpt-oss-120b"


@pytest.fixture
def gpu_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an H100, whose engine is in an environment of its own."""
    script = tmp_path / "nvidia-smi"
    row = "0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.95.05, Disabled"
    script.write_text(f"#!/bin/sh\necho '{row}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return tmp_path


def engine_environment(folder: Path, version: str) -> Path:
    """A virtual environment with vLLM and Triton's MoE kernels; its interpreter cannot be run."""
    site = folder / "lib" / "python3.12" / "site-packages"
    (site / "vllm" / "third_party" / "triton_kernels").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "vllm" / "third_party" / "triton_kernels" / "matmul_ogs.py").write_text("")
    metadata = site / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "pyvenv.cfg").write_text("home = /nowhere/bin\nversion = 3.12.4\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text("")
    return folder


def test_without_the_engine_this_machine_gets_the_answer_of_the_named_gpu(gpu_box: Path) -> None:
    asked = ("explain", GPT, "--tp", "8", "--offline", "--json")
    here, named = moectl(*asked), moectl(*asked, "--gpu", "h100")
    chosen = [
        [group["decision"]["chosen"]["backend"] for group in done.document["groups"]]
        for done in (here, named)
    ]
    assert chosen[0] == chosen[1] == ["triton"]
    says = "vLLM is not installed in this environment: its default packages (profile full) are assumed"
    assert f"{says}; --packages installed detects" in here.stderr
    assert here.document["assumptions"][0].startswith(says)
    detected = moectl(*asked, "--packages", "installed")
    assert detected.document["assumptions"] == []
    assert detected.document["groups"][0]["decision"]["chosen"]["backend"] != "triton"


def test_times_are_predicted_for_a_gpu_that_only_its_driver_knows(bench) -> None:
    gpu = {"uuid": "GPU-0", "name": "NVIDIA GeForce RTX 4080", "memory": 16 << 30, "capability": (8, 9)}
    asked = ("explain", GPT, "--policy", "moectl", "--offline", "--json")
    bench.nvml(gpu)
    assert "are not known" in moectl(*asked).document["groups"][0]["predicted"]["reason"]
    bench.nvml({**gpu, "cores": 9728, "most_memory": 11201, "width": 256})
    predicted = moectl(*asked).document["groups"][0]["predicted"]
    # 716.9 GB/s, for the four experts that a token takes.
    assert predicted["reason"] == "" and predicted["times"][0]["us"] > 4 * 13.2e6 / 716.9e3


def test_without_a_gpu_the_answer_is_said_to_be_the_cpus(bench) -> None:
    said = "no GPU was found, so this is the answer for the CPU; --gpu NAME asks for another device"
    # Whether vLLM has a kernel depends on this machine's CPU.
    assert said in " ".join(moectl("explain", GPT, "--offline", code=None).stderr.split())
    assert said not in " ".join(moectl("explain", GPT, "--offline", "--gpu", "cpu", code=1).stderr.split())


def test_another_environment_is_looked_into(gpu_box: Path) -> None:
    asked = ("explain", GPT, "--tp", "8", "--offline", "--json", "--python")
    for name in ("", "bin", "bin/python"):
        folder = gpu_box / "venv"
        if not folder.exists():
            engine_environment(folder, "0.29.0")
        done = moectl(*asked, folder / name)
        assert done.document["groups"][0]["decision"]["chosen"]["backend"] == "triton"
        warning = "vLLM 0.29.0 is installed, these rules are vLLM 0.28.0's; its choice may differ"
        assert done.document["warnings"] == [warning]
        assert f"moectl: warning: {warning}" in done.stderr
        assert (done.document["installed_engine"], done.document["assumptions"]) == ("0.29.0", [])
        assert done.document["python"] == str(folder / name)
    same = moectl(*asked, engine_environment(gpu_box / "same", "0.33.0"))
    assert same.document["warnings"] == [] and "warning" not in same.stderr
    older = moectl(*asked, engine_environment(gpu_box / "older", "0.31.0"))
    assert older.document["warnings"] == [] and older.document["policy"] == "vllm-0.31.0"
    refused = moectl(*asked, gpu_box / "same", "--packages", "full", code=2)
    assert "--python and --packages contradict each other" in refused.stderr
    refused = moectl(*asked, gpu_box / "nowhere", code=2)
    assert "there is no such file or directory" in refused.stderr


def test_a_driver_that_fails_gets_no_answer_for_the_cpu(gpu_box: Path) -> None:
    (gpu_box / "nvidia-smi").write_text("#!/bin/sh\necho 'cannot communicate with the driver'\nexit 9\n")
    done = moectl("explain", GPT, "--offline", code=1)
    assert done.stdout == ""
    assert done.stderr.startswith("moectl: error: nvidia-smi: cannot communicate with the driver\n")
    moectl("explain", GPT, "--offline", "--gpu", "h100")
