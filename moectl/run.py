"""One fused-MoE layer on real weights: opened, given a backend, run, and held to the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .convert.manifest import load_manifest
from .environment import Device, Packages, detect_cpu, detect_device, packages_from
from .errors import CheckpointError, NoBackend, Unavailable, UsageError
from .experts import ExpertLayer
from .kernels.inputs import DTYPES, Inputs, make_inputs
from .kernels.prepared import PreparedMoE
from .kernels.reference import moe_reference
from .kernels.routing import route_by
from .kernels.runners import runner_for
from .kernels.timing import time_calls
from .kernels.tolerance import CheckResult, check, tolerance_for
from .oracle.decision import Decision
from .oracle.registry import policy_named
from .oracle.select import select
from .prepare import checkpoint_layer, converted_layer
from .problem import MoEProblem

POLICY = "moectl"
"""The policy whose backends this tool runs itself."""


@dataclass(frozen=True)
class Machine:
    """Where a layer runs: torch's device, and the same machine as the oracle sees it."""

    torch: torch.device
    device: Device
    packages: Packages


@dataclass(frozen=True)
class RunResult:
    """One layer's output, held to the reference.

    Attributes:
        routed_by: ``router`` (the checkpoint's), ``input`` (ids given) or ``random``.
        check: the comparison over all tokens.
        prepare_seconds: reading the weights and laying them out.
        first_seconds: the first call, compilation included.
        median_us: median of repeated calls, warm.
        weight_bytes: the layer's weights as the backend holds them.
        peak_bytes: device memory at its highest on CUDA; the process' on a CPU.
    """

    prepared: PreparedMoE
    inputs: Inputs
    y: Tensor
    routed_by: str
    check: CheckResult
    prepare_seconds: float
    first_seconds: float
    median_us: float
    weight_bytes: int
    peak_bytes: int

    @property
    def tokens(self) -> int:
        """How many tokens were run."""
        return len(self.inputs.x)


def this_machine(device: str | None = None) -> Machine:
    """This machine, on `device` (``cpu`` or ``cuda``); a GPU where torch has one by default.

    Raises Unavailable when torch sees no such device.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    packages = packages_from(None)
    if name == "cpu":
        return Machine(torch.device("cpu"), detect_cpu(), packages)
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device here", hint="run on the CPU with --device cpu")
    return Machine(torch.device("cuda"), detect_device(), packages)


def open_layer(source: Checkpoint | Path, layer: int | None = None) -> ExpertLayer:
    """One MoE layer of a checkpoint or of a converted folder's path; the first one for None.

    Raises CheckpointError for a damaged one, Unavailable when its weights are not on this machine,
    UsageError when it has no such layer.
    """
    if isinstance(source, Path):
        return converted_layer(load_manifest(source), layer)
    return checkpoint_layer(source, layer)


def choose_backends(
    problem: MoEProblem, machine: Machine, names: Sequence[str] = (), stored: str = ""
) -> list[str]:
    """Runners that can serve `problem` on `machine`, best first; only `names` where some are given.

    One that reads the layout `stored` comes before the others: it needs nothing laid out anew.

    Raises:
        Unavailable: a backend asked for needs another device.
        NoBackend: a backend asked for, or every one, refuses the problem; the reasons are in the text.
    """
    if not names:
        decision = _decide(problem, machine, None)
        usable = [c for c in decision.candidates if c.usable]
        if not usable:
            raise NoBackend(decision.error)
        return [c.backend.runner for c in sorted(usable, key=lambda c: not stored or c.layout != stored)]
    return [_asked(problem, machine, name) for name in names]


def _decide(problem: MoEProblem, machine: Machine, name: str | None) -> Decision:
    return select(problem, machine.device, machine.packages, policy_named(POLICY), name)


def _asked(problem: MoEProblem, machine: Machine, name: str) -> str:
    decision = _decide(problem, machine, name)
    if not decision.candidates:
        known = [c.backend.name for c in _decide(problem, machine, None).candidates]
        raise UsageError(f"no backend that runs here is called {name!r}; there are {', '.join(known)}")
    if decision.chosen is not None:
        return decision.chosen.backend.runner
    wrong_device = any(v.group == "arch" for c in decision.candidates for v in c.failed)
    kind = Unavailable if wrong_device else NoBackend
    raise kind(decision.error, hint=f"moectl explain CKPT --policy {POLICY} lists every reason")


def run_layer(
    layer: ExpertLayer,
    backend: str,
    machine: Machine,
    *,
    tokens: int = 8,
    seed: int = 0,
    source: Path | None = None,
    repeats: int = 5,
) -> RunResult:
    """Runs `layer` on `backend` and compares with the reference on the stored weights.

    Args:
        tokens, seed: of random tokens, N(0, 1); `source` is a safetensors file with ``x``
            [tokens, hidden] instead, and optionally ``ids`` and ``weights`` [tokens, top_k].

    Raises:
        CheckpointError: `source` cannot be read.
        UsageError: its tensors do not fit the layer.
        NoBackend, Unavailable: as `ExpertLayer.prepared`.
    """
    inputs, routed_by = _inputs(layer, tokens, seed, source)
    begin = time.perf_counter()
    if machine.torch.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prepared = layer.prepared(backend, machine.torch)
    runner = runner_for(backend)
    ids = prepared.local_ids(inputs.ids)
    there = Inputs(*(t.to(machine.torch) for t in (inputs.x, ids, inputs.weights, inputs.logits)))
    ready = time.perf_counter()
    y = runner.run(prepared, there.x, there.ids, there.weights).cpu()
    done = time.perf_counter()
    median = 0.0
    if len(there.x):
        call = [lambda: runner.run(prepared, there.x, there.ids, there.weights)]
        median = time_calls(
            call, machine.torch, repeats=repeats, cold=False, capturable=runner.capturable
        ).median_us
    reference = moe_reference(inputs.x, ids, inputs.weights, layer.reference, layer.problem)
    result = check(y, reference, tolerance_for(layer.problem, runner.accumulation))
    return RunResult(
        prepared,
        inputs,
        y,
        routed_by,
        result,
        ready - begin,
        done - ready,
        median,
        prepared.nbytes,
        _peak_memory(machine.torch),
    )


def _inputs(layer: ExpertLayer, tokens: int, seed: int, source: Path | None) -> tuple[Inputs, str]:
    """Inputs on the CPU, and what routed them."""
    made = make_inputs(layer.problem, tokens, seed)
    if source is not None:
        x, ids, weights = _read_input(source, layer.problem)
        if ids is not None and weights is not None:
            return Inputs(x, ids, weights, torch.zeros(len(x), layer.problem.experts)), "input"
        made = make_inputs(layer.problem, len(x), seed)
        made = Inputs(x, made.ids, made.weights, made.logits)
    # Experts of a hidden size of their own get what a projection makes of the router's input.
    if layer.router is None or layer.problem.model_hidden != layer.problem.dims.hidden:
        return made, "random"
    token_ids = None
    if layer.router.table is not None:
        # Tokens of no text have no ids: random ones.
        generator = torch.Generator().manual_seed(seed)
        token_ids = torch.randint(len(layer.router.table), (len(made.x),), generator=generator)
    ids, weights, logits = route_by(layer.router, made.x, layer.problem, token_ids)
    return Inputs(made.x, ids, weights, logits), "router"


def _read_input(source: Path, problem: MoEProblem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(source)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read --input {source}: {error}") from error
    if "x" not in found:
        raise UsageError(f"--input {source} must hold a tensor x, got {', '.join(sorted(found)) or 'none'}")
    x = found["x"]
    if x.ndim != 2 or x.shape[1] != problem.dims.hidden or not x.is_floating_point():
        raise UsageError(
            f"x in {source} must be floats [tokens, {problem.dims.hidden}], got {x.dtype} {list(x.shape)}"
        )
    ids, weights = found.get("ids"), found.get("weights")
    if (ids is None) != (weights is None):
        raise UsageError(f"{source} must hold ids and weights together, or neither")
    return (
        x.to(DTYPES[problem.dtype]),
        None if ids is None else ids.to(torch.int32),
        None if weights is None else weights.float(),
    )


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
