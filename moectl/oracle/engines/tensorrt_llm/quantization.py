"""Which quantization algorithm TensorRT-LLM takes a checkpoint's experts for, or how it refuses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....problem.schemes import FULL
from ...backend import SupportQuery
from .automatic import KIMI_K3, QWEN35, preferred
from .terms import OVERRIDE, SM100F

UNQUANTIZED = "unquantized"
ALGORITHMS = (
    UNQUANTIZED,
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_BLOCK_SCALES",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "W4A16_MXFP4",
    "W4A8_MXFP4_FP8",
    "W4A8_MXFP4_MXFP8",
    "MXFP8",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16",
)
"""The engine's names of formats of experts that a checkpoint may have."""

_MODELOPT = {
    ("fp8", "fp8"): "FP8",
    ("nvfp4", "nvfp4"): "NVFP4",
    ("nvfp4", "a16"): "W4A16_NVFP4",
    ("nvfp4", "fp8"): "W4A8_NVFP4_FP8",
    ("mxfp4", "a16"): "W4A16_MXFP4",
    ("mxfp4", "fp8"): "W4A8_MXFP4_FP8",
    ("mxfp4", "mxfp8"): "W4A8_MXFP4_MXFP8",
    ("mxfp8", "mxfp8"): "MXFP8",
    ("int4", "a16"): "W4A16_AWQ",
    ("int4", "fp8"): "W4A8_AWQ",
    ("int8", "a16"): "W8A16",
}
"""ModelOpt checkpoints name their algorithm: by weight and activation format."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The algorithm, or without one the exception's class and what it says; `note`: what is lost."""

    algorithm: str = ""
    kind: str = ""
    says: str = ""
    note: str = ""


def read(ask: SupportQuery) -> Reading:
    """How the experts of `ask` are read."""
    reader = _READERS.get(ask.problem.storage)
    if reader is None:
        return Reading(
            kind="NotImplementedError",
            says=f"TensorRT-LLM does not read {ask.problem.storage} checkpoints: it reads those of ModelOpt, "
            "FP8, MXFP8, MXFP4 and compressed-tensors",
        )
    return reader(ask)


def asked(ask: SupportQuery) -> str:
    """The backend whose implementations are considered for `ask`."""
    return preferred(ask, read(ask).algorithm)


def _mxfp4(ask: SupportQuery) -> Reading:
    """Activations of MXFP4 experts follow the GPU and the backend, unless a variable sets them."""
    stated = ask.packages.env.get(OVERRIDE.name, "").lower()
    if stated in OVERRIDE.choices:
        return Reading(stated.upper(), note=f"{OVERRIDE.name} takes MXFP4 experts for {stated.upper()}")
    if ask.device.capability < 100:
        return Reading("W4A16_MXFP4")
    return Reading("W4A8_MXFP4_FP8" if preferred(ask, "") == "triton" else "W4A8_MXFP4_MXFP8")


def _mxfp4_of_fp8(ask: SupportQuery) -> Reading:
    if ask.problem.model_type.startswith("deepseek_v4"):
        return _mxfp4(ask)
    return Reading(
        "FP8_BLOCK_SCALES",
        note="TensorRT-LLM reads MXFP4 experts of FP8 checkpoints for DeepSeek-V4 only, and takes these for "
        "FP8: loading them will fail",
    )


def _fp8(ask: SupportQuery) -> Reading:
    scheme = ask.problem.scheme
    if scheme.weight.name == "mxfp8":
        return Reading("MXFP8")
    if scheme.weight.block == (128, 128):
        return Reading("FP8_BLOCK_SCALES")
    if FULL not in scheme.weight.block:
        rows, columns = scheme.weight.block
        says = f"FP8_BLOCK_SCALES has blocks of 128x128; the checkpoint has {rows}x{columns}"
        return Reading(kind="AssertionError", says=says)
    if not scheme.act.dynamic:
        return Reading(
            "FP8_BLOCK_SCALES",
            note="TensorRT-LLM takes FP8 with static activation scales for FP8 in blocks of 128x128; "
            "ModelOpt's checkpoints are read as FP8 per tensor",
        )
    return Reading(
        UNQUANTIZED,
        note="TensorRT-LLM has no rule for FP8 without blocks and with dynamic activations: it creates "
        "unquantized experts and reads no scales",
    )


def _compressed_tensors(ask: SupportQuery) -> Reading:
    weight, act = ask.problem.scheme.weight, ask.problem.scheme.act
    if ask.model.architecture in KIMI_K3 and weight.name == "mxfp4":
        return Reading("W4A8_MXFP4_MXFP8")
    if act.name == "a16":
        says = f"compressed-tensors without activation quantization ({weight}) are not read"
        return Reading(kind="TypeError", says=f"TensorRT-LLM fails on the checkpoint's config: {says}")
    if weight.bits == 8 and weight.block == (1, FULL) and act.block == (1, FULL):
        return Reading("FP8_PER_CHANNEL_PER_TOKEN")
    if weight.bits == 8 and FULL not in weight.block and act.block == (1, 128):
        return Reading("FP8_BLOCK_SCALES")
    if weight.name == "nvfp4" and act.name == "nvfp4":
        return Reading("NVFP4")
    return Reading(
        kind="ValueError",
        says="TensorRT-LLM reads compressed-tensors with 8-bit weights per channel or block, or NVFP4; "
        f"these are {ask.problem.scheme}",
    )


def _modelopt(ask: SupportQuery) -> Reading:
    weight, act = ask.problem.scheme.weight, ask.problem.scheme.act
    if weight.name == "fp8" and weight.block == (1, FULL):
        return Reading("FP8_PER_CHANNEL_PER_TOKEN")
    if weight.name == "fp8" and FULL not in weight.block:
        return Reading("FP8_BLOCK_SCALES")
    algorithm = _MODELOPT.get((weight.name, act.name))
    if algorithm is None:
        says = f"TensorRT-LLM has no quantization algorithm for {ask.problem.scheme}"
        return Reading(kind="ValueError", says=says)
    promotes = ask.model.architecture in QWEN35 and any(arch.fits(ask.device) for arch in SM100F)
    if algorithm == "W4A16_NVFP4" and promotes:
        note = f"TensorRT-LLM runs Qwen3.5's {algorithm} experts as NVFP4 on {ask.device.arch}"
        return Reading("NVFP4", note=note)
    return Reading(algorithm)


_READERS: dict[str, Callable[[SupportQuery], Reading]] = {
    "plain": lambda ask: Reading(UNQUANTIZED),
    "gpt_oss": _mxfp4,
    "mxfp4": _mxfp4_of_fp8,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
"""By storage; every other one is refused."""
