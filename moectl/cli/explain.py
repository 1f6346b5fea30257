"""`moectl explain`: which backend a checkpoint gets, and every reason against the others."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from ..checkpoint.layers import ranges
from ..errors import ExitCode, UsageError
from .options import CheckpointArg, Offline, framed, option, pick
from .output import Output

if TYPE_CHECKING:
    from ..explain import Explanation
    from ..oracle.policy import Policy
    from ..problem import Parallel
    from .blocks import Block

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
        str | None,
        option(
            "--all2all",
            "--all2all-backend",
            help="Exchange kernels for --dp with --ep; default: allgather_reducescatter.",
        ),
    ] = None,
    eplb: Annotated[bool, option("--eplb", "--enable-eplb", help="Expert load balancing.")] = False,
    packages: Annotated[
        str | None,
        option("--packages", help="A profile (full, bare, ...), a list a,b=1.2, or installed."),
    ] = None,
    env: Annotated[list[str] | None, option("--env", help="Engine switch K=V; repeatable.")] = None,
    backend: Annotated[
        str | None,
        option("--backend", "--moe-backend", own=True, help="Ask for a backend by its engine's name."),
    ] = None,
    allow_fallback: Annotated[
        bool, option("--allow-fallback", help="Let the automatic order take over if --backend cannot serve.")
    ] = False,
    policy: Annotated[
        str, option("--policy", help="vllm-0.33.0, or moectl: what this tool runs.")
    ] = "vllm-0.33.0",
    markdown: Annotated[bool, option("--md", own=True, help="Print markdown, for an issue.")] = False,
    verbose: Annotated[
        bool, option("--verbose", "-v", help="Show every fact with its source, and every candidate.")
    ] = False,
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
    from ..oracle.registry import POLICIES, policy_named
    from ..problem import Parallel
    from .explaining.sections import View, document, sections

    chosen = policy_named(pick(policy, POLICIES, "policy"))
    env_given = switches(env or [])
    if backend is not None and backend != "auto":
        backend = pick(backend, chosen.request_names(), "backend")
    if all2all is not None:
        all2all = pick(all2all, chosen.exchanges, "exchange")
    parallel = Parallel(tp, dp, ep, all2all or Parallel().all2all, eplb)
    device = find_device(gpu) if gpu else detect_device()
    source = open_checkpoint(checkpoint, offline=offline)
    if packages is None:
        packages = PROFILE_OF[device.platform] if gpu else INSTALLED
        if gpu:
            out.note(f"packages assumed: profile {packages}; --packages {INSTALLED} takes those found here")
    installed = packages_from(None if packages == INSTALLED else packages, env_given)
    for note in remarks(chosen, parallel, all2all, env_given):
        out.note(note)
    explanation = library(
        source,
        device,
        installed,
        chosen,
        parallel=parallel,
        backend=backend,
        allow_fallback=allow_fallback,
    )
    show(out, document(explanation), sections(explanation, View(verbose)), brief(explanation), markdown)
    return ExitCode.DONE if explanation.usable else ExitCode.FOUND


def show(
    out: Output, document: dict[str, Any], blocks: "Iterable[Block]", brief: list[str], markdown: bool
) -> None:
    """One result in the form asked for: JSON, one line each, markdown, or text."""
    from . import blocks as drawing

    shown = list(blocks)
    if markdown and not (out.as_json or out.quiet):
        out.text(drawing.markdown(shown))
    else:
        out.result(document, lambda console: drawing.draw(shown, console), brief)


def remarks(policy: "Policy", parallel: "Parallel", all2all: str | None, env: dict[str, str]) -> list[str]:
    """What a user should know of options that change nothing."""
    found = []
    if all2all is not None and not parallel.exchanges:
        found.append("--all2all changes nothing here: tokens travel only with --ep and --dp above 1")
    for name in env:
        if name not in policy.variables:
            near = difflib.get_close_matches(name, policy.variables, n=1, cutoff=0.6)
            also = f"; did you mean {near[0]}?" if near else ""
            found.append(f"no rule of {policy.name} reads the switch {name}{also}")
    return found


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
        lines.append(f"{ranges(group.layers)}\t{chosen.backend.name if chosen else 'none'}")
    return lines
