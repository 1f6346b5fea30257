"""vLLM's own choice of launches: its functions out of `fused_moe.py`, without the imports of that file."""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moectl.capabilities.unpacked_libraries import TRITON_EXPERTS_PEER, library_file, peers_folder

NAMES = ("get_config_file_name", "get_moe_configs", "get_default_config")
TOKENS = (*range(1, 140), *range(140, 1200, 53), 511, 512, 513, 2048, 4096, 16384, 65536)
FORMS: tuple[tuple[str, tuple[int, int]], ...] = (
    ("", (0, 0)),
    ("fp8_w8a8", (0, 0)),
    ("fp8_w8a8", (128, 128)),
)
EXPERTS = (1, 8, 32, 128, 256)
RECORDED = Path(__file__).parents[1] / "data" / "engines" / "vllm_default_launches.json"


def cases() -> Iterator[tuple[int, int, str, tuple[int, int]]]:
    """Tokens, experts, dtype and block of the grid that is recorded."""
    for experts, (dtype, block), tokens in product(EXPERTS, FORMS, TOKENS):
        yield tokens, experts, dtype, block


def vllm_folder() -> Path:
    """The directory with vLLM's file; skips where there is none."""
    folder = library_file(peers_folder(), TRITON_EXPERTS_PEER)
    if folder is None:
        pytest.skip("vLLM's Triton experts are not here: `moectl peers triton`, or MOECTL_PEERS")
    return folder


def vllm_functions(folder: Path, gpu: str, tuned: str | None = None) -> SimpleNamespace:
    """The functions `NAMES` as vLLM has them, on a GPU that its files call `gpu`.

    `tuned` is what ``VLLM_TUNED_CONFIG_FOLDER`` says.
    """
    quiet = SimpleNamespace(info_once=lambda *a, **k: None, warning_once=lambda *a, **k: None)
    namespace: dict[str, Any] = {
        "__file__": str(folder / "fused_moe.py"),
        "Any": Any,
        "functools": functools,
        "json": json,
        "os": os,
        "logger": quiet,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=tuned),
        "current_platform": SimpleNamespace(is_rocm=lambda: False),
        "get_device_name_as_file_name": lambda: gpu,
    }
    exec(_code(folder / "fused_moe.py"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in NAMES})


@functools.cache
def _code(file: Path) -> Any:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
    return compile(ast.Module(body, []), str(file), "exec")


def vllm_defaults(folder: Path) -> list[list[int]]:
    """vLLM's default launch for each of `cases`, its fields in the order of `FIELDS`."""
    from moectl.capabilities.vllm_launches import FIELDS

    choose = vllm_functions(folder, "NVIDIA_H200").get_default_config
    found = []
    for tokens, experts, dtype, block in cases():
        config = choose(tokens, experts, 768, 2048, 8, dtype or None, list(block) if all(block) else None)
        assert config.pop("SPLIT_K") == 1 and config.keys() == set(FIELDS)
        found.append([config[field] for field in FIELDS])
    return found


def packed(launches: list[list[int]]) -> list[list[Any]]:
    """Equal ones that follow each other as one, with their number."""
    runs: list[list[Any]] = []
    for launch in launches:
        if runs and runs[-1][1] == launch:
            runs[-1][0] += 1
        else:
            runs.append([1, launch])
    return runs
