"""vLLM 0.22.0 for unquantized experts, as its difference from 0.23.0."""

from ...backend import only
from ...release import ClassChange, Difference, RouteChange
from .v0_23_0 import VLLM_0_23_0
from .v0_24_0 import UNQUANTIZED

_PLAIN = next(route for route in VLLM_0_23_0.policy.routes if route.name == UNQUANTIZED)

DIFFERENCE = Difference(
    version="0.22.0",
    classes=(
        ClassChange(
            ("TrtLlmBf16Experts",),
            {"routing": only("DeepSeekV3", "Llama4", "Renormalize", "RenormalizeNaive")},
        ),
        ClassChange(("XPUExperts",), {"activations": only("silu", "gelu", "swigluoai", "relu2_no_mul")}),
    ),
    # FlashInfer had priority over Triton on SM9x, too.
    routes=(
        RouteChange((UNQUANTIZED,), {"moves": tuple(move for move in _PLAIN.moves if move.where is None)}),
    ),
)

VLLM_0_22_0 = DIFFERENCE.before(VLLM_0_23_0)
