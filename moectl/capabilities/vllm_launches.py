"""Launches of vLLM's Triton experts: the names and contents of tuned files, and the launches without one.

A file holds launches by number of tokens, for one shape and format on one GPU. The names and defaults are
those of vLLM 0.33.0's `fused_moe.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..files.safe_reading import open_regular
from ..files.strict_json import parse_document, shown
from ..problem.schemes import Scheme

FOLDER_VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
"""Environment variable with a directory that is searched before vLLM's own."""

FP8_TOKENS = "fp8_w8a8"
"""The dtype in names of files for FP8 weights and tokens."""

LARGEST_FILE = 1 << 20
"""Bytes; vLLM's files have at most 5 KB."""

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
    """The parts of a file's name; None for another file.

    Example:
        >>> parse_name("E=128,N=768,device_name=NVIDIA_H200.json").size
        768
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    block = (int(match["rows"] or 0), int(match["columns"] or 0))
    return TunedName(int(match["experts"]), int(match["size"]), match["gpu"], match["dtype"] or "", block)


def gpu_in_names(name: str) -> str:
    """A GPU's name as spelled in file names: every GPU of the H200 family is ``NVIDIA_H200``.

    Example:
        >>> gpu_in_names("NVIDIA H200 NVL"), gpu_in_names("NVIDIA H100 80GB HBM3")
        ('NVIDIA_H200', 'NVIDIA_H100_80GB_HBM3')
    """
    spelled = re.sub(r"[\s/]+", "_", name)
    return "NVIDIA_H200" if "H200" in spelled.split("_") else spelled


def block_in_names(scheme: Scheme) -> tuple[int, int]:
    """Rows and columns that share a scale, where file names hold them; else ``(0, 0)``."""
    rows, columns = scheme.weight.block
    return (rows, columns) if scheme.weight.name == "fp8" and rows > 1 and columns > 1 else (0, 0)


class VllmLaunch(NamedTuple):
    """A launch of vLLM's Triton kernel, in the order of `FIELDS`.

    `group_m` blocks of rows follow each other before the next block of columns.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}, group {self.group_m}, {self.num_warps} warps, "
            f"{self.num_stages} stages"
        )


FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
"""vLLM's name of each field of `VllmLaunch`."""

ONE = frozenset(("SPLIT_K", "num_ctas"))
"""Fields that a file may have besides, if they are 1."""

LARGEST = (256, 512, 512, 1 << 16, 32, 16)
"""The largest value of each field; sizes of blocks and numbers of warps are powers of two."""


def default_launch(tokens: int, experts: int, dtype: str = "", block: tuple[int, int] = (0, 0)) -> VllmLaunch:
    """The launch for `tokens` without a tuned file, on NVIDIA GPUs, for 16-bit weights or `FP8_TOKENS`.

    Example:
        >>> str(default_launch(64, 128))
        '32x64x128, group 1, 4 warps, 3 stages'
    """
    if all(block):
        few = tokens <= 8 and block[0] % 64 == 0
        return VllmLaunch(
            16 if tokens <= 64 else 64,
            64 if few else block[0],
            block[1],
            1 if tokens <= 16 else 32,
            4,
            4 if few and tokens <= 4 else 3,
        )
    rows = next((size for most, size in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    return VllmLaunch(
        rows,
        64 if tokens <= 64 else 128,
        128 if tokens <= 64 or dtype == FP8_TOKENS else 64,
        16 if tokens // max(experts, 1) > 128 else 1,
        4 if tokens <= 128 else 8,
        4 if tokens <= 32 else 3,
    )


def nearest_launch(launches: Mapping[int, VllmLaunch], tokens: int) -> VllmLaunch:
    """The launch for the number of tokens that is nearest, the first of those that are equally near."""
    return launches[min(launches, key=lambda count: abs(count - tokens))]


def find_tuned_file(name: TunedName, folders: Iterable[Path]) -> Path | None:
    """The first of `folders` that has the file `name`, with it; None without one."""
    return next((path for folder in folders if (path := folder / str(name)).is_file()), None)


def read_launches(path: Path) -> dict[int, VllmLaunch]:
    """The launches of a tuned file by number of tokens, in its order; UsageError for another content.

    Its ``triton_version`` is ignored, as vLLM does.
    """
    with open_regular(path, str(path)) as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise UsageError(f"{path} must have at most {LARGEST_FILE} bytes", hint=_REMOVE)
    document = parse_document(data, str(path))
    document.pop("triton_version", None)
    return {_tokens(path, key): _launch(path, key, entry) for key, entry in document.items()}


_REMOVE = f"remove the file, or let {FOLDER_VARIABLE} name another directory"


def _tokens(path: Path, key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", key):
        raise UsageError(f"{path} must have launches by number of tokens, got {shown(key, 40)}", hint=_REMOVE)
    return int(key)


def _launch(path: Path, key: str, entry: Any) -> VllmLaunch:
    """The launch of an entry; UsageError unless it has `FIELDS`, any of `ONE`, and nothing else."""
    found = entry if isinstance(entry, dict) else {}
    others = sorted({*FIELDS, *found} - (set(FIELDS) & set(found)) - ONE)
    if others:
        raise UsageError(
            f"the launch for {key} tokens in {path} must have {', '.join(FIELDS)}, and "
            f"{shown(', '.join(others), 80)} is missing or unknown",
            hint=_REMOVE,
        )
    bounds = dict(zip(FIELDS, LARGEST, strict=True)) | dict.fromkeys(ONE & found.keys(), 1)
    for field, most in bounds.items():
        value, power = found[field], field.startswith("BLOCK") or field == "num_warps"
        if type(value) is not int or not 1 <= value <= most or (power and value & (value - 1)):
            raise UsageError(
                f"{field} for {key} tokens in {path} must be a {'power of two' if power else 'number'} from "
                f"1 to {most}, got {shown(value, 40)}",
                hint=_REMOVE,
            )
    return VllmLaunch(*(found[field] for field in FIELDS))
