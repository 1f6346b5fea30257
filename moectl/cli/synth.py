"""`moectl synth`: writes a checkpoint with a published model's schema and random weights."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Seed, framed, option
from .output import Output, size

EXAMPLES = (
    "moectl synth openai/gpt-oss-20b ./tiny --layers 2 --experts 8 --hidden 256 --intermediate 256",
    "moectl synth moonshotai/Kimi-K2-Thinking ./kimi --layers 1 --experts 32",
    "moectl synth ./my-finetune ./small --layers 2 --experts 16",
    "moectl synth deepseek-ai/DeepSeek-V3 ./fp8 --layers 1 --experts 16 --hidden 512 --intermediate 256",
)


@framed("synth")
def synth(
    model: Annotated[str, typer.Argument(help="A built-in model, a directory, or a config.json.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
    layers: Annotated[int | None, option("--layers", help="MoE layers; default: all.", min=1)] = None,
    experts: Annotated[int | None, option("--experts", help="Experts; default: all.", min=1)] = None,
    hidden: Annotated[int | None, option("--hidden", help="Hidden size.", min=32)] = None,
    intermediate: Annotated[
        int | None, option("--intermediate", help="Experts' intermediate size.", min=32)
    ] = None,
    seed: Seed = 0,
    *,
    out: Output,
) -> None:
    """Write a random checkpoint with the schema of a model.

    The weights are random, well scaled, and quantized like the original ones: for tests and benchmarks
    without a download.
    """
    from ..synth import synthesize

    with out.progress("writing") as progress:
        synthesize(
            model,
            target,
            layers=layers,
            experts=experts,
            hidden=hidden,
            intermediate=intermediate,
            seed=seed,
            progress=progress,
        )
    written = sum(file.stat().st_size for file in target.iterdir() if file.is_file())
    document = {"model": model, "folder": str(target), "bytes": written, "seed": seed}
    out.result(document, lambda console: console.print(f"{model} -> {target} ({size(written)})"), str(target))
