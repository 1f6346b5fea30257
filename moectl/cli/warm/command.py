"""`moectl warm`: compiles the kernels that layers need on a GPU, which need not be here."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...environment import Device
from ...errors import ExitCode, UsageError
from ..options import ActivationOption, CheckpointArg, Offline, framed, option, pick
from ..output import Output

if TYPE_CHECKING:
    from ...layer.warm_layers import WarmLayer, WarmPlan

EXAMPLES = (
    "moectl warm openai/gpt-oss-120b --gpu h200",
    "moectl warm ./prepared -m 8192",
    "moectl warm ./gpt-oss-20b --gpu h200 --tp 2 --to ./kernels",
    "moectl warm ./gpt-oss-20b --from ./kernels",
)
MORE = (
    "Kernels are kept in Triton's cache: TRITON_CACHE_DIR, else ~/.triton/cache.",
    "A directory of --to can be copied to a server with the same Python, Triton and",
    "moectl, and taken over there with --from. Kernels are code that runs on the",
    "GPU: name only directories that you trust.",
)


@dataclass(frozen=True)
class WarmedLayerOptions:
    """Options for the layers, and the ranks' shares of them."""

    tp: Annotated[int, option("--tp", own=True, help="Tensor-parallel ranks.", min=1)] = 1
    ep: Annotated[bool, option("--ep", own=True, help="Distribute whole experts over the ranks.")] = False
    activation: ActivationOption = None
    offline: Offline = False

    def layers(self, checkpoint: str) -> "list[WarmLayer]":
        """The different layers of a checkpoint, whose weights need not be here, or a converted directory."""
        from ...checkpoint import open_checkpoint
        from ...checkpoint.config.user_assumptions import parse_assumptions
        from ...checkpoint.source.open_checkpoint import MANIFEST
        from ...convert.manifest.rank_directories import rank_numbers
        from ...layer.converted_ranks import ConvertedRanks
        from ...layer.layer_source import CheckpointLayers, ConvertedLayers, LayerSource
        from ...layer.warm_layers import warm_layers
        from ...problem.moe_problem import Parallel

        source: LayerSource
        if (Path(checkpoint) / MANIFEST).exists():
            if self.tp > 1 or self.ep or self.activation:
                raise UsageError(
                    f"{checkpoint} is a converted directory, whose manifest settles --tp, --ep, --activation",
                    hint="leave them out",
                )
            folder = Path(checkpoint)
            ranks = bool(rank_numbers(folder))
            source = ConvertedRanks(folder, check=False) if ranks else ConvertedLayers(folder, check=False)
        else:
            assumptions = parse_assumptions(self.activation, None)
            source = CheckpointLayers(
                open_checkpoint(checkpoint, offline=self.offline, assumptions=assumptions)
            )
        return warm_layers(source, Parallel(self.tp, ep=self.ep))


@dataclass(frozen=True)
class CompileOptions:
    """Options for what is compiled, and where it is kept."""

    gpu: Annotated[
        str | None, option("--gpu", help="GPU, such as h200 or sm90; default: this machine's.")
    ] = None
    tokens: Annotated[
        int,
        option("--tokens", "-m", own=True, help="Most tokens of a call, on all ranks.", min=1, max=1 << 20),
    ] = 16384
    backend: Annotated[
        str | None,
        option("--backend", own=True, help="moectl or moectl_marlin; default: what reads the layout."),
    ] = None
    batched: Annotated[
        bool, option("--batched", help="Also for tokens batched by expert, -m per expert.")
    ] = False
    jobs: Annotated[
        int, option("--jobs", "-j", own=True, help="Processes; 0: by cores and free memory.", min=0)
    ] = 0
    source: Annotated[
        Path | None, option("--from", own=True, help="Take kernels from this directory of --to first.")
    ] = None
    target: Annotated[
        Path | None, option("--to", own=True, help="Also write the kernels to this directory.")
    ] = None

    def plan(self) -> "WarmPlan":
        """What to compile, for which GPU."""
        from ...kernels.triton.layer_binaries import OWN
        from ...layer.warm_layers import WarmPlan

        backend = pick(self.backend, OWN, "backend of moectl's own") if self.backend else ""
        device = _gpu(self.gpu)
        places = (self.source, self.target)
        return WarmPlan(device, self.tokens, self.jobs, self.batched, backend, *places)


@framed("warm")
def warm(
    checkpoint: CheckpointArg,
    *,
    layers: WarmedLayerOptions,
    compiled: CompileOptions,
    out: Output,
) -> ExitCode:
    """Compile moectl's kernels for a checkpoint in advance.

    Every kernel that a layer launches for 1 to -m tokens is compiled, in several processes, and kept. A
    server then compiles nothing, whatever the number of tokens. Neither the GPU nor weights are needed.
    Kernels of other libraries, such as FlashInfer, are compiled by these.
    """
    from ...layer.compile_ahead import cache_directory
    from ...layer.kernel_files import differences
    from ...layer.warm_layers import warm as warm_them
    from .text import draw_outcomes, lines_of, outcome_document

    plan = compiled.plan()
    if plan.source is not None and (others := differences(plan.source)):
        out.warn(f"{plan.source} was written with other versions: {'; '.join(others)}")
    outcomes = []
    with out.progress("compiling", unit="kernels") as progress:
        for outcome in warm_them(layers.layers(checkpoint), plan, progress):
            outcomes.append(outcome)
            if outcome.why:
                out.note(f"layers {outcome.layer.layers}: {outcome.why}; its library compiles its kernels")
            for text in outcome.result.failed if outcome.result else ():
                out.warn(f"not compiled: {text}")
            if outcome.result and outcome.result.note:
                out.note(f"compiled in one process, {outcome.result.note}")
    cache = cache_directory()
    document: dict[str, Any] = {
        "checkpoint": checkpoint,
        "gpu": plan.gpu.name,
        "arch": plan.gpu.arch,
        "tokens": plan.tokens,
        "cache": str(cache),
        "written": None if plan.target is None else str(plan.target),
        "layers": [outcome_document(outcome) for outcome in outcomes],
    }
    out.result(document, lambda console: draw_outcomes(outcomes, plan, cache, console), lines_of(outcomes))
    failed = any(outcome.result and outcome.result.failed for outcome in outcomes)
    return ExitCode.FOUND if failed else ExitCode.DONE


def _gpu(name: str | None) -> Device:
    """The GPU called `name`, or this machine's."""
    from ...environment import detect_device, find_device

    device = find_device(name) if name else detect_device()
    if device.platform != "cuda":
        where = f"--gpu {name} is" if name else "this machine has"
        raise UsageError(f"{where} {device.name}: kernels are compiled for CUDA GPUs", hint="--gpu h200")
    return device
