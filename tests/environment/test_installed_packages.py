"""Optional packages in stand-in site folders: versions, places, what they lack, others of the name."""

import pytest

from moectl.environment.installed_packages import distribution_version, find_all, find_package, find_tool
from moectl.oracle.machine_packages import installed_packages, packages_from
from moectl.oracle.registry import known_packages

PROBES = known_packages()


def test_the_unrelated_package_of_pypi_is_told_by_its_files(bench) -> None:
    bench.file("triton_kernels/__init__.py")
    bench.file("triton_kernels/add_vectors.py")
    bench.file("triton_kernels-0.1.0.dist-info/METADATA", "Name: triton-kernels\nVersion: 0.1.0\n")
    bench.file("vllm/third_party/triton_kernels/matmul_ogs.py")
    found = find_package("triton_kernels", PROBES["triton_kernels"])
    assert not found.present
    assert (found.wrong, found.wrong_version) == (str(bench.folder / "triton_kernels"), "0.1.0")
    assert PROBES["triton_kernels"].other.startswith("Kernelize AI")
    for packages in (installed_packages({}), packages_from(None), packages_from("installed,hpc")):
        assert "triton_kernels" not in packages.versions
        assert "Kernelize AI" in packages.remarks[0]
    assert packages_from("installed,triton_kernels").remarks == ()


def test_the_engines_own_copy_counts(bench) -> None:
    bench.file("vllm/third_party/deep_gemm/__init__.py", "__version__ = '2.5.0'\n")
    found = find_package("deep_gemm", PROBES["deep_gemm"])
    assert (found.module, found.version) == ("vllm.third_party.deep_gemm", "2.5.0")
    assert found.path == str(bench.folder / "vllm" / "third_party" / "deep_gemm")


def test_what_a_package_lacks_is_listed(bench) -> None:
    bench.file("flashinfer/__init__.py", "from .x import fp4_quantize\n")
    bench.file("flashinfer/fused_moe.py", "def cutlass_fused_moe(): ...\n")
    found = find_package("flashinfer", PROBES["flashinfer"])
    assert "fused_moe.cutlass_fused_moe" not in found.lacks
    assert "fused_moe.trtllm_bf16_moe" in found.lacks
    packages = installed_packages({"A": "1"})
    assert not packages.has("flashinfer", "fused_moe.trtllm_bf16_moe")
    assert packages.env == {"A": "1"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("version.py", "__version__: str = '1.2'\n"),
        ("_version.py", 'version = "1.2"\n'),
        ("__init__.py", "import os\n__version__ = '1.2'\n"),
    ],
)
def test_a_version_without_metadata_comes_from_the_source(bench, file: str, text: str) -> None:
    bench.file("hpc/__init__.py")
    bench.file(f"hpc/{file}", text)
    assert find_package("hpc", PROBES["hpc"]).version == "1.2"
    assert distribution_version("no-such-distribution", "hpc") == "1.2"
    assert distribution_version("no-such-distribution") == ""


def test_the_compiler_is_looked_for_where_kernels_are_compiled_with_it(bench, monkeypatch) -> None:
    assert not find_tool("nvcc").present
    compiler = bench.file("cuda/bin/nvcc", "#!/bin/sh\n", program=True)
    assert find_tool("nvcc").path == str(compiler)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUDA_PATH", str(bench.folder / "cuda"))
    assert find_tool("nvcc").present
    assert not find_tool("ninja").present


def test_everything_is_looked_for_once(bench) -> None:
    names = [found.name for found in find_all(PROBES)]
    assert names == [*PROBES, "nvcc", "ninja"]
    assert not any(found.present for found in find_all(PROBES))
