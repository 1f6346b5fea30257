"""Extra memory that vLLM 0.33.0 takes while it repacks weights after loading."""

from ...engine import AS_LOADED, Repacking

REPACKING: tuple[tuple[str, Repacking], ...] = (
    ("plain", AS_LOADED),
    ("triton-wna16", AS_LOADED),
    ("deep-gemm", Repacking(0, 0, "only scales are rearranged")),
    ("cutlass-nvfp4", Repacking(0, 0, "only scales are rearranged")),
    ("flashinfer-cutlass-nvfp4", Repacking(0, 0, "gate/up swapped in place")),
    ("trtllm-bf16", Repacking(0, 0, "experts are rearranged in place")),
    ("cutedsl", Repacking(1, 0, "temporary interleaved copy of w13")),
    ("cutlass-bf16", Repacking(1, 0, "temporary gate/up-swapped copy of w13")),
    ("cutlass-fp8", Repacking(1, 0, "temporary gate/up-swapped copy of w13")),
    ("cutlass-w4a8", Repacking(1, 1, "temporary copy: encoded")),
    ("cutlass", Repacking(3, 1, "temporary copies: w13 de-interleaved, swapped and interleaved, w2 once")),
    ("marlin-int", Repacking(2, 2, "temporary copies: transposed, packed")),
    ("marlin-mxfp4", Repacking(1, 1, "temporary copy: packed")),
    ("marlin", Repacking(1, 2, "temporary copies: packed experts, and the stacked w2")),
    ("trtllm-nvfp4", Repacking(1, 1, "temporary copy: shuffled")),
    ("trtllm-fp8-block", Repacking(2, 1, "temporary copies: w13 swapped and shuffled, w2 shuffled")),
    (
        "trtllm-fp8-tensor",
        Repacking(4, 1, "temporary copies: w13 swapped, interleaved, shuffled and stacked"),
    ),
    ("trtllm-mxfp8", Repacking(3, 1, "temporary copies: w13 swapped, reordered and shuffled, w2 shuffled")),
    ("trtllm-mxfp4", Repacking(3, 1, "temporary copies: w13 swapped, shuffled and stacked, w2 shuffled")),
    ("trtllm-mxint4", Repacking(2, 1, "temporary copies: shuffled experts, then stacked")),
    ("triton", Repacking(1, 1, "temporary copy: swizzled")),
    ("aiter", Repacking(1, 1, "temporary copy: shuffled")),
)
"""By layout name prefix, first match: how vLLM 0.33.0 makes each layout after loading
(`process_weights_after_loading`, layer by layer, once all weights are loaded)."""
