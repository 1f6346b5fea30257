"""Caches of compiled kernels, and the number of compilers that can run concurrently."""

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
from ..files.safe_reading import text_or_empty
from ..files.user_paths import home_folder, user_path
from ..oracle.engine import CacheFolder
from ..oracle.registry import answering_engines
from ..whole_numbers import whole_number

SECONDS, FILES = 2.0, 200_000
"""Limits of scanning one directory; beyond them its size is a lower bound."""

ENOUGH_SPACE = 2 << 30
"""Free space in bytes below which compiled kernels may not fit."""

NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.sshfs", "9p", "wekafs")
"""File systems that are slow with thousands of small files, and with locks."""

JOB_BYTES = 6 << 30
"""Memory that compiling one CUTLASS kernel needs, in bytes."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")

Env = Mapping[str, str]


def cache_path(folder: CacheFolder, env: Env) -> Path:
    """The cache's directory for a process with `env`."""
    if named := env.get(folder.variable):
        return user_path(named) / folder.below
    home = str(home_folder(env))
    first, _, rest = folder.default.partition("/")
    roots = {"~": home, "@cache": env.get("XDG_CACHE_HOME") or f"{home}/.cache"}
    return Path(roots[first] if first in roots else _inductor()) / rest


def _inductor() -> str:
    """The default cache of torch inductor: a user's directory in the temporary directory."""
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
"""Caches of compiled kernels that MoE layers use in any engine."""

DRIVER = CacheFolder("CUDA driver", "CUDA_CACHE_PATH", "~/.nv/ComputeCache")


@dataclass(frozen=True, slots=True)
class KernelCache:
    """The state of one cache.

    Attributes:
        name, variable: the program that writes it, and the variable that sets its path.
        path: its directory.
        there: whether the directory exists.
        files, nbytes: number and size of its files; lower bounds unless `counted`.
        writable: whether this process can write to it, or create it.
        free: free space on its file system in bytes.
        filesystem: type of the file system; empty if unknown.
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
        """True on a network file system."""
        return self.filesystem in NETWORK


def find_caches(env: Env) -> tuple[KernelCache, ...]:
    """The caches in `CACHES`, of the engines and of the driver, for a process with `env`."""
    mounts = _mounts()
    engines = (folder for engine in answering_engines() for folder in engine.caches)
    return tuple(_cache(folder, cache_path(folder, env), mounts) for folder in (*CACHES, *engines, DRIVER))


def _cache(location: CacheFolder, path: Path, mounts: list[tuple[str, str]]) -> KernelCache:
    there = path.is_dir()
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    files, nbytes, counted = _count(path) if there else (0, 0, True)
    return KernelCache(
        location.name,
        location.variable,
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
    """Number and total size of the files below `folder`, and whether all of them were counted."""
    files = nbytes = 0
    end = time.monotonic() + SECONDS
    for size in _sizes(folder):
        files, nbytes = files + 1, nbytes + size
        if files >= FILES or time.monotonic() > end:
            return files, nbytes, False
    return files, nbytes, True


def _sizes(folder: Path) -> Iterator[int]:
    """Size of every file below `folder`; files that vanish or cannot be read are skipped."""
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(root) / name).lstat().st_size
            except OSError:
                continue


def _mounts() -> list[tuple[str, str]]:
    """(mount point, file system type), longest mount points first."""
    rows = [line.split() for line in text_or_empty(PROC / "mounts").splitlines()]
    mounts = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    return sorted(mounts, key=lambda mount: -len(mount[0]))


def _filesystem(path: Path, mounts: list[tuple[str, str]]) -> str:
    resolved = path.resolve()
    return next((kind for point, kind in mounts if resolved.is_relative_to(point)), "")


@dataclass(frozen=True, slots=True)
class CompilerJobs:
    """The number of compilers that can run concurrently.

    Attributes:
        cores: usable cores.
        memory: available memory in bytes; 0 if unknown.
        safe: number that cores and memory allow, with `JOB_BYTES` each.
        asked: ``MAX_JOBS`` as set; empty for one per core.
    """

    cores: int
    memory: int
    safe: int
    asked: str = ""

    @property
    def too_many(self) -> bool:
        """True when more compilers would run than memory allows."""
        asked = whole_number(self.asked)
        return (self.cores if asked is None else asked) > self.safe

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**to_json(self), "too_many": self.too_many}


def find_jobs(env: Env) -> CompilerJobs:
    """How many compilers can run concurrently, by cores and memory, including a container's limits."""
    cores, memory = _cores(), _memory()
    safe = max(1, min(cores, memory // JOB_BYTES)) if memory else cores
    return CompilerJobs(cores, memory, safe, env.get("MAX_JOBS", ""))


def _cores() -> int:
    """Usable cores, including a container's quota."""
    quota = text_or_empty(CGROUP / "cpu.max").split()
    if len(quota) == 2 and all(word.isdigit() for word in quota) and int(quota[1]):
        return max(1, min(usable_cores(), int(quota[0]) // int(quota[1])))
    return usable_cores()


def _memory() -> int:
    """Available memory in bytes, including a container's limit."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", text_or_empty(PROC / "meminfo"), re.MULTILINE)
    free = int(match[1]) << 10 if match else 0
    limit, used = (
        text_or_empty(CGROUP / "memory.max").strip(),
        text_or_empty(CGROUP / "memory.current").strip(),
    )
    if limit.isdigit() and used.isdigit():
        return min(free, max(0, int(limit) - int(used)))
    return free
