"""Recording of decisions: what is fetched of a wheel, what stands in for packages, which cells are asked."""

import importlib
import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devtools.conformance.grid import CELL
from devtools.recording import read_cells, record, wheel_files
from devtools.recording.wheel import BLOCK, RemoteFile

from moectl.errors import Unavailable, UsageError
from moectl.oracle.engines.vllm_0_33_0.own_code.stand_ins import StandIns
from moectl.oracle.engines.vllm_0_33_0.own_code.watched_selection import Passing, code_of

DATA = Path(__file__).parents[1] / "data" / "oracle"
SCRIPT = Path(__file__).parents[2] / "scripts" / "engines" / "record"
LIBRARY = 5 * BLOCK


def wheel() -> bytes:
    """A wheel with a large library between its Python files."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        files.writestr("engine/__init__.py", "VERSION = 1\n")
        files.writestr("engine/_C.so", bytes(LIBRARY))
        files.writestr("engine/oracle.py", "def select(): ...\n")
        files.writestr("engine-1.0.dist-info/METADATA", "Name: engine\n")
    return packed.getvalue()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Requests to an index with one wheel of `engine`: address and range."""
    made: list[tuple[str, str]] = []
    content = wheel()

    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        wanted = request.headers.get("Range", "")
        made.append((request.full_url, wanted))
        if request.full_url.endswith("/engine/"):
            names = ("engine-1.0-cp38-abi3-manylinux_2_28_aarch64.whl", "engine-1.0-cp38-abi3-x86_64.whl")
            files = [{"filename": name, "url": f"https://files/{name}"} for name in names]
            return io.BytesIO(json.dumps({"files": files}).encode())
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        answer = io.BytesIO(content[first : last + 1])
        answer.headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}  # type: ignore[attr-defined]
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return made


def test_only_python_files_are_fetched_and_only_once(requests, tmp_path: Path) -> None:
    folder = wheel_files("engine", "1.0", tmp_path)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == ["engine-1.0.dist-info/METADATA", "engine/__init__.py", "engine/oracle.py"]
    assert (folder / "engine/oracle.py").read_text() == "def select(): ...\n"
    asked = {wanted for address, wanted in requests if "x86_64" in address}
    # The size, the first block and the last ones: not those that only the library is in.
    assert len(asked) < LIBRARY // BLOCK
    assert not any("aarch64" in address for address, _ in requests)
    made = len(requests)
    assert wheel_files("engine", "1.0", tmp_path) == folder and len(requests) == made


def test_a_release_without_a_wheel_is_refused_with_those_that_have_one(requests, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"PyPI has no wheel of engine 2\.0") as refused:
        wheel_files("engine", "2.0", tmp_path)
    assert "1.0" in str(refused.value.hint) and not list(tmp_path.iterdir())


def test_a_remote_file_reads_across_blocks(requests) -> None:
    file = RemoteFile("https://files/engine")
    content = wheel()
    assert file.seek(-10, io.SEEK_END) == len(content) - 10 and file.read() == content[-10:]
    file.seek(BLOCK - 5)
    assert file.read(10) == content[BLOCK - 5 : BLOCK + 5] and file.tell() == BLOCK + 5


def test_a_stand_in_has_every_name_of_its_packages_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    StandIns({"absent_front_end"}, r"absent_engine\._C\w*").install()
    module = importlib.import_module("absent_front_end.deep.inside")

    class Derived(module.Base[int]):
        pass

    assert Derived(1, key=2).anything().more is not None
    assert module.decorate(test_a_stand_in_has_every_name_of_its_packages_and_no_other)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_engine")
    for name in [name for name in sys.modules if name.startswith("absent_")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("kernel does not support current device cuda", "device"),
        ("kernel does not support ('batched_experts',) activation format", "activation_format"),
        ("kernel does not support MoEActivation.SILU activation", "activation"),
        ("kernel does not support quantization scheme Key(int4)xNone", "quant_scheme"),
        ("preferred gemm type indexed != supported gemm type grouped_masked", "gemm_type"),
        ("zero points and bias are not supported", "zero_points_or_bias"),
        ("expert bias is not supported", "bias"),
        ("the MoeWNA16 checkpoint layout is not supported", "layout"),
        ("group activation ordering is not supported", "act_order"),
        ("kernel requires amd-quark package", "package"),
        ("kernel requires hidden and intermediate dimensions divisible by 128", "shape"),
        ("something that no release has said", "other"),
        (None, "other"),
    ],
)
def test_refusals_have_the_codes_of_recorded_decisions(reason: str | None, code: str) -> None:
    assert code_of(reason) == code


def test_cells_of_several_recordings_are_asked_once() -> None:
    samples = sorted(DATA.glob("decisions-*.jsonl.gz"))
    assert len(samples) >= 5
    one, every = read_cells(samples[:1]), read_cells(samples)
    assert len(one) < len(every) and one == every[: len(one)]
    assert len({tuple(cell.values()) for cell in every}) == len(every)
    assert all(tuple(cell) == CELL for cell in every)


@pytest.mark.parametrize("engine", ["sglang==0.5.23", "vllm"])
def test_only_named_releases_of_vllm_are_recorded(engine: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), engine, str(tmp_path / "out.jsonl.gz")], capture_output=True, text=True
    )
    assert ran.returncode == 2 and "only releases of vLLM are recorded" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_a_python_without_what_vllm_imports_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("devtools.recording.recording.find_spec", lambda name: None if name == "torch" else 1)
    with pytest.raises(Unavailable, match="recording needs torch, which this Python"):
        list(record("0.33.0", [], {}, tmp_path, 1))
    assert not list(tmp_path.iterdir())


def test_a_hook_keeps_what_passes_by() -> None:
    passing = Passing()
    backends = [SimpleNamespace(value="FIRST"), SimpleNamespace(value="SECOND")]

    class Experts:
        @staticmethod
        def is_supported_config(cls: type, config: str) -> tuple[bool, str | None]:
            return config == "good", "kernel does not support current device"

    ranked = passing.ranking(lambda: backends)
    classes = passing.classes(lambda backend: [Experts])

    def select_it(config: str) -> tuple[Any, type]:
        for backend in ranked():
            for experts in classes(backend):
                supported, _ = experts.is_supported_config(experts, config)
                if supported:
                    return backend, experts
        raise ValueError("none")

    select = passing.selection(select_it)
    select("good")
    assert (passing.selected, passing.experts, passing.rejected) == ("FIRST", Experts, [])
    assert passing.priority == ["FIRST", "SECOND"]
    passing.reset()
    with pytest.raises(ValueError, match="none"):
        select("bad")
    assert [row["backend"] for row in passing.rejected] == ["FIRST", "SECOND"]
    assert passing.selected is None
