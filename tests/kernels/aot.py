"""Compiling the kernels of a call for a GPU that is not here, and reading what came out."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from moectl.kernels.prepared import PreparedMoE
from moectl.kernels.triton import fused_moe_kernels, routing_kernels, runner
from moectl.kernels.triton.launch import Launch
from moectl.problem import MoEProblem

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: resources, and what is wrong with its machine code.

    Attributes:
        warnings: ptxas codes C7510 to C7515: wgmma instructions were serialized.
        hazards: instructions that overwrite the A registers of a wgmma that may still run.
        wgmma, wgmma_a: wgmma instructions, and those of them with A in registers.
    """

    name: str
    registers: int
    stack: int
    warnings: tuple[str, ...]
    hazards: tuple[str, ...]
    wgmma: int
    wgmma_a: int
    mma: int


class _Driver:
    """A driver that names its target and can launch nothing."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Kernels are kept per device, so that each target needs a number of its own.
        return int(self.target.arch)

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Compiler:
    """Stands for a kernel: launching it compiles it for the active driver and keeps the result."""

    def __init__(self, kernel: Any, into: list[Any]) -> None:
        self.kernel, self.into = kernel, into

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.into.append((self.kernel.__name__, self.kernel.warmup(*args, grid=grid, **options)))

        return launch


@contextmanager
def _target(capability: int, monkeypatch: Any, into: list[Any]) -> Iterator[None]:
    with monkeypatch.context() as patch:
        # Not set_active: without a GPU there is no driver to go back to.
        patch.setattr(triton.runtime.driver, "_active", _Driver(capability))
        for module in (fused_moe_kernels, routing_kernels):
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel"):
                    patch.setattr(module, name, _Compiler(kernel, into))
        yield


def shapes_only(problem: MoEProblem) -> PreparedMoE:
    """A layer of `problem` with weights that have a shape and no memory of that size."""

    def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(16, dtype=dtype)[:1].expand(*shape)

    weight, dims, weights = problem.scheme.weight, problem.dims, {}
    span = 64 if weight.group == 32 else weight.group
    words = 64 if (weight.name, weight.group) == ("int4", 32) else 32
    experts = problem.local_experts
    for role, n, k in (
        ("w13", 2 * dims.intermediate, dims.hidden),
        ("w2", dims.hidden, dims.intermediate),
    ):
        k = -(-k // max(64, span)) * max(64, span)
        tiles = -(-n // 64)
        weights[role] = zeros(torch.uint8, experts, tiles, k // 64, 2048)
        weights[f"{role}_scale"] = zeros(torch.int32, experts, tiles, k // span, words)
        if problem.bias:
            weights[f"{role}_bias"] = zeros(torch.bfloat16, experts, 64 * tiles)

    def dense(ids: Any) -> Any:
        raise AssertionError("nothing is decoded when compiling")

    return PreparedMoE(problem, "triton", runner.LAYOUT, weights, dense)


def compile_call(
    problem: MoEProblem, tokens: int, launch: Launch, capability: int, monkeypatch: Any
) -> list[Compiled]:
    """The kernels of one call, compiled for `capability` (90 is sm_90)."""
    x = torch.empty(tokens, problem.dims.hidden, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, problem.top_k, dtype=torch.int32)
    into: list[Any] = []
    with _target(capability, monkeypatch, into):
        runner.run_with(shapes_only(problem), x, ids, ids.float(), launch)
    return [_inspect(name, kernel, capability) for name, kernel in into]


def _inspect(name: str, kernel: Any, capability: int) -> Compiled:
    ptx = kernel.asm["ptx"]
    usage, sass = _disassembled(kernel.asm["cubin"])
    wgmmas = re.findall(r"wgmma\.mma_async[^;]*?;", ptx, re.S)
    return Compiled(
        name,
        int(usage["REG"]),
        int(usage["STACK"]) + len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        _ptxas_warnings(ptx, capability),
        tuple(overwritten_a_registers(sass)),
        len(wgmmas),
        sum(w.count("{") >= 2 for w in wgmmas),
        len(re.findall(r"\bmma\.sync", ptx)),
    )


def _tool(name: str, *arguments: str | Path) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _disassembled(cubin: bytes) -> tuple[dict[str, str], str]:
    with _temporary(cubin, ".cubin") as file:
        usage = dict(re.findall(r"\b(REG|STACK):(\d+)", _tool("cuobjdump", "--dump-resource-usage", file)))
        return usage, _tool("nvdisasm", "-c", file)


def _ptxas_warnings(ptx: str, capability: int) -> tuple[str, ...]:
    with _temporary(ptx.encode(), ".ptx") as file:
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        said = _tool("ptxas", f"-arch={arch}", "-v", file, "-o", "/dev/null")
    return tuple(re.findall(r"C75\d\d", said))


@contextmanager
def _temporary(content: bytes, suffix: str) -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"kernel{suffix}"
        file.write_bytes(content)
        yield file


def overwritten_a_registers(sass: str) -> list[str]:
    """Instructions in wgmma loops that write A registers of a wgmma not yet waited for.

    Each innermost loop with a wgmma is walked twice, so that the loop edge is seen. Straight loop
    bodies only; predicates are taken as always true.
    """
    lines = sass.split("\n")
    found = []
    for first, last in _wgmma_loops(lines):
        flying: list[set[int]] = []
        for line in lines[first : last + 1] * 2:
            text = re.sub(r"/\*[0-9a-fx]+\*/", "", line).strip()
            match = re.match(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);", text)
            if not match:
                continue
            op, operands = match[1], [o.strip() for o in match[2].split(",")]
            if op.startswith("HGMMA"):
                a = _register(operands[1])
                flying.append(set() if a is None else set(range(a, a + 4)))
            elif op.startswith("WARPGROUP.DEPBAR"):
                flying = flying[max(0, len(flying) - int(operands[1], 16)) :]
            elif not op.startswith(("ST", "LDGSTS", "RED", "BAR", "ISETP")):
                written = _register(operands[0])
                if written is not None:
                    wide = set(range(written, written + _width(op)))
                    found += [text[:60] for a_registers in flying if a_registers & wide]
    return found


def _register(operand: str) -> int | None:
    match = re.match(r"R(\d+)", operand)
    return int(match[1]) if match else None


def _width(op: str) -> int:
    if ".128" in op:
        return 4
    return 2 if ".64" in op or op.startswith("IMAD.WIDE") else 1


def _wgmma_loops(lines: list[str]) -> list[tuple[int, int]]:
    """(first, last) lines of the innermost loops that hold a wgmma."""
    labels, loops = {}, []
    for i, line in enumerate(lines):
        if label := re.match(r"^\s*(\.L_x_\d+):", line):
            labels[label[1]] = i
        jump = re.search(r"BRA.*?(\.L_x_\d+)", line)
        if jump and jump[1] in labels and any("HGMMA" in x for x in lines[labels[jump[1]] : i]):
            loops.append((labels[jump[1]], i))
    return [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
