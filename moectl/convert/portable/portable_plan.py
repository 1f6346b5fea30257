"""Plans a portable conversion from tensor headers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ...checkpoint.checkpoint import Checkpoint, LayerGroup
from ...dtypes import MODEL_DTYPES
from ...errors import CheckpointError, NoBackend, UsageError
from ...files.safe_reading import file_sha256
from ...files.safetensors_writer import plan_file
from ...problem.moe_problem import MoEProblem
from ...problem.portable_formats import NATIVE, PortableFormat, container_of
from ...problem.schemes import ActFormat, Scheme, WeightFormat
from ..canonical import CONCATENATED, canonical_shapes, gate_then_up, halves, has_input_scales
from ..manifest.manifest_records import LayoutRecord
from ..plan.conversion_plan import ConversionPlan, LayerPlan
from ..plan.kernel_layout_plan import check_plannable, map_group, plan_passthrough
from ..plan.memory_budget import default_memory, plan_batch
from ..quantize.calibration import Calibration
from ..rank_slice import RankShard, RankSlice
from ..sources import LayerMapping
from ..steps.value_steps import Shapes
from .calibration_activations import Activations
from .change_rules import change_for
from .finish_portable import PortableFinalizer
from .format_changes import FormatChange, Requantized
from .linears import Linear, plan_linears, quantized_linears, stays
from .options import PortableOptions
from .output_storage import OutputStorage, output_storage
from .portable_writer import MatrixChange, PortableWriter
from .quantization_config import DOCUMENTS, Described, Description, expert_targets, with_quantization
from .report_fragments import label_of
from .slots import Slot

PREFIX = "experts-"
"""Prefix of the files of converted layers."""

REST_PREFIX = "rest-"
"""Prefix of files with passthrough tensors extracted from files that also contain experts."""

LINEARS_PREFIX = "linears-"
"""Prefix of the files of other quantized matrices."""

KEPT_ACT_BITS = frozenset((4, 16))
"""Bits of activations that every container of their weight format can state."""


ActivationFunction = Callable[[Tensor, MoEProblem, str], Tensor]
"""Outputs of the experts' first matrix, the problem and the order of its rows to inputs of the second."""

CalibrationSource = tuple[Calibration, ActivationFunction]
"""Calibration activations, and the function from the first matrix's outputs to the second's inputs."""


@dataclass(frozen=True)
class GroupPlan:
    """How the layers of one group change.

    Attributes:
        layers: of the group.
        problem: as the output's config will describe it.
        change: of both matrices.
        output: names and shapes of the stored tensors.
        shapes: canonical roles in the new format.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    change: FormatChange
    output: OutputStorage
    shapes: Shapes


def plan_portable(
    checkpoint: Checkpoint,
    options: PortableOptions,
    *,
    activate: ActivationFunction | None = None,
    max_memory: int | None = None,
    experts_only: bool = False,
) -> ConversionPlan:
    """The `ConversionPlan` to write `checkpoint` as an ordinary checkpoint with the experts as `options` say.

    `activate` is the experts' activation function, which calibration needs.

    Raises like `plan_conversion`, and UsageError if the container cannot describe the output, options
    conflict, or weights would be rounded without permission.
    """
    check_plannable(checkpoint)
    memory = default_memory() if max_memory is None else max_memory
    container = container_of(options.target, options.container)
    storage, readers = options.format.containers[container]
    seen = _seen(options, activate)
    planned = [_plan_group(checkpoint, group, options, seen, storage, memory) for group in checkpoint.groups]
    layers = sorted((layer for _, found in planned for layer in found), key=lambda layer: layer.layer)
    plans = [plan for plan, _ in planned]
    _check_quantizer_options(options, plans)
    consumed = {info.name: info.file for layer in layers for info in layer.map.tensors}
    experts = tuple(group.problem for group in checkpoint.groups)
    other_linears = () if experts_only else quantized_linears(checkpoint, consumed, experts)
    others = _plan_linears(checkpoint, other_linears, storage, options.requantize, memory)
    consumed |= {info.name: info.file for layer in others for info in layer.map.tensors}
    passthrough = () if experts_only else tuple(plan_passthrough(checkpoint, consumed, REST_PREFIX))
    layers += others
    _check_names(layers, [item.name for item in passthrough])
    modules = _plain_modules(checkpoint, {*consumed, *(linear.module for linear in other_linears)})
    described = Description(*_described(plans, () if storage == "plain" else other_linears), modules)
    document = with_quantization(checkpoint.config, DOCUMENTS[plans[0].output.name](described))
    how = _how(options) if isinstance(plans[0].change, Requantized) else ""
    record = LayoutRecord(
        f"{options.target} in {container}{how}", options.target, 1, (), tuple(map(str, readers))
    )
    finalizer = PortableFinalizer(options.target, container, document)
    return ConversionPlan(
        checkpoint, record, RankShard(), (), tuple(layers), passthrough, experts_only, memory, finalizer
    )


def _seen(options: PortableOptions, activate: ActivationFunction | None) -> CalibrationSource | None:
    if options.calibration is None:
        return None
    if activate is None:
        raise ValueError("calibration needs the experts' activation function, got none")
    return Calibration(options.calibration), activate


def _how(options: PortableOptions) -> str:
    """How weights are quantized, so that a conversion is not resumed with something else."""
    quantizer = options.quantizer
    rule = f", {quantizer.rule}" if options.format.has_scale_rules else ""
    seen = "" if options.calibration is None else f", activations {file_sha256(options.calibration)[:16]}"
    return f", {quantizer.method}{rule}{seen}"


def _check_quantizer_options(options: PortableOptions, plans: list[GroupPlan]) -> None:
    """Raises UsageError for quantizer options if nothing is quantized."""
    if not options.quantizing or any(isinstance(plan.change, Requantized) for plan in plans):
        return
    stored = plans[0].problem.scheme.weight
    raise UsageError(
        f"{options.quantizing[0]} says how weights are quantized, "
        f"but these become {stored} without quantizing.",
        hint=f"Leave {' and '.join(options.quantizing)} out.",
    )


def _plan_linears(
    checkpoint: Checkpoint, linears: tuple[Linear, ...], storage: str, requantize: bool, memory: int
) -> list[LayerPlan]:
    """Plans of the matrices that are written otherwise than they are stored, numbered from -1 down."""
    groups: dict[tuple[object, ...], list[Linear]] = {}
    for linear in linears:
        if not stays(linear, storage, checkpoint):
            key = (linear.layer, linear.storage.format.storages, linear.scheme)
            groups.setdefault(key, []).append(linear)
    planned = []
    dtype = checkpoint.groups[0].problem.dtype
    for i, found in enumerate(groups.values()):
        plan = plan_linears(-1 - i, tuple(found), storage, checkpoint, dtype, requantize)
        batch, working = plan_batch(plan.map, plan.writer, {}, memory)
        file = plan_file(f"{LINEARS_PREFIX}{i:05d}.safetensors", plan.writer.specs, {"format": "pt"})
        rank_slice = RankSlice(plan.problem)
        planned.append(LayerPlan(plan.map, rank_slice, plan.problem, plan.writer, file, batch, working, {}))
    return planned


def _described(
    plans: list[GroupPlan], linears: tuple[Linear, ...]
) -> tuple[tuple[Described, ...], tuple[Described, ...]]:
    """The experts' formats, each with targets of the modules that have it; those of other modules."""
    schemes = list(dict.fromkeys(plan.problem.scheme for plan in plans))
    other_linears: dict[Scheme, list[str]] = {}
    for linear in linears:
        other_linears.setdefault(linear.scheme, []).append(linear.module)
    found = []
    for scheme in schemes:
        alike = [plan for plan in plans if plan.problem.scheme == scheme]
        names = [name for plan in alike for name in plan.output.modules]
        layers = [layer for plan in alike for layer in plan.layers] if schemes[1:] else []
        same = other_linears.pop(scheme, [])
        found.append(Described(scheme, (*expert_targets(names, layers), *same)))
    return tuple(found), tuple(Described(scheme, tuple(names)) for scheme, names in other_linears.items())


def _plan_group(
    checkpoint: Checkpoint,
    group: LayerGroup,
    options: PortableOptions,
    seen: CalibrationSource | None,
    storage: str,
    memory: int,
) -> tuple[GroupPlan, list[LayerPlan]]:
    maps = map_group(checkpoint, group)
    plan = _decide(group, maps[0], options, storage)
    planned: list[LayerPlan] = []
    batch = peak = 0
    for mapped in maps:
        writer = _writer(group.problem, mapped, plan, seen)
        if not planned:
            batch, peak = plan_batch(mapped, writer, {}, memory)
        file = plan_file(f"{PREFIX}{mapped.layer:05d}.safetensors", writer.specs, {"format": "pt"})
        planned.append(
            LayerPlan(mapped, RankSlice(group.problem), group.problem, writer, file, batch, peak, {})
        )
    return plan, planned


def _decide(group: LayerGroup, mapped: LayerMapping, options: PortableOptions, storage: str) -> GroupPlan:
    problem, dims = group.problem, group.problem.dims
    stored = problem.scheme.weight
    if "w13_scale" in mapped.shapes and (dtype := mapped.shapes["w13_scale"].dtype) != "U8":
        stored = replace(stored, scale_dtype=dtype)
    sizes = ((dims.intermediate, dims.hidden), (dims.hidden, dims.intermediate))
    weight, change = change_for(stored, options, sizes, MODEL_DTYPES[problem.dtype])
    act = _act(problem.scheme, weight, options.format)
    inputs = has_input_scales(replace(problem, scheme=Scheme(weight, act))) and "w2_input" in mapped.shapes
    native = options.container == NATIVE or storage == "plain"
    output = output_storage(group, storage, weight, native)
    found = replace(
        problem,
        scheme=Scheme(weight, act),
        storage=output.name,
        rows=CONCATENATED if output.apart else problem.rows,
        act_order="",
    )
    try:
        shapes = canonical_shapes(found, problem.experts, inputs)
    except NoBackend as error:
        raise UsageError(
            error.what, hint="Choose another --to: int8 and fp8-channel have a scale for each row."
        ) from error
    return GroupPlan(group.layers, found, change, output, shapes)


def _act(source: Scheme, weight: WeightFormat, target: PortableFormat) -> ActFormat:
    """The source's activations where the weight format stays, else what goes with the format."""
    same = source.weight.name == weight.name and source.act.bits in KEPT_ACT_BITS
    return source.act if same else target.act


def _calibrated(
    change: FormatChange, problem: MoEProblem, plan: GroupPlan, seen: CalibrationSource | None, layer: int
) -> FormatChange:
    """`change` with the activations of one layer, where it can use them and there are any."""
    if not isinstance(change, Requantized) or seen is None:
        return change
    calibration, activate = seen
    rows = plan.problem.rows
    calibration.check(layer, problem.experts, problem.dims.hidden)
    found = Activations(calibration, lambda h: activate(h, problem, rows), layer, problem.dims.hidden)
    return replace(change, activations=found, w13_halves=halves(problem, "w13") if plan.output.apart else 1)


def _writer(
    problem: MoEProblem, mapped: LayerMapping, plan: GroupPlan, seen: CalibrationSource | None
) -> PortableWriter:
    found = plan.output.slots(mapped.layer, plan.problem, plan.shapes)
    _check_covered(plan.shapes, found, mapped.layer)
    stacked = halves(problem, "w13")
    size = problem.dims.hidden * problem.dims.intermediate
    change = _calibrated(plan.change, problem, plan, seen, mapped.layer)
    matrices = {
        "w13": MatrixChange(change, stacked if plan.output.apart else 1, stacked * size),
        "w2": MatrixChange(change, 1, size),
    }
    order = {role: gate_then_up(problem, role) for role in mapped.shapes if plan.output.apart}
    return PortableWriter(plan.shapes, found, matrices, order, label_of(mapped.layer))


def _check_covered(shapes: Shapes, found: tuple[Slot, ...], layer: int) -> None:
    """Raises UsageError when the container has no tensor for a part of what there is to store."""
    for role, (_, shape) in shapes.items():
        rows = {row for slot in found if slot.role == role for row in range(*slot.rows)}
        if len(rows) != shape[1]:
            raise UsageError(
                f"layer {layer}: the container has no place for {role} of the experts.",
                hint="Choose another --container.",
            )


def _check_names(layers: list[LayerPlan], rest: list[str]) -> None:
    names = [layer.file.name for layer in layers] + rest
    for name in names:
        if names.count(name) > 1:
            raise CheckpointError(
                f"two files of the output would be called {name}.", hint="Rename the source's."
            )


def _plain_modules(checkpoint: Checkpoint, quantized: set[str]) -> tuple[str, ...]:
    """Modules that have a matrix as their weight and are not among `quantized` tensors and modules."""
    return tuple(
        sorted(
            name.removesuffix(".weight")
            for name in checkpoint.tensors
            if name.endswith(".weight")
            and not {name, name.removesuffix(".weight")} & quantized
            and len(checkpoint.tensors[name].shape) > 1
        )
    )
