"""vLLM's Marlin MoE kernels as moectl calls them: the library file alone, without the engine."""

from functools import partial
from itertools import product

from ...environment.peers import PREFIX
from ...environment.probes import MARLIN_LIBRARY
from ...padding import padding, size_rule
from ...schemes import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, FULL, MXFP4, MXFP8, NVFP4, int_format
from ..archs import SM90, sm
from ..backend import NAIVE, Ask, Backend, Capability, Choice, Form, Need, Offer, Rule, Variant
from ..keys import exact_key
from .native import GATE
from .peer_rules import MODEL_DTYPE

_LAYOUTS = {name: f"marlin-{name}" for name in ("int4", "int8", "mxfp4", "nvfp4", "mxfp8", "fp8")}
_GROUPS = (32, 64, 128, FULL)
_INT4 = (int_format(4, group, zero_point=zero) for group, zero in product(_GROUPS, (False, True)))
_INT8 = (int_format(8, group) for group in _GROUPS)
_FLOATS = (NVFP4, MXFP8, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK)
"""Computed with 16-bit activations, whatever the checkpoint declares."""


def _sizes(ask: Ask) -> bool:
    """True when the layout can hold the hidden size, which is rounded up for MXFP4 alone."""
    problem = ask.problem
    weight, gated, hidden = problem.scheme.weight, problem.activation.gated, problem.dims.hidden
    name = _LAYOUTS.get(weight.name)
    return name is None or hidden % size_rule(name, weight, gated, hidden).needs.hidden == 0


def _scales(ask: Ask) -> bool:
    """True when scales of integers are of the model's dtype; those of other formats are made anew."""
    weight = ask.problem.scheme.weight
    model = {"bf16": "BF16", "fp16": "F16"}.get(ask.problem.dtype)
    return not weight.name.startswith("int") or weight.scale_dtype in ("", model)


def _weight_on_input(ask: Ask) -> bool:
    return not (ask.problem.routing.weight_on_input and ask.problem.bias)


PEER_MARLIN = Backend(
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
                        vllm_code="other",
                        holds=_sizes,
                        wanted=lambda ask: f"{ask.problem.dims.hidden}, {ask.problem.scheme.weight}",
                        offered="a multiple of 128 (integers) or 64 and of the scales' group; any for MXFP4",
                    ),
                    MODEL_DTYPE,
                    Rule(
                        question="scale dtype by weights",
                        group="scheme",
                        vllm_code="other",
                        holds=_scales,
                        wanted=lambda ask: (
                            f"{ask.problem.scheme.weight.scale_dtype}, {ask.problem.dtype} model"
                        ),
                        offered="the model's dtype for integers",
                    ),
                    Rule(
                        question="router's weight on the input",
                        group="scheme",
                        vllm_code="other",
                        holds=_weight_on_input,
                        wanted=lambda ask: "with a bias",
                        offered="without a bias",
                    ),
                ),
            ),
        ),
    ),
    forms=tuple(
        Form(layout, partial(padding, layout), weights=frozenset({name})) for name, layout in _LAYOUTS.items()
    ),
    runner="marlin",
    verified=(SM90,),
    note="vLLM's Marlin GEMM, from the engine's library file; its kernels are compiled when they are first "
    "called, which takes minutes where the library has none for the GPU.",
)
