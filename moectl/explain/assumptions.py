"""Assumptions that replace properties of a checkpoint's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..checkpoint.config.quantization_formats import MODELOPT_ALGORITHMS
from ..dtypes import MODEL_DTYPES
from ..errors import UsageError
from ..oracle.format_keys import act_key
from ..problem.moe_problem import Dims, MoEProblem
from ..problem.schemes import (
    A16,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_TENSOR,
    FULL,
    ActFormat,
    act_format,
    block_formats,
)
from ..whole_numbers import whole_number

ACTIVATIONS: Mapping[str, ActFormat] = {
    act_key(form): form
    for form in (
        A16,
        act_format("fp8", (FULL, FULL), dynamic=False),
        act_format("fp8", (FULL, FULL)),
        act_format("fp8", (1, FULL)),
        act_format("fp8", (1, 128)),
        act_format("int8", (1, FULL)),
        act_format("int8", (FULL, FULL)),
        *(act_format(number.name) for number in block_formats() if number.token_tolerance),
    )
}
"""Activation formats by key."""


def can_declare(problem: MoEProblem, act: str) -> bool:
    """True when checkpoints stored like that of `problem` can declare the activation format with key `act`.

    Weight-only storages (GPTQ, AWQ, gpt-oss) declare none; FP8 and ModelOpt, what their algorithms do.
    """
    scheme = problem.scheme
    if problem.storage == "compressed-tensors":
        return True
    if problem.storage == "quark":
        return act != "nvfp4"
    known = {scheme.act}
    if problem.storage == "modelopt":
        known |= {other.act for other in MODELOPT_ALGORITHMS.values() if other.weight == scheme.weight}
    if problem.storage == "fp8" and scheme.weight == FP8_TENSOR:
        known |= {FP8_ACT_TENSOR, FP8_ACT_TENSOR_STATIC}
    return act in {act_key(form) for form in known}


def _size(value: str, name: str) -> int:
    size = whole_number(value)
    if not size:
        raise UsageError(f"--assume {name} takes a positive number, got {value!r}")
    return size


def _flag(value: str, name: str) -> bool:
    if value.lower() not in ("yes", "no"):
        raise UsageError(f"--assume {name} takes yes or no, got {value!r}")
    return value.lower() == "yes"


def _one_of(value: str, name: str, choices: Mapping[str, object] | tuple[str, ...]) -> str:
    by_spelling = {choice.replace(" ", "-"): choice for choice in choices}
    choice = by_spelling.get(value.lower().replace(" ", "-"))
    if choice is None:
        raise UsageError(f"--assume {name} takes one of {', '.join(by_spelling)}, got {value!r}")
    return choice


def _hidden(problem: MoEProblem, value: str) -> MoEProblem:
    latent = problem.model_hidden != problem.dims.hidden
    size = _size(value, "hidden")
    return replace(
        problem,
        dims=Dims(size, problem.dims.intermediate),
        model_hidden=problem.model_hidden if latent else size,
    )


def _intermediate(problem: MoEProblem, value: str) -> MoEProblem:
    whole = replace(problem, dims=Dims(problem.dims.hidden, _size(value, "intermediate")))
    return replace(whole, parallel=type(problem.parallel)()).on(problem.parallel)


def _act(problem: MoEProblem, value: str) -> MoEProblem:
    return replace(
        problem, scheme=replace(problem.scheme, act=ACTIVATIONS[_one_of(value, "act", ACTIVATIONS)])
    )


def _token_scales(problem: MoEProblem, value: str) -> MoEProblem:
    act = problem.scheme.act
    rounded = _one_of(value, "token_scales", ("fp32", "ue8m0")) == "ue8m0"
    if rounded and not replace(act, scale_dtype="E8M0").rounds_scales:
        raise UsageError(
            f"--assume token_scales=ue8m0 needs FP8 tokens with dynamic scales, got {act} activations"
        )
    act = replace(act, scale_dtype="E8M0" if rounded else "")
    return replace(problem, scheme=replace(problem.scheme, act=act))


def _zero_points(problem: MoEProblem, value: str) -> MoEProblem:
    weight = replace(problem.scheme.weight, zero_point=_flag(value, "zero_points"))
    return replace(problem, scheme=replace(problem.scheme, weight=weight))


def _act_order(problem: MoEProblem, value: str) -> MoEProblem:
    order = _one_of(value, "act_order", ("none", "weight", "group"))
    return replace(problem, act_order="" if order == "none" else order)


def _dtype(problem: MoEProblem, value: str) -> MoEProblem:
    return replace(problem, dtype=_one_of(value, "dtype", MODEL_DTYPES))


def _lora(problem: MoEProblem, value: str) -> MoEProblem:
    return replace(problem, lora=_flag(value, "lora"))


ASSUMPTIONS: Mapping[str, Callable[[MoEProblem, str], MoEProblem]] = {
    "hidden": _hidden,
    "intermediate": _intermediate,
    "act": _act,
    "token_scales": _token_scales,
    "zero_points": _zero_points,
    "act_order": _act_order,
    "dtype": _dtype,
    "lora": _lora,
}
"""Setters by the name of the assumption; sizes are those of whole experts."""


def assume(problem: MoEProblem, assumptions: Mapping[str, str]) -> MoEProblem:
    """`problem` with `assumptions` applied. Raises UsageError for an invalid name or value.

    Example:
        >>> from moectl.problem.published_layers import model_problem
        >>> assume(model_problem("gpt-oss-20b"), {"intermediate": "3072"}).dims.intermediate
        3072
    """
    for name, value in assumptions.items():
        if name not in ASSUMPTIONS:
            raise UsageError(
                f"--assume does not support {name!r}", hint=f"choose one of {', '.join(ASSUMPTIONS)}"
            )
        problem = ASSUMPTIONS[name](problem, value)
    return problem
