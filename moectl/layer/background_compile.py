"""Compiles a layer's kernels while a server loads its weights, and has them ready before the first call."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch
import triton
from triton.runtime.cache import triton_key

from ..errors import MoectlError, UsageError
from ..files.records import from_json, to_json
from ..files.safe_reading import LAST_BYTES
from ..kernels.prepared_layer import PreparedMoE
from ..kernels.registry import runner_for
from ..kernels.triton.layer_binaries import (
    MOST_TOKENS,
    OWN,
    Binary,
    binaries_at,
    binaries_of,
    counting,
    ranges_needed,
    rely_on,
    scale_forms,
    without_weights,
)
from ..kernels.triton.offline_gpu import OfflineGpu
from ..problem.moe_problem import MoEProblem
from .compile_ahead import (
    CompileRequest,
    CompileResult,
    answers_alone,
    cache_directory,
    compile_one_at_a_time,
    python_process,
    remembered,
    send,
)

PROCESS_CODE = "from moectl.layer.background_compile import serve; serve()"


@dataclass
class KernelLoad:
    """The kernels of equal layers: a process that compiles them, then their way into this process.

    The process is started by `start`, never forked, and sees no GPU. If it cannot start or fails, the kernels
    are compiled here, one after the other.

    Attributes:
        cache: Triton's cache at the start: servers point Triton elsewhere later.
        process, log: the process while it has not been waited for, and what it writes to stderr.
        trouble: what went wrong, for the log; empty if nothing did.
        result: what the process did, or an earlier one; None until `ready`, and if it failed.
    """

    request: CompileRequest
    cache: Path
    process: subprocess.Popen[str] | None = None
    log: IO[str] = field(default_factory=partial(TemporaryFile, "w+", errors="replace"))
    trouble: str = ""
    result: CompileResult | None = None
    _loaded: dict[tuple[object, ...], tuple[frozenset[range], ...]] = field(default_factory=dict)

    @property
    def compiled(self) -> bool:
        """Whether everything was compiled before, so that `ready` waits for no process."""
        return self.process is None and self.result is not None

    def ready(self, layer: PreparedMoE) -> str:
        """Takes the kernels of `layer` into this process, once they are compiled.

        Must not be called during CUDA graph capture. `moectl.refit` refuses scales for which they are wrong
        from then on. Returns a line for the log; an empty one if this
        process has them.
        """
        start = time.perf_counter()
        first = self.process is not None
        if first:
            self._wait()
        waited = time.perf_counter() - start
        bare = without_weights(layer)
        variant = (bare.problem, scale_forms(without_weights(layer)))
        if variant in self._loaded:
            rely_on(layer, self._loaded[variant])
            return ""
        on_gpu = layer.device.type == "cuda"
        with triton.knobs.cache.scope(), torch.cuda.device(layer.device) if on_gpu else nullcontext():
            triton.knobs.cache.dir = str(self.cache)
            with counting() as count:
                kernels = [binary.compile() for binary in self._binaries(bare, layer.device)]
            self._loaded[variant] = ranges_needed(bare)
            rely_on(layer, self._loaded[variant])
            for kernel in kernels if on_gpu else ():
                # Else code is put on the GPU at the first launch, perhaps in the middle of serving.
                kernel._init_handles()
        seconds = time.perf_counter() - start
        here = CompileResult(len(kernels), count.cached, count.compiled, seconds)
        return self._says(here, waited, first)

    def _binaries(self, bare: PreparedMoE, device: torch.device) -> tuple[Binary, ...]:
        runner = runner_for(bare.backend)
        if self.result is None:
            return binaries_of(bare, runner, device, self.request.tokens, self.request.forms)
        return binaries_at(bare, runner, device, self.result.calls)

    def _wait(self) -> None:
        process, self.process = self.process, None
        assert process is not None
        output, _ = process.communicate()
        self.log.seek(max(0, os.fstat(self.log.fileno()).st_size - LAST_BYTES))
        errors = self.log.read(LAST_BYTES)
        try:
            self.result = from_json(CompileResult, json.loads(output), "result", UsageError)
        except (ValueError, MoectlError):
            last = (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]
            self.trouble = f"the process that compiles kernels failed: {last}"
        else:
            self.trouble = self.result.note or "; ".join(self.result.failed)

    def _says(self, here: CompileResult, waited: float, first: bool) -> str:
        ahead = self.result if first else None
        text = str(here)
        if ahead is not None and ahead.compiled:
            text += (
                f"; {ahead.compiled} were compiled by {max(1, ahead.processes)} processes in "
                f"{ahead.seconds:.1f} s, of which this one waited {waited:.1f} s"
            )
        return f"{text} ({self.trouble})" if self.trouble else text


_loads: dict[CompileRequest, KernelLoad] = {}


def start(
    problem: MoEProblem,
    backend: str,
    device: torch.device,
    tokens: int = MOST_TOKENS,
    batched: bool = False,
) -> KernelLoad | None:
    """Starts to compile the kernels of `problem` for 1 to `tokens` tokens; returns at once.

    Equal layers share one `KernelLoad`. None for backends of other libraries, whose kernels are not moectl's
    to compile, and for devices without compiled kernels.
    """
    if backend not in OWN or device.type != "cuda":
        return None
    request = CompileRequest(problem, backend, OfflineGpu.present(device), tokens, batched)
    if request not in _loads:
        _loads[request] = started(request)
    return _loads[request]


def started(request: CompileRequest) -> KernelLoad:
    """A `KernelLoad` whose process runs, unless an earlier one has compiled everything."""
    load = KernelLoad(request, cache_directory())
    # Triton hashes itself once in a process, which takes a third of a second, and then remembers it.
    threading.Thread(target=triton_key, name="triton key", daemon=True).start()
    load.result = remembered(request)
    if load.result is not None:
        return load
    try:
        load.process = python_process(PROCESS_CODE, load.log)
    except OSError as error:
        load.trouble = f"no process to compile kernels can be started ({error.strerror or error})"
        return load
    process = load.process
    atexit.register(_stop, process)
    send(process, json.dumps(to_json(request)) + "\n")
    return load


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def serve() -> None:
    """The process of `started`: reads a `CompileRequest`, compiles, and writes the `CompileResult`."""
    answers = answers_alone()
    request = from_json(CompileRequest, json.loads(sys.stdin.readline()), "request", UsageError)
    try:
        print(json.dumps(to_json(compile_one_at_a_time(request))), file=answers, flush=True)
    except MoectlError as error:
        print(error, file=sys.stderr)
        sys.exit(int(error.exit_code))
