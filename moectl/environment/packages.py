"""Installed packages and engine switches as values; found without importing anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .devices import DATA

PROFILES_FILE = DATA / "vllm-0.33.0-grid.json"
"""Recorded names of the vLLM 0.33.0 policy; its package profiles are offered by name."""


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
    text = next((file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()), "")
    return re.search(rf"\b{re.escape(name)}\b", text) is not None
