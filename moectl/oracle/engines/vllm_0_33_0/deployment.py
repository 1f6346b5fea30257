"""How much memory vLLM 0.33.0 takes beyond the weights that it serves."""

from ...engine import AS_LOADED, Repacking

REPACKING: tuple[tuple[str, Repacking], ...] = (
    ("plain", AS_LOADED),
    ("triton-wna16", AS_LOADED),
    ("deep-gemm", Repacking(0, 0, "weights stay, scales alone are rearranged")),
    ("cutlass-nvfp4", Repacking(0, 0, "weights stay, scales alone are rearranged")),
    ("flashinfer-cutlass-nvfp4", Repacking(0, 0, "halves are exchanged in place")),
    ("trtllm-bf16", Repacking(0, 0, "experts are rearranged in place")),
    ("cutedsl", Repacking(1, 0, "w13 is interleaved beside the loaded one")),
    ("cutlass-bf16", Repacking(1, 0, "w13 with its halves exchanged lives beside the loaded one")),
    ("cutlass-fp8", Repacking(1, 0, "w13 with its halves exchanged lives beside the loaded one")),
    ("cutlass-w4a8", Repacking(1, 1, "the encoded weights live beside the loaded ones")),
    ("cutlass", Repacking(3, 1, "w13 is de-interleaved, exchanged and interleaved, w2 once, all alive")),
    ("marlin-int", Repacking(2, 2, "transposed and packed weights live beside the loaded ones")),
    ("marlin-mxfp4", Repacking(1, 1, "the packed weights live beside the loaded ones")),
    ("marlin", Repacking(1, 2, "packed experts are collected, then joined, beside the loaded weights")),
    ("trtllm-nvfp4", Repacking(1, 1, "the shuffled weights live beside the loaded ones")),
    ("trtllm-fp8-block", Repacking(2, 1, "w13 is exchanged and shuffled, w2 shuffled, all alive")),
    ("trtllm-fp8-tensor", Repacking(4, 1, "w13 is exchanged, interleaved, shuffled and stacked, all alive")),
    ("trtllm-mxfp8", Repacking(3, 1, "w13 is exchanged, reordered and shuffled, w2 shuffled, all alive")),
    ("trtllm-mxfp4", Repacking(3, 1, "w13 is exchanged, shuffled and stacked, w2 shuffled, all alive")),
    ("trtllm-mxint4", Repacking(2, 1, "shuffled experts are collected, then stacked")),
    ("triton", Repacking(1, 1, "the swizzled weights live beside the loaded ones")),
    ("aiter", Repacking(1, 1, "the shuffled weights live beside the loaded ones")),
)
"""By the beginning of a layout's name, the first that fits: how vLLM 0.33.0 makes each layout after
loading (`process_weights_after_loading`, layer by layer, once every weight is there)."""
