"""A HIP kernel for symmetric int4 weights on gfx1100."""

from ....backend import (
    Backend,
    BackendRule,
    Capability,
    ExpertsClass,
    FormatSupport,
    SupportQuery,
    WeightForm,
    only,
)
from ....gpu_archs import gfx
from .defaults import NO_NVLINK_EXCHANGE, SHARED


def _grouped(ask: SupportQuery) -> bool:
    return ask.problem.scheme.weight.group > 0


RDNA3 = Backend(
    name="rdna3",
    engine_name="RDNA3",
    variants=(
        ExpertsClass(
            "Rdna3WNA16Experts",
            Capability(
                arch=(gfx("gfx1100"),),
                formats=(FormatSupport(frozenset({"int4 group", "int4 group 32"})),),
                activations=SHARED,
                parallel=NO_NVLINK_EXCHANGE,
                checkpoints=only("compressed-tensors"),
                act_order=False,
                zero_points=False,
                bias=False,
                rules=(
                    BackendRule(
                        question="scale groups",
                        group="shape",
                        code="layout",
                        holds=_grouped,
                        wanted=lambda ask: str(ask.problem.scheme.weight),
                        offered="one scale per group",
                    ),
                ),
                codes={"zero points": "layout"},
            ),
        ),
    ),
    forms=(WeightForm("rdna3-int4"),),
)
