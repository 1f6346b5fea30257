"""NVFP4 of ModelOpt, compressed-tensors and Quark, with NVFP4 or 16-bit activations."""

from dataclasses import replace

from ....backend import but, only
from ....route import DECLARED_ACT, Exclusion, Order, Route
from ..backends import b12x, nvfp4
from ..backends.humming import HUMMING
from ..backends.marlin import MARLIN
from ..backends.moe_ep import MOE_EP_CUTEDSL
from .order import HUMMING_FIRST
from .terms import ROUTES_AS_DEEPSEEK_V4, refuses

_MODELOPT = Route(
    name="NVFP4 of ModelOpt",
    method="ModelOptNvFp4FusedMoE",
    storages=only("modelopt"),
    weights=frozenset({"nvfp4"}),
    acts=only("nvfp4", "a16"),
    act=DECLARED_ACT,
    orders=(
        Order(
            (
                nvfp4.TRTLLM_NVFP4,
                nvfp4.CUTEDSL,
                nvfp4.CUTEDSL_BATCHED,
                nvfp4.FLASHINFER_CUTLASS_NVFP4,
                nvfp4.CUTLASS_NVFP4,
                MARLIN,
                HUMMING,
                nvfp4.EMULATION_NVFP4,
            )
        ),
    ),
    moves=(HUMMING_FIRST,),
    on_request=(b12x.B12X_NVFP4, nvfp4.FLASHINFER_B12X, MOE_EP_CUTEDSL),
    names={
        "b12x": (b12x.B12X_NVFP4,),
        "cutlass": (nvfp4.CUTLASS_NVFP4,),
        "flashinfer_trtllm": (nvfp4.TRTLLM_NVFP4,),
        "flashinfer_cutlass": (nvfp4.FLASHINFER_CUTLASS_NVFP4,),
        "flashinfer_cutedsl": (nvfp4.CUTEDSL,),
        "flashinfer_moe_ep_cutedsl": (MOE_EP_CUTEDSL,),
        "flashinfer_b12x": (nvfp4.FLASHINFER_B12X,),
        "marlin": (MARLIN,),
        "humming": (HUMMING,),
        "emulation": (nvfp4.EMULATION_NVFP4,),
    },
    exclusions=(
        Exclusion(
            (nvfp4.CUTEDSL_BATCHED, nvfp4.FLASHINFER_B12X),
            "only for activations without a clamp",
            lambda ask: ask.clamped,
            by_name=True,
        ),
    ),
    batched_twins=((nvfp4.CUTEDSL, nvfp4.CUTEDSL_BATCHED),),
    platforms=but("xpu"),
    minimum=75,
    dtypes=only("bf16", "fp16"),
)
_COMPRESSED = replace(
    _MODELOPT,
    name="NVFP4 of compressed-tensors",
    method="CompressedTensorsW4A4Nvfp4MoEMethod",
    storages=only("compressed-tensors"),
    platforms=but(),
    minimum=70,
)
_COMPRESSED_OTHERS = replace(
    _COMPRESSED,
    name="NVFP4 of compressed-tensors with other activations",
    acts=but(),
    refusals=(
        refuses(
            "activation format",
            "compressed-tensors' NVFP4 experts support NVFP4 or 16-bit activations; "
            "quantize the checkpoint with one of these",
            "ValueError",
        ),
    ),
)
_QUARK = replace(
    _MODELOPT,
    name="NVFP4 of Quark",
    method="QuarkNvfp4MoEMethod",
    storages=only("quark"),
    acts=only("nvfp4"),
    minimum=70,
)
_QUARK_OTHERS = replace(
    _QUARK,
    name="NVFP4 of Quark with other activations",
    acts=but(),
    refusals=(
        refuses(
            "activation format",
            "Quark's NVFP4 experts support only NVFP4 activations; export the checkpoint with these",
            "RuntimeError",
        ),
    ),
)
_DEEPSEEK_V4 = replace(
    _MODELOPT,
    name="NVFP4 experts of DeepSeek-V4",
    when=ROUTES_AS_DEEPSEEK_V4,
    # The quantization config is that of the surrounding FP8 layers.
    platforms=but(),
)

ROUTES = (_DEEPSEEK_V4, _MODELOPT, _COMPRESSED, _COMPRESSED_OTHERS, _QUARK, _QUARK_OTHERS)
