"""GPUs of a machine from stand-in drivers and kernel files: several, hidden ones, slices, three makers."""

import re
import sys
from pathlib import Path

import pytest

from moectl.environment import (
    detect_device,
    detect_gpus,
    gpu_clocks,
    gpu_links,
    nvidia,
    nvidia_listing,
    nvidia_smi,
    nvml,
)
from moectl.environment.gpus import Gpu, cut_short, visible_gpus
from moectl.environment.named_devices import Device
from moectl.environment.nvidia import DriverFailure, nvidia_answer
from moectl.environment.sysfs_gpus import amd_gpus, gfx_name, intel_gpus
from moectl.errors import Unavailable

REAL_PATH = list(sys.path)
SOURCES = "".join(Path(str(module.__file__)).read_text() for module in (nvml, gpu_clocks, gpu_links))
H100 = "0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.95.05, {mig}"
H200 = "\n1, GPU-bbbb, NVIDIA H200, 143771, 9.0, 580.95.05, Disabled"
SLICES = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
  MIG 1g.10gb     Device  0: (UUID: MIG-1111)
  MIG 3g.40gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)"""


def test_every_gpu_is_listed_with_its_driver(bench) -> None:
    bench.gpus(H100.format(mig="Disabled") + H200)
    found = detect_gpus()
    assert [(gpu.index, gpu.device.name, gpu.driver) for gpu in found] == [
        ("0", "NVIDIA H100 80GB HBM3", "580.95.05"),
        ("1", "NVIDIA H200", "580.95.05"),
    ]
    assert nvidia_smi.driver_cuda() == "13.0"


def test_a_split_gpu_is_its_slices(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.gpus(H100.format(mig="Enabled") + H200, SLICES)
    found = detect_gpus()
    assert [(gpu.index, gpu.mig, gpu.device.memory_bytes >> 30) for gpu in found[:2]] == [
        ("0:0", "1g.10gb", 10),
        ("0:1", "3g.40gb", 40),
    ]
    assert found[0].device.name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert (found[0].device.sms, found[0].device.bandwidth, found[0].device.bf16_flops) == (0, 0, 0)
    assert found[2].device.sms == 132
    assert detect_device() == found[0].device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    assert detect_device() == found[1].device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert detect_device() == found[0].device


def test_a_gpu_that_is_to_be_split_and_is_not_runs_nothing(bench) -> None:
    bench.gpus(H100.format(mig="Enabled"), SLICES.splitlines()[0])
    (gpu,) = detect_gpus()
    assert "no slice is made" in gpu.remark
    with pytest.raises(DriverFailure, match="GPU 0: MIG is on and no slice is made"):
        detect_device()


def test_without_a_driver_there_is_no_gpu(bench) -> None:
    assert detect_gpus() == ()
    assert nvidia_smi.driver_cuda() == ""
    assert detect_device({"CUDA_VISIBLE_DEVICES": "3"}).platform == "cpu"


def _gpus(platform: str) -> tuple[Gpu, ...]:
    return tuple(Gpu(Device(platform, "x", f"g{n}"), str(n), f"GPU-{n}{n}") for n in range(4))


@pytest.mark.parametrize(
    ("platform", "env", "shown"),
    [
        ("cuda", {}, "0123"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2,0"}, "20"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-33"}, "3"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1,9,0"}, "1"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, ""),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
        ("cuda", {"HIP_VISIBLE_DEVICES": "1"}, "0123"),
        ("rocm", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, "1"),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "2"}, "2"),
        ("xpu", {"ZE_AFFINITY_MASK": "3"}, "3"),
    ],
)
def test_variables_hide_gpus(platform: str, env: dict[str, str], shown: str) -> None:
    assert "".join(gpu.index for gpu in visible_gpus(_gpus(platform), env)) == shown


def test_a_variable_that_asks_for_too_much_is_an_error() -> None:
    with pytest.raises(Unavailable, match="ROCR_VISIBLE_DEVICES asks for GPU '9', and this machine has 0, 1"):
        visible_gpus(_gpus("rocm"), {"ROCR_VISIBLE_DEVICES": "9,0"})
    assert cut_short(_gpus("rocm"), {"ROCR_VISIBLE_DEVICES": "9,0"}) == ("9", "0")
    assert cut_short(_gpus("cuda"), {"CUDA_VISIBLE_DEVICES": "0,7,1"}) == ("7", "1")
    for value in ("0,1", "", "-1", "GPU-33"):
        assert cut_short(_gpus("cuda"), {"CUDA_VISIBLE_DEVICES": value}) == ()
    assert cut_short(_gpus("cuda"), {}) == ()
    assert visible_gpus((), {"CUDA_VISIBLE_DEVICES": "9"}) == ()


def test_amd_gpus_come_from_the_kernels_topology(bench) -> None:
    bench.file("kfd/0/properties", "cpu_cores_count 96\nsimd_count 0\n")
    node = "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\ndevice_id 29857\nunique_id 255\n"
    bench.file("kfd/1/properties", node + "drm_render_minor 128\nmax_waves lots\n")
    bench.file("kfd/1/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 206141652992\n")
    node = "simd_count 8\nsimd_per_cu 2\ngfx_target_version 120001\n"
    bench.file("kfd/10/properties", node + "drm_render_minor 129\n")
    bench.file("drm/renderD129/device/product_name", "AMD Radeon Wonder\n")
    bench.file("amdgpu", "6.14.5\n")
    first, second = detect_gpus()
    assert (first.device.platform, first.device.arch, first.device.sms) == ("rocm", "gfx942", 304)
    assert first.device.name == "AMD Instinct MI300X"
    assert first.device.memory_bytes == 206141652992
    assert first.device.bandwidth > 5e12
    assert (first.uuid, first.driver, second.index) == ("GPU-00000000000000ff", "6.14.5", "1")
    assert (second.device.name, second.device.arch, second.device.sms) == ("AMD Radeon Wonder", "gfx1201", 4)
    assert detect_device({"HIP_VISIBLE_DEVICES": "1"}) == second.device


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (90500, "gfx950")]
)
def test_architectures_of_the_kernel_are_spelled(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_intel_gpus_are_those_that_experts_could_run_on(bench) -> None:
    for number, (vendor, device) in enumerate(
        [("0x8086", "0xe211"), ("0x8086", "0x4680"), ("0x1af4", "0xe211"), ("0x8086", "odd")]
    ):
        bench.file(f"drm/renderD{128 + number}/device/vendor", vendor + "\n")
        bench.file(f"drm/renderD{128 + number}/device/device", device + "\n")
    (gpu,) = intel_gpus()
    assert (gpu.device.platform, gpu.device.name) == ("xpu", "Intel(R) Arc(TM) Pro B60")
    assert gpu.device.memory_bytes > 0
    assert detect_device() == gpu.device
    assert amd_gpus() == ()


NVML_H100 = {
    "uuid": "GPU-aaaa",
    "name": "NVIDIA H100 80GB HBM3",
    "memory": (81559 << 20) + 12345,
    "capability": (9, 0),
    "mig": 0,
}
NVML_H200 = {
    "uuid": "GPU-bbbb",
    "name": b"NVIDIA H200",
    "memory": 143771 << 20,
    "capability": (9, 0),
}
NVML_SLICES = (
    {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "uuid": "MIG-1111"},
    {"name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "uuid": "MIG-2222"},
)


@pytest.mark.parametrize("mig", [False, True])
def test_nvml_and_nvidia_smi_list_the_same(bench, mig: bool) -> None:
    bench.gpus(H100.format(mig="Enabled" if mig else "Disabled") + H200, SLICES)
    by_process = nvidia_answer()
    assert (by_process.through, len(by_process.gpus)) == ("nvidia-smi", 3 if mig else 2)
    bench.nvml({**NVML_H100, "mig": int(mig), "slices": NVML_SLICES}, NVML_H200)
    by_library = nvidia_answer()
    assert (by_library.through, by_library.cuda) == ("NVML", "13.0")
    assert by_library.gpus == by_process.gpus


SAID = {"memory": 80 << 30, "cores": 16896, "most_memory": 2619, "width": 5120}


def listed(bench, *gpus: dict[str, object]) -> list[Device]:
    bench.nvml(*({"uuid": f"GPU-{number}", **SAID, **gpu} for number, gpu in enumerate(gpus)))
    return [gpu.device for gpu in detect_gpus()]


def test_the_driver_says_what_is_not_published(bench) -> None:
    unknown, half_known = listed(
        bench,
        {"name": "NVIDIA H100 80GB HBM2e", "capability": (9, 0)},
        {"name": "NVIDIA B300 SXM6 AC", "capability": (10, 3), "cores": 18944},
    )
    assert (unknown.sms, unknown.bandwidth) == (132, pytest.approx(3.352e12, rel=1e-4))
    assert (half_known.sms, half_known.bandwidth, half_known.bf16_flops) == (148, 8e12, 2.25e15)


def test_what_is_published_counts_before_what_the_driver_says(bench) -> None:
    (known,) = listed(bench, {"name": "NVIDIA H200", "capability": (9, 0), "cores": 128, "width": 64})
    assert (known.sms, known.bandwidth) == (132, 4.8e12)


@pytest.mark.parametrize(
    ("said", "sms", "known"),
    [
        ({"capability": (8, 0), "cores": 6912}, 108, True),
        ({"capability": (8, 9), "cores": 9728}, 76, True),
        ({"capability": (13, 0)}, 0, True),
        ({"cores": None, "width": None}, 0, False),
        ({"most_memory": None}, 132, False),
    ],
)
def test_a_driver_that_does_not_say_leaves_it_unknown(bench, said, sms: int, known: bool) -> None:
    (device,) = listed(bench, {"name": "NVIDIA of tomorrow", "capability": (9, 0), **said})
    assert (device.sms, bool(device.bandwidth)) == (sms, known)


def test_rates_of_a_slice_stay_unknown(bench) -> None:
    part = {"name": "NVIDIA of tomorrow MIG 1g.10gb", "uuid": "MIG-1"}
    (device,) = listed(
        bench, {"name": "NVIDIA of tomorrow", "capability": (9, 0), "mig": 1, "slices": (part,)}
    )
    assert (device.sms, device.bandwidth) == (0, 0.0)


def test_nvidia_smi_answers_where_nvml_does_not(bench) -> None:
    bench.gpus(H100.format(mig="Disabled"))
    bench.nvml(error="no library")
    assert nvidia_answer().through == "nvidia-smi"
    bench.nvml(error="Driver Not Loaded")
    assert nvidia_answer().through == "nvidia-smi"
    bench.file("pynvml.py", "raise ImportError('broken')")
    assert nvidia_answer().through == "nvidia-smi"
    bench.file("pynvml.py", "an_unrelated_module = True")
    assert nvidia_answer().through == "nvidia-smi"


def test_a_driver_that_fails_is_quoted(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.nvml(error="Driver/library version mismatch")
    with pytest.raises(DriverFailure) as caught:
        detect_device()
    assert caught.value.what == "NVML: Driver/library version mismatch"
    bench.failing_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with pytest.raises(DriverFailure) as caught:
        detect_device()
    assert caught.value.what == (
        "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"
    )
    assert detect_device({"CUDA_VISIBLE_DEVICES": ""}).platform == "cpu"
    bench.nvml()
    bench.file("nvidia-smi").unlink()
    with pytest.raises(DriverFailure, match="NVML lists no GPU"):
        detect_device()


def test_a_warning_beside_a_whole_list_is_not_a_failure(bench) -> None:
    bench.failing_gpus(
        f"{H100.format(mig='Disabled')}\nWARNING: infoROM is corrupted at gpu 0000:01:00.0", 14
    )
    answer = nvidia_answer()
    assert [gpu.uuid for gpu in answer.gpus] == ["GPU-aaaa"]
    assert answer.warning == "nvidia-smi: WARNING: infoROM is corrupted at gpu 0000:01:00.0"


@pytest.mark.parametrize("through", ["NVML", "nvidia-smi"])
def test_a_driver_that_hangs_is_a_failure_and_a_slow_one_is_reported(
    bench, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    monkeypatch.setattr(nvidia_listing, "SECONDS", 0.3)
    if through == "NVML":
        bench.nvml(NVML_H200, seconds=2)
    else:
        bench.failing_gpus(H100.format(mig="Disabled"), 0, seconds=2)
    with pytest.raises(DriverFailure, match=rf"{through} did not answer within 0\.3 s"):
        detect_device()
    monkeypatch.setattr(nvidia_listing, "SECONDS", 20)
    monkeypatch.setattr(nvidia, "SLOW", 1)
    answer = nvidia_answer()
    assert len(answer.gpus) == 1
    assert answer.slowness.startswith("the NVIDIA driver took 2 s to list the GPUs: persistence mode")
    monkeypatch.setattr(nvidia, "SLOW", 5)
    assert answer.slowness == ""


def test_a_gpu_that_the_driver_lost_does_not_hide_the_others(bench) -> None:
    bench.nvml({"error": "GPU is lost"}, NVML_H200)
    lost, found = detect_gpus()
    assert (lost.index, lost.remark) == ("0", "NVML: GPU is lost")
    assert detect_device() == found.device


def test_a_device_file_without_the_drivers_tools_is_not_a_machine_without_a_gpu(bench) -> None:
    bench.file("dev/nvidiactl")
    assert detect_device().platform == "cpu"
    bench.file("dev/nvidia0")
    with pytest.raises(DriverFailure, match=r"dev/nvidia0 exists, but .* are not installed") as caught:
        detect_device()
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in caught.value.hint


def test_gpus_of_others_count_where_nvidias_driver_fails(bench) -> None:
    bench.failing_gpus("no driver")
    bench.file("kfd/1/properties", "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\n")
    assert detect_device().platform == "rocm"


def test_the_stand_in_has_the_functions_of_the_real_library(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    origin = next(iter(importlib.metadata.distributions(name="nvidia-ml-py", path=REAL_PATH)))
    real = (origin.locate_file("pynvml.py")).read_text()
    bench.nvml()
    stand_in = (bench.folder / "pynvml.py").read_text()
    defined = re.findall(r"^(?:def|class) (NVMLError|nvml\w+)", stand_in, re.M)
    names = {*re.findall(r"\.(nvml\w+|NVML_\w+)", SOURCES), *re.findall(r'"(nvml\w+)"', SOURCES)}
    assert names and set(defined) <= names | {"NVMLError"}
    for name in names:
        assert re.search(rf"^(?:def |class )?{name}\b", real, re.M), name
