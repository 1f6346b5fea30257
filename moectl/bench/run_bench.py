"""Runs a bench: prepares and checks the backends of each case, and times them in interleaved rounds."""

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
from ..problem.roofline import MeasuredRates, roofline_time
from ..run import BackendChoice, RunMachine, choose_backends, unsupported_error
from .bench_cases import BenchCase, CaseInputs, CheckedOutputs, check_outputs, make_case, plan_cases
from .bench_rows import BenchRow, RowKey
from .bench_targets import BenchTarget
from .prepare_layer import MemoryLeft, ReadyKernels, call_bytes, one_line, prepare_kernels
from .routings import RoutingSource, routing_of
from .settings import ROUTER, TRACE, BenchSettings

COPIES_SHARE = 0.5
"""Share of the free memory that the copies of a layer for all backends may take."""


def empty_row(target: BenchTarget, tokens: int, routing: str, backend: str) -> BenchRow:
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

    `note` is called with notes for the user, `on_start` with the rows that are worked on next: a kernel may
    end the process. Without `costs`, layers are prepared as often as copies are needed, and rows have no
    costs.
    """

    settings: BenchSettings
    machine: RunMachine
    targets: Sequence[BenchTarget]
    rates: MeasuredRates
    note: Callable[[str], None] = field(default=lambda text: None)
    on_start: Callable[[Sequence[BenchRow]], None] = field(default=lambda rows: None)
    costs: bool = True
    _choices: dict[int, BackendChoice] = field(default_factory=dict, compare=False)
    _routings: dict[int, dict[str, RoutingSource]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Raises if a routing is impossible, or no requested backend supports any layer."""
        errors: dict[str, MoectlError] = {}
        for number, target in enumerate(self.targets):
            stored, requested = target.experts.layout, self.settings.backends
            choice = choose_backends(target.problem, self.machine, requested, stored)
            if self.settings.also:
                also = choose_backends(target.problem, self.machine, self.settings.also, stored)
                names = tuple(dict.fromkeys((*choice.names, *also.names)))
                choice = replace(choice, names=names, refused={**choice.refused, **also.refused})
            self._choices[number] = choice
            errors = {**choice.refused, **errors}
            self._routings[number] = {name: self._routing(name, target) for name in self.settings.routings}
        if errors and not any(choice.names for choice in self._choices.values()):
            raise unsupported_error(tuple(errors.values()))

    def _routing(self, name: str, target: BenchTarget) -> RoutingSource:
        source = routing_of(name, target.experts, self.settings, self.machine.torch)
        if name == ROUTER or name.startswith(TRACE):
            source(max(self.settings.tokens), 1)  # a file that is too short is an error before the work
        return source

    def pending(self, done: AbstractSet[RowKey] = frozenset()) -> int:
        """Number of rows that `measured` yields."""
        cases = product(enumerate(self.targets), self.settings.tokens, self.settings.routings)
        return sum(
            empty_row(target, tokens, routing, name).key not in done
            for (number, target), tokens, routing in cases
            for name in (*self._choices[number].names, *self._choices[number].refused)
        )

    def measured(self, done: AbstractSet[RowKey] = frozenset()) -> Iterator[BenchRow]:
        """Yields a `BenchRow` per case and backend, case by case, except those whose keys are `done`.

        A backend that fails becomes a row with the reason. Raises Unavailable, after yielding the row, if the
        failure leaves the device unusable for this process.
        """
        with ClockWatch(gpu_uuid(self.machine.torch)) as clocks:
            for number, target in enumerate(self.targets):
                choice, routings = self._choices[number], self._routings[number]
                yield from _TargetRun(self, target, choice, routings, clocks, done).rows()
                release(self.machine.torch)

    def refused_of(self, number: int) -> Mapping[str, MoectlError]:
        """Why backends do not support target `number`."""
        return self._choices[number].refused

    def backends_of(self, number: int) -> tuple[str, ...]:
        """The backends that support target `number`."""
        return self._choices[number].names

    def routings_of(self, number: int) -> Mapping[str, RoutingSource]:
        """The routings of target `number` by name."""
        return self._routings[number]


def gpu_uuid(device: torch.device) -> str:
    """UUID of a CUDA `device` as the driver's tools print it; empty for others, and if unknown."""
    if device.type != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def release(device: torch.device) -> None:
    """Frees memory that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


MAX_CACHED_BYTES = 8 << 30
"""Bytes that may stay cached between cases, since one graph's memory cannot be reused by another."""


def release_cached(device: torch.device) -> None:
    """Frees cached memory if there is more than `MAX_CACHED_BYTES`."""
    if (
        device.type == "cuda"
        and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > MAX_CACHED_BYTES
    ):
        torch.cuda.empty_cache()


@dataclass
class _TargetRun:
    """Measures the rows of one layer."""

    bench: Bench
    target: BenchTarget
    choice: BackendChoice
    routings: Mapping[str, RoutingSource]
    clocks: ClockWatch
    done: AbstractSet[RowKey]

    @property
    def device(self) -> torch.device:
        return self.bench.machine.torch

    def rows(self) -> Iterator[BenchRow]:
        settings, refused = self.bench.settings, self.choice.refused
        self.routings = {name: cache(source) for name, source in self.routings.items()}
        memory = MemoryLeft(self.device, call_bytes(self.target, max(settings.tokens)))
        for_copies = COPIES_SHARE * memory.free() / max(1, len(self.choice.names))
        cases = plan_cases(self.target, dict(self.routings), settings, self.device, for_copies)
        for case in cases:
            for name, error in refused.items():
                row = self._row(case, name)
                if row.key not in self.done:
                    yield replace(row, reason=error.what, refused=True)
        waiting = [name for name in self.choice.names if any(self._pending(case, name) for case in cases)]
        copies = max(case.copies for case in cases)
        while waiting:
            ready, failed, waiting = self._prepare(waiting, copies, memory, cases)
            for name, reason in failed.items():
                yield from (
                    replace(self._row(case, name), reason=reason)
                    for case in cases
                    if self._pending(case, name)
                )
            if waiting:
                self.bench.note(
                    f"{self.target.model}: not enough memory for all backends at once; "
                    f"{', '.join(waiting)} will run after the others"
                )
            for case in cases:
                pending = [kernels for kernels in ready if self._pending(case, kernels.name)]
                yield from self._measure(case, pending)
                del pending
            del ready
            release(self.device)

    def _pending(self, case: BenchCase, name: str) -> bool:
        """Whether a backend still has to be measured on `case`."""
        return self._row(case, name).key not in self.done

    def _row(self, case: BenchCase, backend: str) -> BenchRow:
        row = empty_row(self.target, case.tokens, case.routing, backend)
        return replace(row, caches=case.caches(self.bench.settings, self.device))

    def _prepare(
        self, names: Sequence[str], copies: int, memory: MemoryLeft, cases: Sequence[BenchCase]
    ) -> tuple[list[ReadyKernels], dict[str, str], list[str]]:
        """Prepares as many of `names` as fit together: (ready, reasons of the failed ones, still waiting)."""
        ready: list[ReadyKernels] = []
        failed: dict[str, str] = {}
        for i, name in enumerate(names):
            if ready and not memory.fits(self.target.nbytes, copies, len(ready)):
                return ready, failed, list(names[i:])
            self.bench.on_start([self._row(case, name) for case in cases if self._pending(case, name)])
            try:
                ready.append(prepare_kernels(self.target, name, self.device, copies, self.bench.costs))
            except Exception as error:  # whatever a library raises is reported, and the others go on
                release(self.device)
                if ready and _is_out_of_memory(error):
                    return ready, failed, list(names[i:])
                failed[name] = f"not prepared: {one_line(error)}"
                if not alive(self.device):
                    raise _device_lost(name) from error
        return ready, failed, []

    def _measure(self, case: BenchCase, ready: Sequence[ReadyKernels]) -> Iterator[BenchRow]:
        """Checks the backends in `ready` on `case`, times the right ones, and yields a row for each."""
        if not ready:
            return
        settings = self.bench.settings
        self.bench.on_start([self._row(case, kernels.name) for kernels in ready])
        inputs = make_case(self.target, case, self.routings[case.routing], settings, self.device)
        rows = {kernels.name: self._described_row(case, kernels, inputs) for kernels in ready}
        timed: dict[str, TimedCalls] = {}
        for kernels in ready:
            self.bench.on_start([rows[kernels.name]])
            row, calls = self._check(rows[kernels.name], kernels, inputs)
            rows[kernels.name] = row
            if calls is not None:
                timed[kernels.name] = calls
            elif not alive(self.device):
                yield row
                raise _device_lost(kernels.name)
        self.bench.on_start([rows[name] for name in timed])
        begin = time.monotonic()
        with torch.inference_mode():
            failed = time_interleaved(timed, self.device, settings.rounds, not settings.warm)
        clocks = self.clocks.between(begin, time.monotonic())
        if failed and not alive(self.device):
            name, error = list(failed.items())[-1]
            yield replace(rows[name], reason=one_line(error))
            raise _device_lost(name)
        for kernels in ready:
            row = rows[kernels.name]
            if kernels.name in failed:
                row = replace(row, reason=one_line(failed[kernels.name]))
            elif kernels.name in timed:
                calls = timed[kernels.name]
                last_outputs = check_outputs(calls.outputs, inputs, tolerance_of(kernels))
                row = self._timed_row(_checked_row(row, last_outputs), calls, clocks)
            rows[kernels.name] = row
        yield from rows.values()
        del timed, calls, inputs
        release_cached(self.device)

    def _described_row(self, case: BenchCase, ready: ReadyKernels, inputs: CaseInputs) -> BenchRow:
        """The row with what is known before anything runs."""
        rates = self.bench.rates.for_tokens(self.target.problem.scheme.act.name)
        roofline = roofline_time(inputs.work, rates)
        return replace(
            self._row(case, ready.name),
            layout=ready.prepared.layout,
            experts=inputs.work.experts,
            bytes=inputs.work.bytes,
            flops=inputs.work.flops,
            floor_us=1e6 * roofline.seconds,
            bound=roofline.bound,
            costs=ready.costs,
        )

    def _check(
        self, row: BenchRow, ready: ReadyKernels, inputs: CaseInputs
    ) -> tuple[BenchRow, TimedCalls | None]:
        """The row with the verdict on the result, and the calls to time if it is right."""
        if ready.kernels[0].monolithic and not inputs.agrees:
            return replace(row, reason="it routes by itself and cannot take the requested routing"), None
        try:
            with torch.inference_mode():
                runner = ready.kernels[0].runner
                row = replace(
                    row,
                    tactic=runner.tactic(ready.prepared, row.tokens),
                    predicted_us=runner.predicted_us(ready.prepared, row.tokens),
                )
                calls = [
                    call_of(ready.kernels[i % len(ready.kernels)], call_inputs, inputs.bias)
                    for i, call_inputs in enumerate(inputs.inputs)
                ]
                timed = prepare_calls(calls, self.device, ready.kernels[0].runner.capturable)
                row = _checked_row(row, check_outputs(timed.outputs, inputs, tolerance_of(ready)))
        except Exception as error:  # whatever a library raises is reported, and the others go on
            return replace(row, reason=one_line(error)), None
        return row, timed if row.ok else None

    def _timed_row(self, row: BenchRow, calls: TimedCalls, clocks: Clocks | None) -> BenchRow:
        if not row.ok:
            return row
        times = quartiles(calls.seconds)
        seconds = times.median * 1e-6
        assert row.bytes is not None and row.flops is not None and row.floor_us is not None
        return replace(
            row,
            median_us=times.median,
            q1_us=times.q1,
            q3_us=times.q3,
            fastest_us=times.fastest,
            rounds=times.rounds,
            calls=calls.calls,
            method=calls.method,
            gb_per_s=row.bytes / seconds / 1e9,
            tflop_per_s=row.flops / seconds / 1e12,
            floor_percent=100 * row.floor_us / times.median,
            sm_mhz=clocks.sm if clocks else None,
            memory_mhz=clocks.memory if clocks else None,
            throttled=", ".join(clocks.reasons) if clocks else "",
        )


def tolerance_of(ready: ReadyKernels) -> Tolerance:
    """The tolerance of a backend's results."""
    problem = ready.prepared.problem
    return tolerance_for(problem, ready.kernels[0].runner.accumulation_of(problem))


def _checked_row(row: BenchRow, checked: CheckedOutputs) -> BenchRow:
    result = checked.check
    where = f"token {result.worst_token} of call {checked.call}"
    why = "" if result.ok else f"wrong result: {where} is off by {result.worst_rms:.2g} (RMS)"
    return replace(
        row,
        ok=result.ok,
        error_rms=result.rms,
        error_max=result.max,
        checked_tokens=checked.tokens,
        reason=why,
    )


def call_of(kernel: FusedMoEKernel, inputs: LayerInputs, bias: Tensor | None) -> Callable[[], Tensor]:
    """A call of a kernel on a case's inputs."""
    return lambda: kernel.run(inputs, bias)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def _device_lost(backend: str) -> Unavailable:
    """The error after a failure that leaves the GPU unusable for this process."""
    return Unavailable(
        f"the {backend} backend left the GPU unusable for this process; the remaining rows were not measured",
        hint="run the same command with -o FILE.jsonl --resume: it continues after this row",
    )
