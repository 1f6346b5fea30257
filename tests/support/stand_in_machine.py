"""Stand-in machines: a site folder, a PATH, kernel files and drivers of their own."""

import stat
import sys
from pathlib import Path

import pytest

from moectl.doctor import kernel_caches
from moectl.environment import sysfs_gpus
from moectl.environment.gpus import VISIBILITY
from moectl.oracle.registry import known_packages

SMI = """#!{python}
import sys
if sys.argv[1:] == ["-L"]:
    print('''{listing}''')
elif len(sys.argv) > 1:
    print('''{rows}''')
else:
    print("| NVIDIA-SMI 580.95.05      Driver Version: 580.95.05      CUDA Version: {cuda}     |")
"""


class Bench:
    """A machine under construction: its folder is site folder, PATH and home at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str, text: str = "", program: bool = False) -> Path:
        """Writes one file below the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if program:
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def package(self, module: str, distribution: str, version: str, text: str = "") -> None:
        """Installs a package with metadata."""
        self.file(f"{module}/__init__.py", text)
        self.file(
            f"{distribution.replace('-', '_')}-{version}.dist-info/METADATA",
            f"Name: {distribution}\nVersion: {version}\n",
        )

    def gpus(self, rows: str, listing: str = "", cuda: str = "13.0") -> None:
        """Installs an `nvidia-smi` that prints these rows."""
        text = SMI.format(python=sys.executable, rows=rows, listing=listing, cuda=cuda)
        self.file("nvidia-smi", text, program=True)

    def env(self, **variables: str) -> dict[str, str]:
        """The environment of a process on this machine."""
        return {"HOME": str(self.folder), "PATH": str(self.folder), **variables}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An empty machine without GPU; this process lives on it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MOECTL_PEERS", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in {name for names in VISIBILITY.values() for name in names}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sysfs_gpus, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(sysfs_gpus, "DRM", tmp_path / "drm")
    monkeypatch.setattr(sysfs_gpus, "AMDGPU_VERSION", tmp_path / "amdgpu")
    monkeypatch.setattr(kernel_caches, "PROC", tmp_path / "proc")
    monkeypatch.setattr(kernel_caches, "CGROUP", tmp_path / "cgroup")
    for probe in known_packages().values():
        for module in probe.modules:
            monkeypatch.delitem(sys.modules, module.split(".")[0], raising=False)
    return Bench(tmp_path)
