"""The bench itself: prepares and checks every backend of a case, and times them in interleaved rounds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from ..environment.gpu_clocks import Clocks, ClockWatch
from ..errors import MoectlError, Unavailable
from ..kernels.layer_inputs import LayerInputs
from ..kernels.modular.fused_moe_kernel import FusedMoEKernel
from ..kernels.timing.interleaved import TimedCalls, alive, prepare_calls, quartiles, time_interleaved
from ..kernels.tolerance import Tolerance, tolerance_for
from ..problem.roofline import DeviceRates, roofline_time
from ..run import BackendChoice, RunMachine, choose_backends, unsupported_error
from .bench_cases import BenchCase, CaseInputs, CheckedOutputs, judge, make_case, plan_cells
from .bench_rows import BenchRow, CompileOutcome, Key
from .bench_targets import BenchTarget
from .prepare_layer import MemoryLeft, ReadyKernels, call_bytes, first_lines, make_ready
from .routings import Sets, routing_of
from .settings import ROUTER, TRACE, BenchSettings

COPIES_SHARE = 0.5
"""Share of the free memory that the copies of a layer for all backends may take."""


def blank(target: BenchTarget, tokens: int, routing: str, backend: str) -> BenchRow:
    """The row of a case and backend before anything has run."""
    return BenchRow(
        model=target.model,
        layers=target.layers,
        layer=target.experts.layer,
        scheme=str(target.problem.scheme),
        backend=backend,
        tokens=tokens,
        routing=routing,
        parallel=target.parallel,
    )


@dataclass(frozen=True)
class Bench:
    """A bench ready to run: its layers, backends and routings have been checked.

    `say` gets notes for the user; `begins` gets the rows that are worked on next, as what they run may
    end the process.
    """

    settings: BenchSettings
    machine: RunMachine
    targets: Sequence[BenchTarget]
    rates: DeviceRates
    say: Callable[[str], None] = field(default=lambda text: None)
    begins: Callable[[Sequence[BenchRow]], None] = field(default=lambda rows: None)
    _choices: dict[int, BackendChoice] = field(default_factory=dict, compare=False)
    _routings: dict[int, dict[str, Sets]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Raises when a routing is impossible, or no requested backend supports any layer."""
        errors: dict[str, MoectlError] = {}
        for at, target in enumerate(self.targets):
            stored, asked = target.experts.layout, self.settings.backends
            choice = choose_backends(target.problem, self.machine, asked, stored)
            self._choices[at] = choice
            errors = {**choice.refused, **errors}
            self._routings[at] = {name: self._routing(name, target) for name in self.settings.routings}
        if errors and not any(choice.names for choice in self._choices.values()):
            raise unsupported_error(tuple(errors.values()))

    def _routing(self, name: str, target: BenchTarget) -> Sets:
        sets = routing_of(name, target.experts, self.settings, self.machine.torch)
        if name == ROUTER or name.startswith(TRACE):
            sets(max(self.settings.tokens), 1)  # refuses a file that is too short before the work
        return sets

    def pending(self, done: AbstractSet[Key] = frozenset()) -> int:
        """Number of rows that `measured` yields."""
        asked = self.settings
        cells = product(enumerate(self.targets), asked.tokens, asked.routings)
        return sum(
            blank(target, tokens, routing, name).key not in done
            for (at, target), tokens, routing in cells
            for name in (*self._choices[at].names, *self._choices[at].refused)
        )

    def measured(self, done: AbstractSet[Key] = frozenset()) -> Iterator[BenchRow]:
        """Yields a `BenchRow` per case and backend, a case's together, without those whose key is `done`.

        A backend that fails becomes a row with the reason. Raises Unavailable when one has broken the device
        for this process, after yielding its row.
        """
        with ClockWatch(gpu_name(self.machine.torch)) as clocks:
            for at, target in enumerate(self.targets):
                yield from _TargetRun(
                    self, target, self._choices[at], self._routings[at], clocks, done
                ).rows()
                release(self.machine.torch)

    def compiled(self, part: int = 0, parts: int = 1) -> Iterator[CompileOutcome]:
        """Runs cases once each, without timing, to compile their kernels; yields a line for each.

        Part `part` of `parts`; layers and backends are dealt out with a few token counts each.
        """
        backends = dict.fromkeys(name for choice in self._choices.values() for name in choice.names)
        units = product(backends, _chunks(self.settings.tokens, TOKENS_OF_A_PART), enumerate(self.targets))
        # Layers last, so that processes hold different ones: several of the largest may not fit together.
        todo = [unit for unit in units if unit[0] in self._choices[unit[2][0]].names]
        for backend, counts, (at, target) in todo[part::parts]:
            name, sets = next(iter(self._routings[at].items()))
            yield from self._compile(target, backend, name, sets, counts)
            release(self.machine.torch)

    def _compile(
        self, target: BenchTarget, backend: str, routing: str, sets: Sets, counts: Sequence[int]
    ) -> Iterator[CompileOutcome]:
        device, what = self.machine.torch, f"{target.model} {target.layers} {backend}"
        try:
            ready = make_ready(target, backend, device, 1, costs=False)
        except Exception as error:  # whatever a library raises is reported
            yield CompileOutcome(f"{what}: {first_lines(error)}", failed=True)
            return
        for tokens in counts:
            case = make_case(target, BenchCase(routing, tokens, 1), sets, self.settings, device, judged=False)
            begin = time.monotonic()
            try:
                _call(ready.kernels[0], case.inputs[0], case.bias)()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except Exception as error:
                yield CompileOutcome(f"{what} M={tokens}: {first_lines(error)}", failed=True)
                continue
            yield CompileOutcome(f"{what} M={tokens}: {time.monotonic() - begin:.1f} s")


TOKENS_OF_A_PART = 4
"""Numbers of tokens in one unit of work of a compiling process."""


def _chunks(items: Sequence[int], size: int) -> list[Sequence[int]]:
    step = -(-len(items) // size)
    return [items[first::step] for first in range(step)]


def gpu_name(device: torch.device) -> str:
    """UUID of a CUDA `device`, as the driver's tools print it; empty for others, and if unknown."""
    if device.type != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def release(device: torch.device) -> None:
    """Frees memory that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


CACHED = 8 << 30
"""Bytes that may stay cached between cases: one graph's memory cannot be reused by another."""


def release_cached(device: torch.device) -> None:
    """Frees cached memory when there is more than `CACHED`."""
    if (
        device.type == "cuda"
        and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > CACHED
    ):
        torch.cuda.empty_cache()


@dataclass
class _TargetRun:
    """The rows of one layer."""

    bench: Bench
    target: BenchTarget
    choice: BackendChoice
    routings: Mapping[str, Sets]
    clocks: ClockWatch
    done: AbstractSet[Key]

    @property
    def device(self) -> torch.device:
        return self.bench.machine.torch

    def rows(self) -> Iterator[BenchRow]:
        settings, refused = self.bench.settings, self.choice.refused
        self.routings = {name: cache(sets) for name, sets in self.routings.items()}
        memory = MemoryLeft(self.device, call_bytes(self.target, max(settings.tokens)))
        room = COPIES_SHARE * memory.free() / max(1, len(self.choice.names))
        cells = plan_cells(self.target, dict(self.routings), settings, self.device, room)
        for cell in cells:
            for name, error in refused.items():
                row = self._row(cell, name)
                if row.key not in self.done:
                    yield replace(row, reason=error.what, refused=True)
        waiting = [name for name in self.choice.names if any(self._wanted(cell, name) for cell in cells)]
        copies = max(cell.copies for cell in cells)
        while waiting:
            ready, failed, waiting = self._prepare(waiting, copies, memory, cells)
            for name, reason in failed.items():
                yield from (
                    replace(self._row(cell, name), reason=reason)
                    for cell in cells
                    if self._wanted(cell, name)
                )
            if waiting:
                later = ", ".join(waiting)
                self.bench.say(
                    f"{self.target.model}: no memory for all at once, {later} come after the others"
                )
            for cell in cells:
                yield from self._cell(cell, [one for one in ready if self._wanted(cell, one.name)])
            del ready
            release(self.device)

    def _wanted(self, cell: BenchCase, name: str) -> bool:
        return self._row(cell, name).key not in self.done

    def _row(self, cell: BenchCase, backend: str) -> BenchRow:
        made = blank(self.target, cell.tokens, cell.routing, backend)
        return replace(made, caches=cell.caches(self.bench.settings, self.device))

    def _prepare(
        self, names: Sequence[str], copies: int, memory: MemoryLeft, cells: Sequence[BenchCase]
    ) -> tuple[list[ReadyKernels], dict[str, str], list[str]]:
        """Prepares as many of `names` as fit together: (ready, failed with reasons, still waiting)."""
        ready: list[ReadyKernels] = []
        failed: dict[str, str] = {}
        for at, name in enumerate(names):
            if ready and not memory.fits(self.target.nbytes, copies, len(ready)):
                return ready, failed, list(names[at:])
            self.bench.begins([self._row(cell, name) for cell in cells if self._wanted(cell, name)])
            try:
                ready.append(make_ready(self.target, name, self.device, copies))
            except Exception as error:  # whatever a library raises is reported, and the others go on
                release(self.device)
                if ready and _is_memory(error):
                    return ready, failed, list(names[at:])
                failed[name] = f"not prepared: {first_lines(error)}"
                if not alive(self.device):
                    raise _broken(name) from error
        return ready, failed, []

    def _cell(self, cell: BenchCase, ready: Sequence[ReadyKernels]) -> Iterator[BenchRow]:
        if not ready:
            return
        settings = self.bench.settings
        self.bench.begins([self._row(cell, one.name) for one in ready])
        case = make_case(self.target, cell, self.routings[cell.routing], settings, self.device)
        rows = {one.name: self._about(cell, one, case) for one in ready}
        turns: dict[str, TimedCalls] = {}
        for one in ready:
            self.bench.begins([rows[one.name]])
            row, turn = self._checked(rows[one.name], one, case)
            rows[one.name] = row
            if turn is not None:
                turns[one.name] = turn
            elif not alive(self.device):
                yield row
                raise _broken(one.name)
        self.bench.begins([rows[name] for name in turns])
        begin = time.monotonic()
        with torch.inference_mode():
            failed = time_interleaved(turns, self.device, settings.rounds, not settings.warm)
        clocks = self.clocks.between(begin, time.monotonic())
        if failed and not alive(self.device):
            name, error = list(failed.items())[-1]
            yield replace(rows[name], reason=first_lines(error))
            raise _broken(name)
        for one in ready:
            row = rows[one.name]
            if one.name in failed:
                row = replace(row, reason=first_lines(failed[one.name]))
            elif one.name in turns:
                again = judge(turns[one.name].outputs, case, tolerance_of(one))
                row = self._timed(_judged(row, again), turns[one.name], clocks)
            rows[one.name] = row
        yield from rows.values()
        del turns, case
        release_cached(self.device)

    def _about(self, cell: BenchCase, one: ReadyKernels, case: CaseInputs) -> BenchRow:
        """The row with what is known before anything runs."""
        floor = roofline_time(case.work, self.bench.rates)
        return replace(
            self._row(cell, one.name),
            layout=one.prepared.layout,
            experts=case.work.experts,
            bytes=case.work.bytes,
            flops=case.work.flops,
            floor_us=1e6 * floor.seconds,
            bound=floor.bound,
            costs=one.costs,
        )

    def _checked(
        self, row: BenchRow, one: ReadyKernels, case: CaseInputs
    ) -> tuple[BenchRow, TimedCalls | None]:
        """The row with its verdict, and the calls to time if it is right."""
        if one.kernels[0].monolithic and not case.agrees:
            return replace(row, reason="it routes by itself, and cannot be given the requested routing"), None
        try:
            with torch.inference_mode():
                row = replace(row, tactic=one.kernels[0].runner.tactic(one.prepared, row.tokens))
                calls = [
                    _call(one.kernels[i % len(one.kernels)], inputs, case.bias)
                    for i, inputs in enumerate(case.inputs)
                ]
                turn = prepare_calls(calls, self.device, one.kernels[0].runner.capturable)
                row = _judged(row, judge(turn.outputs, case, tolerance_of(one)))
        except Exception as error:  # whatever a library raises is reported, and the others go on
            return replace(row, reason=first_lines(error)), None
        return row, turn if row.ok else None

    def _timed(self, row: BenchRow, turn: TimedCalls, clocks: Clocks | None) -> BenchRow:
        if not row.ok:
            return row
        times = quartiles(turn.seconds)
        seconds = times.median * 1e-6
        assert row.bytes is not None and row.flops is not None and row.floor_us is not None
        return replace(
            row,
            median_us=times.median,
            q1_us=times.q1,
            q3_us=times.q3,
            fastest_us=times.fastest,
            rounds=times.rounds,
            calls=turn.calls,
            method=turn.method,
            gb_per_s=row.bytes / seconds / 1e9,
            tflop_per_s=row.flops / seconds / 1e12,
            floor_percent=100 * row.floor_us / times.median,
            sm_mhz=clocks.sm if clocks else None,
            memory_mhz=clocks.memory if clocks else None,
            throttled=", ".join(clocks.reasons) if clocks else "",
        )


def tolerance_of(one: ReadyKernels) -> Tolerance:
    """The tolerance of a backend's results."""
    return tolerance_for(one.prepared.problem, one.kernels[0].runner.accumulation)


def _judged(row: BenchRow, found: CheckedOutputs) -> BenchRow:
    result = found.check
    where = f"token {result.worst_token} of call {found.call}"
    why = "" if result.ok else f"wrong result: {where} is off by {result.worst_rms:.2g} (RMS)"
    return replace(
        row,
        ok=result.ok,
        error_rms=result.rms,
        error_max=result.max,
        checked_tokens=found.tokens,
        reason=why,
    )


def _call(kernel: FusedMoEKernel, inputs: LayerInputs, bias: Tensor | None) -> Callable[[], Tensor]:
    return lambda: kernel.run(inputs, bias)


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def _broken(backend: str) -> Unavailable:
    """The error after a GPU failure that persists in this process."""
    return Unavailable(
        f"the {backend} backend has broken the GPU for this process, and the rest was not measured",
        hint="run the same command with -o FILE.jsonl --resume: it continues after this row",
    )
