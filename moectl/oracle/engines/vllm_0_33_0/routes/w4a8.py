"""int4 weights with 8-bit activations: FP8 on GPUs, int8 on Arm CPUs."""

from dataclasses import replace

from .....problem.schemes import FULL
from ....backend import SupportQuery, only
from ....decision import Candidate
from ....format_keys import group32_key
from ....route import DECLARED_ACT, Condition, LateFailure, Order, Route
from ..backends import cpu, cutlass
from ..backends.humming import HUMMING
from .order import CPU

_TILE = 256


def _ragged(ask: SupportQuery, chosen: Candidate | None) -> bool:
    dims = chosen.dims if chosen else ask.problem.dims
    return bool(dims.padded_hidden % _TILE or dims.padded_intermediate % _TILE)


def _uneven(ask: SupportQuery) -> bool:
    dims, group = ask.problem.dims, ask.problem.scheme.weight.group
    return group != FULL and bool(dims.hidden % group or dims.intermediate % group)


_ZERO_POINTS = Condition(
    "zero points",
    lambda ask: ask.problem.scheme.weight.zero_point,
    lambda ask: f"the engine has no method for {ask.problem.scheme}",
    kind="RuntimeError",
)
_FP8 = Route(
    name="int4 weights with FP8 activations",
    method="CompressedTensorsW4A8Fp8MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"int4"}),
    acts=only("fp8 per token dynamic"),
    key=group32_key,
    act=DECLARED_ACT,
    orders=(Order((cutlass.CUTLASS_W4A8, HUMMING)),),
    names={"cutlass": (cutlass.CUTLASS_W4A8,), "humming": (HUMMING,)},
    minimum=70,
    refusals=(
        _ZERO_POINTS,
        Condition(
            "scale groups",
            lambda ask: ask.problem.scheme.weight.group != 128,
            lambda ask: f"the method supports only groups of 128; weights are {ask.problem.scheme.weight}",
            kind="AssertionError",
        ),
    ),
    late_failures=(
        LateFailure(
            "tiles",
            _ragged,
            lambda ask, chosen: (
                f"hidden {ask.problem.dims.hidden} and intermediate {ask.problem.dims.intermediate} per "
                f"rank must both be multiples of {_TILE}"
            ),
            kind="AssertionError",
            sized=True,
        ),
    ),
    fails_by_name="NotImplementedError",
    fails_unknown="ValueError",
)
_INT8 = replace(
    _FP8,
    name="int4 weights with int8 activations",
    method="CompressedTensorsW4A8Int8MoEMethod",
    acts=only("int8 per token dynamic"),
    # The kernels quantize activations themselves, so 16-bit ones are requested.
    act="own",
    orders=(Order((cpu.CPU_W4A8,), CPU),),
    names={"cpu": (cpu.CPU_W4A8,)},
    refusals=(
        _ZERO_POINTS,
        Condition(
            "scale groups",
            _uneven,
            lambda ask: f"{ask.problem.scheme.weight} does not divide the sizes of one rank evenly",
        ),
        Condition(
            "platform",
            lambda ask: ask.device.platform != "cpu",
            lambda ask: f"the method supports only CPUs; this device is {ask.device.arch}",
            kind="NotImplementedError",
        ),
    ),
    late_failures=(),
    fails_by_name="ValueError",
    fails_unknown="",
)

ROUTES = (_FP8, _INT8)
