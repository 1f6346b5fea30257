"""Tuned files of vLLM's Triton kernels: which one a layer would look up, and whether it exists.

A file holds kernel configs by batch size for one shape on one GPU. Without one the kernels use the
default config, which may be slower and is never an error. Names and defaults are in
`moectl.capabilities.vllm_launches`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, partial
from pathlib import Path

from ....capabilities.vllm_launches import (
    FIELDS,
    FOLDER_VARIABLE,
    FP8_TOKENS,
    LARGEST_FILE,
    TunedName,
    VllmLaunch,
    block_in_names,
    default_launch,
    gpu_in_names,
    parse_name,
)
from ....environment import Device
from ....environment.named_devices import find_device
from ....errors import CheckpointError, UsageError
from ....files.safe_reading import read_bounded
from ....files.strict_json import parse_value
from ....whole_numbers import whole_number
from ...backend import is_on
from ...decision import Decision
from ...name_history import read_history
from ...tuned_files import TunedFile, TunedFiles, TunedKernel, TunedStatus, reads_none
from . import data
from .variables import VARIABLES, VERSION

SHIPPED = "vLLM's own folder"
NEAR = 3
"""Near misses to list, of each kind."""


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
    ("fp8", "fp8"): FP8_TOKENS,
    ("fp8", "a16"): "fp8_w8a16",
    ("int8", "a16"): "int8_w8a16",
    ("int4", "a16"): "int4_w4a16",
}
"""dtype in the name, by weight and activation format; others have none."""


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
    available[SHIPPED] = set(shipped(decision.inputs.policy.rpartition("-")[2]))
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
    gpu = gpu_in_names(decision.inputs.device.name)
    if reader.plain:
        return TunedName(problem.local_experts, size, gpu)
    dtype = _DTYPES.get((scheme.weight.name, scheme.act.name), "")
    if not dtype and problem.dtype == "fp32":
        dtype = "float32"
    return TunedName(problem.local_experts, size, gpu, dtype, block_in_names(scheme))


def _other_gpus(wanted: TunedName, device: Device, names: Iterable[TunedName]) -> tuple[TunedName, ...]:
    """Files of the same shape and format: for variants of the same GPU first, then of its architecture."""

    def distance(name: TunedName) -> tuple[bool, bool, float, str]:
        similarity = SequenceMatcher(None, name.gpu, wanted.gpu).ratio()
        variant = (
            name.gpu.split("_")[:2] == wanted.gpu.split("_")[:2]
        )  # NVIDIA_H100_PCIe, NVIDIA_H100_80GB_HBM3
        return _arch(name.gpu) != device.arch, not variant, -similarity, name.gpu

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
def shipped(release: str = VERSION) -> frozenset[TunedName]:
    """The files that a release of vLLM ships and can look up."""
    history = read_history(data.TUNED, "tuned_files")
    return frozenset(name for name in map(parse_name, history.at(release)) if name)


def file_remark(file: Path, triton: str) -> str:
    """A warning about a tuned file: vLLM fails on it, or it was measured with another Triton than `triton`.

    Empty if there is nothing to warn about; with an empty `triton`, versions are not compared.
    """
    try:
        document = parse_value(read_bounded(file, LARGEST_FILE, str(file)), "it", ValueError)
    except CheckpointError as error:
        return error.what
    except ValueError as error:
        return f"{file} cannot be read, and vLLM fails on it: {error}"
    if not isinstance(document, dict):
        return f"{file} holds no table of kernel configs, and vLLM fails on it"
    measured = str(document.pop("triton_version", ""))
    invalid = [key for key in document if whole_number(key.strip()) is None]
    if invalid:
        return f"{file} has the entry {invalid[0]!r} where vLLM expects a number of tokens, and fails"
    if measured and triton and measured != triton:
        return f"{file} was measured with Triton {measured}; Triton {triton} is installed"
    return ""


CHOICES: Mapping[str, str] = dict(zip(FIELDS, VllmLaunch._fields, strict=True))
"""The engine's name of each of `GemmConfig`'s fields."""


_FP8_BLOCKS = (FP8_TOKENS, (128, 128))

KERNELS: Mapping[tuple[str, tuple[int, int]], TunedKernel] = {
    ("", (0, 0)): TunedKernel("16-bit weights", False, default_launch),
    _FP8_BLOCKS: TunedKernel(
        "FP8 weights in blocks of 128x128",
        True,
        partial(default_launch, dtype=_FP8_BLOCKS[0], block=_FP8_BLOCKS[1]),
    ),
}
"""By dtype and block in the file's name: what moectl has a kernel for. The kernels of other files unpack
integers or have other scales, so that times of another kernel would be meaningless."""


def _kernel(name: TunedFile) -> TunedKernel | None:
    return KERNELS.get((name.dtype, name.block)) if isinstance(name, TunedName) else None


TUNED_FILES = TunedFiles(
    variable=FOLDER_VARIABLE,
    shipped=SHIPPED,
    lookup=lookup,
    parse=parse_name,
    remark=file_remark,
    choices=CHOICES,
    kernels=tuple(KERNELS.values()),
    kernel=_kernel,
)
