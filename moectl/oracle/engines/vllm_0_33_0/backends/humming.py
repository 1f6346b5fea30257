"""Humming: generated GEMMs for many weight formats; the engine's first choice on Hopper."""

from collections.abc import Iterator

from .....problem.moe_problem import Align
from ....backend import (
    NO_ALIGN,
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    PackageNeed,
    SupportQuery,
    WeightForm,
    only,
    weighted_input,
)
from ....gpu_archs import sm
from .defaults import SHARED, mxfp4_forms

_SWITCH = "VLLM_HUMMING_MOE_GEMM_TYPE"


def gemm_type(ask: SupportQuery) -> str:
    """The GEMM that the engine asks for: by switch, else grouped with expert parallelism."""
    asked = ask.packages.env.get(_SWITCH, "auto").lower()
    if asked != "auto":
        return "grouped_contiguous" if asked == "grouped" else asked
    return "grouped_contiguous" if ask.problem.parallel.ep_size > 1 else "indexed"


def _gemm(kind: str) -> BackendRule:
    return BackendRule(
        question="GEMM type",
        group="parallel",
        code="gemm_type",
        holds=lambda ask: gemm_type(ask) == kind,
        wanted=gemm_type,
        offered=kind,
        switch=_SWITCH,
    )


_OFFERS = (
    FormatSupport(
        frozenset({"mxfp4 group 32"}),
        only("a16", "mxfp4", "mxfp8", "fp8 per token dynamic", "fp8 group 128 dynamic"),
    ),
    FormatSupport(frozenset({"nvfp4 group 16"}), only("a16", "fp8 per token dynamic", "nvfp4")),
    FormatSupport(frozenset({"mxfp8 group 32"}), only("a16", "fp8 per token dynamic", "mxfp8")),
    FormatSupport(
        frozenset({"fp8 per channel", "fp8 per tensor"}),
        only("a16", "fp8 per token dynamic", "fp8 per tensor static", "fp8 group 128 dynamic"),
    ),
    FormatSupport(
        frozenset({"fp8 block 128x128"}), only("a16", "fp8 per token dynamic", "fp8 group 128 dynamic")
    ),
    FormatSupport(frozenset({"int4 group", "int8 group"}), only("a16", "fp8 per token dynamic")),
    FormatSupport(
        frozenset({"int4 group 32", "int4 group 32 with zero points", "int8 per channel"}),
        only("a16", "fp8 per token dynamic", "int8 per token dynamic"),
    ),
)


def _capability(kind: str) -> Capability:
    return Capability(
        arch=(sm(75),),
        needs=(PackageNeed("humming"),),
        formats=_OFFERS,
        activations=SHARED,
        invariant=True,
        runtime_failures=(weighted_input("AssertionError"),),
        rules=(_gemm(kind),),
    )


_BEFORE_SM100, _FROM_SM100 = (sm(75, 99),), (sm(100),)


def _forms() -> Iterator[WeightForm]:
    """Layouts by weight format; those of floats differ from SM100 on."""
    for name in ("int4", "int8"):
        yield WeightForm(f"humming-{name}", weights=frozenset({name}))
    for name in ("mxfp4", "nvfp4", "fp8", "mxfp8"):
        align = Align(1, 64) if name == "mxfp4" else NO_ALIGN
        for where, suffix in ((_BEFORE_SM100, ""), (_FROM_SM100, "-sm100")):
            yield WeightForm(f"humming-{name}{suffix}", align, where, frozenset({name}))


HUMMING = Backend(
    name="humming",
    engine_name="HUMMING",
    variants=(
        ExpertsClass("BatchedHummingGroupedExperts", _capability("grouped_masked"), batched=True),
        ExpertsClass("HummingGroupedExperts", _capability("grouped_contiguous")),
        ExpertsClass("HummingIndexedExperts", _capability("indexed")),
    ),
    forms=(*_forms(), *mxfp4_forms("humming"), WeightForm("humming")),
)
