"""Plans a portable conversion from tensor headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...checkpoint.checkpoint import Checkpoint, LayerGroup
from ...checkpoint.tensors.storage import PROJECTIONS
from ...dtypes import MODEL_DTYPES
from ...errors import CheckpointError, NoBackend, UsageError
from ...files.safe_reading import file_sha256
from ...files.safetensors_writer import plan_file
from ...lazy_torch import Tensor
from ...problem.moe_problem import MoEProblem
from ...problem.portable_formats import NATIVE, PortableFormat, container_of, is_loaded, readers_of
from ...problem.schemes import BF16, ActFormat, Scheme, WeightFormat
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
from .linears import Linear, keeps_storage, plan_linears, quantized_linears
from .options import PortableOptions
from .output_storage import OutputStorage, experts_module, module_prefix, output_storage
from .portable_writer import MatrixChange, PortableWriter
from .quantization_config import DOCUMENTS, Described, Description, expert_targets, with_quantization
from .report_fragments import LAYER_KINDS, label_of
from .slots import Slot

PREFIX = "experts-"
"""Prefix of the files of converted layers."""

REST_PREFIX = "rest-"
"""Prefix of files with passthrough tensors extracted from files that also contain experts."""

LINEARS_PREFIX = "linears-"
"""Prefix of the files of other quantized matrices."""

KEPT_ACT_BITS = frozenset((4, 16))
"""Bits of activations that every container can describe."""


ActivationFunction = Callable[[Tensor, MoEProblem, str], Tensor]
"""(outputs of the experts' first matrix, problem, order of its rows) -> inputs of the second matrix."""

CalibrationSource = tuple[Calibration, ActivationFunction]
"""Calibration activations, and the function from the first matrix's outputs to the second's inputs."""


@dataclass(frozen=True)
class GroupPlan:
    """How the layers of one group change.

    Attributes:
        layers: numbers of the layers.
        problem: the problem that the output's config will describe.
        change: the change of both matrices.
        output: names and shapes of the stored tensors.
        shapes: types of the canonical roles in the new format.
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
    """The plan to write `checkpoint` as an ordinary checkpoint with its experts in the format of `options`.

    `activate` is the experts' activation function, which calibration needs.

    Raises what `plan_conversion` raises, and UsageError if the container cannot describe the output, options
    conflict, or weights would be rounded without permission.
    """
    check_plannable(checkpoint)
    memory = default_memory() if max_memory is None else max_memory
    container = container_of(options.target, options.container, _model_types(checkpoint))
    options = replace(options, container=container)
    storage, _ = options.format.containers[container]
    calibration = _calibration_source(options, activate)
    kept = kept_groups(checkpoint, options)
    converted = [group for group in checkpoint.groups if group not in kept]
    planned = [_plan_group(checkpoint, group, options, calibration, storage, memory) for group in converted]
    layers = sorted((layer for _, in_group in planned for layer in in_group), key=lambda layer: layer.layer)
    plans = [plan for plan, _ in planned]
    _check_quantizer_options(options, plans)
    consumed = {info.name: info.file for layer in layers for info in layer.map.tensors}
    experts = tuple(group.problem for group in converted)
    other_linears = () if experts_only else quantized_linears(checkpoint, consumed, experts)
    others = _plan_linears(checkpoint, other_linears, storage, options.requantize, memory)
    consumed |= {info.name: info.file for layer in others for info in layer.map.tensors}
    passthrough = () if experts_only else tuple(plan_passthrough(checkpoint, consumed, REST_PREFIX))
    layers += others
    _check_names(layers, [item.name for item in passthrough])
    quantized = {*consumed, *(linear.module for linear in other_linears)}
    modules = tuple(sorted({*_plain_modules(checkpoint, quantized), *_kept_modules(kept)}))
    described = Description(*_described(plans, () if storage == "plain" else other_linears), modules)
    document = with_quantization(checkpoint.config, DOCUMENTS[plans[0].output.name](described))
    requantizes = any(isinstance(plan.change, Requantized) for plan in plans)
    method = _quantizer_words(options) if requantizes else ""
    fused = plans[0].output.storage.fused
    readers = readers_of(options.target, container, _model_types(checkpoint), fused=fused)
    record = LayoutRecord(
        f"{options.target} in {container}{method}", options.target, 1, (), tuple(map(str, readers))
    )
    finalizer = PortableFinalizer(
        options.target,
        container,
        document,
        _kinds(plans, kept),
        is_loaded(readers),
    )
    return ConversionPlan(
        checkpoint, record, RankShard(), (), tuple(layers), passthrough, experts_only, memory, finalizer
    )


def _model_types(checkpoint: Checkpoint) -> frozenset[str]:
    """The model type of the config, and that of the text model in it."""
    declared = checkpoint.config.get("model_type")
    inner = checkpoint.groups[0].problem.model_type
    return frozenset((declared, inner) if isinstance(declared, str) and declared else (inner,))


def kept_groups(checkpoint: Checkpoint, options: PortableOptions) -> tuple[LayerGroup, ...]:
    """Groups that stay as they are: those that a quantized checkpoint leaves in 16 bits, unless asked."""
    plain = tuple(g for g in checkpoint.groups if g.problem.scheme.weight.name == BF16.name)
    return () if options.include_unquantized or len(plain) == len(checkpoint.groups) else plain


def _kinds(plans: list[GroupPlan], kept: tuple[LayerGroup, ...]) -> dict[str, tuple[int, ...]]:
    """Layers by what becomes of their experts, in the order of `LAYER_KINDS`."""
    layers: dict[str, list[int]] = {kind: [] for kind in LAYER_KINDS}
    for plan in plans:
        layers[plan.change.kind] += plan.layers
    layers["kept"] += [layer for group in kept for layer in group.layers]
    return {kind: tuple(sorted(numbers)) for kind, numbers in layers.items() if numbers}


def _kept_modules(groups: tuple[LayerGroup, ...]) -> Iterator[str]:
    """Modules of kept experts as quantization configs exclude them: all experts, and each by itself.

    Readers ask for one or the other, whether the experts are stored in one tensor or not.
    """
    for group in groups:
        module = experts_module(module_prefix(group))
        matrices = PROJECTIONS.matrices.values()
        if group.storage is not None and not group.storage.fused:
            matrices = group.storage.arrangement.matrices.values()
        for layer in group.layers:
            experts = module.replace("{layer}", str(layer))
            yield experts.removesuffix(".")
            for expert in range(group.problem.experts):
                yield from (f"{experts}{expert}.{matrix}" for matrix in matrices)


def _calibration_source(
    options: PortableOptions, activate: ActivationFunction | None
) -> CalibrationSource | None:
    if options.calibration is None:
        return None
    if activate is None:
        raise ValueError("calibration needs the experts' activation function, got none")
    return Calibration(options.calibration), activate


def _quantizer_words(options: PortableOptions) -> str:
    """How weights are quantized, so that a conversion is not resumed in another way."""
    quantizer = options.quantizer
    rule = f", {quantizer.rule}" if options.format.has_scale_rules else ""
    activations = (
        "" if options.calibration is None else f", activations {file_sha256(options.calibration)[:16]}"
    )
    return f", {quantizer.method}{rule}{activations}"


def _check_quantizer_options(options: PortableOptions, plans: list[GroupPlan]) -> None:
    """Raises UsageError for quantizer options if nothing is quantized."""
    if not options.quantizer_options or any(isinstance(plan.change, Requantized) for plan in plans):
        return
    stored = plans[0].problem.scheme.weight
    raise UsageError(
        f"{options.quantizer_options[0]} sets how weights are quantized, "
        f"but these become {stored} without quantization.",
        hint=f"Leave {' and '.join(options.quantizer_options)} out.",
    )


def _plan_linears(
    checkpoint: Checkpoint, linears: tuple[Linear, ...], storage: str, requantize: bool, memory: int
) -> list[LayerPlan]:
    """Plans of the matrices that are repacked, numbered from -1 downwards."""
    groups: dict[tuple[object, ...], list[Linear]] = {}
    for linear in linears:
        if not keeps_storage(linear, storage, checkpoint):
            key = (linear.layer, linear.storage.format.storages, linear.scheme)
            groups.setdefault(key, []).append(linear)
    planned = []
    dtype = checkpoint.groups[0].problem.dtype
    for i, members in enumerate(groups.values()):
        plan = plan_linears(-1 - i, tuple(members), storage, checkpoint, dtype, requantize)
        batch, working = plan_batch(plan.map, plan.writer, {}, memory)
        file = plan_file(f"{LINEARS_PREFIX}{i:05d}.safetensors", plan.writer.specs, {"format": "pt"})
        rank_slice = RankSlice(plan.problem)
        planned.append(
            LayerPlan(plan.map, plan.map, rank_slice, plan.problem, plan.writer, file, batch, working, {})
        )
    return planned


def _described(
    plans: list[GroupPlan], linears: tuple[Linear, ...]
) -> tuple[tuple[Described, ...], tuple[Described, ...]]:
    """The experts' schemes with the modules that have them, and those of other modules."""
    schemes = list(dict.fromkeys(plan.problem.scheme for plan in plans))
    other_linears: dict[Scheme, list[str]] = {}
    for linear in linears:
        other_linears.setdefault(linear.scheme, []).append(linear.module)
    described = []
    for scheme in schemes:
        with_scheme = [plan for plan in plans if plan.problem.scheme == scheme]
        names = [name for plan in with_scheme for name in plan.output.modules]
        layers = [layer for plan in with_scheme for layer in plan.layers] if schemes[1:] else []
        modules = other_linears.pop(scheme, [])
        described.append(Described(scheme, (*expert_targets(names, layers), *modules)))
    return tuple(described), tuple(Described(scheme, tuple(names)) for scheme, names in other_linears.items())


def _plan_group(
    checkpoint: Checkpoint,
    group: LayerGroup,
    options: PortableOptions,
    calibration: CalibrationSource | None,
    storage: str,
    memory: int,
) -> tuple[GroupPlan, list[LayerPlan]]:
    maps = map_group(checkpoint, group)
    plan = _group_plan(group, maps[0], options, storage)
    planned: list[LayerPlan] = []
    batch = peak = 0
    for mapped in maps:
        writer = _writer(group.problem, mapped, plan, calibration)
        if not planned:
            batch, peak = plan_batch(mapped, writer, {}, memory)
        file = plan_file(f"{PREFIX}{mapped.layer:05d}.safetensors", writer.specs, {"format": "pt"})
        planned.append(
            LayerPlan(mapped, mapped, RankSlice(group.problem), group.problem, writer, file, batch, peak, {})
        )
    return plan, planned


def _group_plan(group: LayerGroup, mapped: LayerMapping, options: PortableOptions, storage: str) -> GroupPlan:
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
    target = replace(
        problem,
        scheme=Scheme(weight, act),
        storage=output.name,
        rows=CONCATENATED if output.concatenated else problem.rows,
        act_order="",
    )
    try:
        shapes = canonical_shapes(target, problem.experts, inputs)
    except NoBackend as error:
        raise UsageError(
            error.what, hint="Choose another --to: int8 and fp8-channel have a scale for each row."
        ) from error
    return GroupPlan(group.layers, target, change, output, shapes)


def _act(source: Scheme, weight: WeightFormat, target: PortableFormat) -> ActFormat:
    """The source's activation format if the weight format stays, else the target's.

    Of formats that are equal the source's also says how scales are rounded.
    """
    kept = source.act.bits in KEPT_ACT_BITS or source.act == target.act
    return source.act if kept and source.weight.name == weight.name else target.act


def _calibrated(
    change: FormatChange,
    problem: MoEProblem,
    plan: GroupPlan,
    source: CalibrationSource | None,
    layer: int,
) -> FormatChange:
    """`change` with the activations of one layer, if it uses them and there are any."""
    if not isinstance(change, Requantized) or source is None:
        return change
    calibration, activate = source
    rows = plan.problem.rows
    calibration.check(layer, problem.experts, problem.dims.hidden)
    activations = Activations(calibration, lambda h: activate(h, problem, rows), layer, problem.dims.hidden)
    return replace(
        change, activations=activations, w13_halves=halves(problem, "w13") if plan.output.concatenated else 1
    )


def _writer(
    problem: MoEProblem, mapped: LayerMapping, plan: GroupPlan, calibration: CalibrationSource | None
) -> PortableWriter:
    slots = plan.output.slots(mapped.layer, plan.problem, plan.shapes)
    _check_covered(plan.shapes, slots, mapped.layer)
    parts = halves(problem, "w13")
    size = problem.dims.hidden * problem.dims.intermediate
    change = _calibrated(plan.change, problem, plan, calibration, mapped.layer)
    matrices = {
        "w13": MatrixChange(change, parts if plan.output.concatenated else 1, parts * size),
        "w2": MatrixChange(change, 1, size),
    }
    order = {role: gate_then_up(problem, role) for role in mapped.shapes if plan.output.concatenated}
    return PortableWriter(plan.shapes, slots, matrices, order, label_of(mapped.layer))


def _check_covered(shapes: Shapes, slots: tuple[Slot, ...], layer: int) -> None:
    """Raises UsageError if the container has no tensor for some role or some of its rows."""
    for role, (_, shape) in shapes.items():
        rows = {row for slot in slots if slot.role == role for row in range(*slot.rows)}
        if len(rows) != shape[1]:
            raise UsageError(
                f"layer {layer}: the container has no tensor for {role} of the experts.",
                hint="Choose another --container.",
            )


def _check_names(layers: list[LayerPlan], passthrough: list[str]) -> None:
    names = [layer.file.name for layer in layers] + passthrough
    for name in names:
        if names.count(name) > 1:
            raise CheckpointError(
                f"two files of the output would have the name {name}.", hint="Rename that of the source."
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
