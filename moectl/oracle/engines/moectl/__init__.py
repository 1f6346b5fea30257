"""moectl as an engine: its own kernels, and the external kernels that it calls."""

from ....capabilities.kernel_packages import KERNEL_PACKAGES
from ...engine import Engine, Repacking
from ..shared_repacking import CUTLASS, MARLIN, TRTLLM
from .kernel_names import KERNEL_NAMES
from .policy import POLICY

MOECTL = Engine(
    policy=POLICY,
    title="moectl",
    family="moectl",
    packages=KERNEL_PACKAGES,
    kernel_names=KERNEL_NAMES,
    repacking=(
        ("moectl", Repacking(1, 1, "temporary copy: tiled")),
        *MARLIN,
        ("humming", Repacking(1, 1, "temporary copy: tiled")),
        ("plain", Repacking(1, 1, "temporary copy: stacked")),
        ("triton-hopper", Repacking(1, 1, "temporary copy: swizzled")),
        *TRTLLM,
        *CUTLASS,
    ),
)


def engine(version: str) -> Engine:
    """moectl, the only `version`."""
    return MOECTL
