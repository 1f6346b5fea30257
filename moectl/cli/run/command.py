"""`moectl run`: runs layers on real weights, and compares backends with the reference and each other."""

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
    ActivationOption,
    Layer,
    Offline,
    ParsedOption,
    RecordOptions,
    RoutingOption,
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
    "moectl run ./gpt-oss-20b --layers all --backend moectl,torch",
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
            help="A name, a comma-separated list, or all; default: the best that supports the layer.",
        ),
        lambda text: EVERY if text == "all" else tuple(backend_names(text)),
    ),
    fallback=option(
        "--allow-fallback", own=True, help="If the backend fails, run the next one that supports the layer."
    ),
    stress=option("--stress", help="Also run edge cases: odd sizes, empty experts, ties, ..."),
    dtype=ParsedOption(
        option("--dtype", own=True, help="Activation dtype: bf16 or fp16; default: the model's."),
        lambda text: pick(text, DTYPES, "dtype") if text else "",
    ),
    device=DEVICE,
    source=option("--input", help="safetensors file with x, or with x, ids and weights."),
)
"""Options of a `RunPlan`."""


@framed("run")
def run(
    checkpoint: WeightsArg,
    layer: Layer = None,
    layers: Annotated[
        str | None, option("--layers", own=True, help="Several layers: all, or 0,3,5-9.")
    ] = None,
    *,
    plan_of: Annotated[Callable[..., RunPlan], PLAN],
    output: Annotated[
        Path | None,
        option(
            "--output", own=True, help="Write y (or y.BACKEND for several), x, ids and weights to this file."
        ),
    ] = None,
    activation: ActivationOption = None,
    routing: RoutingOption = None,
    offline: Offline = False,
    out: Output,
) -> ExitCode:
    """Run layers on real weights and check them.

    Results are compared with a plain fp32 reference, and several backends with each other; exit code 1 if a
    result is outside the tolerance, or a backend or a --stress case fails. Only the routed experts run. CKPT
    may be a converted directory: its layers run from their prepared weights. For one rank's directory, the
    partial sum of that rank is computed and checked.
    """
    plan = plan_of()
    if plan.fallback and plan.compares:
        raise UsageError(
            "--allow-fallback is for one backend, got several",
            hint="leave it out: each one's failure is shown",
        )
    if layers is not None and layer is not None:
        raise UsageError("--layer and --layers contradict each other", hint="leave one of them out")
    source = find_source(checkpoint, layer, offline=offline, activation=activation, routing=routing)
    if output is not None:
        check_writable(output, [checkpoint, *([plan.source] if plan.source else [])])
    for note in source.notes:
        out.note(note)

    from ...run import this_machine

    machine, several = this_machine(plan.device), layers is not None
    layers_data: list[text.Data] = []
    outputs: dict[str, Any] = {}
    for done in _runs(source, layer, layers, machine, plan, out):
        unused = done.choice.left_out if plan.every and done.choice else None
        layers_data.append(text.layer_data(done, unused))
        if output is not None:
            outputs |= tensors(done, prefix=f"layers.{done.number}." if several else "")
    if output is not None:
        _write(output, outputs, checkpoint)
    head = {
        "checkpoint": checkpoint,
        "device": machine.device.name,
        "platform": machine.device.platform,
    }
    shape = {"several": several, "compares": plan.compares}
    out.result(
        text.document(head, layers_data, **shape),
        lambda console: text.draw(head, layers_data, console, **shape),
        text.brief(layers_data, **shape),
    )
    return text.exit_code(layers_data)


def _runs(
    source: "LayerSource",
    layer: int | None,
    layers: str | None,
    machine: "RunMachine",
    plan: "RunPlan",
    out: Output,
) -> "Iterator[LayerRun]":
    """The runs of the layers; a single layer's errors are raised."""
    from ...run import run_one
    from ...run.all_layers import every_layer

    with out.progress("running", unit="layers") as progress:
        if layers is None:
            opened = source.layer(layer)
            out.note(f"layer {opened.layer}, {machine.device.name}")
            yield run_one(opened, machine, plan, lambda step: progress(0, 1, step), out.note)
            return
        numbers = pick_layers(layers, source.layers())
        finished = 0

        def report(step: str) -> None:
            progress(finished, len(numbers), f"layer {numbers[finished]}: {step}")

        for done in every_layer(source, numbers, machine, plan, report):
            finished += 1
            _note_tried(done, out)
            yield done


def _note_tried(done: "LayerRun", out: Output) -> None:
    for failed in done.compared.tried if done.compared else ():
        if failed.error:
            out.note(f"layer {done.number}: {failed.backend} was tried: {failed.error.what}")


def tensors(done: "LayerRun", prefix: str = "") -> dict[str, Any]:
    """The tensors of --output for a layer: the inputs, and y, or y.BACKEND for several backends."""
    if done.workload is None or done.compared is None:
        return {}
    inputs = done.workload.inputs
    named = {"x": inputs.x, "ids": inputs.ids, "weights": inputs.weights}
    results = [outcome.result for outcome in done.compared.outcomes if outcome.result is not None]
    several = len(done.compared.outcomes) > 1
    named |= {f"y.{result.backend}" if several else "y": result.y for result in results}
    return {prefix + name: tensor for name, tensor in named.items()}


def _write(path: Path, named: dict[str, Any], checkpoint: str) -> None:
    """Writes the tensors of --output, for those alone who may read the checkpoint's weights."""
    from safetensors.torch import save

    from ...files.access import BY_UMASK, access_of
    from ...files.atomic import write_file

    folder = Path(checkpoint)
    weights = [file.name for file in folder.glob("*.safetensors")] if folder.is_dir() else []
    access = access_of(folder, weights) if folder.is_dir() else BY_UMASK
    write_file(path, save({name: tensor.contiguous() for name, tensor in named.items()}), access)
