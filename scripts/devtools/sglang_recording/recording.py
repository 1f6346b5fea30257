"""What SGLang is asked: checkpoints, devices, deployments and forced names; one process a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from devtools.recording.worker_process import ask_worker
from moectl.checkpoint import open_checkpoint
from moectl.checkpoint.source.catalogue import model_names
from moectl.errors import UsageError
from moectl.problem.moe_problem import MoEProblem

WORKER = Path(__file__).with_name("sglang_worker.py")

DEVICES: dict[str, dict[str, Any]] = {
    "sm80": {"kind": "cuda", "cc": [8, 0], "name": "NVIDIA A100-SXM4-80GB", "mem": 80},
    "sm89": {"kind": "cuda", "cc": [8, 9], "name": "NVIDIA L40S", "mem": 48},
    "sm90": {"kind": "cuda", "cc": [9, 0], "name": "NVIDIA H200", "mem": 141},
    "sm100": {"kind": "cuda", "cc": [10, 0], "name": "NVIDIA B200", "mem": 180},
    "sm110": {"kind": "cuda", "cc": [11, 0], "name": "NVIDIA Thor", "mem": 128},
    "sm120": {"kind": "cuda", "cc": [12, 0], "name": "NVIDIA RTX PRO 6000", "mem": 96},
    "gfx942": {"kind": "rocm", "cc": [9, 4], "gfx": "gfx942", "name": "AMD Instinct MI300X", "mem": 192},
    "gfx950": {"kind": "rocm", "cc": [9, 5], "gfx": "gfx950", "name": "AMD Instinct MI355X", "mem": 288},
    "gfx942 aiter": {
        "kind": "rocm", "cc": [9, 4], "gfx": "gfx942", "name": "AMD Instinct MI300X", "mem": 192,
        "env": {"SGLANG_USE_AITER": "1"},
    },
    "gfx950 aiter": {
        "kind": "rocm", "cc": [9, 5], "gfx": "gfx950", "name": "AMD Instinct MI355X", "mem": 288,
        "env": {"SGLANG_USE_AITER": "1"},
    },
    "cpu": {"kind": "cpu", "name": "cpu", "mem": 512},
}  # fmt: skip

RUNNERS = (
    "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_trtllm_routed",
    "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl", "flashinfer_megamoe", "cutlass",
    "aiter", "marlin", "humming", "experimental_sgl_trtllm", "experimental_sgl_marlin", "hpc_ops", "megamoe",
)  # fmt: skip
EXCHANGES = (
    "deepep", "mooncake", "nixl", "mori", "flashinfer", "megamoe", "deepep_v2", "pplx", "flashinfer_megamoe",
)  # fmt: skip
EXCHANGING = (
    "deep_gemm", "triton", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "marlin", "aiter",
)  # fmt: skip
"""Runners that are asked for together with an exchange."""

ROUTING = {
    "qwen3_moe": "Renormalize", "qwen2_moe": "RenormalizeNaive", "qwen3_next": "RenormalizeNaive",
    "qwen3_5_moe": "RenormalizeNaive", "glm4_moe": "DeepSeekV3", "llama4": "Llama4",
    "nemotron_h": "DeepSeekV3", "deepseek_v3": "DeepSeekV3",
    "kimi_k2": "DeepSeekV3", "deepseek_v2": "DeepSeekV3",
}  # fmt: skip
"""By the model's type: the routing method that its module passes to the experts."""

NOT_SERVED = frozenset({"JambaForCausalLM", "DbrxForCausalLM"})
"""Architectures of the catalogue that SGLang cannot load."""

NOT_WHOLE = frozenset({"RedHatAI/Qwen3-Coder-Next-NVFP4", "nvidia/MiniMax-M3-NVFP4"})
"""Checkpoints whose files in the catalogue lack what SGLang decides by: activations, layers' names."""


def _layer(problem: MoEProblem, index: int) -> dict[str, Any]:
    """What a model's module passes to its experts."""
    activation = problem.activation
    swiglu_oai = activation.name == "swigluoai"
    block = "block_sparse_moe" if problem.model_type in ("mixtral", "minimax_m2") else "mlp"
    if problem.model_type.startswith("nemotron"):
        block = "mixer"
    return {
        "experts": problem.experts,
        "top_k": problem.top_k,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        "index": index,
        "prefix": f"model.layers.{index}.{block}.experts",
        "activation": {"swigluoai": "silu", "gelu_tanh": "gelu"}.get(activation.name, activation.name),
        "alpha": activation.alpha if swiglu_oai else None,
        "limit": activation.limit if swiglu_oai else None,
        "bias": problem.bias,
        "gated": activation.gated,
        "dtype": {"bf16": "bfloat16", "fp16": "float16"}[problem.dtype],
        "routing": ROUTING.get(problem.model_type),
    }


def checkpoints() -> dict[str, dict[str, Any]]:
    """One checkpoint of the catalogue for each architecture, storage and number format, by name.

    Left out are those whose files of the catalogue do not declare the quantization of every layer.
    """
    found: dict[tuple[object, ...], tuple[str, dict[str, Any]]] = {}
    for name in model_names():
        opened = open_checkpoint(name, offline=True)
        group = opened.groups[0]
        problem = group.problem
        declared = opened.quantization or "quantization_config" in json.dumps(opened.config)
        mixed = len({group.problem.storage for group in opened.groups}) > 1
        if opened.model.architecture in NOT_SERVED or name in NOT_WHOLE or mixed:
            continue
        if problem.storage != "plain" and not declared:
            continue
        key = (opened.model.architecture, problem.storage, str(problem.scheme))
        row: dict[str, Any] = {"config": dict(opened.config), "layer": _layer(problem, group.layers[0])}
        if opened.quantization_file and opened.quantization_file != "config.json":
            row["files"] = {opened.quantization_file: dict(opened.quantization or {})}
        found.setdefault(key, (name, row))
    return dict(found.values())


def cells(names: list[str]) -> Iterator[dict[str, Any]]:
    """Every question about each of the checkpoints `names`, the device aside."""

    def cell(name: str, tp: int, dp: int = 1, ep: bool = False, **more: str) -> dict[str, Any]:
        return {"checkpoint": name, "tp": tp, "dp": dp, "ep": ep, "a2a": None, "forced": None, **more}

    kinds: set[object] = set()
    for name in names:
        problem = open_checkpoint(name, offline=True).groups[0].problem
        first = (kind := (problem.storage, str(problem.scheme))) not in kinds
        kinds.add(kind)
        yield cell(name, 1)
        yield cell(name, 4)
        yield cell(name, 4, ep=True)
        yield from (cell(name, 1, 4, True, a2a=a2a) for a2a in EXCHANGES)
        yield from (cell(name, 4, ep=True, a2a=a2a) for a2a in ("deepep", "mooncake"))
        if not first:
            continue
        for runner in RUNNERS:
            yield cell(name, 1, forced=runner)
            yield cell(name, 4, ep=True, forced=runner)
            if runner in EXCHANGING:
                yield from (
                    cell(name, 1, 4, True, a2a=a2a, forced=runner) for a2a in ("deepep", "flashinfer")
                )


def record(source: Path, devices: list[str], names: list[str], jobs: int) -> Iterator[dict[str, Any]]:
    """SGLang's decisions; `source` is the folder with its package, `names` the checkpoints (empty: all)."""
    known = checkpoints()
    if unknown := sorted(set(names) - set(known)):
        raise UsageError(f"{unknown[0]} is not asked about", hint=f"Asked about are {', '.join(known)}.")
    if unknown := sorted(set(devices) - set(DEVICES)):
        raise UsageError(f"{unknown[0]} is no device to ask about", hint=f"There are {', '.join(DEVICES)}.")
    asked = {name: known[name] for name in names} if names else known
    document = {"checkpoints": asked, "cells": list(cells(list(asked)))}

    def ask(device: str) -> list[dict[str, Any]]:
        return ask_worker(WORKER, source, {**document, "device": DEVICES[device]}, f"SGLang on {device}")

    with ThreadPoolExecutor(jobs) as pool:
        for device, rows in zip(devices, pool.map(ask, devices), strict=True):
            yield from ({"device": device, **row} for row in rows)
