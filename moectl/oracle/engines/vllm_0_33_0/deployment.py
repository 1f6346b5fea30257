"""Extra memory that vLLM 0.33.0 takes while it repacks weights after loading."""

from ...engine import AS_LOADED, Repacking
from ..shared_repacking import CUTLASS, MARLIN, TRTLLM

REPACKING: tuple[tuple[str, Repacking], ...] = (
    ("plain", AS_LOADED),
    ("triton-wna16", AS_LOADED),
    ("deep-gemm", Repacking(0, 0, "only scales are rearranged")),
    ("cutlass-nvfp4", Repacking(0, 0, "only scales are rearranged")),
    ("flashinfer-cutlass-nvfp4", Repacking(0, 0, "gate/up swapped in place")),
    ("cutedsl", Repacking(1, 0, "temporary interleaved copy of w13")),
    ("cutlass-w4a8", Repacking(1, 1, "temporary copy: encoded")),
    *CUTLASS,
    *MARLIN,
    *TRTLLM,
    ("triton", Repacking(1, 1, "temporary copy: swizzled")),
    ("aiter", Repacking(1, 1, "temporary copy: shuffled")),
)
"""By layout name prefix, first match: how vLLM 0.33.0 makes each layout after loading
(`process_weights_after_loading`, layer by layer, once all weights are loaded)."""
