"""vLLM 0.24.0 for unquantized experts, as its difference from 0.26.0."""

from ...backend import NONE, only
from ...release import ClassChange, Difference, RouteChange
from ...route import Assignment
from .v0_26_0 import VLLM_0_26_0

UNQUANTIZED = "unquantized experts"
ADAPTERS, ON_CPU = f"{UNQUANTIZED} with adapters", f"{UNQUANTIZED} on CPUs"
PLAIN = next(route for route in VLLM_0_26_0.policy.routes if route.name == UNQUANTIZED)
BACKENDS = {backend.engine_name: backend for backend in PLAIN.backends()}

DIFFERENCE = Difference(
    version="0.24.0",
    only=frozenset({UNQUANTIZED, ADAPTERS, ON_CPU}),
    without=frozenset({"TrtLlmBf16ExpertsModular", "TrtLlmBf16LoRAExperts"}),
    classes=(
        ClassChange(("TrtLlmBf16ExpertsMonolithic",), renamed="TrtLlmBf16Experts", monolithic=True),
        ClassChange(("AiterExperts",), {"activations": only("silu", "gelu", "swigluoai")}),
    ),
    routes=(
        RouteChange(
            (UNQUANTIZED,),
            # FlashInfer was not yet moved back for gpt-oss.
            {"ignored": NONE, "moves": tuple(move for move in PLAIN.moves if "gpt-oss" not in move.why)},
        ),
        RouteChange(
            (ADAPTERS,),
            {"assigned": (Assignment(BACKENDS["TRITON"], BACKENDS["TRITON"].variants[0], "TRITON"),)},
        ),
    ),
)

VLLM_0_24_0 = DIFFERENCE.before(VLLM_0_26_0)
