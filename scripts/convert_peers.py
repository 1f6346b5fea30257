"""What other packages do to the same tensors, for `bench_convert`: functions of theirs, called per expert.

A peer takes the folder of an unpacked vLLM wheel or None, the padded problem, and one expert's chains and
canonical tensors. It gives a job per role whose result has the bytes of that role in the layout; making
the input that their functions start from (padding, row order, unpacked codes) is not part of a job.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moectl.convert.canonical import gate_then_up, padded
from moectl.convert.layouts.registry import Chain
from moectl.convert.steps.transforms import PackedCodes, Rearrange
from moectl.problem.moe_problem import MoEProblem

Given = Mapping[str, tuple[Chain, Tensor]]
Jobs = dict[str, Callable[[], Tensor]]
UTILS = "vllm/model_executor/layers/quantization/utils"
LAYOUTS = "vllm/third_party/triton_kernels/tensor_details/layout_details"


class Absent(Exception):
    """The other package, or a part of it, is not here."""


def definitions(
    folder: Path | None, path: str, names: tuple[str, ...], known: dict[str, Any]
) -> dict[str, Any]:
    """`known` with some definitions of a module that itself is not imported, nor what it imports."""
    if folder is None or not (folder / path).is_file():
        raise Absent(f"no {path} in {folder or 'a folder (give --vllm)'}")
    tree = ast.parse((folder / path).read_text())
    kept = [node for node in tree.body if _name(node) in names]
    if len(kept) != len(names):
        raise Absent(f"{path} does not define all of {', '.join(names)}")
    exec(compile(ast.Module(kept, []), path, "exec"), known)
    return known


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _rows(problem: MoEProblem, role: str, t: Tensor) -> Tensor:
    """The padded matrix of one expert, rows in the source's order."""
    return Chain(padded(problem, role)).apply(t)[0]


def marlin_reference(vllm: Path | None, problem: MoEProblem, given: Given) -> Jobs:
    """vLLM's Python reference for Marlin (marlin_weights)"""
    known: dict[str, Any] = {"np": np, "torch": torch}
    definitions(vllm, f"{UTILS}/marlin_utils.py", ("GPTQ_MARLIN_TILE",), known)
    definitions(vllm, f"{UTILS}/quant_utils.py", ("get_pack_factor",), known)
    names = ("marlin_permute_weights", "marlin_weights", "get_weight_perm")
    theirs = definitions(vllm, f"{UTILS}/marlin_utils_test.py", names, known)
    perm, jobs = theirs["get_weight_perm"](4), Jobs()
    unpacked = Chain((PackedCodes(4, True), Rearrange("e n k -> e k n")))
    for role in ("w13", "w2"):
        q_w = unpacked.apply(_rows(problem, role, given[role][1])[None])[0].int()
        jobs[role] = lambda q_w=q_w: theirs["marlin_weights"](q_w, *q_w.shape, 4, perm)
    return jobs


def flashinfer_shuffles(vllm: Path | None, problem: MoEProblem, given: Given) -> Jobs:
    """FlashInfer's reorder_rows_for_gated_act_gemm and shuffle_matrix_a"""
    try:
        core = importlib.import_module("flashinfer.fused_moe.core")
        shuffle = importlib.import_module("flashinfer").shuffle_matrix_a
    except ImportError as error:
        raise Absent(str(error)) from error
    jobs = Jobs()
    for role in ("w13", "w2"):
        t = _rows(problem, role, given[role][1])
        if role == "w13":
            gate, up = Chain(gate_then_up(problem, role)).apply(t[None])[0].chunk(2)
            both = torch.cat((up, gate))
            jobs[role] = lambda t=both: shuffle(core.reorder_rows_for_gated_act_gemm(t), 128)
        else:
            jobs[role] = lambda t=t: shuffle(t, 128)
    return jobs


def triton_swizzle(vllm: Path | None, problem: MoEProblem, given: Given) -> Jobs:
    """triton_kernels' HopperMXValueLayout.swizzle_data"""
    known: dict[str, Any] = {"torch": torch, "Layout": _Shaped}
    names = ("right_shift_unsigned", "_compress_fp4", "_compress_fourth", "_pack_bits", "HopperMXValueLayout")
    layout = definitions(vllm, f"{LAYOUTS}/hopper_value.py", names, known)["HopperMXValueLayout"]
    jobs = Jobs()
    for role in ("w13", "w2"):
        t = _rows(problem, role, given[role][1])[None].mT
        jobs[role] = lambda t=t: layout(t.shape, 1).swizzle_data(t).mT.contiguous()
    return jobs


class _Shaped:
    """What a layout class of triton_kernels is based on: it remembers the shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.initial_shape = shape


PEERS: Mapping[str, tuple[Callable[[Path | None, MoEProblem, Given], Jobs], ...]] = {
    "marlin-mxfp4": (marlin_reference,),
    "marlin-int4": (marlin_reference,),
    "trtllm-mxfp4": (flashinfer_shuffles,),
    "triton-hopper": (triton_swizzle,),
}
