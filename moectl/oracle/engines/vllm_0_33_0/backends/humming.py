"""Humming: generated GEMMs for many weight formats; the engine's first choice on Hopper."""

from ....archs import sm
from ....backend import Ask, Backend, Capability, Form, Need, Offer, Rule, Variant, only, weighted_input
from .defaults import SHARED, mxfp4_forms

_SWITCH = "VLLM_HUMMING_MOE_GEMM_TYPE"


def gemm_type(ask: Ask) -> str:
    """The GEMM that the engine asks for: by switch, else grouped with expert parallelism."""
    asked = ask.packages.env.get(_SWITCH, "auto").lower()
    if asked != "auto":
        return "grouped_contiguous" if asked == "grouped" else asked
    return "grouped_contiguous" if ask.problem.parallel.ep else "indexed"


def _gemm(kind: str) -> Rule:
    return Rule(
        question="GEMM type",
        group="parallel",
        code="gemm_type",
        holds=lambda ask: gemm_type(ask) == kind,
        wanted=gemm_type,
        offered=kind,
        switch=_SWITCH,
    )


_OFFERS = (
    Offer(
        frozenset({"mxfp4 group 32"}),
        only("a16", "mxfp4", "mxfp8", "fp8 per token dynamic", "fp8 group 128 dynamic"),
    ),
    Offer(frozenset({"nvfp4 group 16"}), only("a16", "fp8 per token dynamic", "nvfp4")),
    Offer(frozenset({"mxfp8 group 32"}), only("a16", "fp8 per token dynamic", "mxfp8")),
    Offer(
        frozenset({"fp8 per channel", "fp8 per tensor"}),
        only("a16", "fp8 per token dynamic", "fp8 per tensor static", "fp8 group 128 dynamic"),
    ),
    Offer(frozenset({"fp8 block 128x128"}), only("a16", "fp8 per token dynamic", "fp8 group 128 dynamic")),
    Offer(frozenset({"int4 group", "int8 group"}), only("a16", "fp8 per token dynamic")),
    Offer(
        frozenset({"int4 group 32", "int4 group 32 with zero points", "int8 per channel"}),
        only("a16", "fp8 per token dynamic", "int8 per token dynamic"),
    ),
)


def _capability(kind: str) -> Capability:
    return Capability(
        arch=(sm(75),),
        needs=(Need("humming"),),
        offers=_OFFERS,
        activations=SHARED,
        invariant=True,
        stops=(weighted_input("AssertionError"),),
        rules=(_gemm(kind),),
    )


HUMMING = Backend(
    name="humming",
    engine_name="HUMMING",
    variants=(
        Variant("BatchedHummingGroupedExperts", _capability("grouped_masked"), batched=True),
        Variant("HummingGroupedExperts", _capability("grouped_contiguous")),
        Variant("HummingIndexedExperts", _capability("indexed")),
    ),
    forms=(*mxfp4_forms("humming"), Form("humming")),
)
