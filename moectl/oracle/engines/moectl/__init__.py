"""moectl as an engine: its own kernels, and the external kernels that it calls."""

from ....capabilities.kernel_packages import KERNEL_PACKAGES
from ...engine import Engine, Repacking
from .kernel_names import KERNEL_NAMES
from .policy import POLICY

_COPY, _COPIES = "temporary copy", "temporary copies"

MOECTL = Engine(
    policy=POLICY,
    title="moectl",
    family="moectl",
    packages=KERNEL_PACKAGES,
    kernel_names=KERNEL_NAMES,
    repacking=(
        ("moectl", Repacking(1, 1, f"{_COPY}: tiled")),
        ("marlin-int", Repacking(2, 2, f"{_COPIES}: transposed, packed")),
        ("marlin-mxfp4", Repacking(1, 1, f"{_COPY}: packed")),
        ("marlin", Repacking(1, 2, "temporary copies: packed experts, and the stacked w2")),
        ("triton-hopper", Repacking(1, 1, f"{_COPY}: swizzled")),
        ("trtllm-bf16", Repacking(0, 0, "experts are rearranged in place")),
        ("trtllm-nvfp4", Repacking(1, 1, f"{_COPY}: shuffled")),
        ("trtllm-fp8-block", Repacking(2, 1, "temporary copies: w13 swapped and shuffled, w2 shuffled")),
        (
            "trtllm-fp8-tensor",
            Repacking(4, 1, "temporary copies: w13 swapped, interleaved, shuffled and stacked"),
        ),
        (
            "trtllm-mxfp8",
            Repacking(3, 1, "temporary copies: w13 swapped, reordered and shuffled, w2 shuffled"),
        ),
        ("trtllm-mxfp4", Repacking(3, 1, "temporary copies: w13 swapped, shuffled and stacked, w2 shuffled")),
        ("trtllm-mxint4", Repacking(2, 1, "temporary copies: shuffled experts, then stacked")),
        ("cutlass-bf16", Repacking(1, 0, "temporary gate/up-swapped copy of w13")),
        ("cutlass-fp8", Repacking(1, 0, "temporary gate/up-swapped copy of w13")),
        (
            "cutlass",
            Repacking(3, 1, "temporary copies: w13 de-interleaved, swapped and interleaved, w2 once"),
        ),
    ),
)
