"""DeepGEMM without a GPU: where it and its compiler are found, and when it is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moectl.environment.installed_packages import nvcc_of_wheels
from moectl.errors import Unavailable
from moectl.kernels.external import cuda_compiler, deep_gemm
from moectl.kernels.external.import_library import unavailable_reason
from support import peer_cases as cases

PACKAGE = """
pdl = []
set_pdl = pdl.append
class _C:
    get_mk_alignment_for_contiguous_layout = staticmethod(lambda: 128)
"""
FUNCTIONS = "\n".join(f"{name} = print" for name in deep_gemm.FUNCTIONS if name != "set_pdl")


def nvcc(path: Path, version: str, top: Path | None = None) -> Path:
    """A compiler that states its version, and its toolkit if asked how it would work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = f'echo "#$ TOP={top}" >&2' if top else "exit 1"
    version = f'echo "Cuda compilation tools, release {version}, V1"'
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) {version};; *) {said};; esac\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of unpacked libraries, and no compiler but those that a test makes."""
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("moectl.environment.installed_packages._DEFAULT_CUDA_HOME", tmp_path / "none")
    monkeypatch.setattr(cuda_compiler, "nvcc_of_wheels", lambda: ())
    monkeypatch.setattr("moectl.environment.installed_packages._NVCC_WHEELS", ())
    caches = (cuda_compiler.cuda_toolkit, deep_gemm.library)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "deep_gemm"]:
        del sys.modules[name]


def unpack(folder: Path, source: str) -> None:
    (folder / "deep_gemm/include/deep_gemm").mkdir(parents=True)
    (folder / "deep_gemm/__init__.py").write_text(source)


def test_it_is_loaded_with_the_compilers_own_toolkit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(machine, PACKAGE + FUNCTIONS)
    toolkit = machine / "cuda-13.0"
    toolkit.mkdir()
    nvcc(machine / "bin/nvcc", "13.0", toolkit)
    monkeypatch.setenv("PATH", f"{machine / 'bin'}:/usr/bin:/bin")
    library = deep_gemm.library()
    assert os.environ["CUDA_HOME"] == str(toolkit) and library.pdl == [True]
    assert deep_gemm.alignment() == 128


def test_a_stated_toolkit_stays(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(machine, PACKAGE + FUNCTIONS)
    nvcc(machine / "mine/bin/nvcc", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(machine / "mine"))
    deep_gemm.library()
    assert os.environ["CUDA_HOME"] == str(machine / "mine")
    assert cuda_compiler.cuda_toolkit(deep_gemm.OLDEST_NVCC) == machine / "mine"


def test_without_a_compiler_it_is_refused(machine: Path) -> None:
    unpack(machine, PACKAGE + FUNCTIONS)
    says = "compiled at the first call by nvcc 12.9 or newer, and there is no nvcc in CUDA_HOME, in PATH"
    assert says in unavailable_reason(deep_gemm.library)
    assert "deep_gemm" not in sys.modules


def test_an_old_compiler_is_refused_and_one_of_a_wheel_taken(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(machine, PACKAGE + FUNCTIONS)
    nvcc(machine / "bin/nvcc", "12.4")
    monkeypatch.setenv("PATH", f"{machine / 'bin'}:/usr/bin:/bin")
    assert f"{machine}/bin/nvcc is 12.4" in unavailable_reason(deep_gemm.library)
    found = nvcc(machine / "site/nvidia/cu13/bin/nvcc", "13.0")
    monkeypatch.setattr("moectl.environment.installed_packages._NVCC_WHEELS", ("nvidia.cu13",))
    monkeypatch.syspath_prepend(str(machine / "site"))
    assert nvcc_of_wheels() == (found,)
    monkeypatch.setattr(cuda_compiler, "nvcc_of_wheels", nvcc_of_wheels)
    assert cuda_compiler.cuda_toolkit(deep_gemm.OLDEST_NVCC) == machine / "site/nvidia/cu13"


def test_another_version_is_refused_by_what_it_lacks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(machine, PACKAGE)
    nvcc(machine / "mine/bin/nvcc", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(machine / "mine"))
    with pytest.raises(
        Unavailable, match=r"lacks m_grouped_fp8_gemm_nt_contiguous, .*moectl peers deep_gemm"
    ):
        deep_gemm.library()


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"), [(1, 128, 16), (64, 128, 16), (300, 384, 64), (4096, 4096, 768)]
)
def test_masked_rows_are_whole_tiles_with_room_for_every_token(tokens: int, rows: int, expected: int) -> None:
    assert deep_gemm.masked_rows(tokens) == rows
    assert deep_gemm.expected_tokens(tokens * 3, 16, rows) == expected


def test_operands_of_both_formats() -> None:
    problem = cases.GROUPED["fp8 blocks, fp8 tokens"]
    prepared = cases.layer_for(problem).prepared("deep_gemm", "cpu")
    w13, _ = deep_gemm.ready(prepared)
    assert w13.scales is not None and w13.scales.shape == (7, 4, 3) and w13.weight.shape == (7, 512, 384)
    rows, scales = torch.empty(256, 384).to(torch.float8_e4m3fn), torch.empty(1, 3, 256)
    a, b, options = deep_gemm.operands(w13, rows, scales)
    assert a[1].shape == (256, 3) and a[1].stride() == (1, 256) and options == {"disable_ue8m0_cast": True}
    assert b[0].dtype == torch.float8_e4m3fn and b[1].dtype == torch.float32
    a, _, _ = deep_gemm.operands(w13, rows.view(2, 128, 384), torch.empty(2, 3, 128))
    assert a[1].shape == (2, 128, 3) and a[1].stride() == (384, 1, 128)
    plain = cases.layer_for(cases.GROUPED["bf16"]).prepared("deep_gemm", "cpu")
    x = torch.empty(8, 384).bfloat16()
    assert deep_gemm.operands(deep_gemm.ready(plain)[1], x, x)[2] == {}


def test_what_a_cpu_is_told() -> None:
    problem = cases.GROUPED["bf16"]
    assert deep_gemm.refusal(problem, torch.device("cpu")) == "it needs a CUDA GPU; the weights are on cpu"
