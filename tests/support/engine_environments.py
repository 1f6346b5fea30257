"""Python environments with an engine in them: stand-ins, and unpacked wheels where there are some."""

import os
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("MOECTL_TEST_ENGINES") or Path.home() / ".cache" / "moectl-engines")
"""Where `scripts/engines/record` keeps the Python files of releases."""


def environment(folder, files, paths=()):
    """An environment of this Python in `folder`, with `files` by path in its packages, and with `paths`."""
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    site.mkdir(parents=True, exist_ok=True)
    (site / "also.pth").write_text("".join(f"{path}\n" for path in paths))
    (folder / "bin").mkdir()
    real = Path(sys.executable).resolve()
    (folder / "bin" / "python").symlink_to(real)
    (folder / "pyvenv.cfg").write_text(f"home = {real.parent}\nversion = {sys.version.split()[0]}\n")
    return folder


def unpacked_release(folder, version):
    """An environment with the Python files of a vLLM release; skips where they are not kept."""
    wheel, dependencies = CACHE / f"vllm-{version}", CACHE / "dependencies"
    if not (wheel.is_dir() and dependencies.is_dir()):
        pytest.skip(f"no {wheel}: `scripts/engines/record vllm=={version} OUT` fetches it")
    pytest.importorskip("torch")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    return environment(folder, {}, [wheel, dependencies, *packages])
