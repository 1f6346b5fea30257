"""What transformers is asked: checkpoints, devices, arguments of `from_pretrained` and packages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from devtools.recording.worker_process import ask_worker
from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.errors import UsageError

HERE = Path(__file__).parent
WORKER, LOADER = HERE / "transformers_worker.py", HERE / "tiny_loads.py"

DEVICES: dict[str, dict[str, Any]] = {
    "sm75": {"kind": "cuda", "cc": [7, 5]},
    "sm80": {"kind": "cuda", "cc": [8, 0]},
    "sm89": {"kind": "cuda", "cc": [8, 9]},
    "sm90": {"kind": "cuda", "cc": [9, 0]},
    "sm100": {"kind": "cuda", "cc": [10, 0]},
    "sm103": {"kind": "cuda", "cc": [10, 3]},
    "sm110": {"kind": "cuda", "cc": [11, 0]},
    "sm120": {"kind": "cuda", "cc": [12, 0]},
    "gfx942": {"kind": "rocm", "cc": [9, 4]},
    "gfx950": {"kind": "rocm", "cc": [9, 5]},
    "xpu": {"kind": "xpu"},
    "cpu": {"kind": "cpu"},
}

PLAIN: dict[str, Any] = {
    "implementation": None, "dequantize": False, "use_kernels": False, "compile": False, "dtype": "bfloat16",
}  # fmt: skip
IMPLEMENTATIONS = (
    "eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "deepgemm_megamoe", "flash_moe",
)  # fmt: skip
"""Values of `experts_implementation`; there is no flash_moe."""
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    *({"implementation": name} for name in IMPLEMENTATIONS),
    {"dequantize": True},
    {"dequantize": True, "implementation": "deepgemm"},
    {"use_kernels": True},
    {"compile": True},
    {"dtype": "float16"},
    {"dtype": "float16", "compile": True},
    {"dtype": "float16", "implementation": "deepgemm"},
)
"""Arguments of `from_pretrained` that differ from `PLAIN`; `compile`: under torch.compile."""
FEW: tuple[dict[str, Any], ...] = ({}, {"implementation": "deepgemm"}, {"implementation": "sonicmoe"})
EAGER = {"implementation": "eager"}
LIKE_OTHERS = frozenset({"sm103", "sm110", "gfx950"})
"""Devices that few arguments are asked about."""
DEQUANTIZING = frozenset({"mxfp4", "fp8", "mxfp8", "compressed-tensors"})
"""Quantizations whose configuration has `dequantize`."""

COMPLETE = {
    "accelerate": "1.15.0", "triton": "3.7.0", "compressed_tensors": "0.20.0", "gptqmodel": "7.7.0",
    "optimum": "2.3.0", "quark": "0.12.0", "nvcc": "13.0",
    "nvidia_cutlass_dsl": "4.6.0", "apache_tvm_ffi": "0.1.10",
}  # fmt: skip
"""Packages as complete as any release needs them, `kernels` apart; nvcc is the CUDA toolkit's."""
VERSIONS: dict[str, tuple[str | None, ...]] = {
    "kernels": (None, "0.12.3", "0.16.2", "0.17.2", "0.18.2", "0.19.0"),
    "nvcc": (None, "12.2", "12.8", "12.9"),
    "triton": (None, "3.3.1", "3.4.0"),
    "accelerate": (None, "1.0.0"),
    "compressed_tensors": (None, "0.14.0"),
    "gptqmodel": (None, "1.4.2"),
    "optimum": (None, "1.23.0"),
    "quark": (None,),
    "nvidia_cutlass_dsl": (None, "4.5.0"),
    "apache_tvm_ffi": (None, "0.1.9"),
}
"""Packages that are asked about absent (None) and in other versions."""
OWN_PACKAGES: dict[str, tuple[str, ...]] = {
    "mxfp4": ("triton", "accelerate"),
    "fp8": ("accelerate",),
    "mxfp8": ("accelerate",),
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "accelerate"),
    "quark": ("quark",),
}
"""By quantization: packages of which each cell's change is asked about; those of kernels always are."""
KERNEL_PACKAGES = ("kernels", "nvcc", "nvidia_cutlass_dsl", "apache_tvm_ffi")
VARIABLES = ({"USE_HUB_KERNELS": "NO"}, {"TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR": "1"})

NOT_WHOLE = frozenset({"nvidia/DeepSeek-V4-Flash-NVFP4", "QuantTrio/Qwen3.6-35B-A3B-AWQ"})
"""Checkpoints whose config.json declares another format than that of the experts asked about."""
UNKNOWN_MODELS = frozenset(
    {"moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K3"}
)
"""Checkpoints that only their own code can load: asked about a few times, not in place of others."""


def checkpoints() -> dict[str, dict[str, Any]]:
    """One checkpoint of the catalogue for each architecture, storage and number format, by name."""
    found: dict[tuple[object, ...], tuple[str, dict[str, Any]]] = {}
    for name in model_names():
        opened = open_checkpoint(name, offline=True)
        group = opened.groups[0]
        problem = group.problem
        if name in NOT_WHOLE:
            continue
        key = (opened.model.architecture, problem.model_type, problem.storage, str(problem.scheme))
        config = {key: value for key, value in opened.config.items() if key != "auto_map"}
        layer = {
            "index": group.layers[0],
            "experts": problem.experts,
            "top_k": problem.top_k,
            "hidden": problem.dims.hidden,
        }
        found.setdefault(key, (name, {"config": config, "layer": layer}))
    return dict(found.values())


def _method(config: dict[str, Any]) -> str:
    declared = config.get("quantization_config") or (config.get("text_config") or {}).get(
        "quantization_config"
    )
    return str((declared or {}).get("quant_method", ""))


def cells(asked: dict[str, dict[str, Any]], kernels: str) -> Iterator[dict[str, Any]]:
    """Every question about the checkpoints `asked`; `kernels` is a version of that package that fits."""
    complete = {**COMPLETE, "kernels": kernels}
    kinds: set[object] = set()
    for name, row in asked.items():
        problem = open_checkpoint(name, offline=True).groups[0].problem
        method = _method(row["config"])
        kind = (
            problem.storage,
            problem.scheme.weight.name,
            problem.activation.gated,
            "llama4" in problem.model_type,
        )
        first = kind not in kinds and name not in UNKNOWN_MODELS
        kinds |= {kind} if first else set()

        def cell(device: str, arguments: dict[str, Any], name: str = name, **more: Any) -> dict[str, Any]:
            return {
                "checkpoint": name, "device": device, "packages": complete, "env": {},
                "arguments": {**PLAIN, **arguments}, **more,
            }  # fmt: skip

        for device in DEVICES if first else ("sm90", "cpu"):
            for arguments in ARGUMENTS if first and device not in LIKE_OTHERS else FEW:
                if not arguments.get("dequantize") or method in DEQUANTIZING:
                    yield cell(device, arguments)
        if not first:
            continue
        changed = (*KERNEL_PACKAGES, *OWN_PACKAGES.get(method, ()))
        changes = [
            (package, version)
            for package in changed
            for version in VERSIONS[package]
            if version != complete[package]
        ]
        for device in ("sm90", "sm100"):
            for arguments in (*FEW, *((EAGER,) if method in ("fp8", "mxfp8") else ())):
                for package, version in changes:
                    packages = {k: v for k, v in {**complete, package: version}.items() if v is not None}
                    yield cell(device, arguments, packages=packages)
                yield from (cell(device, arguments, env=env) for env in VARIABLES)
        without = {name: version for name, version in complete.items() if name != "kernels"}
        yield from (cell(device, {"use_kernels": True}, packages=without) for device in ("sm90", "cpu"))


def record(source: Path | None, kernels: str, names: list[str], jobs: int) -> Iterator[dict[str, Any]]:
    """transformers' decisions; `source` is the folder with its package (None: as installed), `names` the
    checkpoints (empty: all)."""
    known = checkpoints()
    if unknown := sorted(set(names) - set(known)):
        raise UsageError(f"{unknown[0]} is not asked about", hint=f"Asked about are {', '.join(known)}.")
    asked = {name: known[name] for name in names} if names else known
    questions = list(cells(asked, kernels))
    document = {"checkpoints": asked, "devices": DEVICES, "imported": {**COMPLETE, "kernels": kernels}}
    parts = [questions[start::jobs] for start in range(jobs)]
    with ThreadPoolExecutor(jobs + 1) as pool:
        loads = pool.submit(ask_worker, LOADER, source, {}, "transformers")
        asked_parts = ({**document, "cells": part} for part in parts)
        for rows in pool.map(lambda part: ask_worker(WORKER, source, part, "transformers"), asked_parts):
            yield from rows
        yield from loads.result()
