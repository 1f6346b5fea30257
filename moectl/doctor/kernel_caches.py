"""Folders in which kernels are kept once they are compiled, and how many compilers may run at once."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment.detection import usable_cores
from ..files.records import to_json
from ..oracle.engine import CacheFolder
from ..oracle.registry import newest_engines

SECONDS, FILES = 2.0, 200_000
"""How long, and how many files, one folder is counted for; beyond that its size is a lower bound."""

ROOMY = 2 << 30
"""Bytes of free space below which compiled kernels may not fit."""

NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.sshfs", "9p", "wekafs")
"""File systems on which thousands of small files, and locks on them, are slow."""

JOB_BYTES = 6 << 30
"""Memory that one compiler of a CUTLASS kernel may take."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")

Env = Mapping[str, str]


def cache_path(folder: CacheFolder, env: Env) -> Path:
    """Where the cache is for a process with `env`."""
    if named := env.get(folder.variable):
        return Path(named).expanduser() / folder.below
    home = env.get("HOME") or str(Path.home())
    first, _, rest = folder.default.partition("/")
    roots = {"~": home, "@cache": env.get("XDG_CACHE_HOME") or f"{home}/.cache"}
    return Path(roots[first] if first in roots else _inductor()) / rest


def _inductor() -> str:
    """Where torch keeps compiled kernels: a folder of the user's among the temporary ones."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return f"{tempfile.gettempdir()}/torchinductor_{re.sub(r'[^A-Za-z0-9_.-]', '_', user)}"


CACHES = (
    CacheFolder("Triton", "TRITON_CACHE_DIR", "~/.triton/cache"),
    CacheFolder("torch inductor", "TORCHINDUCTOR_CACHE_DIR", "@inductor"),
    CacheFolder("FlashInfer", "FLASHINFER_WORKSPACE_BASE", "~/.cache/flashinfer", ".cache/flashinfer"),
    CacheFolder("DeepGEMM", "DG_JIT_CACHE_DIR", "~/.deep_gemm"),
    CacheFolder("Humming", "HUMMING_CACHE_DIR", "~/.humming/cache"),
    CacheFolder("b12x", "B12X_COMPILE_CACHE_DIR", "@cache/b12x/compile"),
    CacheFolder("AITER", "AITER_JIT_DIR", "~/.aiter/jit"),
)
"""Caches of compiled kernels that a MoE layer may go through in any engine."""

DRIVER = CacheFolder("CUDA driver", "CUDA_CACHE_PATH", "~/.nv/ComputeCache")


@dataclass(frozen=True, slots=True)
class KernelCache:
    """One cache as it is.

    Attributes:
        name, variable: what writes it, and the variable that moves it.
        path: where it is; `there` tells whether it has been made.
        files, nbytes: what is in it; lower bounds unless `counted`.
        writable: whether this process may write to it, or make it.
        free: bytes left on its file system; `filesystem` its type, empty where that is not known.
    """

    name: str
    variable: str
    path: str
    there: bool
    files: int
    nbytes: int
    counted: bool
    writable: bool
    free: int
    filesystem: str = ""

    @property
    def remote(self) -> bool:
        """True on a file system of another machine."""
        return self.filesystem in NETWORK


def find_caches(env: Env) -> tuple[KernelCache, ...]:
    """Every cache of `CACHES`, of the engines and of the driver, with `env`."""
    mounts = _mounts()
    engines = (folder for engine in newest_engines() for folder in engine.caches)
    return tuple(_cache(folder, cache_path(folder, env), mounts) for folder in (*CACHES, *engines, DRIVER))


def _cache(place: CacheFolder, path: Path, mounts: list[tuple[str, str]]) -> KernelCache:
    there = path.is_dir()
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    files, nbytes, counted = _count(path) if there else (0, 0, True)
    return KernelCache(
        place.name,
        place.variable,
        str(path),
        there,
        files,
        nbytes,
        counted,
        nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        shutil.disk_usage(nearest).free,
        _filesystem(nearest, mounts),
    )


def _count(folder: Path) -> tuple[int, int, bool]:
    """Files and bytes below `folder`, and whether all of them were counted."""
    files = nbytes = 0
    end = time.monotonic() + SECONDS
    for size in _sizes(folder):
        files, nbytes = files + 1, nbytes + size
        if files >= FILES or time.monotonic() > end:
            return files, nbytes, False
    return files, nbytes, True


def _sizes(folder: Path) -> Iterator[int]:
    """Size of every file below `folder`; what vanishes or may not be read is left out."""
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(root) / name).lstat().st_size
            except OSError:
                continue


def _mounts() -> list[tuple[str, str]]:
    """(mount point, file system type), the longest mount points first."""
    rows = [line.split() for line in _read(PROC / "mounts").splitlines()]
    found = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    return sorted(found, key=lambda mount: -len(mount[0]))


def _filesystem(path: Path, mounts: list[tuple[str, str]]) -> str:
    place = path.resolve()
    return next((kind for point, kind in mounts if place.is_relative_to(point)), "")


@dataclass(frozen=True, slots=True)
class CompilerJobs:
    """How many compilers may run at once.

    Attributes:
        cores: that this process may use; `memory` bytes that it may still take, 0 where unknown.
        safe: as many as both allow, `JOB_BYTES` each.
        asked: ``MAX_JOBS`` as it is set; empty: one for each core.
    """

    cores: int
    memory: int
    safe: int
    asked: str = ""

    @property
    def too_many(self) -> bool:
        """True when more would run than memory allows."""
        return (int(self.asked) if self.asked.isdigit() else self.cores) > self.safe

    def to_json(self) -> dict[str, Any]:
        """Plain data, every field."""
        return {**to_json(self), "too_many": self.too_many}


def find_jobs(env: Env) -> CompilerJobs:
    """Compilers that may run at once here: by cores and by memory, a container's limits included."""
    cores, memory = _cores(), _memory()
    safe = max(1, min(cores, memory // JOB_BYTES)) if memory else cores
    return CompilerJobs(cores, memory, safe, env.get("MAX_JOBS", ""))


def _cores() -> int:
    """Cores that this process may use; a container's quota counts."""
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and all(word.isdigit() for word in quota) and int(quota[1]):
        return max(1, min(usable_cores(), int(quota[0]) // int(quota[1])))
    return usable_cores()


def _memory() -> int:
    """Bytes that this process may still take: what is free here, or what its container leaves."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _read(PROC / "meminfo"), re.MULTILINE)
    free = int(found[1]) << 10 if found else 0
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        return min(free, max(0, int(limit) - int(used)))
    return free


def _read(file: Path) -> str:
    """The file's text; empty on systems that have no such file."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
