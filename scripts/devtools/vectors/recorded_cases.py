"""The layout, sizes and tensors of a recorded conversion, from its function and parameters alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from moectl.convert.canonical import CONCATENATED, INTERLEAVED, groups
from moectl.convert.layouts import marlin, triton_blackwell, triton_hopper
from moectl.convert.layouts.registry import layout_for, layout_named
from moectl.convert.recipe.chain import Chain
from moectl.convert.recipe.recipe import Recipe, StoredOutput
from moectl.convert.steps.transforms import type_of
from moectl.errors import NoBackend, UsageError
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import (
    BF16,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP8,
    NVFP4,
    Scheme,
    WeightFormat,
    int_format,
)

from .recorded_inputs import AWQ, FP8, GPT_OSS, NUMBERS, OUTPUTS, PLAIN, Inputs, integers, layer
from .recordings import Mismatch, Recording, Unsupported


@dataclass(frozen=True)
class Deviation:
    """A recorded behaviour that is known to be wrong, from which moectl deviates.

    `applies` recognises it by the parameters and the layer; `role` is the output that differs; `recorded` is
    the chain that the engine ran for it, which the recording must match exactly.
    """

    name: str
    why: str
    role: str
    applies: Callable[[Recording, MoEProblem], bool]
    recorded: Callable[[MoEProblem, Chain], Chain]


def _engine_groups(recording: Recording, problem: MoEProblem) -> bool:
    """True if the engine assumes several groups: the group is smaller than the unpadded intermediate size."""
    group = problem.scheme.weight.group
    return 0 < group < recording.number("intermediate")


def _scale_rule(role: str, functions: str) -> Deviation:
    """How the engine orders the scales of `role`, in functions whose name contains `functions`."""

    def several(problem: MoEProblem) -> bool:
        return groups(problem.scheme.weight, marlin.reduction(problem, role)) > 1

    def applies(recording: Recording, problem: MoEProblem) -> bool:
        return functions in recording.function and _engine_groups(recording, problem) != several(problem)

    def other(problem: MoEProblem, chain: Chain) -> Chain:
        ours, theirs = (marlin.scale_steps(grouped) for grouped in (several(problem), not several(problem)))
        assert chain.steps[-len(ours) :] == ours
        return Chain(chain.steps[: -len(ours)] + theirs)

    why = (
        f"vLLM 0.33.0 chooses the order of {role[:-6]}'s scales by group_size < intermediate, its kernel by "
        "more than one group; moectl follows the kernel"
    )
    return Deviation("marlin-scale-rule", why, role, applies, other)


DEVIATIONS: tuple[Deviation, ...] = (
    _scale_rule("w13_scale", "weights_marlin"),
    _scale_rule("w2_scale", "awq_weights_marlin"),
)


@dataclass(frozen=True)
class RecordedCase:
    """A recorded conversion in moectl's terms.

    Attributes:
        problem: the layer's problem.
        recipe: how the layer is stored and restored.
        canonical: its canonical tensors.
        names: names of the recorded outputs, by stored tensor.
        labels: formats of stored bytes, in safetensors spellings.
        joined: stored tensors whose recorded outputs have experts as the second axis, after one of length 1.
        deviations: known deviations that may explain a difference.
    """

    problem: MoEProblem
    recipe: Recipe
    canonical: Mapping[str, Tensor]
    names: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()
    deviations: tuple[Deviation, ...] = ()


def _case(
    recording: Recording,
    layout_name: str,
    weight: WeightFormat,
    rows: str = CONCATENATED,
    inputs: Inputs = PLAIN,
) -> RecordedCase:
    """The case of a recording that converts a whole layer to one layout, with sizes and padding checked."""
    layout = layout_named(layout_name)
    problem, canonical = layer(recording, layout, weight, rows, inputs)
    whole = layout.recipe(problem, {role: type_of(t) for role, t in canonical.items()})
    names = {name: OUTPUTS.get(name, name) for name in whole.outputs}
    return RecordedCase(problem, whole, canonical, names, layout.logical_dtypes)


_ACTS = {"": "", "None": "", "torch.int8": "-act-int8", "torch.float8_e4m3fn": "-act-fp8"}


def _act(recording: Recording) -> str:
    """The suffix of a Marlin layout's name for the recorded activations."""
    if recording.text("act") not in _ACTS:
        raise Unsupported(f"{recording.text('act')} activations")
    return _ACTS[recording.text("act")]


def _known_layout(name: str, what: str) -> str:
    """`name` if such a layout exists; otherwise Unsupported."""
    from moectl.convert.layouts.registry import LAYOUTS

    if name not in {layout.name for layout in LAYOUTS}:
        raise Unsupported(what)
    return name


def _marlin_int(recording: Recording, awq: bool) -> RecordedCase:
    bits, group = recording.number("bits"), recording.number("group_size")
    if bits not in (4, 8):
        raise Unsupported(f"{bits}-bit integers")
    zero = awq or any(name.endswith("_qzeros") for name in recording.inputs)
    if recording.flag("zp", zero) != zero:
        raise Mismatch("params and inputs differ about zero points")
    weight = int_format(bits, FULL if group == -1 else group, zero_point=zero)
    name = _known_layout(f"marlin-int{bits}{_act(recording)}", f"{recording.text('act')} activations")
    case = _case(recording, name, weight, inputs=AWQ if awq else integers(bits))
    return replace(case, deviations=DEVIATIONS)


def _marlin_mxfp4(recording: Recording) -> RecordedCase:
    name = _known_layout(f"marlin-mxfp4{_act(recording)}", f"{recording.text('act')} activations")
    return _case(recording, name, MXFP4, _rows(recording, INTERLEAVED), _fused_names(recording))


def _marlin_fp8(recording: Recording) -> RecordedCase:
    return _case(recording, "marlin-fp8", _fp8(recording), inputs=FP8)


_FP8 = {"tensor": FP8_TENSOR, "tensor2": FP8_TENSOR, "channel": FP8_CHANNEL, "block": FP8_BLOCK, "mx": MXFP8}


def _fp8(recording: Recording) -> WeightFormat:
    if recording.text("mode") not in _FP8:
        raise Unsupported(f"FP8 of mode {recording.text('mode')!r}")
    return _FP8[recording.text("mode")]


def _flashinfer_fp8(recording: Recording) -> RecordedCase:
    family = {"True": "trtllm", "False": "cutlass"}.get(_argument(recording).removeprefix("is_trtllm="), "")
    weight = _fp8(recording)
    kinds = {FP8_TENSOR: "fp8-tensor", FP8_BLOCK: "fp8-block", MXFP8: "mxfp8"}
    name = _known_layout(f"{family}-{kinds.get(weight, 'none')}", f"{_argument(recording)} with {weight}")
    return _case(recording, name, weight, inputs=FP8)


def _rows(recording: Recording, default: str) -> str:
    """The order of `w13` rows that the parameters state, by its first word."""
    stated = re.match(r"[a-z]+", recording.text("w13_rows"))
    known = {"interleaved": INTERLEAVED, "concatenated": CONCATENATED, "concat": CONCATENATED}
    if stated is None:
        return default
    if stated[0] not in known:
        raise Unsupported(f"rows {recording.text('w13_rows')!r}")
    return known[stated[0]]


def _argument(recording: Recording) -> str:
    """The text in parentheses after the function's name: a backend, or a flag."""
    return recording.function.rpartition("(")[2].rstrip(")") if "(" in recording.function else ""


def _fused_names(recording: Recording) -> Inputs:
    return GPT_OSS if any(name in GPT_OSS for name in recording.inputs) else PLAIN


_MXFP4_BACKENDS = {
    "FLASHINFER_TRTLLM_MXFP4_BF16": "trtllm-mxfp4",
    "FLASHINFER_TRTLLM_MXFP4_MXFP8": "trtllm-mxfp4",
    "FLASHINFER_CUTLASS_MXFP4_BF16": "cutlass-sm90",
    "FLASHINFER_CUTLASS_MXFP4_MXFP8": "cutlass-sm100",
    "CUTLASS_MXFP4_MXFP4": "cutlass-mxfp4",
    "B12X_MXFP4_BF16": "b12x-mxfp4",
    "B12X_MXFP4_MXFP8": "b12x-mxfp4",
    "MARLIN": "marlin-mxfp4",
    "BATCHED_MARLIN": "marlin-mxfp4",
}
_NVFP4_BACKENDS = {
    "FLASHINFER_TRTLLM": "trtllm-nvfp4",
    "FLASHINFER_CUTLASS": "flashinfer-cutlass-nvfp4",
    "FLASHINFER_B12X": "flashinfer-cutlass-nvfp4",
    "FLASHINFER_CUTEDSL_BATCHED": "cutedsl-batched-nvfp4",
    "VLLM_CUTLASS": "cutlass-nvfp4",
}


def _backend(recording: Recording, known: Mapping[str, str]) -> str:
    if _argument(recording) not in known:
        raise Unsupported(f"backend {_argument(recording)}")
    return known[_argument(recording)]


def _oracle_mxfp4(recording: Recording, rows: str) -> RecordedCase:
    name = _backend(recording, _MXFP4_BACKENDS)
    return _case(recording, name, MXFP4, _rows(recording, rows), _fused_names(recording))


def _nvfp4(recording: Recording, name: str, interleaved: frozenset[str] = frozenset()) -> RecordedCase:
    """`interleaved`: activations for which the function expects interleaved gate and up rows."""
    rows = INTERLEAVED if recording.text("activation") in interleaved else CONCATENATED
    return _case(recording, name, NVFP4, rows, NUMBERS)


def _trtllm_mxint4(recording: Recording) -> RecordedCase:
    return _case(recording, "trtllm-mxint4", int_format(4, recording.number("group")), inputs=integers(4))


def _triton_kernels(recording: Recording) -> RecordedCase:
    """A single matrix in the package's layout; on Hopper `num_warps` decides the order of the scales."""
    experts, rows, columns = (recording.number(name) for name in ("E", "N", "K"))
    for name, shape in (("weight", (experts, rows, columns // 2)), ("scale", (experts, rows, columns // 32))):
        if name not in recording.inputs or tuple(recording.inputs[name].shape) != shape:
            raise Mismatch(f"input {name} of {list(shape)} is missing")
    arch = recording.number("arch")
    if arch == 90:
        weight = triton_hopper.value_steps(rows, columns // 2)
        scale = triton_hopper.scale_steps(rows, columns // 32, recording.number("num_warps"))
    elif arch // 10 in (10, 11, 12):
        weight = triton_blackwell.value_steps(columns // 2)
        scale = triton_blackwell.scale_steps(rows, columns // 32)
    else:
        raise Unsupported(f"triton_kernels layouts for arch {arch}")
    outputs = {name: StoredOutput(name, chain=Chain(s)) for name, s in (("weight", weight), ("scale", scale))}
    canonical = {name: recording.inputs[name] for name in outputs}
    extra = sorted(set(recording.inputs) - set(outputs))
    if extra:
        raise Mismatch(f"tensors that are not compared: {', '.join(extra)}")
    shapes = {name: type_of(t) for name, t in canonical.items()}
    problem = MoEProblem(Dims(columns, rows), experts, 1, Scheme(MXFP4))
    names = {"weight": "value_storage", "scale": "scale_storage"}
    joined = frozenset() if arch == 90 else frozenset({"scale"})
    return RecordedCase(problem, Recipe(shapes, outputs), canonical, names, joined=joined)


_FORMATS = (MXFP4, NVFP4, MXFP8, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK)


def _humming(recording: Recording) -> RecordedCase:
    """Both matrices of a layer, for a compute capability, a model's dtype and activations."""
    name, block = recording.text("weight"), tuple(recording.params.get("block", ()))
    zero = any(name.endswith("_qzeros") for name in recording.inputs)
    if name in ("int4", "int8") and len(block) == 2:
        weight, inputs = int_format(int(name[-1]), block[1], zero_point=zero), integers(int(name[-1]))
    else:
        known = [weight for weight in _FORMATS if (weight.name, weight.block) == (name, block)]
        if not known:
            raise Unsupported(f"{name} weights with blocks {block}")
        weight, inputs = known[0], NUMBERS if name == "nvfp4" else PLAIN
    try:
        layout = layout_for(
            recording.text("target"), weight, f"sm{recording.number('sm')}", recording.text("act")
        )
    except UsageError as error:
        raise Unsupported(str(error)) from error
    return _case(recording, layout.name, weight, _rows(recording, CONCATENATED), inputs)


FUNCTIONS: Mapping[str, Callable[[Recording], RecordedCase]] = {
    "int_wna16.py::_process_weights_marlin": lambda r: _marlin_int(r, awq=False),
    "int_wna16.py::_process_awq_weights_marlin": lambda r: _marlin_int(r, awq=True),
    "marlin_utils_fp4.py::prepare_moe_mxfp4_layer_for_marlin": _marlin_mxfp4,
    "marlin_utils_fp4.py::prepare_nvfp4_moe_layer_for_marlin": lambda r: _nvfp4(r, "marlin-nvfp4"),
    "marlin_utils_fp8.py::prepare_fp8_moe_layer_for_marlin": _marlin_fp8,
    "marlin_utils_fp8.py::prepare_mxfp8_moe_layer_for_marlin": lambda r: _case(r, "marlin-mxfp8", MXFP8),
    "mxfp4.py::convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": lambda r: _oracle_mxfp4(r, INTERLEAVED),
    "mxfp4.py::convert_weight_to_mxfp4_moe_kernel_format": lambda r: _oracle_mxfp4(r, CONCATENATED),
    "flashinfer_mxint4_moe.py::prepare_static_weights_for_trtllm_mxint4_moe": _trtllm_mxint4,
    "flashinfer_utils.py::prepare_fp8_moe_layer_for_fi": _flashinfer_fp8,
    "flashinfer_utils.py::align_moe_weights_for_fi": lambda r: _case(r, "trtllm-bf16", BF16),
    "flashinfer_utils.py::convert_moe_weights_to_flashinfer_trtllm_block_layout": lambda r: _case(
        r, "trtllm-bf16", BF16
    ),
    "flashinfer_fp4_moe.py::prepare_nvfp4_moe_layer_for_fi_or_cutlass": lambda r: _nvfp4(
        r, _backend(r, _NVFP4_BACKENDS)
    ),
    "flashinfer_fp4_moe.py::prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": lambda r: _nvfp4(
        r, "cutedsl-nvfp4", frozenset({"swigluoai"})
    ),
    "b12x_moe.py::prepare_nvfp4_moe_layer_for_b12x": lambda r: _nvfp4(r, "b12x-nvfp4"),
    "mxfp4_utils.py::_swizzle_mxfp4": _triton_kernels,
    "transform.py::transform_humming_tensors": _humming,
}
"""Producing functions by file and name, as the metadata states them."""

_FUNCTION = re.compile(r"(\w+\.py::\w+)")


def function_of(recording: Recording) -> str:
    """File and name of the function that produced a recording; empty when the metadata names none."""
    known = _FUNCTION.search(recording.function)
    return known[1] if known else ""


def case_of(recording: Recording) -> RecordedCase:
    """The case of `recording`; Unsupported when no layout of moectl covers it."""
    function = function_of(recording)
    if function not in FUNCTIONS:
        raise Unsupported(f"function {recording.function!r}")
    try:
        return FUNCTIONS[function](recording)
    except NoBackend as error:
        raise Unsupported(str(error)) from error
