"""moectl as an engine: the backends that it runs itself, its own kernels and those of others."""

from ....capabilities.kernel_packages import KERNEL_PACKAGES
from ...engine import Engine, Repacking
from .policy import POLICY

_BESIDE = "weights live beside the loaded ones"

MOECTL = Engine(
    policy=POLICY,
    title="moectl",
    family="moectl",
    packages=KERNEL_PACKAGES,
    repacking=(
        ("moectl", Repacking(1, 1, f"the tiled {_BESIDE}")),
        ("marlin-int", Repacking(2, 2, f"transposed and packed {_BESIDE}")),
        ("marlin-mxfp4", Repacking(1, 1, f"the packed {_BESIDE}")),
        ("marlin", Repacking(1, 2, "packed experts are collected, then joined, beside the loaded weights")),
        ("triton-hopper", Repacking(1, 1, f"the swizzled {_BESIDE}")),
        ("trtllm-bf16", Repacking(0, 0, "experts are rearranged in place")),
        ("trtllm-nvfp4", Repacking(1, 1, f"the shuffled {_BESIDE}")),
        ("trtllm-fp8-block", Repacking(2, 1, "w13 is exchanged and shuffled, w2 shuffled, all alive")),
        (
            "trtllm-fp8-tensor",
            Repacking(4, 1, "w13 is exchanged, interleaved, shuffled and stacked, all alive"),
        ),
        ("trtllm-mxfp8", Repacking(3, 1, "w13 is exchanged, reordered and shuffled, w2 shuffled, all alive")),
        ("trtllm-mxfp4", Repacking(3, 1, "w13 is exchanged, shuffled and stacked, w2 shuffled, all alive")),
        ("trtllm-mxint4", Repacking(2, 1, "shuffled experts are collected, then stacked")),
        ("cutlass-bf16", Repacking(1, 0, "w13 with its halves exchanged lives beside the loaded one")),
        ("cutlass-fp8", Repacking(1, 0, "w13 with its halves exchanged lives beside the loaded one")),
        ("cutlass", Repacking(3, 1, "w13 is de-interleaved, exchanged and interleaved, w2 once, all alive")),
    ),
)
