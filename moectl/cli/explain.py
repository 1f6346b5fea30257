"""`moectl explain`: which backend a checkpoint gets, and every reason against the others."""

from typing import TYPE_CHECKING, Annotated, Any

from ..errors import ExitCode, UsageError
from .options import CheckpointArg, Offline, framed, option
from .output import Output, ranges, size, table

if TYPE_CHECKING:
    from ..explain import Explanation, GroupExplanation
    from ..oracle.decision import Candidate, Decision

EXAMPLES = (
    "moectl explain openai/gpt-oss-120b --gpu h200",
    "moectl explain moonshotai/Kimi-K2-Thinking --gpu b200 --tp 8",
    "moectl explain ./ckpt --dp 8 --ep --all2all deepep_low_latency --json",
)

INSTALLED = "installed"
"""What --packages is called when this machine's packages are meant."""

PROFILE_OF = {"cuda": "full", "rocm": "rocm_default", "cpu": "cpu", "xpu": "xpu"}
"""Packages that a named device is assumed to have: the engine's default installation there."""


@framed("explain")
def explain(
    checkpoint: CheckpointArg,
    gpu: Annotated[
        str | None, option("--gpu", help="h200, b200, rtx5090, ..., sm90, gfx942 or cpu; default: this one.")
    ] = None,
    tp: Annotated[
        int, option("--tp", "-tp", "--tensor-parallel-size", help="Tensor-parallel ranks.", min=1)
    ] = 1,
    dp: Annotated[int, option("--dp", "-dp", "--data-parallel-size", help="Data-parallel ranks.", min=1)] = 1,
    ep: Annotated[
        bool, option("--ep", "-ep", "--enable-expert-parallel", help="Spread whole experts over all ranks.")
    ] = False,
    all2all: Annotated[
        str, option("--all2all", "--all2all-backend", help="Exchange kernels for --dp with --ep.")
    ] = "allgather_reducescatter",
    eplb: Annotated[bool, option("--eplb", "--enable-eplb", help="Expert load balancing.")] = False,
    packages: Annotated[
        str | None,
        option("--packages", help="A profile (full, bare, ...), a list a,b=1.2, or installed."),
    ] = None,
    env: Annotated[list[str] | None, option("--env", help="Engine switch K=V; repeatable.")] = None,
    backend: Annotated[
        str | None, option("--backend", "--moe-backend", help="Ask for one backend by name.")
    ] = None,
    allow_fallback: Annotated[
        bool, option("--allow-fallback", help="Let the automatic order take over if --backend cannot serve.")
    ] = False,
    policy: Annotated[
        str, option("--policy", help="vllm-0.33.0, or moectl: what this tool runs.")
    ] = "vllm-0.33.0",
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Say which fused-MoE backend a checkpoint gets, and why.

    With every reason against each other candidate, from config and tensor headers alone: no weights, no
    GPU, no engine.
    """
    from ..checkpoint import open_checkpoint
    from ..environment import detect_device, find_device, packages_from
    from ..explain import explain as library
    from ..oracle.registry import policy_named
    from ..problem import Parallel

    device = find_device(gpu) if gpu else detect_device()
    chosen = policy_named(policy)
    if packages is None:
        packages = PROFILE_OF[device.platform] if gpu else INSTALLED
        if gpu:
            out.note(
                f"assuming the packages of profile {packages}; for this machine's: --packages {INSTALLED}"
            )
    installed = packages_from(None if packages == INSTALLED else packages, switches(env or []))
    explanation = library(
        open_checkpoint(checkpoint, offline=offline),
        device,
        installed,
        chosen,
        parallel=Parallel(tp, dp, ep, all2all, eplb),
        backend=backend,
        allow_fallback=allow_fallback,
    )
    out.result(explanation.to_json(), lambda console: draw(explanation, console), brief(explanation))
    return ExitCode.DONE if explanation.usable else ExitCode.FOUND


def switches(pairs: list[str]) -> dict[str, str]:
    """``K=V`` arguments as a mapping; UsageError for one without a name or an equals sign."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"--env takes K=V, got {pair!r}", hint="for example --env VLLM_USE_DEEP_GEMM=0")
        found[key] = value
    return found


def brief(explanation: "Explanation") -> list[str]:
    """One line a group: layers and the backend's name."""
    lines = []
    for group in explanation.groups:
        chosen = group.decision.chosen if group.decision.usable else None
        lines.append(f"{ranges(group.group.layers)}\t{chosen.backend.name if chosen else 'none'}")
    return lines


def draw(explanation: "Explanation", console: Any) -> None:
    """The whole explanation for a person."""
    origin, device = explanation.checkpoint.origin, explanation.device
    where = f"{origin.kind}{f', revision {origin.revision}' if origin.revision else ''}"
    where += f"; {origin.note}" if origin.note else ""
    console.print(f"checkpoint  {origin.name}  (read from: {where})", markup=False)
    console.print(f"device      {device.name}, {device.arch}{_device_facts(explanation)}", markup=False)
    packages = ", ".join(sorted(explanation.packages.versions)) or "none"
    console.print(f"packages    {packages}", markup=False)
    if explanation.packages.env:
        console.print(
            f"switches    {' '.join(f'{k}={v}' for k, v in explanation.packages.env.items())}", markup=False
        )
    parallel = explanation.parallel
    if parallel.ranks > 1:
        ep = f" ep={parallel.ep_size} all2all={parallel.all2all}" if parallel.ep else ""
        console.print(f"parallel    tp={parallel.tp} dp={parallel.dp}{ep}{' eplb' if parallel.eplb else ''}")
    console.print(f"policy      {explanation.policy}")
    for group in explanation.groups:
        console.print()
        _draw_group(group, console)


UNITS_OF = {"cuda": "SMs", "cpu": "cores"}


def _device_facts(explanation: "Explanation") -> str:
    device = explanation.device
    found = {
        f"{device.sms} {UNITS_OF.get(device.platform, 'CUs')}": device.sms,
        size(device.memory_bytes): device.memory_bytes,
        f"{device.bandwidth / 1e12:.3g} TB/s": device.bandwidth,
        f"{device.bf16_flops / 1e12:.4g} bf16 TFLOP/s": device.bf16_flops,
        f"{device.fp8_flops / 1e12:.4g} fp8 TFLOP/s": device.fp8_flops,
    }
    return "".join(f", {fact}" for fact, known in found.items() if known)


def _draw_group(group: "GroupExplanation", console: Any) -> None:
    from ..explain import facts, source_of

    known = table("fact", "value", "source", title=f"layers {ranges(group.group.layers)}")
    for fact, value in facts(group.problem).items():
        known.add_row(fact, value, source_of(fact, group.group.sources))
    console.print(known)
    for note in group.group.notes:
        console.print(f"note: {note}", markup=False)
    decision = group.decision
    _draw_choice(decision, console)
    memory, layers = group.memory, len(group.group.layers)
    console.print(
        f"expert weights per rank: {size(memory.stored)} a layer as stored, {size(memory.padded)} as padded; "
        f"{size(memory.stored * layers)} and {size(memory.padded * layers)} in {layers} layers"
    )
    console.print()
    candidates = table("#", "backend", "experts", "kind", "verdict", title="candidates, in the order asked")
    for candidate in decision.candidates:
        kind = "monolithic" if candidate.variant.monolithic else "modular"
        kind += ", batched" if candidate.variant.batched else ""
        verdict = _verdict(candidate, decision)
        candidates.add_row(
            str(candidate.rank + 1), candidate.backend.name, candidate.variant.experts, kind, verdict
        )
    console.print(candidates)


def _draw_choice(decision: "Decision", console: Any) -> None:
    chosen = decision.chosen
    for gate in decision.gates:
        console.print(f"refused: {gate}", markup=False)
    if chosen is None or decision.error:
        console.print(f"no backend: {decision.error or 'see the reasons below'}", markup=False, style="bold")
    if chosen is not None and not decision.error:
        dims = decision.problem.dims
        kind = (
            "monolithic: takes router logits"
            if chosen.variant.monolithic
            else "modular: takes top-k ids and weights"
        )
        console.print(f"backend     {chosen.backend.name}", style="bold")
        console.print(f"experts     {chosen.variant.experts} ({kind})")
        console.print(f"route       {decision.route} ({decision.method})")
        padded = [
            f"hidden {dims.hidden} -> {dims.padded_hidden}",
            f"intermediate {dims.intermediate} -> {dims.padded_intermediate}",
        ]
        console.print(f"padding     {', '.join(padded)}")
    for note in decision.notes:
        console.print(f"note: {note}", markup=False)


def _verdict(candidate: "Candidate", decision: "Decision") -> Any:
    """Chosen, usable, or every failing question by group."""
    from rich.text import Text

    if decision.chosen is not None and candidate is decision.chosen:
        return Text("chosen" + (f": {candidate.backend.note}" if candidate.backend.note else ""))
    if candidate.usable:
        return Text("usable, but comes later")
    lines = [f"{group}: {verdict}" for group, verdicts in candidate.reasons().items() for verdict in verdicts]
    return Text("\n".join(lines))
