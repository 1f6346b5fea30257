"""Where in shared memory a compiled kernel puts what, read from its PTX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from devtools.inspection.kernel_report import report_of
from devtools.inspection.offline_gpu import OFFLINE_GPUS, LaunchedKernel, compiling_for

from moectl.kernels.choice.launch import Launch
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.triton_runner import run_with

COPIES = re.compile(r"cp\.async\.cg\.shared\.global \[ (%r\d+) \+ 0 \]")
"""Triton's asynchronous copies into shared memory: the address of a thread's 16 bytes."""

BOXES = re.compile(r"cp\.async\.bulk\.tensor\S+ \[(%r\d+)\]")
"""TMA's copies into shared memory: the address of a box."""

READ = re.compile(r"add\.u32 low, low, (%r\d+);")
"""Where `hopper.joint` adds the place of tokens to the beginning of shared memory."""

_DEFINED = re.compile(r"^\s*(?P<op>[a-z][\w.]*)\s+(?P<to>%r\d+), (?P<of>[^;{}\[\]]+);", re.MULTILINE)
_BOTH_WAYS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "mul": lambda a, b: a * b,
}


@dataclass(frozen=True)
class Place:
    """An address in shared memory, counted from its beginning.

    Attributes:
        origin: where it is when all that the kernel knows only when running is 0: first stage, first thread.
        strides: by how much each such number moves it when it becomes 1.
    """

    origin: int
    strides: frozenset[int]


@dataclass
class Ptx:
    """A kernel's code, as far as whole numbers of 32 bits are computed from each other."""

    text: str
    _made: Mapping[str, tuple[str, tuple[str, ...]] | None] = field(init=False)

    def __post_init__(self) -> None:
        made: dict[str, tuple[str, tuple[str, ...]] | None] = {}
        for line in _DEFINED.finditer(self.text):
            # A register that is written twice changes over a loop.
            known = line["to"] in made
            made[line["to"]] = None if known else (line["op"], tuple(line["of"].split(", ")))
        self._made = made

    def place(self, register: str) -> Place:
        """What `register` holds, an address."""
        leaves: set[str] = set()
        origin = self._value(register, {}, leaves)
        moved = (self._value(register, {leaf: 1}, set()) - origin for leaf in leaves)
        return Place(origin, frozenset(moved))

    def _value(self, word: str, known: Mapping[str, int], leaves: set[str]) -> int:
        if word == "global_smem":
            return 0
        if not word.startswith("%"):
            return int(word, 0)
        op, of = self._made.get(word) or ("", ())
        kind = op.split(".")[0]
        if (kind == "mov" and not of[0].startswith("%")) or (kind == "mov" and of[0].startswith("%r")):
            return self._value(of[0], known, leaves)
        if kind in _BOTH_WAYS and "wide" not in op:
            a, b = (self._value(operand, known, leaves) for operand in of)
            return _BOTH_WAYS[kind](a, b)
        if kind == "mad" and "wide" not in op:
            a, b, c = (self._value(operand, known, leaves) for operand in of)
            return a * b + c
        leaves.add(word)
        return known.get(word, 0)


def launched_gemms(layer: PreparedMoE, launch: Launch, tokens: int, name: str) -> list[LaunchedKernel]:
    """A call's two kernels called `name`, compiled for SM90."""
    problem = layer.problem
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    with compiling_for(OFFLINE_GPUS[90]) as launched:
        x = torch.empty(tokens, problem.dims.hidden, dtype=dtype, device="meta")
        ids = torch.empty(tokens, problem.top_k, dtype=torch.int32, device="meta")
        run_with(layer, x, ids, ids.float(), launch)
    found = [kernel for kernel in launched if kernel.name == name]
    assert len(found) == 2
    return found


def gemms(layer: PreparedMoE, launch: Launch, tokens: int, name: str) -> list[dict[str, Any]]:
    """What a call's two kernels called `name` were compiled to for SM90, by kind of code.

    They multiply on tensor cores, spill nothing and have no register hazard.
    """
    found = launched_gemms(layer, launch, tokens, name)
    for report in map(report_of, found):
        assert report.wgmma and not report.mma and not report.faults, report
    return [kernel.kernel.asm for kernel in found]
