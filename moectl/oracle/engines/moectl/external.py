"""Libraries of others that moectl calls: Humming, vLLM's Marlin without the engine, triton_kernels."""

from functools import partial
from itertools import product

from ....capabilities.kernel_packages import MARLIN_LIBRARY
from ....capabilities.unpacked import PREFIX
from ....padding import padding, size_rule
from ....schemes import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, FULL, MXFP4, MXFP8, NVFP4, int_format
from ...archs import SM90, sm
from ...backend import Ask, Backend, Capability, Choice, Form, Need, Offer, Rule, Variant, only
from ...keys import exact_key
from .own import GATE, INTEGERS, NAIVE


def _dtype(ask: Ask) -> bool:
    return ask.dtype == "bf16" or (ask.dtype == "fp16" and ask.problem.scheme.weight.name.startswith("int"))


MODEL_DTYPE = Rule(
    question="model dtype by weights",
    group="scheme",
    code="other",
    holds=_dtype,
    wanted=lambda ask: f"{ask.dtype}, {ask.problem.scheme.weight}",
    offered="bf16, and fp16 for integers",
)
WEIGHT_AT_THE_END = Rule(
    question="router's weight",
    group="scheme",
    code="other",
    holds=lambda ask: not ask.problem.routing.weight_on_input,
    wanted=lambda ask: "on the input" if ask.problem.routing.weight_on_input else "at the end",
    offered="at the end",
)


def _whole_words(ask: Ask) -> bool:
    dims = ask.problem.dims
    return dims.hidden % 32 == 0 and dims.intermediate % 32 == 0


HUMMING = Backend(
    name="humming",
    engine_name="humming",
    variants=(
        Variant(
            "indexed",
            Capability(
                arch=(sm(80),),
                needs=(Need("humming", "forward.humming_forward", instead=(f"{PREFIX}humming",)),),
                offers=(Offer(frozenset(map(exact_key, (MXFP4, *INTEGERS)))),),
                spread=NAIVE,
                act_order=False,
                scales=only("E8M0", "BF16", "F16"),
                rules=(
                    GATE,
                    Rule(
                        question="sizes",
                        group="shape",
                        code="other",
                        holds=_whole_words,
                        wanted=lambda ask: f"{ask.problem.dims.hidden} and {ask.problem.dims.intermediate}",
                        offered="multiples of 32",
                    ),
                    MODEL_DTYPE,
                    WEIGHT_AT_THE_END,
                ),
            ),
        ),
    ),
    runner="humming",
    verified=(SM90,),
    note="Humming's indexed GEMMs: weights are laid out by its own transformation when a layer is prepared, "
    "and kernels are compiled when a number of tokens first asks for them.",
)

_MARLIN_LAYOUTS = {name: f"marlin-{name}" for name in ("int4", "int8", "mxfp4", "nvfp4", "mxfp8", "fp8")}
_GROUPS = (32, 64, 128, FULL)
_INT4 = (int_format(4, group, zero_point=zero) for group, zero in product(_GROUPS, (False, True)))
_INT8 = (int_format(8, group) for group in _GROUPS)
_FLOATS = (NVFP4, MXFP8, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK)
"""Computed with 16-bit activations, whatever the checkpoint declares."""


def _marlin_sizes(ask: Ask) -> bool:
    """True when the layout can hold the hidden size, which is rounded up for MXFP4 alone."""
    problem = ask.problem
    weight, gated, hidden = problem.scheme.weight, problem.activation.gated, problem.dims.hidden
    name = _MARLIN_LAYOUTS.get(weight.name)
    return name is None or hidden % size_rule(name, weight, gated, hidden).needs.hidden == 0


def _marlin_scales(ask: Ask) -> bool:
    """True when scales of integers are of the model's dtype; those of other formats are made anew."""
    weight = ask.problem.scheme.weight
    model = {"bf16": "BF16", "fp16": "F16"}.get(ask.problem.dtype)
    return not weight.name.startswith("int") or weight.scale_dtype in ("", model)


def _without_bias(ask: Ask) -> bool:
    return not (ask.problem.routing.weight_on_input and ask.problem.bias)


MARLIN = Backend(
    name="marlin",
    engine_name="marlin",
    variants=(
        Variant(
            "moe_wna16_marlin_gemm",
            Capability(
                arch=(sm(80),),
                needs=(Need("vllm", MARLIN_LIBRARY, instead=(f"{PREFIX}vllm",)),),
                offers=(
                    Offer(frozenset(map(exact_key, (MXFP4, *_INT4, *_INT8)))),
                    Offer(frozenset(map(exact_key, _FLOATS)), Choice()),
                ),
                spread=NAIVE,
                act_order=False,
                rules=(
                    GATE,
                    Rule(
                        question="hidden size",
                        group="shape",
                        code="other",
                        holds=_marlin_sizes,
                        wanted=lambda ask: f"{ask.problem.dims.hidden}, {ask.problem.scheme.weight}",
                        offered="a multiple of 128 (integers) or 64 and of the scales' group; any for MXFP4",
                    ),
                    MODEL_DTYPE,
                    Rule(
                        question="scale dtype by weights",
                        group="scheme",
                        code="other",
                        holds=_marlin_scales,
                        wanted=lambda ask: (
                            f"{ask.problem.scheme.weight.scale_dtype}, {ask.problem.dtype} model"
                        ),
                        offered="the model's dtype for integers",
                    ),
                    Rule(
                        question="router's weight on the input",
                        group="scheme",
                        code="other",
                        holds=_without_bias,
                        wanted=lambda ask: "with a bias",
                        offered="without a bias",
                    ),
                ),
            ),
        ),
    ),
    forms=tuple(
        Form(layout, partial(padding, layout), weights=frozenset({name}))
        for name, layout in _MARLIN_LAYOUTS.items()
    ),
    runner="marlin",
    verified=(SM90,),
    note="vLLM's Marlin GEMM, from the engine's library file; its kernels are compiled when they are first "
    "called, which takes minutes where the library has none for the GPU.",
)

_HOPPER = "triton-hopper"

TRITON_KERNELS = Backend(
    name="triton_kernels",
    engine_name="triton_kernels",
    variants=(
        Variant(
            "matmul_ogs",
            Capability(
                arch=(SM90,),
                needs=(
                    Need("triton_kernels", "routing.compute_expt_data", instead=(f"{PREFIX}triton_kernels",)),
                ),
                offers=(Offer(frozenset({exact_key(MXFP4)})),),
                ungated=False,
                spread=NAIVE,
                act_order=False,
                dtypes=only("bf16"),
                rules=(
                    GATE,
                    WEIGHT_AT_THE_END,
                ),
            ),
        ),
    ),
    forms=(Form(_HOPPER, partial(padding, _HOPPER)),),
    runner="triton_kernels",
    verified=(SM90,),
    note="The copy that vLLM carries; that of Triton's repository where it has the same functions.",
)
