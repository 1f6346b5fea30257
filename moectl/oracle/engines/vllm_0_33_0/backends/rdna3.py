"""A HIP kernel for symmetric int4 weights on gfx1100."""

from ....archs import gfx
from ....backend import Ask, Backend, Capability, Form, Offer, Rule, Variant, only
from .defaults import NO_NVLINK_EXCHANGE, SHARED


def _grouped(ask: Ask) -> bool:
    return ask.problem.scheme.weight.group > 0


RDNA3 = Backend(
    name="rdna3",
    engine_name="RDNA3",
    variants=(
        Variant(
            "Rdna3WNA16Experts",
            Capability(
                arch=(gfx("gfx1100"),),
                offers=(Offer(frozenset({"int4 group", "int4 group 32"})),),
                activations=SHARED,
                spread=NO_NVLINK_EXCHANGE,
                checkpoints=only("compressed-tensors"),
                act_order=False,
                zero_points=False,
                bias=False,
                rules=(
                    Rule(
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
    forms=(Form("rdna3-int4"),),
)
