"""The functions `moectl.explain`, `moectl.convert` and `moectl.bench`.

Each does what the command of its name does, takes and returns Python values, and raises `moectl.MoectlError`
for what its caller can fix. This module imports nothing heavy; a call imports what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bench.bench_rows import BenchRow
    from .checkpoint.checkpoint import Checkpoint
    from .convert.execute.convert import ConversionSummary
    from .explain.explanation import Explanation


def explain(
    checkpoint: str | Path | Checkpoint,
    gpu: str | None = None,
    *,
    tp: int = 1,
    dp: int = 1,
    ep: bool = False,
    all2all: str | None = None,
    backend: str | None = None,
    allow_fallback: bool = False,
    policy: str = "vllm",
    packages: str | None = None,
    env: Mapping[str, str] | None = None,
    assume: Mapping[str, str] | None = None,
    offline: bool = False,
) -> Explanation:
    """Which fused-MoE backend an engine picks for each layer group of a checkpoint, and why not the others.

    Reads config and tensor headers alone; needs no GPU and no torch.

    Args:
        checkpoint: a directory, a config.json, a Hub id ``org/name[@revision]``, a built-in model's name, or
            what `open_checkpoint` returned.
        gpu: a name such as ``h200``; None for this machine's.
        tp, dp, ep: tensor-parallel and data-parallel ranks; whether whole experts are distributed over them.
        all2all: exchange kernels for `dp` with `ep`; None for the engine's default.
        backend: a backend to request by the engine's name; None for the engine's own choice.
        allow_fallback: choose automatically if `backend` cannot run.
        policy: an engine, its release such as ``vllm==0.31.0``, or ``moectl`` for this tool's own choice.
        packages: profile or list of optional packages; None for the engine's usual ones with `gpu`, else
            those installed here.
        env: the engine's environment variables.
        assume: replaces facts of the checkpoint, such as ``{"act": "mxfp8"}``.
        offline: do not use the network.

    Returns:
        An `Explanation`; ``explanation.groups[0].decision.chosen.backend.name`` is the answer, and
        ``explanation.to_json()`` the document of ``moectl explain --json``.

    Raises:
        UsageError: an unknown name, or experts that cannot be divided as asked.
        CheckpointError: the checkpoint does not exist, or is damaged.
        Unavailable: the Hub cannot be reached.

    Example:
        >>> import moectl
        >>> moectl.explain("openai/gpt-oss-120b", "h200", offline=True)
        Explanation(openai/gpt-oss-120b on NVIDIA H200, TP 1, vllm-0.33.0)
          layers 0-35: triton
    """
    from .checkpoint import Checkpoint, open_checkpoint
    from .explain.assumed_machines import machine
    from .explain.explanation import Question
    from .explain.explanation import explain as explain_checkpoint
    from .oracle.registry import engine_named
    from .problem.moe_problem import Parallel

    engine = engine_named(policy)
    source = (
        checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint, offline=offline)
    )
    asked = machine(gpu, packages, dict(env or {}), engine)
    parallel = Parallel(tp, dp, ep, all2all or engine.policy.default_exchange)
    question = Question(
        engine.policy,
        parallel,
        backend=backend,
        allow_fallback=allow_fallback,
        assumptions=dict(assume or {}),
    )
    return explain_checkpoint(source, asked.device, asked.packages, question)


def convert(
    checkpoint: str | Path,
    out: str | Path,
    to: str,
    *,
    arch: str | None = None,
    act: str | None = None,
    container: str | None = None,
    method: str | None = None,
    calibration: str | Path | None = None,
    requantize: bool = False,
    experts_only: bool = False,
    tp_size: int = 1,
    ep_size: int = 1,
    rank: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    max_memory: int | None = None,
    resume: bool = False,
    offline: bool = False,
) -> tuple[ConversionSummary, ...]:
    """Writes a checkpoint's expert weights in a kernel layout or a portable format.

    Args:
        checkpoint: a checkpoint's directory, or a name whose weights are in the Hub cache.
        out: a new or empty directory; with several ranks, each one's layers are in ``out/rank-NN``.
        to: a layout (``moectl list layouts``) or a portable format (``moectl list formats``).
        arch, act: architecture and activations of a layout, where `to` alone is ambiguous.
        container, method, calibration: of a portable format, as the options of ``moectl convert``.
        requantize: allow lossy requantization of quantized weights.
        experts_only: skip tensors that are not experts'.
        tp_size, ep_size, rank: slice for ranks; `rank` alone, or all of them for None. What ranks share is
            written to `out` when all of them are there.
        device: where tensors are converted: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        threads: worker threads; None for all cores.
        max_memory: bytes; None for a quarter of the machine's.
        resume: finish a conversion that was interrupted.
        offline: do not use the network.

    Returns:
        A `ConversionSummary` for each rank: its directory, layers, and bytes read and written.

    Raises:
        UsageError: unknown names, or options or an output directory that do not fit.
        CheckpointError: the checkpoint is damaged, or its files do not match their headers.
        Unavailable: no weights on this machine, or no room on the disk; resumable.
    """
    from .checkpoint import open_checkpoint
    from .cli.convert.planner import TargetOptions, planner
    from .convert.execute.convert import convert as convert_rank
    from .convert.execute.rank_plans import check_outputs, convert_ranks, plan_ranks
    from .convert.portable.options import PortableOptions
    from .errors import CheckpointError

    target = TargetOptions(to, arch, act, experts_only).spelled()
    source = open_checkpoint(checkpoint, offline=offline)
    if not source.groups:
        raise CheckpointError(f"{checkpoint} has no MoE layers", hint="`moectl explain` shows what it holds")
    portable = PortableOptions(
        target.to,
        container,
        method,
        calibration=None if calibration is None else Path(calibration),
        requantize=requantize,
    )
    folder = Path(out)
    plans = plan_ranks(folder, tp_size, ep_size, rank, planner(source, target, portable, max_memory))
    check_outputs(source.folder, folder, plans, resume)
    return tuple(
        convert_ranks(
            plans,
            lambda item, progress: convert_rank(
                item.plan, item.folder, resume=resume, progress=progress, threads=threads, device=device
            ),
        )
    )


def bench(
    checkpoint: str | Path | None = None,
    *,
    models: Sequence[str] = (),
    tokens: Sequence[int] = (1, 8, 64),
    backends: Sequence[str] = (),
    routings: Sequence[str] = ("uniform",),
    layer: int | None = None,
    tp: int = 1,
    ep: int = 1,
    device: str | None = None,
    rounds: int = 11,
    warm: bool = False,
    seed: int = 0,
    offline: bool = False,
    on_row: Callable[[BenchRow], None] | None = None,
) -> list[BenchRow]:
    """Times backends on a checkpoint's layers, or on layers of named models with random weights.

    Every result is checked against the fp32 reference first; a wrong one gets no time.

    Args:
        checkpoint: a checkpoint's directory, or a converted one; None with `models`.
        models: names as in ``moectl bench --model``.
        tokens: numbers of tokens of a call.
        backends: names; empty for every usable one.
        routings: ``uniform``, ``balanced``, ``zipf:A``, ``trace:FILE``, ...
        layer: number of the only layer; None for the first of each group.
        tp, ep: slices of each expert, and ranks that share the experts; the first rank is timed.
        device: ``cpu`` or ``cuda``; None for a GPU if there is one.
        rounds: measurements of each row.
        warm: leave weights in the cache, if they fit.
        seed: of tokens and routings.
        offline: do not use the network.
        on_row: called with each row once it is measured.

    Returns:
        One `BenchRow` per layer, number of tokens, routing and backend; ``row.median_us`` is the time,
        ``row.ok`` whether the result was right, ``row.reason`` why there is no time.

    Raises:
        UsageError: unknown names, or settings that contradict each other.
        NoBackend: none of `backends` supports any layer.
        Unavailable: no such device, or no weights on this machine.
    """
    from .bench.open_bench import open_bench
    from .bench.settings import BenchSettings
    from .cli.checkpoint_argument import find_source

    settings = BenchSettings(
        checkpoint="" if checkpoint is None else str(checkpoint),
        models=tuple(models),
        tokens=tuple(tokens),
        routings=tuple(routings),
        backends=tuple(backends),
        layer=layer,
        tp=tp,
        ep=ep,
        device=device or "",
        rounds=rounds,
        warm=warm,
        seed=seed,
    )
    source = find_source(settings.checkpoint, layer, offline=offline) if settings.checkpoint else None
    rows = []
    for row in open_bench(settings, source).measured():
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows
