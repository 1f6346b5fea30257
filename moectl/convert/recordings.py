"""Recorded conversions of other projects, and which layout, sizes and tensors each is about.

A recording is a safetensors file with ``in.*`` and ``out.*`` tensors; its metadata names the
`function` that made the outputs and its `params` as JSON. These alone decide what it is, never its
file name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..problem import Dims, MoEProblem
from ..schemes import FULL, MXFP4, Scheme, WeightFormat, int_format
from .canonical import CONCATENATED, INTERLEAVED, canonical_shapes, groups
from .chain import Chain
from .layout import layout_named
from .layouts import marlin, triton_hopper

MAX_BYTES = 1 << 30
"""Recordings are small; a larger file is refused before it is read."""


class Unsupported(Exception):
    """The recording is of a kind that no layout here covers; the message says which."""


class Mismatch(Exception):
    """The recording and this project disagree; the message says where."""


@dataclass(frozen=True)
class Recording:
    """One file: the producing function, its parameters, and tensors without their ``in.``, ``out.``."""

    function: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def number(self, *names: str) -> int:
        """The integer parameter that goes by one of `names`; Mismatch when there is none."""
        for name in names:
            value = self.params.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        raise Mismatch(f"params have no whole number {' or '.join(names)}")

    def text(self, name: str) -> str:
        """The parameter `name` as text, empty when absent."""
        return str(self.params.get(name, ""))


def read_recording(path: Path) -> Recording:
    """The recording in `path`; Mismatch when the file or its metadata is damaged."""
    if path.stat().st_size > MAX_BYTES:
        raise Mismatch(f"{path.stat().st_size} bytes, more than the {MAX_BYTES} a recording may have")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise Mismatch(f"not a readable safetensors file: {error}") from error
    try:
        params = json.loads(metadata.get("params", ""))
    except ValueError as error:
        raise Mismatch("the metadata's params are not JSON") from error
    if not isinstance(params, dict) or "function" not in metadata:
        raise Mismatch("the metadata lacks a function or an object of params")
    parts: dict[str, dict[str, Tensor]] = {"in": {}, "out": {}}
    for name, tensor in tensors.items():
        side, dot, rest = name.partition(".")
        if not dot or side not in parts:
            raise Mismatch(f"tensor {name} is neither in.* nor out.*")
        parts[side][rest] = tensor
    if not parts["in"] or not parts["out"]:
        raise Mismatch("there are no in.* or no out.* tensors")
    return Recording(metadata["function"], params, parts["in"], parts["out"])


@dataclass(frozen=True)
class Deviation:
    """A recorded behaviour that is known to be wrong, and what this project does instead.

    `holds` recognises it by parameters; `role` is the output that differs; `recorded` is the chain
    that the engine ran for it, so that a recording only counts when it shows exactly that.
    """

    name: str
    why: str
    role: str
    holds: Callable[[Recording], bool]
    recorded: Callable[[MoEProblem, Chain], Chain]


def _engine_rule_differs(recording: Recording) -> bool:
    """True when ``group_size < intermediate`` and "more than one group" disagree for `w13`."""
    group, hidden = recording.params.get("group_size"), recording.params.get("hidden")
    inter = recording.params.get("intermediate")
    if not isinstance(group, int) or not isinstance(hidden, int) or not isinstance(inter, int) or group < 1:
        return False
    return (group < inter) != (hidden // group > 1)


def _other_scale_rule(problem: MoEProblem, chain: Chain) -> Chain:
    """`chain` with the scale permutation of the other case: one group for several, or the reverse."""
    several = groups(problem.scheme.weight, problem.dims.padded_hidden) > 1
    ours, theirs = (marlin.scale_steps(grouped) for grouped in (several, not several))
    assert chain.steps[-len(ours) :] == ours
    return Chain(chain.steps[: -len(ours)] + theirs)


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "marlin-scale-rule",
        "vLLM 0.33.0 chooses the order of w13's scales by group_size < intermediate, its kernel by more "
        "than one group; moectl follows the kernel",
        "w13_scale",
        _engine_rule_differs,
        _other_scale_rule,
    ),
)


@dataclass(frozen=True)
class Case:
    """What to compare: chains by role, the recording's names of the inputs, and known deviations."""

    problem: MoEProblem
    chains: Mapping[str, Chain]
    names: Mapping[str, str]
    labels: Mapping[str, str]
    deviations: tuple[Deviation, ...] = ()


GPT_OSS_NAMES = {
    "w13": "gate_up_proj_blocks",
    "w13_scale": "gate_up_proj_scales",
    "w13_bias": "gate_up_proj_bias",
    "w2": "down_proj_blocks",
    "w2_scale": "down_proj_scales",
    "w2_bias": "down_proj_bias",
}


def _case(
    recording: Recording,
    layout_name: str,
    weight: WeightFormat,
    rows: str,
    names: Mapping[str, str] | None = None,
) -> Case:
    """The whole layer that a recording converts, in one layout, with sizes and padding checked."""
    if recording.params.get("gated") is False:
        raise Unsupported("experts without a gate")
    layout = layout_named(layout_name)
    known = names if names and any(name in recording.inputs for name in names.values()) else {}
    hidden = _rows_of(recording, known.get("w2", "w2"), ("hidden", "hidden_padded"))
    inter = _rows_of(recording, known.get("w13", "w13"), ("intermediate", "intermediate_padded"), 2)
    dims = Dims(hidden, inter)
    bias = any(name.endswith("_bias") for name in recording.inputs)
    dtype = "fp16" if recording.text("dtype") == "torch.float16" else "bf16"
    experts = recording.number("E")
    problem = MoEProblem(dims, experts, 1, Scheme(weight), rows=rows, bias=bias, dtype=dtype)
    problem = replace(problem, dims=layout.align(weight).apply(dims))
    for ours, keys in (
        (problem.dims.padded_hidden, ("hidden_padded", "padded_hidden")),
        (problem.dims.padded_intermediate, ("intermediate_padded", "padded_intermediate")),
    ):
        recorded = [recording.params[key] for key in keys if key in recording.params]
        if recorded and recorded != [ours]:
            raise Mismatch(f"{keys[0]} is {recorded[0]}, {layout_name} pads to {ours}")
    roles = canonical_shapes(problem, experts)
    return Case(problem, layout.chains(problem), {r: known.get(r, r) for r in roles}, layout.logical_dtypes)


def _rows_of(recording: Recording, name: str, sizes: tuple[str, ...], matrices: int = 1) -> int:
    """Rows of each of the `matrices` stacked in input `name`, which one of the parameters `sizes` states.

    A recording may start from a tensor that was padded before.
    """
    if name not in recording.inputs or recording.inputs[name].ndim < 3:
        raise Mismatch(f"input {name} with rows and columns is missing")
    rows = recording.inputs[name].shape[1] // matrices
    if rows not in [recording.params.get(size) for size in sizes]:
        raise Mismatch(f"{name} has {rows} rows, params say {recording.params.get(sizes[0])}")
    return rows


def _sixteen_bit_activations(recording: Recording) -> None:
    if recording.text("act") not in ("", "None"):
        raise Unsupported(f"{recording.text('act')} activations")


def _marlin_int(recording: Recording) -> Case:
    _sixteen_bit_activations(recording)
    if recording.params.get("zp") or any("zero" in name for name in recording.inputs):
        raise Unsupported("zero points")
    bits, group = recording.number("bits"), recording.number("group_size")
    if bits not in (4, 8):
        raise Unsupported(f"{bits}-bit integers")
    scales = "F16" if recording.text("dtype") == "torch.float16" else "BF16"
    weight = int_format(bits, FULL if group == -1 else group, scales)
    case = _case(recording, f"marlin-int{bits}", weight, CONCATENATED)
    return replace(case, deviations=DEVIATIONS)


def _marlin_mxfp4(recording: Recording) -> Case:
    _sixteen_bit_activations(recording)
    return _case(recording, "marlin-mxfp4", MXFP4, _rows(recording, INTERLEAVED), GPT_OSS_NAMES)


def _rows(recording: Recording, default: str) -> str:
    """The order of `w13` rows that the parameters state, by its first word."""
    stated = re.match(r"[a-z]+", recording.text("w13_rows"))
    known = {"interleaved": INTERLEAVED, "concatenated": CONCATENATED, "concat": CONCATENATED}
    if stated is None:
        return default
    if stated[0] not in known:
        raise Unsupported(f"rows {recording.text('w13_rows')!r}")
    return known[stated[0]]


def _oracle_mxfp4(recording: Recording, rows: str) -> Case:
    backends = {
        "FLASHINFER_TRTLLM_MXFP4_BF16": "trtllm-mxfp4",
        "FLASHINFER_TRTLLM_MXFP4_MXFP8": "trtllm-mxfp4",
        "FLASHINFER_CUTLASS_MXFP4_BF16": "cutlass-sm90",
    }
    backend = recording.function.rpartition("(")[2].rstrip(")")
    if backend not in backends:
        raise Unsupported(f"backend {backend}")
    return _case(recording, backends[backend], MXFP4, _rows(recording, rows), GPT_OSS_NAMES)


def _trtllm_mxint4(recording: Recording) -> Case:
    return _case(recording, "trtllm-mxint4", int_format(4, recording.number("group")), CONCATENATED)


def _triton_kernels(recording: Recording) -> Case:
    """One matrix alone, as the package lays it out; `num_warps` decides the order of the scales."""
    if recording.number("arch") != 90:
        raise Unsupported(f"triton_kernels layouts for arch {recording.number('arch')}")
    experts, rows, columns = (recording.number(name) for name in ("E", "N", "K"))
    for name, shape in (("weight", (experts, rows, columns // 2)), ("scale", (experts, rows, columns // 32))):
        if name not in recording.inputs or tuple(recording.inputs[name].shape) != shape:
            raise Mismatch(f"input {name} of {list(shape)} is missing")
    chains = {
        "weight": Chain(triton_hopper.value_steps(rows, columns // 2)),
        "scale": Chain(triton_hopper.scale_steps(rows, columns // 32, recording.number("num_warps"))),
    }
    problem = MoEProblem(Dims(columns, rows), experts, 1, Scheme(MXFP4))
    return Case(problem, chains, {"weight": "weight", "scale": "scale"}, {})


OUTPUT_NAMES = {"weight": "value_storage", "scale": "scale_storage"}

FUNCTIONS: Mapping[str, Callable[[Recording], Case]] = {
    "int_wna16.py::_process_weights_marlin": _marlin_int,
    "marlin_utils_fp4.py::prepare_moe_mxfp4_layer_for_marlin": _marlin_mxfp4,
    "mxfp4.py::convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": lambda r: _oracle_mxfp4(r, INTERLEAVED),
    "mxfp4.py::convert_weight_to_mxfp4_moe_kernel_format": lambda r: _oracle_mxfp4(r, CONCATENATED),
    "flashinfer_mxint4_moe.py::prepare_static_weights_for_trtllm_mxint4_moe": _trtllm_mxint4,
    "mxfp4_utils.py::_swizzle_mxfp4": _triton_kernels,
}
"""Producing functions by file and name, as the metadata states them."""

_FUNCTION = re.compile(r"(\w+\.py::\w+)")


def case_of(recording: Recording) -> Case:
    """What to compare of `recording`; Unsupported when no layout here covers it."""
    known = _FUNCTION.search(recording.function)
    if known is None or known[1] not in FUNCTIONS:
        raise Unsupported(f"function {recording.function!r}")
    return FUNCTIONS[known[1]](recording)
