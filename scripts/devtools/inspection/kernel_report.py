"""Resources, instruction counts and faults of one compiled kernel."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.compiler import make_backend

from moectl.errors import Unavailable

from .barriers import overwritten_barriers
from .handovers import early_handovers, is_access
from .hazards import WGMMA, a_registers, hazards
from .offline_gpu import OFFLINE_GPUS, LaunchedKernel
from .sass import SassCode, SassLoop, parse

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
"""Where Triton's wheels have nvdisasm and cuobjdump."""

SERIALIZED = re.compile(r"\bC751[0-5]\b")
"""ptxas' warnings that wgmma instructions are serialized, one code for each reason."""

MOST_STACK = 16
"""Tolerated bytes of stack per thread: a few saved addresses outside of loops."""

TUNED_FOR = 90
"""Architecture for which tiles are tuned, where no register may spill; elsewhere `MOST_STACK` is allowed."""

COUNTED: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "HGMMA": r"HGMMA\b",
        "QGMMA": r"QGMMA\b",
        "IGMMA": r"IGMMA\b",
        "HMMA": r"HMMA\b",
        "QMMA": r"QMMA\b",
        "IMMA": r"IMMA\b",
        "UTCMMA": r"UTC\w*MMA\b",
        "LDGSTS": r"LDGSTS\b",
        "LDG": r"LDG\b",
        "LDG.128": r"LDG\b.*\.128",
        "UTMALDG": r"UTMALDG\b",
        "UBLKCP": r"UBLKCP\b",
        "LDS": r"LDS\b",
        "LDSM": r"LDSM\b",
        "STS": r"STS\b",
        "BAR": r"BAR\b",
        "SYNCS": r"SYNCS\b",
        "USETMAXREG": r"USETMAXREG\b",
        "LOP3": r"LOP3\b",
        "SHF": r"SHF\b",
        "PRMT": r"PRMT\b",
        "HMUL2": r"HMUL2\b",
        "HFMA2": r"HFMA2\b",
        "LDL": r"LDL\b",
        "STL": r"STL\b",
    }.items()
}
"""Instructions that are counted: matrix products (wgmma, mma.sync, tcgen05), copies, barriers,
dequantization, and local memory accesses (spilled registers)."""

READ_IN_PLACE = frozenset({"_rows_gemm_kernel"})
"""Kernels whose wgmmas read both operands from shared memory, where weights are not dequantized."""

THROUGH_TABLE = re.compile(r"\b(BRX|BRXU|JMX|JMXU)\b")
"""Jumps to an address in a register."""

MMA = ("HMMA", "QMMA", "IMMA", "UTCMMA")


@dataclass(frozen=True)
class LoopReport:
    """An innermost loop: the number of its instructions, and of its matrix products."""

    instructions: int
    products: int


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel.

    Attributes:
        arch: the architecture: 90 is sm_90.
        registers, stack: registers and bytes of stack per thread.
        shared: bytes of shared memory per program.
        instructions: number of instructions in the code.
        opcodes: number of each of `COUNTED`, including zeros.
        wgmma, wgmma_a: wgmma instructions, and those of them with the A operand in registers.
        loops: innermost loops with matrix products, in the order of the code.
        warnings: ptxas' codes C7510 to C7515 for serialized wgmmas; only checked in kernels with wgmma.
        hazards: instructions that touch registers which a wgmma in flight still needs, see `hazards`.
        handovers: shared memory that is released too early, see `handovers`.
        overwritten: stores of other values to the memory of mbarriers, see `barriers`.
        unreached: number of wgmmas and shared accesses that no known path reaches, for which hazards and
            handovers could not be checked.
    """

    name: str
    arch: int
    registers: int
    stack: int
    shared: int
    instructions: int
    opcodes: Mapping[str, int]
    wgmma: int
    wgmma_a: int
    loops: tuple[LoopReport, ...]
    warnings: tuple[str, ...]
    hazards: tuple[str, ...]
    handovers: tuple[str, ...]
    overwritten: tuple[str, ...]
    unreached: int

    @property
    def spills(self) -> int:
        """Instructions that load from local memory or store to it."""
        return self.opcodes["LDL"] + self.opcodes["STL"]

    @property
    def mma(self) -> int:
        """Matrix products other than wgmma: mma.sync, or tcgen05 on Blackwell."""
        return sum(self.opcodes[name] for name in MMA)

    @property
    def faults(self) -> tuple[str, ...]:
        """Defects that a shipped kernel must not have, as text; empty if there are none."""
        faults = []
        if self.spills and (self.arch == TUNED_FOR or self.stack > MOST_STACK):
            faults.append(f"{self.spills} spill instructions")
        if self.stack > MOST_STACK:
            faults.append(f"{self.stack} bytes of stack")
        if self.arch in OFFLINE_GPUS and self.shared > OFFLINE_GPUS[self.arch].shared:
            faults.append(
                f"{self.shared} bytes of shared memory, sm_{self.arch} has {OFFLINE_GPUS[self.arch].shared}"
            )
        if self.warnings:
            faults.append(f"wgmma serialized ({', '.join(self.warnings)})")
        if self.name in READ_IN_PLACE:
            if self.wgmma_a:
                faults.append(f"{self.wgmma_a} of {self.wgmma} wgmmas with A in registers")
        elif self.wgmma_a < self.wgmma:
            faults.append(f"{self.wgmma - self.wgmma_a} of {self.wgmma} wgmmas without A in registers")
        if self.hazards:
            faults.append(f"{len(self.hazards)} hazards, the first: {self.hazards[0]}")
        if self.handovers:
            faults.append(f"{len(self.handovers)} early handovers, the first: {self.handovers[0]}")
        if self.overwritten:
            faults.append(f"{len(self.overwritten)} overwritten barriers, the first: {self.overwritten[0]}")
        if self.unreached:
            faults.append(f"{self.unreached} products or accesses that no known path reaches")
        return tuple(faults)


def report_of(launched: LaunchedKernel) -> KernelReport:
    """The report of a launch's kernel. Raises Unavailable if Triton's tools are missing."""
    kernel = launched.kernel
    return _report(_Key(launched.name, kernel.hash, kernel))


@dataclass(frozen=True)
class _Key:
    """A kernel identified by Triton's hash, so that a kernel launched twice is disassembled once."""

    name: str
    hash: str
    kernel: Any

    def __hash__(self) -> int:
        return hash(self.hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.hash == other.hash


@cache
def _report(key: _Key) -> KernelReport:
    kernel, arch = key.kernel, int(key.kernel.metadata.target.arch)
    usage, code = disassembled(kernel.asm["cubin"])
    wgmmas = [i for i in code.instructions if i.family in WGMMA]
    return KernelReport(
        name=key.name,
        arch=arch,
        registers=usage["REG"],
        stack=usage["STACK"],
        shared=kernel.metadata.shared,
        instructions=len(code.instructions),
        opcodes={
            name: sum(count for op, count in code.opcodes.items() if pattern.match(op))
            for name, pattern in COUNTED.items()
        },
        wgmma=len(wgmmas),
        wgmma_a=sum(bool(a_registers(i)) for i in wgmmas),
        loops=tuple(report for loop in code.loops if (report := _loop(loop)).products),
        warnings=_serialized(kernel) if wgmmas else (),
        hazards=tuple(map(str, hazards(code))),
        handovers=tuple(map(str, early_handovers(code))),
        overwritten=overwritten_barriers(code),
        unreached=sum(i.family in WGMMA or is_access(i) for i in code.unreached),
    )


def _loop(loop: SassLoop) -> LoopReport:
    products = sum(any(COUNTED[n].match(i.op) for n in (*WGMMA, *MMA)) for i in loop.instructions)
    return LoopReport(len(loop.instructions), products)


def disassembled(cubin: bytes) -> tuple[dict[str, int], SassCode]:
    """A cubin's resources per thread (``REG``, ``STACK``), and its code."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        uses = re.findall(r"\b(REG|STACK):(\d+)", _tool("cuobjdump", "--dump-resource-usage", file))
        # Without its dataflow analysis it takes two thirds of the time, but lists no targets of jumps through
        # tables. Triton keeps the kernel's PTX in the cubin.
        code = "" if b"brx.idx" in cubin else _tool("nvdisasm", "-c", "--no-dataflow", file)
        if not code or THROUGH_TABLE.search(code):
            code = _tool("nvdisasm", "-c", file)
        return {name: int(number) for name, number in uses}, parse(code)


def _tool(name: str, *arguments: str | Path) -> str:
    try:
        done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    except OSError as error:
        raise Unavailable(
            f"{name} of Triton {triton.__version__} cannot be run: {error}",
            hint="install triton from PyPI, whose wheels have it",
        ) from error
    return done.stdout


def _serialized(kernel: Any) -> tuple[str, ...]:
    """ptxas' codes for serialized wgmmas, from assembling `kernel` again with Triton's options."""
    metadata = kernel.metadata
    backend = make_backend(metadata.target)
    # With warp specialization, num_warps is the sum over all partitions, which is not a valid option.
    options = backend.parse_options({k: v for k, v in metadata._asdict().items() if k != "num_warps"})
    output = io.StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(output):
        triton.knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(kernel.asm["ptx"], {}, options, int(metadata.target.arch))
    log = output.getvalue()
    if "Compiling entry function" not in log:
        raise Unavailable(f"Triton {triton.__version__} did not show ptxas' log for {metadata.name}")
    return tuple(sorted(set(SERIALIZED.findall(log))))
