"""Devices by name, this machine's device from a stand-in `nvidia-smi`, and packages without imports."""

import json
import stat
import sys
from pathlib import Path

import pytest

from moectl import environment
from moectl.environment import DATA, detect_cpu, detect_device, find_device, nvidia
from moectl.environment.named_devices import nominal_memory, squeeze
from moectl.environment.nvidia import DriverFailure
from moectl.errors import Unavailable, UsageError
from moectl.oracle.machine_packages import packages_from
from moectl.oracle.registry import known_packages

TABLE = json.loads((DATA / "gpus.json").read_text())


@pytest.mark.parametrize(
    ("name", "arch", "sms"),
    [
        ("h100", "sm90", 132),
        ("NVIDIA H100 80GB HBM3", "sm90", 132),
        ("H200", "sm90", 132),
        ("RTX 5090", "sm120", 170),
        ("rtx-4090", "sm89", 128),
        ("Tesla T4", "sm75", 40),
        ("sm90a", "sm90", 132),
        ("sm_100", "sm100", 148),
        ("sm87", "sm87", 0),
        ("mi300x", "gfx942", 304),
        ("gfx950", "gfx950", 256),
        ("gfx1103", "gfx1103", 0),
        ("sm110", "sm110", 20),
        ("sm53", "sm53", 0),
        ("gb10", "sm121", 48),
    ],
)
def test_devices_by_name(name: str, arch: str, sms: int) -> None:
    device = find_device(name)
    assert (device.arch, device.sms) == (arch, sms)
    assert device.platform == ("rocm" if arch.startswith("gfx") else "cuda")


def test_cpus_by_name() -> None:
    assert find_device("cpu").features == frozenset()
    assert find_device("cpu-amx").features == {"amx"}
    assert find_device("CPU").platform == "cpu"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h10", "h100"),
        ("b20", "b200"),
        ("mi300", "mi300x"),
        ("sm20", "sm"),
        ("sm95", "sm90"),
        ("sm101", "sm100"),
        ("gfx000", "gfx90"),
    ],
)
def test_unknown_devices_get_near_matches(name: str, near: str) -> None:
    with pytest.raises(UsageError, match="no device is called") as caught:
        find_device(name)
    assert near in caught.value.hint


def test_table_rows_are_complete_sourced_and_plausible() -> None:
    spellings: dict[str, str] = {}
    for key, row in TABLE["gpus"].items():
        assert row["source"], key
        assert find_device(key).name == row["names"][0]
        assert 8 <= row["memory_gib"] <= 512, key
        if "memory_mib" in row:
            assert 0.92 <= row["memory_mib"] / 1024 / row["memory_gib"] <= 1.0, key
        if row["bandwidth_tb_s"] is not None:
            assert 0.2 <= row["bandwidth_tb_s"] <= 10, key
        bf16, fp8 = row["bf16_tflops"], row["fp8_tflops"]
        if bf16 and fp8:
            assert 1.9 <= fp8 / bf16 <= 2.1, key
        for spelling in (key, *row["aliases"], *row["names"]):
            assert spellings.setdefault(squeeze(spelling), key) == key
    for arch, key in TABLE["representatives"].items():
        assert TABLE["gpus"][key]["arch"] == arch
        assert find_device(arch).arch == arch


@pytest.mark.parametrize(
    ("name", "mib", "sold"),
    [
        ("l40s", 46068, 48),
        ("h200", 143771, 141),
        ("a100", 81920, 80),
        ("NVIDIA A10", 23028, 24),
        ("sm89", 46068, 48),
    ],
)
def test_memory_is_what_the_driver_reports(name: str, mib: int, sold: int) -> None:
    device = find_device(name)
    assert device.memory_bytes == mib * 2**20 and nominal_memory(device.name) == sold


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH; with a stand-in nvidia-smi of two GPUs."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!{sys.executable}\n"
        "print('0, GPU-aaaa-1, NVIDIA H200, 143771, 9.0, 580.95.05, Disabled')\n"
        "print('1, GPU-bbbb-2, NVIDIA Wonder, [N/A], 12.1, 580.95.05, [N/A]')\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvidia, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def test_the_first_gpu_is_detected_and_its_row_found(machine: Path) -> None:
    device = detect_device()
    assert (device.platform, device.arch, device.name) == ("cuda", "sm90", "NVIDIA H200")
    assert device.memory_bytes == 143771 << 20
    assert device.sms == 132


@pytest.mark.parametrize("visible", ["1", "1,0", "GPU-bbbb"])
def test_cuda_visible_devices_is_honoured(
    machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = detect_device()
    assert (device.arch, device.name, device.sms, device.memory_bytes) == ("sm121", "NVIDIA Wonder", 0, 0)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_leave_the_cpu(machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect_device().platform == "cpu"


def test_a_gpu_that_is_not_there_is_an_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(Unavailable, match="asks for GPU '7'"):
        detect_device()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise SystemExit(9)", "nvidia-smi: exited with status 9"),
        ("raise SystemExit('cannot talk\\nto it')", "nvidia-smi: cannot talk to it"),
        ("print('No devices were found')", "nvidia-smi: No devices were found"),
        ("print('a,b,c,d,e,f,g')", "nvidia-smi: a,b,c,d,e,f,g"),
        ("pass", "nvidia-smi lists no GPU"),
    ],
)
def test_a_driver_that_fails_is_an_error_in_its_own_words(
    machine: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    machine.write_text(f"#!{sys.executable}\n{body}\n")
    with pytest.raises(DriverFailure) as caught:
        detect_device()
    assert (caught.value.what, caught.value.exit_code) == (words, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_device().platform == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    machine.unlink()
    assert detect_device().platform == "cpu"


def test_the_cpu_has_cores_and_memory() -> None:
    device = detect_cpu()
    assert device.sms >= 1
    assert device.memory_bytes > 1 << 20
    assert device.arch


def test_cpu_features_come_from_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/cpuinfo": "vendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: fpu amx_tile avx512f\n",
        "/proc/meminfo": "MemTotal:       1024 kB\n",
    }
    monkeypatch.setattr(environment.detection, "text_or_empty", lambda file: files[str(file)])
    device = detect_cpu()
    assert device.features == {"amx", "avx512"}
    assert (device.name, device.memory_bytes) == ("Xeon", 1 << 20)


def make(folder: Path, name: str, text: str = "") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site folder, the only place to import from beside the standard library."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MOECTL_PEERS", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for probe in known_packages().values():
        for module in probe.modules:
            # What another test has imported would be found without looking at the path.
            monkeypatch.delitem(sys.modules, module.split(".")[0], raising=False)
    return tmp_path


def test_packages_are_found_without_being_imported(site: Path) -> None:
    make(site, "flashinfer/__init__.py", "raise RuntimeError('imported')\nfrom .x import fp4_quantize\n")
    make(site, "flashinfer/fused_moe/__init__.py", "from .core import cutlass_fused_moe\n")
    make(site, "flashinfer_python-0.7.2.dist-info/METADATA", "Name: flashinfer-python\nVersion: 0.7.2\n")
    make(site, "vllm/__init__.py", "raise RuntimeError('imported')\n")
    make(site, "vllm/third_party/triton_kernels/matmul_ogs.py")
    found = packages_from(None)
    assert found.versions == {"flashinfer": "0.7.2", "triton_kernels": "", "vllm": ""}
    assert found.has("vllm") and not found.has("vllm", "_moe_C*.so")
    assert found.has("flashinfer", "fused_moe.cutlass_fused_moe")
    assert found.has("flashinfer", "fp4_quantize")
    assert not found.has("flashinfer", "fused_moe.trtllm_bf16_moe")
    assert not found.has("deep_gemm")


def test_an_unrelated_package_of_the_same_name_does_not_count(site: Path) -> None:
    make(site, "triton_kernels/__init__.py")
    assert "triton_kernels" not in packages_from(None).versions


def test_switches_of_this_process_are_read_for_what_is_installed_only(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert packages_from(None).env["VLLM_USE_DEEP_GEMM"] == "0"
    assert packages_from(None, {"VLLM_USE_DEEP_GEMM": "1"}).env["VLLM_USE_DEEP_GEMM"] == "1"
    assert packages_from("none").env == {}


def test_profiles_and_lists() -> None:
    assert set(packages_from("bare").versions) == {"deep_ep"}
    assert packages_from("full", {"A": "1"}).env["A"] == "1"
    listed = packages_from("flashinfer, humming=0.1.19,nvcc")
    assert listed.versions == {"flashinfer": "", "humming": "0.1.19", "nvcc": "", "flashinfer_cubin": ""}
    assert packages_from("none").versions == {}
    with pytest.raises(UsageError, match="no package or profile 'flashinfr'"):
        packages_from("flashinfr")


@pytest.mark.parametrize(
    ("stated", "usable"),
    [
        ("flashinfer", True),
        ("flashinfer=0.7.2", True),
        ("flashinfer=0.7.2.post1+cu130", True),
        ("flashinfer=0.10", True),
        ("flashinfer=0.7.1", False),
        ("flashinfer=0.1.0", False),
        ("humming=0.1.18", False),
        ("quark=0.0.1", True),
        ("full,flashinfer=0.1.0", False),
        ("flashinfer=0.1.0,flashinfer", True),
    ],
)
def test_a_stated_version_counts(stated: str, usable: bool) -> None:
    package = stated.split(",")[-1].split("=")[0]
    found = packages_from(stated)
    assert found.has(package) == usable
    assert found.has(package, "fused_moe.cutlass_fused_moe") == usable


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a version such as flashinfer=1\.2\.3, got 'new'"):
        packages_from("flashinfer=new")
