"""`moectl run`: layers on real weights, checked against the reference and compared with each other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...dtypes import MODEL_DTYPES
from ...errors import ExitCode, UsageError
from ...problem.moe_problem import MAX_TOKENS
from ...run.run_plan import EVERY, RunPlan
from ..checkpoint_argument import DEVICE, backend_names, find_source, pick_layers
from ..options import (
    SEED,
    Activation,
    Layer,
    Offline,
    ParsedOption,
    RecordOptions,
    Routing,
    WeightsArg,
    framed,
    option,
    pick,
)
from ..output import Output
from ..output_paths import check_writable
from . import text

if TYPE_CHECKING:
    from ...layer.layer_source import LayerSource
    from ...run import LayerRun, RunMachine

EXAMPLES = (
    "moectl run ./gpt-oss-20b --layer 3 --tokens 64",
    "moectl run ./gpt-oss-20b --backend all --stress",
    "moectl run ./gpt-oss-20b --layers all --backend triton,torch",
    "moectl run ./kimi --input x.safetensors --output y.safetensors",
)
DTYPES = tuple(MODEL_DTYPES)


PLAN = RecordOptions(
    RunPlan,
    tokens=option("--tokens", own=True, help="Random tokens.", min=0, max=MAX_TOKENS),
    seed=SEED,
    backends=ParsedOption(
        option(
            "--backend",
            own=True,
            help="A name, several with commas, or all that can run here; default: the best one.",
        ),
        lambda text: EVERY if text == "all" else tuple(backend_names(text)),
    ),
    fallback=option("--allow-fallback", own=True, help="If it fails, the next one that can serve runs."),
    stress=option("--stress", help="Also what is easy to get wrong: odd sizes, empty experts, ties, ..."),
    dtype=ParsedOption(
        option("--dtype", own=True, help="Of the activations: bf16 or fp16; default: the model's."),
        lambda text: pick(text, DTYPES, "dtype") if text else "",
    ),
    device=DEVICE,
    source=option("--input", help="safetensors file with x, or x, ids and weights."),
)
"""Options that say how each layer is run."""


@framed("run")
def run(
    checkpoint: WeightsArg,
    layer: Layer = None,
    layers: Annotated[
        str | None, option("--layers", own=True, help="Several of them: all, or 0,3,5-9.")
    ] = None,
    *,
    plan_of: Annotated[Callable[..., RunPlan], PLAN],
    output: Annotated[
        Path | None,
        option("--output", own=True, help="Write y (y.NAME of several), x, ids, weights to this file."),
    ] = None,
    activation: Activation = None,
    routing: Routing = None,
    offline: Offline = False,
    out: Output,
) -> ExitCode:
    """Run layers on real weights and check them.

    Results are compared with a plain fp32 reference, and several backends with each other; exit code 1
    when one is too far away, fails, or fails a --stress case. It is the routed experts that run. CKPT may be
    a converted folder: layers then run from their prepared weights. Of one rank's folder, the partial sum
    that this rank computes is what runs and is checked.
    """
    plan = plan_of()
    if plan.fallback and plan.compares:
        raise UsageError(
            "--allow-fallback is for one backend, got several",
            hint="leave it out: each one's failure is shown",
        )
    if layers is not None and layer is not None:
        raise UsageError("--layer and --layers ask for different things", hint="leave one of them out")
    source = find_source(checkpoint, layer, offline=offline, activation=activation, routing=routing)
    if output is not None:
        check_writable(output, [checkpoint, *([plan.source] if plan.source else [])])
    for note in source.notes:
        out.note(note)

    from ...run import this_machine

    machine, several = this_machine(plan.device), layers is not None
    found: list[text.Data] = []
    written: dict[str, Any] = {}
    for done in _runs(source, layer, layers, machine, plan, out):
        unused = done.choice.left_out if plan.every and done.choice else None
        found.append(text.layer_data(done, unused))
        if output is not None:
            written |= tensors(done, prefix=f"layers.{done.number}." if several else "")
    if output is not None:
        _write(output, written)
    head = {"checkpoint": checkpoint, "device": machine.device.name}
    shape = {"several": several, "compares": plan.compares}
    out.result(
        text.document(head, found, **shape),
        lambda console: text.draw(head, found, console, **shape),
        text.brief(found, **shape),
    )
    return text.exit_code(found)


def _runs(
    source: "LayerSource",
    layer: int | None,
    layers: str | None,
    machine: "RunMachine",
    plan: "RunPlan",
    out: Output,
) -> "Iterator[LayerRun]":
    """Each layer's run; of one layer alone its errors are raised."""
    from ...run import run_one
    from ...run.all_layers import every_layer

    with out.progress("running", unit="layers") as progress:
        if layers is None:
            opened = source.layer(layer)
            out.note(f"layer {opened.layer}, {machine.device.name}")
            yield run_one(opened, machine, plan, lambda doing: progress(0, 1, doing), out.note)
            return
        numbers = pick_layers(layers, source.layers())
        finished = 0

        def told(doing: str) -> None:
            progress(finished, len(numbers), f"layer {numbers[finished]}: {doing}")

        for done in every_layer(source, numbers, machine, plan, told):
            finished += 1
            _tell_tried(done, out)
            yield done


def _tell_tried(done: "LayerRun", out: Output) -> None:
    for failed in done.compared.tried if done.compared else ():
        if failed.error:
            out.note(f"layer {done.number}: {failed.backend} was tried: {failed.error.what}")


def tensors(done: "LayerRun", prefix: str = "") -> dict[str, Any]:
    """What --output writes of a layer: the inputs, and y, or y.NAME of each of several backends."""
    if done.workload is None or done.compared is None:
        return {}
    inputs = done.workload.inputs
    found = {"x": inputs.x, "ids": inputs.ids, "weights": inputs.weights}
    results = [it.result for it in done.compared.outcomes if it.result is not None]
    several = len(done.compared.outcomes) > 1
    found |= {f"y.{it.backend}" if several else "y": it.y for it in results}
    return {prefix + name: tensor for name, tensor in found.items()}


def _write(path: Path, found: dict[str, Any]) -> None:
    from safetensors.torch import save

    from ...files.atomic import write_file

    write_file(path, save({name: tensor.contiguous() for name, tensor in found.items()}))
