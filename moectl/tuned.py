"""Tuned files of vLLM's Triton kernels: which one a layer would be run with, and whether it is there.

A file holds launch choices by batch size for one shape on one GPU. Without one the kernels run with
default choices: that is slower in places and never an error. The names are vLLM 0.33.0's
(`get_config_file_name` and `try_get_optimal_moe_config` of `fused_moe.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

from .environment import DATA, Device
from .environment.devices import find_device
from .errors import UsageError
from .oracle.backend import is_on
from .oracle.decision import Decision
from .schemes import Scheme

FOLDER = "VLLM_TUNED_CONFIG_FOLDER"
"""Names a folder that is looked in before vLLM's own."""

SHIPPED = "vLLM's own folder"
NEAR = 3
"""Near misses that are listed, of each kind."""

_NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<size>\d+),device_name=(?P<gpu>[^,]+)"
    r"(?:,dtype=(?P<dtype>[a-z0-9_]+))?(?:,block_shape=\[(?P<rows>\d+),(?P<columns>\d+)\])?\.json"
)


@dataclass(frozen=True, slots=True)
class TunedName:
    """The name of a tuned file, in parts.

    Attributes:
        experts: experts on one rank.
        size: reduction size of the second GEMM on one rank, padded.
        gpu: the GPU's name, blanks and slashes as underscores.
        dtype: empty for 16-bit weights and for formats without a name of their own.
        block: rows and columns that share a scale; ``(0, 0)`` for other formats.
    """

    experts: int
    size: int
    gpu: str
    dtype: str = ""
    block: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = f",block_shape=[{self.block[0]},{self.block[1]}]" if all(self.block) else ""
        return f"E={self.experts},N={self.size},device_name={self.gpu}{dtype}{block}.json"


def parse_name(name: str) -> TunedName | None:
    """The parts of a file's name; None for another file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    block = (int(found["rows"] or 0), int(found["columns"] or 0))
    return TunedName(int(found["experts"]), int(found["size"]), found["gpu"], found["dtype"] or "", block)


def gpu_in_names(device: Device) -> str:
    """The GPU's name as it stands in file names: every GPU of the H200 family is ``NVIDIA_H200``."""
    name = re.sub(r"[\s/]+", "_", device.name)
    return "NVIDIA_H200" if "H200" in name.split("_") else name


@dataclass(frozen=True, slots=True)
class Reader:
    """How an experts class looks a file up.

    Attributes:
        plain: its weights are decoded first, so that the name holds neither dtype nor block.
        codes: codes in one element of the weights whose size stands in the name.
        when: for which calls only; empty: for every one.
    """

    plain: bool = False
    codes: int = 1
    when: str = ""


_DECODED = Reader(plain=True)
READERS: Mapping[str, Reader] = {
    "TritonExperts": Reader(),
    "TritonWNA16Experts": Reader(),
    "BatchedTritonExperts": Reader(),
    "TritonOrDeepGemmExperts": Reader(when="calls whose sizes DeepGEMM does not take"),
    "TritonOrCutlassExperts": Reader(when="calls whose sizes CUTLASS does not take"),
    "Int4EmulationTritonExperts": _DECODED,
    "Mxfp8EmulationTritonExperts": _DECODED,
    "OCP_MXQuantizationEmulationTritonExperts": _DECODED,
    "Nvfp4QuantizationEmulationTritonExperts": Reader(plain=True, codes=2),
}
"""vLLM's experts classes that look for a tuned file. No other class does."""

_DTYPES: Mapping[tuple[str, str], str] = {
    ("fp8", "fp8"): "fp8_w8a8",
    ("fp8", "a16"): "fp8_w8a16",
    ("int8", "a16"): "int8_w8a16",
    ("int4", "a16"): "int4_w4a16",
}
"""dtype in the name, by weight and activation format; others have none."""


def _block(scheme: Scheme) -> tuple[int, int]:
    """Rows and columns that share a scale, where the name holds them."""
    rows, columns = scheme.weight.block
    return (rows, columns) if scheme.weight.name == "fp8" and rows > 1 and columns > 1 else (0, 0)


@dataclass(frozen=True, slots=True)
class TunedStatus:
    """What is to be said of tuned files for one decision.

    Attributes:
        reads: the chosen experts look for a file; `why` says when, or why not.
        wanted: the name they look for, `found` where it lies, `folders` where they look.
        other_gpus: files of the same shape for other GPUs, the likest first.
        other_shapes: files of this GPU and format for other shapes, the nearest first.
    """

    reads: bool
    why: str
    wanted: TunedName | None = None
    found: str = ""
    folders: tuple[str, ...] = ()
    other_gpus: tuple[TunedName, ...] = ()
    other_shapes: tuple[TunedName, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, names as file names."""
        return {
            "reads": self.reads,
            "why": self.why,
            "wanted": str(self.wanted) if self.wanted else None,
            "found": self.found or None,
            "folders": list(self.folders),
            "same_shape_on_other_gpus": [str(name) for name in self.other_gpus],
            "other_shapes_on_this_gpu": [str(name) for name in self.other_shapes],
        }


def tuned_status(decision: Decision, folders: Mapping[str, Iterable[str]] | None = None) -> TunedStatus:
    """What tuned files mean to the choice of `decision`.

    `folders` are listed folders (path to file names) that are looked in before vLLM's own.
    """
    chosen = decision.chosen
    if chosen is None:
        return TunedStatus(False, "there is no backend that could read one")
    reader = READERS.get(chosen.variant.experts)
    if reader is None:
        name = f"{chosen.backend.name} ({chosen.variant.experts})"
        return TunedStatus(False, f"{name} reads no tuned files")
    if is_on(decision.inputs.packages, "VLLM_BATCH_INVARIANT"):
        return TunedStatus(False, "VLLM_BATCH_INVARIANT leaves tuned files unread")
    wanted = _wanted(decision, reader)
    listed = {place: tuple(names) for place, names in (folders or {}).items()}
    there = {place: {str(name) for name in map(parse_name, names) if name} for place, names in listed.items()}
    there[SHIPPED] = {str(name) for name in shipped()}
    found = next((place for place, names in there.items() if str(wanted) in names), "")
    known = {name for names in listed.values() for name in map(parse_name, names) if name} | set(shipped())
    return TunedStatus(
        reads=True,
        why=f"for {reader.when}" if reader.when else "",
        wanted=wanted,
        found=found,
        folders=tuple(there),
        other_gpus=() if found else _other_gpus(wanted, decision.inputs.device, known),
        other_shapes=() if found else _other_shapes(wanted, known),
    )


def _wanted(decision: Decision, reader: Reader) -> TunedName:
    problem = decision.problem
    scheme = problem.scheme
    size = problem.dims.padded_intermediate // reader.codes
    gpu = gpu_in_names(decision.inputs.device)
    if reader.plain:
        return TunedName(problem.local_experts, size, gpu)
    dtype = _DTYPES.get((scheme.weight.name, scheme.act.name), "")
    if not dtype and problem.dtype == "fp32":
        dtype = "float32"
    return TunedName(problem.local_experts, size, gpu, dtype, _block(scheme))


def _other_gpus(wanted: TunedName, device: Device, known: Iterable[TunedName]) -> tuple[TunedName, ...]:
    """Files of the same shape and format, those for GPUs of the same architecture first."""

    def distance(name: TunedName) -> tuple[bool, float, str]:
        alike = SequenceMatcher(None, name.gpu, wanted.gpu).ratio()
        return _arch(name.gpu) != device.arch, -alike, name.gpu

    same = [
        name
        for name in known
        if name.gpu != wanted.gpu
        and (name.experts, name.size, name.dtype, name.block)
        == (wanted.experts, wanted.size, wanted.dtype, wanted.block)
    ]
    return tuple(sorted(same, key=distance)[:NEAR])


def _other_shapes(wanted: TunedName, known: Iterable[TunedName]) -> tuple[TunedName, ...]:
    """Files for the same GPU and format, by how far experts and size are off."""

    def distance(name: TunedName) -> tuple[float, int, int]:
        off = abs(math.log(name.experts / wanted.experts)) + abs(math.log(name.size / wanted.size))
        return off, name.experts, name.size

    same = [
        name
        for name in known
        if (name.gpu, name.dtype, name.block) == (wanted.gpu, wanted.dtype, wanted.block) and name != wanted
    ]
    return tuple(sorted(same, key=distance)[:NEAR])


@cache
def _arch(gpu: str) -> str:
    """Architecture of a GPU by its name in file names; empty for one that the table does not know."""
    try:
        return find_device(gpu).arch
    except UsageError:
        return ""


@cache
def shipped() -> frozenset[TunedName]:
    """The files that vLLM 0.33.0 ships and can look up."""
    document = json.loads((DATA / "vllm-0.33.0-tuned.json").read_text(encoding="utf-8"))
    names = (
        parse_name(f"E={experts},N={size},device_name={gpu}{',' if suffix else ''}{suffix}.json")
        for gpu, suffixes in document["files"].items()
        for suffix, shapes in suffixes.items()
        for experts, sizes in shapes.items()
        for size in sizes
    )
    return frozenset(name for name in names if name)


def listed_folders(env: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """File names in the folder that `env` names; no entry without one, no names where it cannot be read."""
    place = env.get(FOLDER)
    if place is None:
        return {}
    try:
        return {place: tuple(sorted(entry.name for entry in Path(place).iterdir()))}
    except OSError:
        return {place: ()}


def file_remark(file: Path, triton: str) -> str:
    """What is odd about a tuned file: vLLM fails on it, or another Triton than `triton` measured it.

    Empty when nothing is, or when `triton` is empty and the file can be read.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{file} cannot be read, and vLLM fails on it: {error}"
    if not isinstance(document, dict):
        return f"{file} holds no table of launch choices, and vLLM fails on it"
    measured = str(document.pop("triton_version", ""))
    odd = [key for key in document if not key.strip().isdigit()]
    if odd:
        return f"{file} has the entry {odd[0]!r} where vLLM expects a number of tokens, and fails"
    if measured and triton and measured != triton:
        return f"{file} was measured with Triton {measured}; Triton {triton} is installed"
    return ""
