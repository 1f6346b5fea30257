"""Which canonical role each input of a recorded conversion has, and how stored tensors are named there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moectl.convert.canonical import canonical_shapes, scale_dtype
from moectl.convert.layouts.weight_layout import WeightLayout
from moectl.convert.recipe.chain import Chain
from moectl.convert.sources import packings
from moectl.convert.steps.transforms import Step, dtype_name
from moectl.dtypes import CONFIG_DTYPES
from moectl.errors import CheckpointError
from moectl.problem.moe_problem import Activation, Dims, MoEProblem
from moectl.problem.schemes import A16, Scheme, WeightFormat, act_format

from .recordings import Mismatch, Recording, Unsupported

Inputs = Mapping[str, tuple[str, tuple[Step, ...]]]
"""The canonical role of each input, by name, and the steps that bring it into canonical form."""

_MATRICES = ("w13", "w2")


def _both(kinds: Mapping[str, tuple[str, tuple[Step, ...]]]) -> dict[str, tuple[str, tuple[Step, ...]]]:
    """`kinds` of both matrices: a suffix of the input's name, then the suffix of the role."""
    return {
        f"{matrix}{suffix}": (f"{matrix}{kind}", steps)
        for matrix in _MATRICES
        for suffix, (kind, steps) in kinds.items()
    }


PLAIN: Inputs = _both({"": ("", ()), "_scale": ("_scale", ()), "_bias": ("_bias", ())})
FP8: Inputs = {**PLAIN, **_both({"_input_scale": ("_input", ())})}
NUMBERS: Inputs = {
    **PLAIN,
    **_both({"_scale_2": ("_global", ())}),
    "a13_scale": ("w13_input", ()),
    "a2_scale": ("w2_input", ()),
}
GPT_OSS: Inputs = {
    f"{name}_{suffix}": (role + kind, ())
    for name, role in (("gate_up_proj", "w13"), ("down_proj", "w2"))
    for suffix, kind in (("blocks", ""), ("scales", "_scale"), ("bias", "_bias"))
}
OUTPUTS: Mapping[str, str] = {
    **{f"{matrix}_zero": f"{matrix}_qzeros" for matrix in _MATRICES},
    **{f"{matrix}_global": f"{matrix}_scale_2" for matrix in _MATRICES},
    **{f"{matrix}_input_global": f"{matrix}_input_global_scale" for matrix in _MATRICES},
    "w13_input": "a13_scale",
    "w2_input": "a2_scale",
}
"""Recorded names of stored tensors, where they differ."""


def integers(bits: int) -> Inputs:
    """Weights packed into words along K, zero points along N, as in compressed-tensors."""
    return {**PLAIN, **_both({"_qzeros": ("_zero", packings.zeros_along_n(bits))})}


AWQ: Inputs = {
    **PLAIN,
    **_both(
        {
            "": ("", packings.awq_weights()),
            "_scale": ("_scale", packings.TRANSPOSED),
            "_qzeros": ("_zero", packings.awq_zeros()),
        }
    ),
}

_BYTES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)


def canonical_of(recording: Recording, inputs: Inputs) -> dict[str, Tensor]:
    """The inputs of `recording` by canonical role; Mismatch when one is not among `inputs`."""
    unknown = sorted(set(recording.inputs) - set(inputs))
    if unknown:
        raise Mismatch(f"tensors that are not compared: {', '.join(unknown)}")
    canonical: dict[str, Tensor] = {}
    for name, (role, steps) in inputs.items():
        t = recording.inputs.get(name)
        if t is None:
            continue
        if t.dtype in _BYTES:
            t = t.view(torch.uint8)
        if t.dtype is torch.int32 and not steps:
            steps = packings.WORDS_ALONG_K
        try:
            canonical[role] = (
                Chain(steps).apply(t.flatten(2) if t.ndim == 4 else t) if steps or t.ndim == 4 else t
            )
        except CheckpointError as error:
            raise Mismatch(f"input {name}: {error}") from error
    return canonical


def _per_half(t: Tensor, experts: int, halves: int, largest: bool = False) -> Tensor:
    """Numbers per expert, or per half of each expert, as ``[e, halves, 1]``.

    With `largest`, two numbers recorded for one expert give their maximum, as in the engine.
    """
    if largest and halves == 1 and t.numel() == 2 * experts:
        t = t.reshape(experts, 2).amax(1)
    if t.numel() not in (experts, halves * experts):
        raise Mismatch(f"{list(t.shape)} does not have a number for each of {experts} experts")
    return t.reshape(experts, -1, 1).expand(-1, halves, -1).contiguous()


def layer(
    recording: Recording, layout: WeightLayout, weight: WeightFormat, rows: str, inputs: Inputs
) -> tuple[MoEProblem, dict[str, Tensor]]:
    """The problem of a recording, with `layout`'s padding, and its canonical tensors."""
    tensors = canonical_of(recording, inputs)
    experts, gated = recording.number("E"), recording.flag("gated", True)
    hidden = _rows_of(recording, tensors, "w2", ("hidden", "hidden_padded", "padded_hidden"))
    inter = _rows_of(
        recording,
        tensors,
        "w13",
        ("intermediate", "intermediate_padded", "padded_intermediate"),
        2 if gated else 1,
    )
    scale = tensors.get("w13_scale")
    if scale is not None and scale.is_floating_point():
        weight = replace(weight, scale_dtype=dtype_name(scale.dtype))
    problem = MoEProblem(
        Dims(hidden, inter),
        experts,
        1,
        Scheme(weight, act_format(weight.name) if weight.number.global_scale else A16),
        Activation("silu") if gated else Activation("relu2", gated=False),
        rows=rows,
        bias=any(role.endswith("_bias") for role in tensors),
        dtype=_dtype(recording, tensors),
    )
    problem = layout.pad(problem)
    _check_padding(recording, problem, layout.name)
    return problem, _shaped(problem, tensors)


def _dtype(recording: Recording, tensors: Mapping[str, Tensor]) -> str:
    """The model's dtype: as the parameters state it, else that of biases, else bf16."""
    stated = recording.text("dtype")
    if stated and stated not in CONFIG_DTYPES:
        raise Unsupported(f"models of dtype {stated}")
    halves = any(t.dtype is torch.float16 for role, t in tensors.items() if role.endswith("_bias"))
    return CONFIG_DTYPES[stated] if stated else "fp16" if halves else "bf16"


def _rows_of(
    recording: Recording, tensors: Mapping[str, Tensor], role: str, sizes: tuple[str, ...], halves: int = 1
) -> int:
    """Rows of each of the `halves` of `role`, or of its scales, as one of the parameters `sizes` states.

    A recording may start from a tensor that is already padded.
    """
    t = tensors.get(role, tensors.get(f"{role}_scale"))
    if t is None or t.ndim < 3:
        raise Mismatch(f"input {role} with rows and columns is missing")
    rows = t.shape[1] // halves
    if rows not in [recording.params.get(size) for size in sizes]:
        raise Mismatch(f"{role} has {rows} rows, params say {recording.params.get(sizes[0])}")
    return rows


def _check_padding(recording: Recording, problem: MoEProblem, layout: str) -> None:
    for ours, name in (
        (problem.dims.padded_hidden, "hidden"),
        (problem.dims.padded_intermediate, "intermediate"),
    ):
        for key in (f"{name}_padded", f"padded_{name}"):
            recorded = recording.params.get(key, ours)
            if recorded != ours:
                raise Mismatch(f"{key} is {recorded}, {layout} pads to {ours}")


def _shaped(problem: MoEProblem, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` in their canonical shapes; Mismatch when one is missing or has another shape."""
    with_inputs = any(role.endswith("_input") for role in tensors)
    shapes = canonical_shapes(problem, problem.experts, with_inputs)
    only_scales = set(tensors) == {"w13_scale", "w2_scale"}
    absent = sorted(set(shapes) - set(tensors))
    if absent and not only_scales:
        raise Mismatch(f"inputs missing: {', '.join(absent)}")
    shaped: dict[str, Tensor] = {}
    for role, t in tensors.items():
        dtype, shape = shapes[role]
        if len(shape) == 3 and shape[2] == 1 and t.ndim < 3 and shape[1] <= 2:
            t = _per_half(t, shape[0], shape[1], largest=role == "w13_input")
        elif t.ndim == 2 and len(shape) == 3 and shape[2] == 1:
            t = t.unsqueeze(2)
        if tuple(t.shape) != shape or dtype_name(t.dtype) != dtype:
            raise Mismatch(
                f"{role}: the input is {dtype_name(t.dtype)} {list(t.shape)}, {dtype} {list(shape)} expected"
            )
        shaped[role] = t
    assert scale_dtype(problem)
    return shaped
