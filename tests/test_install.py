"""The wheel, and what works where only moectl's core is installed: no torch, triton, numba or numpy."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from support.invoking import moectl

ROOT = Path(__file__).parents[1]
UV = Path(sys.prefix) / "bin" / "uv"


def uv(*words: object) -> str:
    """What uv prints; packages come from its cache, and from an index only if they are not there."""
    config = Path(sys.prefix) / "uv.toml"
    command = [str(UV), *(["--config-file", str(config)] if config.exists() else [])]
    done = subprocess.run([*command, "--offline", *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        done = subprocess.run([*command, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "-q", "--wheel", "--out-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("core") / "venv"
    uv("venv", "-q", "--python", sys.executable, folder)
    uv("pip", "install", "-q", "--python", folder / "bin" / "python", "-c", "constraints.txt", wheel)
    return folder / "bin"


def run(core: Path, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [core / "moectl", *map(str, words)],
        cwd=cwd or core,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(core), "HF_HUB_OFFLINE": "1"},
    )


def test_wheel_has_licence_types_and_light_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
        fields = HeaderParser().parsestr(archive.read(metadata).decode())
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert "moectl/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]
    assert fields["License-Expression"] == "Apache-2.0"
    required = fields.get_all("Requires-Dist", [])
    always = {line.split(">=")[0] for line in required if "extra ==" not in line}
    assert always == {"typer", "rich", "huggingface-hub", "safetensors", "psutil", "nvidia-ml-py"}
    running = {line.split(">=")[0] for line in required if "extra == 'run'" in line}
    assert running == {"torch", "triton", "numpy", "numba"}


def test_core_has_neither_torch_nor_numpy(core: Path) -> None:
    heavy = ("torch", "triton", "numba", "numpy")
    code = f"from importlib.util import find_spec; print([name for name in {heavy} if find_spec(name)])"
    printed = subprocess.run([core / "python", "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("explain openai/gpt-oss-120b --gpu h200 -q", "0-35"),
        ("explain openai/gpt-oss-120b --gpu h100,b200 --tp 1,8", "b200"),
        ("list models", "openai/gpt-oss-120b"),
        ("list layouts", "marlin-mxfp4"),
        ("env", "moectl"),
        ("--help", "explain"),
        ("bench --help", "--model"),
    ],
)
def test_commands_of_the_core(core: Path, words: str, expected: str) -> None:
    done = run(core, *words.split())
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_doctor_and_compare_of_the_core(core: Path) -> None:
    done = run(core, "doctor", "--json")
    assert done.returncode == 0
    (note,) = (it for it in json.loads(done.stdout)["remarks"] if it["about"] == "torch")
    assert note["level"] == "note" and "moectl[run]" in note["says"] + note["do"]
    rows = ROOT / "docs" / "bench_h200.jsonl"
    done = run(core, "compare", rows, rows, "-q")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("target", ["marlin", "trtllm", "moectl", "triton-hopper", "nvfp4", "int8"])
def test_dry_run_without_torch_plans_the_same(
    core: Path, tiny_gpt_oss: Path, tmp_path: Path, target: str
) -> None:
    words = ("convert", tiny_gpt_oss, tmp_path / "out", "--to", target, "--requantize", "--dry-run", "--json")
    done = run(core, *words)
    assert done.returncode == 0, done.stderr
    plan, here = json.loads(done.stdout), moectl(*map(str, words)).document
    assert plan.pop("rate_measured") is False
    for name in ("seconds_estimate", "rate_measured"):
        plan.pop(name, None), here.pop(name, None)
    assert plan == here
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        "run {}",
        "bench {}",
        "tune {}",
        "bench --model gpt-oss-20b",
        "bench --model gpt-oss-20b --with marlin",
        "synth gpt-oss-20b out",
        "convert {} out --to marlin",
    ],
)
def test_what_needs_torch_names_the_extra(core: Path, tiny_gpt_oss: Path, tmp_path: Path, words: str) -> None:
    done = run(core, *words.format(tiny_gpt_oss).split(), cwd=tmp_path)
    assert done.returncode == 3
    # A conversion first says who will read it.
    assert done.stderr.splitlines()[-2:] == [
        "moectl: error: this needs torch, which is not installed",
        "  next: pip install 'moectl[run]'   (in a clone of moectl: pip install '.[run]')",
    ]
    assert "fetch" not in done.stderr
    assert not (tmp_path / "out").exists()
