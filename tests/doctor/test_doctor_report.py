"""The state of stand-in machines: problems that are there are named, machines in order have none."""

import json
import re
import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from moectl.capabilities.unpacked_libraries import find_peers
from moectl.doctor import NOTE, PROBLEM, WARNING, DoctorReport, examine, kernel_caches
from moectl.doctor.kernel_caches import JOB_BYTES, find_jobs
from moectl.doctor.problems import remarks_on
from moectl.doctor.software import cuda_toolkit, torch_build, try_import
from moectl.environment import Packages, nvidia
from moectl.environment.python_environments import PythonEnvironment, python_environment
from moectl.errors import install_hint

H200 = "0, GPU-aaaa, NVIDIA H200, 143771, 9.0, 580.95.05, Disabled"
OLD = "1, GPU-bbbb, Tesla T4, 15360, 7.5, 580.95.05, [N/A]"
DEEP_GEMM = """
__version__ = '2.5'
# m_grouped_fp8_gemm_nt_contiguous m_grouped_fp8_fp4_gemm_nt_contiguous
"""
TORCH = """
class accelerator:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
"""
SYMBOLS = """
from .x import fp4_quantize, nvfp4_block_scale_interleave
"""
FUSED = "cutlass_fused_moe trtllm_bf16_moe trtllm_fp4_block_scale_moe trtllm_fp8_block_scale_moe " + (
    "trtllm_fp8_per_tensor_scale_moe trtllm_mxint4_block_scale_moe "
    "CuteDslMoEWrapper b12x_fused_moe mxfp8_quantize"
)


def sound(bench) -> None:
    """Installs what a machine with an H200 needs."""
    bench.gpus(H200)
    bench.package("torch", "torch", "2.13.0")
    bench.file("torch/version.py", "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    bench.package("vllm", "vllm", "0.33.0")
    bench.file("vllm/third_party/triton_kernels/matmul_ogs.py")
    bench.file("vllm/third_party/deep_gemm/__init__.py", DEEP_GEMM)


def levels(report: DoctorReport, about: str) -> list[str]:
    return [remark.level for remark in report.remarks if remark.about == about]


def own(report: DoctorReport) -> dict[str, str]:
    """What this tool's own backends for the device lack here."""
    return {
        status.name: " ".join(verdict.wanted for verdict in status.against)
        for status in report.backends
        if status.policy == "moectl" and not status.elsewhere
    }


def says(report: DoctorReport) -> str:
    return " | ".join(f"{remark.says} {remark.do}" for remark in report.remarks)


def test_a_machine_in_order_has_no_problems(bench) -> None:
    sound(bench)
    report = examine(bench.env())
    assert report.problems == (), says(report)
    assert report.device.name == "NVIDIA H200"
    assert (report.driver, report.driver_cuda, report.software.torch_cuda) == ("580.95.05", "13.0", "13.0")
    runs = {status.name for status in report.backends if status.runs and status.policy == "vllm-0.33.0"}
    assert {"marlin", "triton"} <= runs
    assert "flashinfer_trtllm" not in runs
    assert json.dumps(report.to_json())


def test_without_torch_and_engine_the_light_install_is_in_order(bench) -> None:
    bench.gpus(H200)
    report = examine(bench.env())
    assert report.problems == ()
    (remark,) = (remark for remark in report.remarks if remark.about == "torch")
    assert remark.level == NOTE and remark.do == install_hint("run")
    assert "explain, list, compare" in remark.says
    bench.package("vllm", "vllm", "0.33.0")
    (problem,) = examine(bench.env()).problems
    assert problem.says == "torch is not installed, and vLLM cannot run without it"


def test_libraries_of_torch_are_told_with_what_it_was_built_with(bench) -> None:
    sound(bench)
    pins = ('nvidia-nccl-cu13==2.28.9; platform_system == "Linux"', "nvidia-cudnn-cu13==9.20.0", "sympy>=1")
    bench.package("torch", "torch", "2.13.0", requires=(*pins, "nvidia-cublas==13.1.0"))
    bench.package("a", "nvidia-nccl-cu13", "2.29.2")
    bench.package("b", "nvidia-nccl-cu12", "2.20.0")
    bench.package("c", "nvidia-cudnn-cu13", "9.20.0")
    bench.package("d", "nvidia-cuda-runtime", "13.0.96")
    assert examine(bench.env()).software.torch_libraries == {
        "CUDA runtime": "13.0.96",
        "cuBLAS": "not installed (torch was built with 13.1.0)",
        "cuDNN": "9.20.0",
        "NCCL": "2.29.2 (torch was built with 2.28.9)",
    }


def test_the_toolkit_has_the_version_that_nvcc_prints(bench) -> None:
    assert cuda_toolkit() == ""
    bench.file(
        "cuda/bin/nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n", program=True
    )
    assert examine(bench.env()).software.cuda_toolkit == "13.0.88"
    bench.file("cuda/bin/nvcc", "no program", program=True)
    assert cuda_toolkit() == ""


def test_another_environment_is_examined(bench, tmp_path_factory) -> None:
    bench.gpus(H200)
    other = type(bench)(tmp_path_factory.mktemp("other") / "lib" / "python3.12" / "site-packages")
    root = other.folder.parents[2]
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    (root / "pyvenv.cfg").write_text("version = 3.12.9\n")
    other.package("vllm", "vllm", "0.29.0")
    other.package("torch", "torch", "2.11.0")
    other.package("triton", "triton", "3.6.0")
    other.file("torch/version.py", "cuda = '13.0'\n")
    where = python_environment(root)
    report = examine(bench.env(), where=where)
    software = report.software
    assert (software.python, software.environment) == ("3.12.9", str(root))
    assert software.libraries.items() >= {"vllm": "0.29.0", "torch": "2.11.0"}.items()
    assert (software.torch_cuda, levels(report, "vllm")) == ("13.0", [WARNING])
    assert own(report).items() >= {"torch": "", "moectl": ""}.items()
    assert own(examine(bench.env()))["torch"] == "torch"
    assert python_environment(root).interpreter == str(root / "bin" / "python")


def test_a_deep_check_runs_the_other_environments_python(bench, tmp_path) -> None:
    where = PythonEnvironment("other", (), "", str(bench.folder / "python"))
    bench.file("python", '#!/bin/sh\necho "ModuleNotFoundError: $2" >&2; exit 1\n', program=True)
    assert try_import("torch", where) == "ModuleNotFoundError: import torch"


def test_links_of_several_gpus_and_the_host_are_in_the_report(bench) -> None:
    sound(bench)
    bench.file("etc/os-release", "PRETTY_NAME=Fedora\n")
    topology = "  GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X"
    bench.gpus(f"{H200}\n{H200.replace('0, GPU-aaaa', '1, GPU-cccc')}", topology=topology)
    document = examine(bench.env()).to_json()
    assert document["links"] == {"0-1": "NV18"}
    assert document["host"]["system"] == "Fedora"


def test_what_this_process_imported_is_not_what_is_installed(bench, monkeypatch) -> None:
    sound(bench)
    imported = ModuleType("torch")
    imported.__spec__ = ModuleSpec("torch", None, is_package=True)
    monkeypatch.setitem(sys.modules, "torch", imported)
    assert examine(bench.env()).software.torch_cuda == "13.0"


def test_without_a_gpu_decisions_are_for_the_cpu(bench) -> None:
    bench.package("torch", "torch", "2.13.0")
    bench.file("torch/version.py", "cuda = None\n")
    report = examine(bench.env(CUDA_VISIBLE_DEVICES="3"))
    assert report.device.platform == "cpu"
    assert report.problems == ()
    assert levels(report, "GPUs") == [NOTE]
    assert own(report).items() >= {"torch": "", "emulation": ""}.items()


def test_a_driver_that_fails_is_a_problem_and_the_cpu_no_answer(bench) -> None:
    sound(bench)
    bench.failing_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    words = "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"
    report = examine(bench.env())
    assert [(remark.about, remark.says) for remark in report.problems] == [("driver", words)]
    assert report.device is None and report.backends == ()
    assert levels(report, "GPUs") == []
    document = report.to_json()
    assert (document["device"], document["driver_failure"]) == (None, words)


def test_gpus_that_cannot_be_used_leave_no_device(bench) -> None:
    sound(bench)
    bench.gpus(H200.replace("Disabled", "Enabled"), "GPU 0: NVIDIA H200 (UUID: GPU-aaaa)")
    report = examine(bench.env())
    assert levels(report, "GPUs") == [PROBLEM]
    assert report.device is None and report.backends == ()


@pytest.mark.parametrize(
    ("installed", "rules", "warned"),
    [
        (
            "0.29.0",
            "0.28.0",
            "vLLM 0.29.0 is installed, these rules are vLLM 0.28.0's; its choice may differ",
        ),
        ("0.9.0", "0.33.0", "vLLM 0.9.0 is installed, these rules are vLLM 0.33.0's; its choice may differ"),
        ("0.33.1.dev7+gabc", "0.33.0", "vLLM 0.33.1.dev7+gabc is installed, these rules are"),
        ("0.31.0", "0.31.0", ""),
        ("0.33.0", "0.33.0", ""),
        ("0.33.0.post1", "0.33.0", ""),
        ("0.33.0+cu129", "0.33.0", ""),
    ],
)
def test_rules_of_another_version_are_a_warning(bench, installed: str, rules: str, warned: str) -> None:
    sound(bench)
    shutil.rmtree(bench.folder / "vllm-0.33.0.dist-info")
    bench.package("vllm", "vllm", installed)
    report = examine(bench.env())
    assert report.problems == ()
    assert levels(report, "vllm") == ([WARNING] if warned else [])
    assert warned in says(report)
    engines = report.to_json()["engines"]
    assert engines == [{"name": f"vllm-{rules}", "rules": rules, "installed": installed}]


def test_what_the_driver_says_besides_is_a_note(bench, monkeypatch) -> None:
    sound(bench)
    bench.failing_gpus(f"{H200}\nWARNING: infoROM is corrupted", 14)
    monkeypatch.setattr(nvidia, "SLOW", 0)
    report = examine(bench.env())
    assert report.problems == () and report.device is not None
    assert levels(report, "driver") == [WARNING, WARNING]
    assert "infoROM is corrupted" in says(report) and "persistence mode" in says(report)


PEERS = {
    "humming": "humming.forward.humming_forward or MOECTL_PEERS/humming",
    "marlin": "vllm._moe_C*.so or MOECTL_PEERS/vllm",
    "cutlass": "vllm._C_stable_libtorch*.so or MOECTL_PEERS/vllm_cutlass",
    "triton": "vllm.model_executor.layers.fused_moe.fused_moe.fused_moe_kernel or MOECTL_PEERS/vllm_triton",
    "triton_kernels": "triton_kernels.routing.compute_expt_data or MOECTL_PEERS/triton_kernels",
}
FLASHINFER = "flashinfer.fused_moe.cutlass_fused_moe flashinfer_cubin or nvcc and ninja"


def test_own_backends_need_what_they_run_on(bench) -> None:
    bench.gpus(H200)

    def lacking(libraries: str) -> dict[str, str]:
        torch = libraries.partition(" ")[0].replace("triton", "")
        own_ones = {"torch": torch, "emulation": torch, "moectl": libraries, "moectl_marlin": libraries}
        peers = {name: f"{needs} {libraries}".strip() for name, needs in PEERS.items()}
        return own_ones | peers | {"flashinfer_cutlass": f"{FLASHINFER} {torch}".strip()}

    assert own(examine(bench.env())).items() >= lacking("torch triton").items()
    bench.package("torch", "torch", "2.13.0")
    assert own(examine(bench.env())).items() >= lacking("triton").items()
    bench.package("triton", "triton", "3.6.0")
    assert own(examine(bench.env())).items() >= lacking("").items()


def test_libraries_of_others_are_found_installed_and_in_a_folder(bench, monkeypatch) -> None:
    bench.gpus(H200)
    bench.package("torch", "torch", "2.13.0")
    bench.package("triton", "triton", "3.6.0")
    bench.file("vllm/_moe_C_stable_libtorch.abi3.so", "")
    bench.file("vllm/_C_stable_libtorch.abi3.so", "")
    bench.file("peers/vllm_triton/fused_moe.py", "")
    bench.file("peers/humming/layer.py", "")
    bench.file("peers/humming_kernels-0.1.19.dist-info/METADATA", "")
    bench.file("peers/triton_kernels/matmul_ogs.py", "")
    folder = str(bench.folder / "peers")
    monkeypatch.setenv("MOECTL_PEERS", folder)
    report = examine(bench.env(MOECTL_PEERS=folder))
    assert {name for name in PEERS if not own(report)[name]} == set(PEERS)
    humming = report.installed("MOECTL_PEERS/humming")
    assert (humming.version, humming.path) == ("0.1.19", f"{folder}/humming")
    assert not report.installed("humming").present


def test_what_has_no_version_in_the_folder_is_told_by_a_hash(bench) -> None:
    """Another build of a library is another version: times of the one are not the other's."""
    bench.file("peers/triton_kernels/matmul_ogs.py", "first = 1")
    bench.file("peers/triton_kernels/inner/more.py", "")
    library = bench.file("peers/_moe_C_stable_libtorch.abi3.so", "one build")

    def versions() -> dict[str, str]:
        return {one.name: one.version for one in find_peers(bench.folder / "peers")}

    before = versions()
    assert set(before) == {"MOECTL_PEERS/vllm", "MOECTL_PEERS/triton_kernels"} and versions() == before
    assert all(re.fullmatch("sha256:[0-9a-f]{12}", version) for version in before.values())
    library.write_text("another build")
    bench.file("peers/triton_kernels/inner/more.py", "second = 2")
    after = versions()
    assert all(after[name] != before[name] for name in before)
    # Metadata that lies beside a package speaks for it.
    bench.file("peers/humming/layer.py", "")
    assert versions()["MOECTL_PEERS/humming"].startswith("sha256:")
    bench.file("peers/humming_kernels-0.1.19.dist-info/METADATA", "")
    assert versions()["MOECTL_PEERS/humming"] == "0.1.19"


def test_a_folder_of_libraries_that_is_none_is_a_problem_of_a_whole_report(bench, monkeypatch) -> None:
    sound(bench)
    monkeypatch.setenv("MOECTL_PEERS", "/no/such/folder")
    report = examine(bench.env(MOECTL_PEERS="/no/such/folder"))
    (problem,) = report.problems
    assert problem.about == "MOECTL_PEERS" and "'/no/such/folder'" in problem.says
    assert "unset MOECTL_PEERS" in problem.do and report.to_json()["peers_refused"] == problem.says
    assert own(report)["torch"] == ""


def test_hidden_and_unlike_gpus_are_told(bench) -> None:
    sound(bench)
    bench.gpus(f"{H200}\n{OLD}")
    report = examine(bench.env(CUDA_VISIBLE_DEVICES="1"))
    assert [gpu.index for gpu in report.shown] == ["1"]
    assert report.device.arch == "sm75"
    assert report.hidden_by == {"CUDA_VISIBLE_DEVICES": "1"}
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in says(report)
    ordered = examine(bench.env(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID"))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" not in says(ordered)
    nothing = examine(bench.env(CUDA_VISIBLE_DEVICES=""))
    assert "every GPU is hidden by CUDA_VISIBLE_DEVICES=''" in says(nothing)
    assert nothing.device.platform == "cpu"
    long = examine(bench.env(CUDA_VISIBLE_DEVICES="0,7"))
    assert [gpu.index for gpu in long.shown] == ["0"]
    assert "CUDA_VISIBLE_DEVICES lists 7, ignored: no such GPU" in long.problems[0].says
    wrong = examine(bench.env(CUDA_VISIBLE_DEVICES="7"))
    assert "asks for GPU '7'" in wrong.problems[0].says
    assert wrong.shown == ()


def test_a_torch_for_another_device_is_a_problem(bench) -> None:
    sound(bench)
    bench.file("torch/version.py", "cuda: Optional[str] = None\nhip = '7.2.1'\n")
    report = examine(bench.env())
    assert torch_build() == "hip 7.2.1"
    assert "built for hip 7.2.1, the device is NVIDIA H200" in report.problems[0].says
    bench.file("torch/version.py", "cuda = None\n")
    assert "built for cpu" in examine(bench.env()).problems[0].says


@pytest.mark.parametrize(("built", "problem"), [("13.0", True), ("12.9", False), ("12.8", False)])
def test_a_driver_too_old_for_torch_is_a_problem(bench, built: str, problem: bool) -> None:
    sound(bench)
    bench.gpus(H200, cuda="12.8")
    bench.file("torch/version.py", f"cuda = '{built}'\n")
    assert (levels(examine(bench.env()), "driver") == [PROBLEM]) == problem


def test_the_unrelated_triton_kernels_is_named(bench) -> None:
    sound(bench)
    bench.package("triton_kernels", "triton-kernels", "0.1.0")
    (problem,) = examine(bench.env()).problems
    assert "triton_kernels 0.1.0" in problem.says
    assert "Kernelize AI" in problem.says
    assert problem.do.startswith("pip uninstall triton_kernels; the real one: comes with vLLM")


def test_flashinfer_needs_compiled_kernels_or_the_means_to_compile_them(bench) -> None:
    sound(bench)
    bench.package("flashinfer", "flashinfer-python", "0.7.2", SYMBOLS)
    bench.file("flashinfer/fused_moe/__init__.py", FUSED)
    bare = examine(bench.env())
    assert "(nvcc and ninja missing): vLLM uses none of its backends" in says(bare)
    assert "flashinfer-cubin==0.7.2" in says(bare)
    bench.file("ninja", "#!/bin/sh\n", program=True)
    assert "(nvcc missing)" in says(examine(bench.env()))
    assert "compiled kernels" not in says(examine(bench.env(VLLM_HAS_FLASHINFER_CUBIN="1")))
    bench.file("cuda/bin/nvcc", "#!/bin/sh\n", program=True)
    assert "missing" not in says(examine(bench.env()))
    bench.package("flashinfer_cubin", "flashinfer-cubin", "0.7.1")
    assert "flashinfer-cubin 0.7.1 does not belong to flashinfer 0.7.2" in says(examine(bench.env()))


def test_missing_symbols_are_named(bench) -> None:
    sound(bench)
    bench.package("flashinfer", "flashinfer-python", "0.1.0")
    bench.package("flashinfer_cubin", "flashinfer-cubin", "0.1.0")
    problem = next(remark for remark in examine(bench.env()).problems if "lacks" in remark.says)
    assert "fused_moe.cutlass_fused_moe" in problem.says
    bench.package("deep_gemm", "deep-gemm", "1.0", "m_grouped_fp8_gemm_nt_contiguous = 1\n")
    assert "deep_gemm 1.0 lacks m_grouped_fp8_fp4_gemm_nt_contiguous" in says(examine(bench.env()))


def test_variables_that_do_nothing_are_problems(bench) -> None:
    sound(bench)
    report = examine(bench.env(VLLM_USE_DEEP_GEMM="0", VLLM_MXFP4_USE_MARLIN="1", VLLM_MOE_PADING="1"))
    assert levels(report, "variables") == [PROBLEM, PROBLEM]
    assert "--moe-backend marlin" in says(report)
    assert "or VLLM_MOE_PADDING?" in says(report)
    deep = next(status for status in report.backends if status.name == "deep_gemm")
    assert not deep.runs
    assert "VLLM_USE_DEEP_GEMM" in deep.against[0].question


def test_caches_are_measured(bench) -> None:
    bench.file("t/a/kernel.cubin", "x" * 100)
    bench.file("proc/mounts", f"/dev/x / ext4 rw 0 0\nserver:/x {bench.folder}/t nfs4 rw 0 0\n")
    env = bench.env(TRITON_CACHE_DIR=f"{bench.folder}/t")
    found = {cache.name: cache for cache in kernel_caches.find_caches(env)}
    triton = found["Triton"]
    assert (triton.files, triton.nbytes, triton.counted, triton.writable) == (1, 100, True, True)
    assert triton.remote
    assert triton.free > 0
    assert not found["DeepGEMM"].there
    assert found["DeepGEMM"].path == f"{bench.folder}/.deep_gemm"
    assert found["DeepGEMM"].filesystem == "ext4"
    moved = {
        c.name: c.path for c in kernel_caches.find_caches({"FLASHINFER_WORKSPACE_BASE": "/w", "HOME": "/h"})
    }
    assert moved["FlashInfer"] == "/w/.cache/flashinfer"
    assert moved["vLLM"] == "/h/.cache/vllm"


def test_caches_that_cannot_be_written_or_are_far_away_are_told(bench) -> None:
    sound(bench)
    report = examine(bench.env())
    cache = report.caches[0]
    worse = (
        replace(cache, writable=False),
        replace(cache, name="Full", free=1 << 20),
        replace(cache, name="Far", there=True, filesystem="lustre"),
    )
    made = remarks_on(replace(report, caches=worse), Packages())
    found = [remark for remark in made if remark.about == "caches"]
    assert [remark.level for remark in found] == [PROBLEM, PROBLEM, NOTE]
    assert f"set {cache.variable}" in found[0].do


def test_counting_ends_at_a_bound(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        bench.file(f"t/{number}", "xx")
    monkeypatch.setattr(kernel_caches, "FILES", 3)
    found = kernel_caches.find_caches(bench.env(TRITON_CACHE_DIR=f"{bench.folder}/t"))[0]
    assert (found.files, found.nbytes, found.counted) == (3, 6, False)


@pytest.mark.parametrize(
    ("files", "cores", "gibibytes"),
    [
        ({"proc/meminfo": "MemAvailable: 104857600 kB\n"}, 0, 100),
        ({"proc/meminfo": "MemAvailable: 104857600 kB\n", "cgroup/cpu.max": "100000 100000\n"}, 1, 100),
        (
            {
                "proc/meminfo": "MemAvailable: 104857600 kB\n",
                "cgroup/memory.max": f"{20 << 30}\n",
                "cgroup/memory.current": f"{6 << 30}\n",
            },
            0,
            14,
        ),
        ({"proc/meminfo": "MemAvailable: 1048576 kB\n", "cgroup/memory.max": "max\n"}, 0, 1),
    ],
)
def test_compilers_are_bounded_by_cores_and_memory(
    bench, files: dict[str, str], cores: int, gibibytes: int
) -> None:
    for name, text in files.items():
        bench.file(name, text)
    found = find_jobs({})
    assert found.memory == gibibytes << 30
    assert not cores or found.cores == cores
    assert found.safe == max(1, min(found.cores, found.memory // JOB_BYTES))
    assert find_jobs({"MAX_JOBS": "900"}).too_many
    assert not find_jobs({"MAX_JOBS": "1"}).too_many


def test_too_many_compilers_are_a_problem_where_there_is_a_compiler(bench) -> None:
    sound(bench)
    bench.file("proc/meminfo", "MemAvailable: 8388608 kB\n")
    assert "compilers" not in says(examine(bench.env(MAX_JOBS="64")))
    bench.file("ninja", "#!/bin/sh\n", program=True)
    bench.file("cuda/bin/nvcc", "#!/bin/sh\n", program=True)
    report = examine(bench.env(MAX_JOBS="64"))
    assert "64 compilers of 6 GiB each would run at once, but 8 GiB are free" in says(report)
    assert "export MAX_JOBS=1" in says(report)


def test_a_deep_look_imports_in_a_process_of_its_own(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sound(bench)
    bench.file("deep_ep/__init__.py", "raise ImportError('libnvshmem.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(bench.folder))
    assert try_import("json") == ""
    report = examine(bench.env(), deep=True)
    assert report.imports["deep_ep"] == "ImportError: libnvshmem.so is missing"
    assert report.imports["deep_gemm"] == ""
    assert "cannot be imported: ImportError: libnvshmem.so is missing" in says(report)
    assert report.imports["torch"] == ""
    assert "torch sees no device, but the driver shows 1 to this process: " in says(report)
    bench.file("torch/__init__.py", TORCH)
    seen = examine(bench.env(), deep=True)
    assert seen.torch_view is not None
    assert seen.torch_view.devices == 2
    assert "torch sees no device" not in says(seen)
    assert seen.to_json()["torch_devices"] == 2
