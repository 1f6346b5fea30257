"""What a bench compiles: each backend on each layer with a few token counts, run once without timing."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import product

import torch

from .bench_cases import BenchCase, make_case
from .bench_rows import BenchRow, CompileOutcome, RowKey
from .bench_targets import RANDOM, named_shares
from .prepare_layer import one_line, prepare_kernels
from .run_bench import Bench, call_of, empty_row, release
from .settings import BenchSettings

UNIT_TOKENS = 4
"""Token counts in one unit of work of a compiling process."""


@dataclass(frozen=True, slots=True)
class CompileUnit:
    """A backend with a few token counts on one layer, the number of a bench's target."""

    backend: str
    target: int
    tokens: tuple[int, ...]


def compile_units(bench: Bench, done: AbstractSet[RowKey] = frozenset()) -> list[CompileUnit]:
    """What is to be compiled for the rows of `bench` that are not `done`.

    Layers vary fastest, so that processes that take a unit each hold different ones: several of the largest
    may not fit.
    """
    backends = dict.fromkeys(
        name for number in range(len(bench.targets)) for name in bench.backends_of(number)
    )
    wanted = {
        (backend, number): [
            tokens
            for tokens in bench.settings.tokens
            if any(
                empty_row(target, tokens, routing, backend).key not in done
                for routing in bench.settings.routings
            )
        ]
        for backend, (number, target) in product(backends, enumerate(bench.targets))
        if backend in bench.backends_of(number)
    }
    parts = {key: -(-len(tokens) // UNIT_TOKENS) for key, tokens in wanted.items()}
    return [
        CompileUnit(backend, number, tuple(tokens[part :: parts[backend, number]]))
        for part in range(max(parts.values(), default=0))
        for (backend, number), tokens in wanted.items()
        if part < parts[backend, number]
    ]


def case_name(row: BenchRow) -> str:
    """What a line of `compile_unit` begins with, for the case of `row`: its layer, backend and tokens."""
    weight, parallel = row.scheme.partition(",")[0], "" if row.parallel == "1" else f" {row.parallel}"
    return f"{row.model}{parallel} {row.layers} {weight} {row.backend} M={row.tokens}"


_LINE = re.compile(r"(.+? M=\d+): (.*)")
_RAN = re.compile(r"[\d.]+ s")


def refused_cases(bench: Bench) -> Iterator[CompileOutcome]:
    """A line for each case of a backend that does not support its layer; that is no failure."""
    for number, target in enumerate(bench.targets):
        for backend, tokens in product(bench.refused_of(number), bench.settings.tokens):
            row = empty_row(target, tokens, bench.settings.routings[0], backend)
            yield CompileOutcome(f"{case_name(row)}: {NOTHING}")


def unopened_cases(settings: BenchSettings) -> Iterator[CompileOutcome]:
    """A line for each case of named layers that no backend of `settings` supports; that is no failure.

    Raises UsageError for unknown names and impossible shardings.
    """
    for model, parallel, share in named_shares(settings):
        for backend, tokens in product(settings.backends, settings.tokens):
            scheme, routing = str(share.whole.scheme), settings.routings[0]
            row = BenchRow(model, RANDOM, 0, scheme, backend, tokens, routing, parallel)
            yield CompileOutcome(f"{case_name(row)}: {NOTHING}")


NOTHING = "nothing to compile, the layer is not supported"


def reason_in(line: str) -> tuple[str, str] | None:
    """The name of the case that a line of `compile_unit` is about, and why it did not run; empty if it did.

    None for other lines.

    Example:
        >>> reason_in("kimi-k2 - int4 group 32 humming M=8: RuntimeError: no nvcc")
        ('kimi-k2 - int4 group 32 humming M=8', 'RuntimeError: no nvcc')
    """
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    return found[1], "" if found[2] == NOTHING or _RAN.fullmatch(found[2]) else found[2]


def compile_unit(bench: Bench, unit: CompileUnit) -> Iterator[CompileOutcome]:
    """Runs each case of a unit once to compile its kernels; yields a line for each."""
    target, device = bench.targets[unit.target], bench.machine.torch
    routing, source = next(iter(bench.routings_of(unit.target).items()))
    names = {tokens: case_name(empty_row(target, tokens, routing, unit.backend)) for tokens in unit.tokens}
    try:
        ready = prepare_kernels(target, unit.backend, device, 1, costs=False)
    except Exception as error:  # whatever a library raises is reported
        for name in names.values():
            yield CompileOutcome(f"{name}: not prepared: {one_line(error)}", failed=True)
        return
    for tokens, name in names.items():
        case = BenchCase(routing, tokens, 1)
        inputs = make_case(target, case, source, bench.settings, device, with_reference=False)
        begin = time.monotonic()
        try:
            call_of(ready.kernels[0], inputs.inputs[0], inputs.bias)()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            yield CompileOutcome(f"{name}: {one_line(error)}", failed=True)
            continue
        yield CompileOutcome(f"{name}: {time.monotonic() - begin:.1f} s")
    del ready
    release(device)
