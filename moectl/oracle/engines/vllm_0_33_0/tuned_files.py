"""Tuned files of vLLM's Triton kernels: which one a layer would look up, and whether it exists.

A file holds kernel configs by batch size for one shape on one GPU. Without one the kernels use the
default config, which may be slower and is never an error. The names are vLLM 0.33.0's
(`get_config_file_name` and `try_get_optimal_moe_config` of `fused_moe.py`). The kernels take the nearest
number of tokens, and ignore ``triton_version``; the default configs are those of `get_default_config`.
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

from ....environment import Device
from ....environment.named_devices import find_device
from ....errors import UsageError
from ....problem.schemes import Scheme
from ...backend import is_on
from ...decision import Decision
from ...tuned_files import TunedFile, TunedFiles, TunedKernel, TunedStatus, reads_none
from . import data
from .variables import VARIABLES

FOLDER = "VLLM_TUNED_CONFIG_FOLDER"
"""Names a directory that is searched before vLLM's own."""

SHIPPED = "vLLM's own folder"
NEAR = 3
"""Near misses to list, of each kind."""

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
        dtype: empty for 16-bit weights and for formats that file names do not spell.
        block: rows and columns that share a scale; ``(0, 0)`` for other formats.
    """

    experts: int
    size: int
    gpu: str
    dtype: str = ""
    block: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> str:
        """Experts and size, as spelled in the name."""
        return f"E={self.experts},N={self.size}"

    def __str__(self) -> str:
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = f",block_shape=[{self.block[0]},{self.block[1]}]" if all(self.block) else ""
        return f"{self.shape},device_name={self.gpu}{dtype}{block}.json"


def parse_name(name: str) -> TunedName | None:
    """The parts of a file's name; None for another file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    block = (int(match["rows"] or 0), int(match["columns"] or 0))
    return TunedName(int(match["experts"]), int(match["size"]), match["gpu"], match["dtype"] or "", block)


def gpu_in_names(device: Device) -> str:
    """The GPU's name as spelled in file names: every GPU of the H200 family is ``NVIDIA_H200``."""
    name = re.sub(r"[\s/]+", "_", device.name)
    return "NVIDIA_H200" if "H200" in name.split("_") else name


@dataclass(frozen=True, slots=True)
class FileReader:
    """How an experts class looks a file up.

    Attributes:
        plain: its weights are decoded first, so that the name holds neither dtype nor block.
        codes: codes in one element of the weights whose size stands in the name.
        when: for which calls only; empty: for every one.
    """

    plain: bool = False
    codes: int = 1
    when: str = ""


_DECODED = FileReader(plain=True)
READERS: Mapping[str, FileReader] = {
    "TritonExperts": FileReader(),
    "TritonWNA16Experts": FileReader(),
    "BatchedTritonExperts": FileReader(),
    "TritonOrDeepGemmExperts": FileReader(when="calls whose sizes DeepGEMM does not take"),
    "TritonOrCutlassExperts": FileReader(when="calls whose sizes CUTLASS does not take"),
    "Int4EmulationTritonExperts": _DECODED,
    "Mxfp8EmulationTritonExperts": _DECODED,
    "OCP_MXQuantizationEmulationTritonExperts": _DECODED,
    "Nvfp4QuantizationEmulationTritonExperts": FileReader(plain=True, codes=2),
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


def lookup(decision: Decision, folders: Mapping[str, Iterable[str]]) -> TunedStatus:
    """Which tuned file the chosen experts of `decision` look up, as `TunedFiles.lookup`."""
    chosen = decision.chosen
    assert chosen is not None
    reader = READERS.get(chosen.variant.experts)
    if reader is None:
        return reads_none(decision)
    if is_on(decision.inputs.packages, VARIABLES["VLLM_BATCH_INVARIANT"]):
        return TunedStatus(False, "tuned files are ignored with VLLM_BATCH_INVARIANT")
    wanted = _wanted(decision, reader)
    available = {
        folder: {name for name in map(parse_name, names) if name} for folder, names in folders.items()
    }
    available[SHIPPED] = set(shipped())
    found = next((folder for folder, names in available.items() if wanted in names), "")
    every_name = {name for names in available.values() for name in names}
    return TunedStatus(
        reads=True,
        why=f"for {reader.when}" if reader.when else "",
        wanted=wanted,
        found=found,
        folders=tuple(available),
        other_gpus=() if found else _other_gpus(wanted, decision.inputs.device, every_name),
        other_shapes=() if found else _other_shapes(wanted, every_name),
    )


def _wanted(decision: Decision, reader: FileReader) -> TunedName:
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


def _other_gpus(wanted: TunedName, device: Device, names: Iterable[TunedName]) -> tuple[TunedName, ...]:
    """Files of the same shape and format, those for GPUs of the same architecture first."""

    def distance(name: TunedName) -> tuple[bool, float, str]:
        similarity = SequenceMatcher(None, name.gpu, wanted.gpu).ratio()
        return _arch(name.gpu) != device.arch, -similarity, name.gpu

    same = [
        name
        for name in names
        if name.gpu != wanted.gpu
        and (name.experts, name.size, name.dtype, name.block)
        == (wanted.experts, wanted.size, wanted.dtype, wanted.block)
    ]
    return tuple(sorted(same, key=distance)[:NEAR])


def _other_shapes(wanted: TunedName, names: Iterable[TunedName]) -> tuple[TunedName, ...]:
    """Files for the same GPU and format, nearest experts and size first."""

    def distance(name: TunedName) -> tuple[float, int, int]:
        off = abs(math.log(name.experts / wanted.experts)) + abs(math.log(name.size / wanted.size))
        return off, name.experts, name.size

    same = [
        name
        for name in names
        if (name.gpu, name.dtype, name.block) == (wanted.gpu, wanted.dtype, wanted.block) and name != wanted
    ]
    return tuple(sorted(same, key=distance)[:NEAR])


@cache
def _arch(gpu: str) -> str:
    """Architecture of a GPU by its name in file names; empty for unknown GPUs."""
    try:
        return find_device(gpu).arch
    except UsageError:
        return ""


@cache
def shipped() -> frozenset[TunedName]:
    """The files that vLLM 0.33.0 ships and can look up."""
    document = json.loads(data.TUNED.read_text(encoding="utf-8"))
    names = (
        parse_name(f"E={experts},N={size},device_name={gpu}{',' if suffix else ''}{suffix}.json")
        for gpu, suffixes in document["files"].items()
        for suffix, shapes in suffixes.items()
        for experts, sizes in shapes.items()
        for size in sizes
    )
    return frozenset(name for name in names if name)


def file_remark(file: Path, triton: str) -> str:
    """A warning about a tuned file: vLLM fails on it, or it was measured with another Triton than `triton`.

    Empty if there is nothing to warn about; with an empty `triton`, versions are not compared.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{file} cannot be read, and vLLM fails on it: {error}"
    if not isinstance(document, dict):
        return f"{file} holds no table of kernel configs, and vLLM fails on it"
    measured = str(document.pop("triton_version", ""))
    invalid = [key for key in document if not key.strip().isdigit()]
    if invalid:
        return f"{file} has the entry {invalid[0]!r} where vLLM expects a number of tokens, and fails"
    if measured and triton and measured != triton:
        return f"{file} was measured with Triton {measured}; Triton {triton} is installed"
    return ""


CHOICES: Mapping[str, str] = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""The engine's name of each of `GemmConfig`'s fields."""


def _plain_default(tokens: int, experts: int) -> tuple[int, ...]:
    rows = next((size for most, size in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    columns, depth = (64, 128) if tokens <= 64 else (128, 64)
    group = 16 if tokens // max(experts, 1) > 128 else 1
    return rows, columns, depth, group, 4 if tokens <= 128 else 8, 4 if tokens <= 32 else 3


def _block_default(tokens: int, experts: int) -> tuple[int, ...]:
    columns = 64 if tokens <= 8 else 128
    return 16 if tokens <= 64 else 64, columns, 128, 1 if tokens <= 16 else 32, 4, 4 if tokens <= 4 else 3


KERNELS: Mapping[tuple[str, tuple[int, int]], TunedKernel] = {
    ("", (0, 0)): TunedKernel("16-bit weights", False, _plain_default),
    ("fp8_w8a8", (128, 128)): TunedKernel("FP8 weights in blocks of 128x128", True, _block_default),
}
"""By dtype and block in the file's name: what moectl has a kernel for. The kernels of other files unpack
integers or have other scales, so that times of another kernel would be meaningless."""


def _kernel(name: TunedFile) -> TunedKernel | None:
    return KERNELS.get((name.dtype, name.block)) if isinstance(name, TunedName) else None


TUNED_FILES = TunedFiles(
    variable=FOLDER,
    shipped=SHIPPED,
    lookup=lookup,
    parse=parse_name,
    remark=file_remark,
    choices=CHOICES,
    kernels=tuple(KERNELS.values()),
    kernel=_kernel,
)
