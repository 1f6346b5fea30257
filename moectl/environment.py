"""Machines and installed packages as values; reading the real ones happens at the edge."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from .errors import Unavailable, UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the CPU.

    Attributes:
        platform: ``cuda``, ``rocm``, ``xpu`` or ``cpu``.
        arch: ``sm90``, ``gfx942``, ``x86``, ``aarch64``, ...
        name: the name an engine would see.
        sms: streaming multiprocessors (CUDA), compute units (ROCm), cores (CPU).
        memory_bytes: device memory.
        bandwidth: peak memory bandwidth, bytes/s; 0 when unknown.
        bf16_flops, fp8_flops: peak dense matrix rates, FLOP/s; 0 when unknown or absent.
        features: instruction sets that decide, such as ``amx``.
    """

    platform: str
    arch: str
    name: str
    sms: int = 0
    memory_bytes: int = 0
    bandwidth: float = 0.0
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    features: frozenset[str] = frozenset()

    @property
    def capability(self) -> int:
        """CUDA compute capability times ten (``sm90`` is 90, ``sm103`` 103); 0 off CUDA."""
        return int(self.arch[2:].rstrip("af")) if self.platform == "cuda" else 0


@dataclass(frozen=True, slots=True)
class Packages:
    """Optional packages and switches that a decision depends on.

    `versions` maps an importable package to its version (``""`` when unknown); `missing` lists
    symbols (``package:dotted.name``) that an installed package lacks; `env` holds engine switches.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)

    def has(self, package: str, symbol: str = "") -> bool:
        """True when `package` is installed and, if named, holds `symbol`."""
        return package in self.versions and f"{package}:{symbol}" not in self.missing


DATA = Path(__file__).parent / "data"
PROFILES_FILE = DATA / "vllm-0.33.0-grid.json"
"""Recorded names of the vLLM 0.33.0 policy; its package profiles are offered by name."""

_GIB = 1 << 30
_CPUS = {
    "cpu": frozenset[str](),
    "cpu-x86": frozenset[str](),
    "cpu-amx": frozenset({"amx"}),
    "cpu-x86-amx": frozenset({"amx"}),
}
_MACHINES = {"x86_64": "x86", "amd64": "x86", "arm64": "aarch64"}
_CPU_FLAGS = {"amx_tile": "amx", "avx512f": "avx512"}
_CUDA_ARCH = re.compile(r"sm_?(\d{2,3})[af]?")
_GFX_ARCH = re.compile(r"gfx[0-9a-f]{3,5}")
_NOISE = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|[\s_()-]")


@cache
def _table() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "gpus.json").read_text(encoding="utf-8"))
    return document


def _squeeze(name: str) -> str:
    return _NOISE.sub("", name.lower())


@cache
def _known() -> dict[str, str]:
    """Every spelling, squeezed, with the key of its row."""
    found: dict[str, str] = {}
    for key, row in _table()["gpus"].items():
        for spelling in (key, *row["aliases"], *row["names"]):
            found.setdefault(_squeeze(spelling), key)
    return found


def _scaled(figure: float | None) -> float:
    """A figure in tera as a whole number; 0 where it is unknown."""
    return float(round((figure or 0) * 1e12))


def _device(key: str, arch: str = "") -> Device:
    row = _table()["gpus"][key]
    return Device(
        platform=row["platform"],
        arch=arch or row["arch"],
        name=row["names"][0],
        sms=row["sms"] or 0,
        memory_bytes=row["memory_gib"] * _GIB,
        bandwidth=_scaled(row["bandwidth_tb_s"]),
        bf16_flops=_scaled(row["bf16_tflops"]),
        fp8_flops=_scaled(row["fp8_tflops"]),
    )


def find_device(name: str) -> Device:
    """The device called `name`: a GPU (``h100``, ``NVIDIA H200``, ``mi300x``), an architecture
    (``sm90``, ``gfx942``, stood for by one GPU of it), ``cpu`` or ``cpu-amx``.

    UsageError with near matches when nothing has that name.
    """
    text = name.strip().lower()
    if text in _CPUS:
        return Device("cpu", "x86", "cpu", features=_CPUS[text])
    if key := _known().get(_squeeze(text)):
        return _device(key)
    representatives = _table()["representatives"]
    cuda = _CUDA_ARCH.fullmatch(text)
    arch = f"sm{cuda[1]}" if cuda else text
    if key := representatives.get(arch):
        return _device(key, arch)
    if cuda and 50 <= int(cuda[1]) < 200:
        return Device("cuda", arch, arch)
    if _GFX_ARCH.fullmatch(text):
        return Device("rocm", arch, arch)
    names = [*_table()["gpus"], *representatives, *_CPUS]
    near = get_close_matches(text, names, n=4, cutoff=0.5)
    raise UsageError(
        f"no device is called {name!r}",
        hint=f"Near matches: {', '.join(near)}." if near else f"Known are {', '.join(names)}.",
    )


def detect_device() -> Device:
    """The first visible GPU of this machine, or its CPU.

    Asks `nvidia-smi` (five seconds) and honours ``CUDA_VISIBLE_DEVICES``. Unavailable when that
    variable names a GPU that is not there.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none", "NoDevFiles"):
        return detect_cpu()
    rows = _nvidia_rows()
    if not rows:
        return detect_cpu()
    row = rows[0] if visible is None else _visible_row(rows, visible.split(",")[0].strip())
    _, _, name, mebibytes, capability = row
    known = _known().get(_squeeze(name))
    arch = "sm" + capability.replace(".", "")
    device = _device(known, arch) if known else Device("cuda", arch, name)
    return replace(device, name=name, memory_bytes=_mebibytes(mebibytes) or device.memory_bytes)


def _mebibytes(text: str) -> int:
    """Bytes of a MiB figure; 0 where the driver gives none, as on unified memory."""
    return int(text) << 20 if text.isdigit() else 0


def _visible_row(rows: list[tuple[str, ...]], wanted: str) -> tuple[str, ...]:
    for row in rows:
        if wanted == row[0] or (wanted.startswith("GPU-") and row[1].startswith(wanted)):
            return row
    raise Unavailable(
        f"CUDA_VISIBLE_DEVICES asks for GPU {wanted!r}, nvidia-smi lists {len(rows)} GPU(s) from 0",
        hint="Unset CUDA_VISIBLE_DEVICES, or name a device with --gpu.",
    )


def _nvidia_rows() -> list[tuple[str, ...]]:
    """(index, uuid, name, memory in MiB, compute capability) of each GPU; empty without a driver."""
    command = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.total,compute_cap",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [tuple(part.strip() for part in line.split(",")) for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 5 and re.fullmatch(r"\d+\.\d", row[4])]


def detect_cpu() -> Device:
    """The CPU of this machine: usable cores, memory, and the instruction sets that decide."""
    machine = platform.machine().lower()
    info = _read("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", info, re.MULTILINE)
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    words = frozenset(flags[1].split()) if flags else frozenset[str]()
    features = {feature for flag, feature in _CPU_FLAGS.items() if flag in words}
    if "AuthenticAMD" in info and "avx512" in features:
        features.add("zen")
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    affinity = getattr(os, "sched_getaffinity", None)
    return Device(
        platform="cpu",
        arch=_MACHINES.get(machine, machine),
        name=model[1].strip() if model else "cpu",
        sms=len(affinity(0)) if affinity else (os.cpu_count() or 1),
        memory_bytes=int(memory[1]) << 10 if memory else 0,
        features=frozenset(features),
    )


def _read(path: str) -> str:
    """The file's text; empty on systems that have no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Where a package may be installed, and what must be in its source files.

    Attributes:
        modules: importable names, the engine's bundled copy last.
        distribution: name of its metadata.
        marks: files of which the real package has at least one; empty: any package of the name.
        symbols: dotted names that are looked for.
    """

    modules: tuple[str, ...]
    distribution: str = ""
    marks: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()


PROBES: dict[str, Probe] = {
    "flashinfer": Probe(
        ("flashinfer",),
        "flashinfer-python",
        symbols=(
            "fp4_quantize",
            "nvfp4_block_scale_interleave",
            "fused_moe.cutlass_fused_moe",
            "fused_moe.trtllm_bf16_moe",
            "fused_moe.trtllm_fp4_block_scale_moe",
            "fused_moe.trtllm_fp8_block_scale_moe",
            "fused_moe.trtllm_fp8_per_tensor_scale_moe",
            "fused_moe.trtllm_mxint4_block_scale_moe",
        ),
    ),
    "flashinfer_cubin": Probe(("flashinfer_cubin",), "flashinfer-cubin"),
    # A package of the same name on PyPI is unrelated: it has none of these files.
    "triton_kernels": Probe(
        ("triton_kernels", "vllm.third_party.triton_kernels"), marks=("matmul_ogs.py", "matmul.py")
    ),
    "deep_gemm": Probe(("deep_gemm", "vllm.third_party.deep_gemm"), "deep-gemm"),
    "humming": Probe(("humming",), "humming-kernels", marks=("layer.py", "kernel", "ops")),
    "deep_ep": Probe(("deep_ep",), "deep-ep"),
    "aiter": Probe(("aiter",), "amd-aiter"),
    "quark": Probe(("quark",), "amd-quark"),
    "b12x": Probe(("b12x",), "b12x"),
    "hpc": Probe(("hpc",)),
    "zentorch": Probe(("zentorch",), "zentorch"),
}
"""Optional packages that decide, by the name under which `Packages` lists them."""

_TOOLS = ("nvcc", "ninja")


def packages_from(spec: str | None, env: Mapping[str, str] | None = None) -> Packages:
    """Packages and switches that a decision may count on; `env` adds or replaces switches.

    None is what is installed here, found without importing it, and this process's ``VLLM_*``
    variables. Otherwise `spec` is the name of a profile (``full``, ``bare``, ...) or a list such as
    ``flashinfer,humming=0.1.19``; listed packages count as complete, and ``none`` is no package.

    UsageError when a name is neither.
    """
    switches = dict(env or {})
    if spec is None:
        mine = {key: value for key, value in os.environ.items() if key.startswith("VLLM_")}
        versions, missing = _installed()
        return Packages(versions, missing, {**mine, **switches})
    profiles: dict[str, Any] = json.loads(PROFILES_FILE.read_text(encoding="utf-8"))["PROFILES"]
    if profile := profiles.get(spec.strip()):
        return Packages(dict.fromkeys(profile["packages"], ""), env={**profile["env"], **switches})
    versions = {}
    for item in spec.split(","):
        name, _, version = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name in ("", "none"):
            continue
        if name not in PROBES and name not in _TOOLS:
            raise UsageError(
                f"{name!r} is neither a package that decides nor a profile",
                hint=f"Packages: {', '.join((*PROBES, *_TOOLS))}. Profiles: {', '.join(profiles)}.",
            )
        versions[name] = version
    if "flashinfer" in versions:
        versions.setdefault("flashinfer_cubin", "")
    return Packages(versions, env=switches)


def _installed() -> tuple[dict[str, str], frozenset[str]]:
    """Versions of what is installed, and symbols that it lacks."""
    versions: dict[str, str] = {}
    missing: set[str] = set()
    for name, probe in PROBES.items():
        folder = next((found for module in probe.modules if (found := _folder(module))), None)
        if folder is None or (probe.marks and not any((folder / mark).exists() for mark in probe.marks)):
            continue
        versions[name] = _version(probe.distribution)
        missing |= {f"{name}:{symbol}" for symbol in probe.symbols if not _defines(folder, symbol)}
    versions.update({tool: "" for tool in _TOOLS if shutil.which(tool)})
    return versions, frozenset(missing)


def _folder(module: str) -> Path | None:
    """Folder of a package's source files, found without importing anything."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place).joinpath(*inner)
        if folder.is_dir():
            return folder
    return None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution) if distribution else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _defines(folder: Path, symbol: str) -> bool:
    """True when the package's source names `symbol` in the module where callers look for it."""
    *inner, name = symbol.split(".")
    module = folder.joinpath(*inner)
    files = (module / "__init__.py", module.with_suffix(".py"))
    text = next((_read(str(file)) for file in files if file.is_file()), "")
    return re.search(rf"\b{re.escape(name)}\b", text) is not None
