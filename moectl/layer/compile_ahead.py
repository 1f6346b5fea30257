"""Compiles all kernels of a layer in advance, in worker processes that need no GPU.

Compiled kernels go to Triton's cache, whose keys are hashes of source, constants, options, GPU and Triton. A
process finds there what others have compiled, on this machine or for it (`kernel_files`).
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch
import triton

from ..cache.cache_file import LARGEST, CacheWarning, locked, set_aside
from ..cache.launches_file import KIND
from ..cache.measurement_keys import built
from ..environment import Device
from ..environment.cache_folder import cache_folder
from ..errors import CheckpointError, MoectlError, Unavailable, UsageError
from ..files.atomic import replace_file
from ..files.records import Count, from_json, to_json
from ..files.safe_reading import read_bounded, text_or_empty
from ..files.strict_json import parse_document
from ..kernels.registry import runner_for
from ..kernels.runner import ActivationFormat
from ..kernels.triton.layer_binaries import MOST_TOKENS, OWN, Binary, binaries_of, is_cached
from ..kernels.triton.offline_gpu import OfflineGpu, standing_in
from ..problem.moe_problem import MoEProblem, Parallel
from .experts import empty_layer

WORKER_CODE = "from moectl.layer.compile_ahead import work; work()"
WORKER_BYTES = 1536 << 20
"""Memory of a worker: torch, Triton, and what LLVM and ptxas take for the largest kernel."""

Report = Callable[[int, int, str], object]
"""Called with binaries that are done, all of them, and the name of the last."""


@dataclass(frozen=True)
class CompileRequest:
    """What is to be compiled: the kernels of a layer on a GPU, for 1 to `tokens` tokens.

    Attributes:
        problem: one rank's layer.
        backend: one of `moectl.kernels.triton.layer_binaries.OWN`.
        batched: whether also for batched activations, with up to `tokens` rows of an expert.
    """

    problem: MoEProblem
    backend: str
    gpu: OfflineGpu
    tokens: int = MOST_TOKENS
    batched: bool = False

    @property
    def forms(self) -> tuple[ActivationFormat, ...]:
        """The activation formats in which the layer is to be compiled."""
        batched = (ActivationFormat.BATCHED,) if self.batched else ()
        return (ActivationFormat.STANDARD, *batched)

    def binaries(self) -> tuple[Binary, ...]:
        """Every binary that the layer needs; inside `standing_in` for its GPU.

        Raises NoBackend if the layout cannot hold the layer, UsageError for backends of other libraries.
        """
        if self.backend not in OWN:
            raise UsageError(
                f"the kernels of the {self.backend} backend are not moectl's: its library compiles them",
                hint=f"choose from {', '.join(OWN)}",
            )
        layer, runner = empty_layer(self.problem, self.backend), runner_for(self.backend)
        return binaries_of(layer, runner, torch.device("cuda"), self.tokens, self.forms)


@dataclass(frozen=True)
class CompileResult:
    """What compiling a request's kernels came to.

    Attributes:
        kernels, cached, compiled: binaries of the layer, and those of them that Triton's cache had and that
            were compiled.
        seconds: wall time.
        failed: a sentence for every binary that could not be compiled.
        binaries: name and key of every binary, activation format and fewest tokens of calls that launch it.
        processes: workers that compiled; 0 for one process.
        note: why one process had to compile everything although more were wanted; empty if it had not.
    """

    kernels: int
    cached: int
    compiled: int
    seconds: float
    failed: tuple[str, ...] = ()
    binaries: tuple[tuple[str, str, str, int], ...] = ()
    processes: int = 0
    note: str = ""

    @property
    def calls(self) -> tuple[tuple[ActivationFormat, int], ...]:
        """Activation formats and numbers of tokens of calls that launch all of the kernels."""
        calls = {(ActivationFormat(form), tokens) for *_, form, tokens in self.binaries}
        return tuple(sorted(calls, key=lambda call: (call[0].value, call[1])))

    def __str__(self) -> str:
        """A line such as ``12 kernels, 10 from the cache, 2 compiled in 4.1 s``."""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        took = f"{self.compiled} compiled in {self.seconds:.1f} s{failed}"
        return f"{self.kernels} kernels, {self.cached} from the cache, {took}"


def cache_directory() -> Path:
    """Triton's cache of this process: TRITON_CACHE_DIR, else ``.triton/cache`` in the home directory."""
    return Path(triton.knobs.cache.dir).absolute()


def refuse_unwritable_cache() -> None:
    """Unavailable when the system refuses to write a file to Triton's cache, which is created if need be."""
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Unavailable(
            f"Triton's cache {folder} cannot be written: {error.strerror or error}",
            hint="set TRITON_CACHE_DIR to a directory that can be written",
        ) from error


def most_workers() -> int:
    """Workers that this machine has cores and free memory for, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = _free_memory()
    return max(1, cores if free is None else min(cores, free // WORKER_BYTES))


def _free_memory() -> int | None:
    with suppress(ValueError, IndexError):
        for line in text_or_empty(Path("/proc/meminfo")).splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def compile_ahead(request: CompileRequest, jobs: int = 0, report: Report | None = None) -> CompileResult:
    """Compiles what Triton's cache lacks of the kernels of `request`.

    It changes what torch and Triton believe about the GPU while it runs: processes that use a GPU have a
    process of its own do it (`background_compile`).

    Args:
        jobs: worker processes; 0: as many as there are cores and memory for. 1 compiles in this process, if
            that has not compiled for another architecture before.
        report: is told of progress.

    Raises UsageError, NoBackend as `CompileRequest.binaries` does. A kernel that fails does not stop the
    others; `CompileResult.failed` says which.
    """
    with standing_in(request.gpu):
        return compile_binaries(request, request.binaries(), jobs, report)


def compile_binaries(
    request: CompileRequest, binaries: Sequence[Binary], jobs: int = 0, report: Report | None = None
) -> CompileResult:
    """`compile_ahead` of binaries that are known, inside `standing_in` for the request's GPU."""
    start = time.perf_counter()
    # Kernels for many tokens take the longest, so they are begun first.
    missing = sorted((b for b in binaries if not b.cached), key=lambda b: -b.tokens)
    said = report or (lambda done, total, name: None)
    workers = min(jobs or most_workers(), len(missing))
    note, failed = "", None
    if workers > 1 or (workers and _compiled_here - {request.gpu.arch}):
        try:
            with _workers(request, workers) as processes:
                failed = _compile_in(request, processes, missing, said)
        except OSError as error:
            note = f"worker processes cannot be started: {error.strerror or error}"
    if failed is None:
        workers, failed = 0, _compile_here(request, missing, said)
    return CompileResult(
        kernels=len(binaries),
        cached=len(binaries) - len(missing),
        compiled=len(missing) - len(failed),
        seconds=time.perf_counter() - start,
        failed=tuple(failed),
        binaries=tuple((b.name, b.key, b.form.value, b.tokens) for b in binaries),
        processes=workers,
        note=note,
    )


def compile_one_at_a_time(request: CompileRequest) -> CompileResult:
    """`compile_ahead`, after all other processes of this user that compile the same, such as other ranks'.

    The result is kept for `remembered`, which also answers where another process was first.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock everything is compiled, perhaps twice
            lock = _record(request).with_suffix(".lock")
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock))
        if known := remembered(request):
            return known
        result = compile_ahead(request)
        remember(request, result)
    return result


@dataclass(frozen=True)
class Remembered:
    """What compiling for 1 to `tokens` tokens came to, as a file of the user's cache."""

    tokens: Count
    result: CompileResult


def remember(request: CompileRequest, result: CompileResult) -> None:
    """Keeps what compiling `request` came to for `remembered`, unless a binary failed or it is known.

    A cache that cannot be written is left as it is.
    """
    if result.failed or not result.binaries or remembered(request) is not None:
        return
    record = _record(request)
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        replace_file(record, json.dumps(to_json(Remembered(request.tokens, result))).encode())


def remembered(request: CompileRequest) -> CompileResult | None:
    """What `request` needs, if all of it was compiled before and Triton's cache still holds it.

    What was compiled for more tokens serves fewer: of its binaries those count that fewer tokens launch.
    """
    path = _record(request)
    try:
        data = read_bounded(path, LARGEST, path.name)
        kept = from_json(Remembered, parse_document(data, "it", ValueError), "it", ValueError)
        needed = tuple(binary for binary in kept.result.binaries if binary[3] <= request.tokens)
        known = CompileResult(len(needed), len(needed), 0, 0.0, binaries=needed)
        if not known.calls or kept.tokens < request.tokens:
            return None
        return known if all(is_cached(name, key) for name, key, *_ in needed) else None
    except (OSError, CheckpointError):
        return None
    except ValueError as error:
        with suppress(OSError):
            warnings.warn(set_aside(path, str(error).removesuffix(".")), CacheWarning, stacklevel=2)
        return None


def _record(request: CompileRequest) -> Path:
    """The file of `remembered`, for any number of tokens.

    It is another one after anything has changed on which launches or keys of kernels depend: Triton's keys
    differ by Python's minor version, for which its library is built. The GPU's name is not in it but
    by the launches that were tuned on it, nor is what a deployment adds to one rank's sizes.
    """
    gpu = request.gpu
    device = Device("cuda", f"sm{gpu.arch}", gpu.name, sms=gpu.sms)
    tuned = b""
    with suppress(CheckpointError):
        tuned = read_bounded(KIND.path(device), LARGEST, KIND.path(device).name)
    problem = replace(request.problem, parallel=Parallel())
    size = [gpu.arch, gpu.sms, gpu.shared]
    about = [to_json(problem), request.backend, size, request.batched, built(), sys.version_info[:2]]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode() + tuned).hexdigest()[:24]
    return cache_folder() / "compiling" / f"{digest}.json"


_compiled_here: set[int] = set()
"""Architectures for which this process has compiled. Triton 3.6 keeps how FP8 becomes BF16 on the first of
them, by instructions that the assembler of another one may refuse."""


def _compile_here(request: CompileRequest, binaries: Sequence[Binary], report: Report) -> list[str]:
    failed = []
    if binaries:
        _compiled_here.add(request.gpu.arch)
    for number, binary in enumerate(binaries, 1):
        if sentence := _failure(binary):
            failed.append(sentence)
        report(number, len(binaries), binary.name)
    return failed


def _failure(binary: Binary) -> str:
    """Compiles `binary`; why that failed, empty if it did not."""
    try:
        binary.compile()
    except Exception as error:  # Triton, LLVM and ptxas raise many kinds
        return f"{binary.name} for {binary.tokens} tokens: {type(error).__name__}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


@contextmanager
def _workers(request: CompileRequest, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """`count` processes that compile kernels of `request`; they are gone when the context ends."""
    text = json.dumps(to_json(request)) + "\n"
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            processes.append(python_process(WORKER_CODE, subprocess.DEVNULL))
            send(processes[-1], text)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()


def python_process(code: str, stderr: int | IO[str]) -> subprocess.Popen[str]:
    """A process that runs `code` with this moectl and this cache of Triton's, and with pipes; sees no GPU.

    Raises OSError if it cannot be started.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(cache_directory())}
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=environment)


def send(process: subprocess.Popen[str], line: str) -> None:
    """Writes a line to the process; one that has ended reads nothing, and its status says why."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def _compile_in(
    request: CompileRequest,
    processes: Sequence[subprocess.Popen[str]],
    binaries: Iterable[Binary],
    report: Report,
) -> list[str]:
    """Hands `binaries` to the processes one by one; those that no process compiled are compiled here."""
    todo: queue.SimpleQueue[Binary] = queue.SimpleQueue()
    total = 0
    for binary in binaries:
        todo.put(binary)
        total += 1
    lock, failed, left, done = threading.Lock(), list[str](), list[Binary](), [0]

    def serve(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        while True:  # until a process has died, or cannot compile what it is told to
            try:
                binary = todo.get_nowait()
            except queue.Empty:
                return
            answer = ""
            with suppress(OSError, ValueError):
                send(process, binary.key + "\n")
                answer = process.stdout.readline()
            with lock:
                sentence = _answered(answer)
                if sentence is None:
                    left.append(binary)
                    return
                if sentence:
                    failed.append(sentence)
                done[0] += 1
                report(done[0], total, binary.name)

    threads = [threading.Thread(target=serve, args=(process,), daemon=True) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with suppress(queue.Empty):
        while True:
            left.append(todo.get_nowait())
    return failed + _compile_here(
        request, left, lambda number, _, name: report(done[0] + number, total, name)
    )


def _answered(line: str) -> str | None:
    """What a worker says of a binary: why it failed, empty if it did not; None if the worker is of no use."""
    with suppress(ValueError, KeyError, TypeError):
        failed = json.loads(line)["failed"]
        return failed if isinstance(failed, str) else None
    return None


def answers_alone() -> IO[str]:
    """This process's stdout for its answers; from now on what libraries print there goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def work() -> None:
    """A worker process: reads a `CompileRequest`, then keys of binaries, and answers each with JSON."""
    answers = answers_alone()
    try:
        request = from_json(CompileRequest, json.loads(sys.stdin.readline()), "request", UsageError)
        with standing_in(request.gpu):
            binaries = {binary.key: binary for binary in request.binaries()}
            for line in sys.stdin:
                binary = binaries.get(line.strip())
                # A key is unknown if a source has changed in between; then the parent compiles.
                print(json.dumps({"failed": binary and _failure(binary)}), file=answers, flush=True)
    except MoectlError as error:
        sys.exit(int(error.exit_code))
