"""`moectl run`: one fused-MoE layer on real weights, checked against the reference."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import ExitCode
from .options import (
    MAX_TOKENS,
    Activation,
    Device,
    Layer,
    Offline,
    Routing,
    Seed,
    WeightsArg,
    check_writable,
    framed,
    option,
    pick,
)
from .output import Output, duration, size
from .source import DEVICES, backend_names, find_source

if TYPE_CHECKING:
    from ..run import RunResult

EXAMPLES = (
    "moectl run ./gpt-oss-20b --layer 3 --tokens 64",
    "moectl run ./marlin --backend torch",
    "moectl run ./kimi --input x.safetensors --output y.safetensors",
)


@framed("run")
def run(
    checkpoint: WeightsArg,
    layer: Layer = None,
    tokens: Annotated[int, option("--tokens", own=True, help="Random tokens.", min=0, max=MAX_TOKENS)] = 8,
    seed: Seed = 0,
    backend: Annotated[
        str | None,
        option("--backend", own=True, help="triton, triton_marlin or torch; default: the best one here."),
    ] = None,
    device: Device = None,
    input: Annotated[
        Path | None, option("--input", help="safetensors file with x, or x, ids and weights.")
    ] = None,
    output: Annotated[
        Path | None,
        option("--output", own=True, help="Write y, x, ids, weights to this safetensors file."),
    ] = None,
    activation: Activation = None,
    routing: Routing = None,
    offline: Offline = False,
    *,
    out: Output,
) -> ExitCode:
    """Run one layer on real weights and check it.

    The result is compared with a plain fp32 reference; exit code 1 when it is too far away. CKPT may be
    a converted folder: the layer then runs from its prepared weights. Of one rank's folder, the partial
    sum that this rank computes is what runs and is checked.
    """
    names = backend_names(backend)
    device = pick(device, DEVICES, "device") if device else None
    source = find_source(checkpoint, layer, offline=offline, activation=activation, routing=routing)
    if output is not None:
        check_writable(output)

    from ..run import choose_backends, open_layer, run_layer, this_machine

    machine = this_machine(device)
    opened = open_layer(source, layer)
    name = choose_backends(opened.problem, machine, names, opened.layout)[0]
    out.note(f"layer {opened.layer} on {name}, {machine.device.name}")
    partial = opened.partial
    result = run_layer(opened, name, machine, tokens=tokens, seed=seed, source=input)
    if output is not None:
        _write(output, result)
    checked = result.check
    document = {
        "checkpoint": checkpoint,
        "layer": opened.layer,
        "problem": asdict(opened.problem),
        "device": machine.device.name,
        "backend": name,
        "layout": result.prepared.layout,
        "relaid": result.prepared.relaid,
        "partial": partial,
        "tokens": result.tokens,
        "routed_by": result.routed_by,
        "check": asdict(checked),
        "prepare_seconds": result.prepare_seconds,
        "first_seconds": result.first_seconds,
        "median_us": result.median_us,
        "weight_bytes": result.weight_bytes,
        "peak_bytes": result.peak_bytes,
    }

    def draw(console: Any) -> None:
        moved = f" (laid out anew: {result.prepared.relaid})" if result.prepared.relaid else ""
        limit = checked.tolerance
        rows = {
            "layer": f"{opened.layer} of {checkpoint}, {opened.problem.scheme}",
            "backend": f"{name}, weights in layout {result.prepared.layout}{moved}",
            "tokens": f"{result.tokens}, routed by {result.routed_by}, top-{opened.problem.top_k}",
            "error": f"max {checked.max:.3g} (at most {limit.max:g}), RMS {checked.rms:.3g} ({limit.rms:g})",
            "worst": f"token {checked.worst_token}, RMS {checked.worst_rms:.3g}" if result.tokens else "",
            "prepare": duration(result.prepare_seconds),
            "first": f"{duration(result.first_seconds)} (compilation included)",
            "warm": f"{duration(result.median_us * 1e-6)} (median)" if result.tokens else "",
            "memory": f"{size(result.weight_bytes)} of weights, peak {size(result.peak_bytes)}",
            "check": "passed" if checked.ok else "FAILED",
            "partial": partial,
        }
        for label, value in rows.items():
            if value:
                console.print(f"{label:<9} {value}", markup=False)

    out.result(document, draw, f"{'ok' if checked.ok else 'failed'} {checked.rms:.3g}")
    return ExitCode.DONE if checked.ok else ExitCode.FOUND


def _write(path: Path, result: "RunResult") -> None:
    from safetensors.torch import save

    from ..convert.disk import write_file

    inputs = result.inputs
    tensors = {"y": result.y, "x": inputs.x, "ids": inputs.ids, "weights": inputs.weights}
    write_file(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
