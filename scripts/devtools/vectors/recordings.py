"""Reading files of conversions that were recorded from other projects.

A recording is a safetensors file with ``in.*`` and ``out.*`` tensors; its metadata has the `function` that
produced the outputs and its `params` as JSON. Only these identify the conversion, never the file name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

MAX_BYTES = 1 << 30
"""Largest recording; larger files are refused before they are read."""


class Unsupported(Exception):
    """No layout of moectl covers the recorded conversion; the message names it."""


class Mismatch(Exception):
    """The recording and moectl disagree; the message says where."""


@dataclass(frozen=True)
class Recording:
    """One file: the producing function, its parameters, and the tensors without ``in.`` and ``out.``."""

    function: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def number(self, *names: str) -> int:
        """The integer parameter with one of `names`; Mismatch when there is none."""
        for name in names:
            value = self.params.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        raise Mismatch(f"params have no whole number {' or '.join(names)}")

    def flag(self, name: str, default: bool) -> bool:
        """The boolean parameter `name`; Mismatch when it is present and not boolean."""
        value = self.params.get(name, default)
        if not isinstance(value, bool):
            raise Mismatch(f"params say {name} {value!r}, expected true or false")
        return value

    def text(self, name: str) -> str:
        """The parameter `name` as text, empty when absent."""
        return str(self.params.get(name, ""))


def read_recording(path: Path) -> Recording:
    """The recording in `path`; Mismatch when the file or its metadata is damaged."""
    if path.stat().st_size > MAX_BYTES:
        raise Mismatch(f"{path.stat().st_size} bytes, more than the {MAX_BYTES} a recording may have")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise Mismatch(f"not a readable safetensors file: {error}") from error
    try:
        params = json.loads(metadata.get("params", ""))
    except ValueError as error:
        raise Mismatch("the metadata's params are not JSON") from error
    if not isinstance(params, dict) or "function" not in metadata:
        raise Mismatch("the metadata lacks a function or an object of params")
    parts: dict[str, dict[str, Tensor]] = {"in": {}, "out": {}}
    for name, tensor in tensors.items():
        side, dot, rest = name.partition(".")
        if not dot or side not in parts:
            raise Mismatch(f"tensor {name} is neither in.* nor out.*")
        parts[side][rest] = tensor
    if not parts["in"] or not parts["out"]:
        raise Mismatch("there are no in.* or no out.* tensors")
    return Recording(metadata["function"], params, parts["in"], parts["out"])
