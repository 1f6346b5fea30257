"""Extra memory while FlashInfer's and Marlin's layouts are made, the same in every engine that makes them."""

from ..engine import Repacking

SWAPPED = Repacking(1, 0, "temporary gate/up-swapped copy of w13")

MARLIN: tuple[tuple[str, Repacking], ...] = (
    ("marlin-int", Repacking(2, 2, "temporary copies: transposed, packed")),
    ("marlin-mxfp4", Repacking(1, 1, "temporary copy: packed")),
    ("marlin", Repacking(1, 2, "temporary copies: packed experts, and the stacked w2")),
)

TRTLLM: tuple[tuple[str, Repacking], ...] = (
    ("trtllm-bf16", Repacking(0, 0, "experts are rearranged in place")),
    ("trtllm-nvfp4", Repacking(1, 1, "temporary copy: shuffled")),
    ("trtllm-fp8-block", Repacking(2, 1, "temporary copies: w13 swapped and shuffled, w2 shuffled")),
    (
        "trtllm-fp8-tensor",
        Repacking(4, 1, "temporary copies: w13 swapped, interleaved, shuffled and stacked"),
    ),
    ("trtllm-mxfp8", Repacking(3, 1, "temporary copies: w13 swapped, reordered and shuffled, w2 shuffled")),
    ("trtllm-mxfp4", Repacking(3, 1, "temporary copies: w13 swapped, shuffled and stacked, w2 shuffled")),
    ("trtllm-mxint4", Repacking(2, 1, "temporary copies: shuffled experts, then stacked")),
)

CUTLASS: tuple[tuple[str, Repacking], ...] = (
    ("cutlass-bf16", SWAPPED),
    ("cutlass-fp8", SWAPPED),
    ("cutlass", Repacking(3, 1, "temporary copies: w13 de-interleaved, swapped and interleaved, w2 once")),
)
"""By layout name prefix, the narrower first, as in `Engine.repacking`."""
