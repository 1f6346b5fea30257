"""`moectl warm`: compiles the kernels that layers need on a GPU, which need not be here."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...errors import ExitCode, UsageError
from ..options import ActivationOption, CheckpointArg, Offline, framed, option, pick
from ..output import Output
from .warming import MOST_TOKENS, compiled, converted_layers, named_gpu

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
        from ...layer.layer_source import CheckpointLayers
        from ...layer.warm_layers import warm_layers
        from ...problem.moe_problem import Parallel

        if (Path(checkpoint) / MANIFEST).exists():
            if self.tp > 1 or self.ep or self.activation:
                raise UsageError(
                    f"{checkpoint} is a converted directory, whose manifest settles --tp, --ep, --activation",
                    hint="leave them out",
                )
            return converted_layers(Path(checkpoint))
        assumptions = parse_assumptions(self.activation, None)
        source = open_checkpoint(checkpoint, offline=self.offline, assumptions=assumptions)
        return warm_layers(CheckpointLayers(source), Parallel(self.tp, ep=self.ep))


@dataclass(frozen=True)
class CompileOptions:
    """Options for what is compiled, and where it is kept."""

    gpu: Annotated[
        str | None, option("--gpu", help="GPU, such as h200 or sm90; default: this machine's.")
    ] = None
    tokens: Annotated[
        int,
        option("--tokens", "-m", own=True, help="Most tokens of a call, on all ranks.", min=1, max=1 << 20),
    ] = MOST_TOKENS
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
        device = named_gpu(self.gpu)
        places = (self.source, self.target)
        return WarmPlan(device, self.tokens, self.jobs, self.batched, backend, *places)


@framed("warm")
def warm(
    checkpoint: CheckpointArg,
    *,
    layers: WarmedLayerOptions,
    options: CompileOptions,
    out: Output,
) -> ExitCode:
    """Compile moectl's kernels for a checkpoint in advance.

    Every kernel that a layer launches for 1 to -m tokens is compiled, in several processes, and kept. A
    server then compiles nothing, whatever the number of tokens. Neither the GPU nor weights are needed.
    Kernels of other libraries, such as FlashInfer, are compiled by these.
    """
    from ...layer.kernel_files import differences
    from .text import lines_of

    plan = options.plan()
    if plan.source is not None and (others := differences(plan.source)):
        out.warn(f"{plan.source} was written with other versions: {'; '.join(others)}")
    result = compiled(layers.layers(checkpoint), plan, out)
    written = None if plan.target is None else str(plan.target)
    document = {"checkpoint": checkpoint, "written": written, **result.document()}
    out.result(document, result.draw, lines_of(result.outcomes))
    return ExitCode.FOUND if result.failed else ExitCode.DONE
