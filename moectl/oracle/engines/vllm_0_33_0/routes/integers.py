"""Integer weights: compressed-tensors, GPTQ, AWQ and Quark, with 16-bit or int8 activations."""

from dataclasses import replace

from .....problem.schemes import FULL
from ....backend import but, only
from ....format_keys import exact_key, group32_key, symmetric_group32_key, symmetric_group_key
from ....route import DECLARED_ACT, Assignment, Condition, Order, Route
from ..backends import cpu, emulation, flashinfer, flydsl, rdna3, triton, xpu
from ..backends.humming import HUMMING
from ..backends.marlin import BATCHED_MARLIN, MARLIN
from .order import CPU, HUMMING_FIRST, XPU
from .terms import (
    AWQ_HAS_4_BITS,
    AWQ_NEEDS_TURING,
    CHANNELS_WITH_MARLIN_ONLY,
    COUNTS_CHANNELS_AS_GROUPS,
    GPTQ_ZERO_POINTS,
    HALVES_GROUPS,
    MARLIN_REFUSES,
    REFUSES_ACT_ORDER,
    WHOLE_GROUPS,
)

_INTEGER_ORDERS = (
    Order((cpu.ZEN_INT4, cpu.CPU_INT4), CPU),
    Order((xpu.XPU_INT4,), XPU),
    Order(
        (
            rdna3.RDNA3,
            flashinfer.TRTLLM_INT4,
            MARLIN,
            BATCHED_MARLIN,
            triton.TRITON_INT,
            HUMMING,
            emulation.EMULATION_INT4,
        ),
    ),
)
_COMPRESSED_INT = Route(
    name="int4 and int8 weights of compressed-tensors",
    method="CompressedTensorsWNA16MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"int4", "int8"}),
    acts=only("a16"),
    key=group32_key,
    may_have_bias=False,
    pads_tiles=True,
    orders=_INTEGER_ORDERS,
    moves=(HUMMING_FIRST,),
    names={
        "triton": (triton.TRITON_INT,),
        "marlin": (MARLIN,),
        "humming": (HUMMING,),
        "flashinfer_trtllm": (flashinfer.TRTLLM_INT4,),
        "emulation": (emulation.EMULATION_INT4,),
        "rdna3": (rdna3.RDNA3,),
    },
    minimum=70,
    refusals=(REFUSES_ACT_ORDER,),
    late_failures=(CHANNELS_WITH_MARLIN_ONLY, WHOLE_GROUPS),
)
_FLYDSL = replace(
    _COMPRESSED_INT,
    name="int4 weights of compressed-tensors, FlyDSL asked for",
    method="CompressedTensorsW4A16FlydslMoEMethod",
    weights=frozenset({"int4"}),
    when=Condition(
        "FlyDSL",
        lambda ask: (
            ask.request == "flydsl"
            and ask.device.arch == "gfx950"
            and ask.problem.scheme.weight.group == 32
            and not ask.problem.lora
        ),
        lambda ask: "FlyDSL is asked for, for groups of 32 on gfx950",
    ),
    orders=(),
    moves=(),
    names={"flydsl": (flydsl.FLYDSL,)},
    assigned=(Assignment(flydsl.FLYDSL, flydsl.FLYDSL.variants[0], flydsl.FLYDSL.engine_name),),
    refusals=(
        REFUSES_ACT_ORDER,
        Condition(
            "zero points",
            lambda ask: ask.zero_points,
            lambda ask: "FlyDSL supports only symmetric weights",
            kind="AssertionError",
        ),
    ),
    late_failures=(),
)
_GPTQ = replace(
    _COMPRESSED_INT,
    name="GPTQ",
    method="AutoGPTQMoEMethod",
    storages=only("gptq"),
    key=symmetric_group_key,
    may_have_bias=True,
    minimum=60,
    refusals=(REFUSES_ACT_ORDER, GPTQ_ZERO_POINTS),
    late_failures=(),
)
_AWQ = replace(
    _GPTQ,
    name="AWQ",
    method="AutoAWQMoEMethod",
    storages=only("awq"),
    minimum=75,
    refusals=(AWQ_HAS_4_BITS,),
)
_MOE_WNA16 = replace(
    _COMPRESSED_INT,
    name="GPTQ and AWQ with sizes that Marlin does not support",
    method="MoeWNA16Method",
    storages=only("gptq", "awq"),
    when=MARLIN_REFUSES,
    key=symmetric_group32_key,
    may_have_bias=False,
    pads_tiles=False,
    checkpoint="moe_wna16",
    minimum=60,
    refusals=(REFUSES_ACT_ORDER, GPTQ_ZERO_POINTS, AWQ_HAS_4_BITS, AWQ_NEEDS_TURING),
    late_failures=(COUNTS_CHANNELS_AS_GROUPS, HALVES_GROUPS),
    replaces=(_GPTQ.name, _AWQ.name),
)
_QUARK_INT4 = replace(
    _COMPRESSED_INT,
    name="int4 weights of Quark",
    method="QuarkW4A16Int4MoEMethod",
    storages=only("quark"),
    weights=frozenset({"int4"}),
    checkpoint="quark_int4",
    pads_tiles=False,
    platforms=but("xpu"),
    refusals=(),
    late_failures=(COUNTS_CHANNELS_AS_GROUPS, HALVES_GROUPS),
)
_INT8_PER_CHANNEL = Condition(
    "scales",
    lambda ask: ask.problem.scheme.weight.block != (1, FULL),
    lambda ask: f"the method supports only per-channel scales; weights are {ask.problem.scheme.weight}",
)
_INT8 = Route(
    name="int8 weights and activations",
    method="CompressedTensorsW8A8Int8MoEMethod",
    storages=only("compressed-tensors"),
    weights=frozenset({"int8"}),
    acts=only("int8 per token dynamic"),
    key=exact_key,
    act=DECLARED_ACT,
    orders=(Order((triton.TRITON_PLAIN, HUMMING, cpu.CPU_INT8)),),
    names={"triton": (triton.TRITON_PLAIN,), "humming": (HUMMING,)},
    minimum=70,
    refusals=(REFUSES_ACT_ORDER, _INT8_PER_CHANNEL),
)
_QUARK_INT8 = replace(
    _INT8,
    name="int8 weights and activations of Quark",
    method="QuarkW8A8Int8MoEMethod",
    storages=only("quark"),
    platforms=but("xpu"),
    refusals=(),
)

ROUTES = (_FLYDSL, _COMPRESSED_INT, _MOE_WNA16, _GPTQ, _AWQ, _QUARK_INT4, _INT8, _QUARK_INT8)
