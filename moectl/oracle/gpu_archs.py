"""Sets of devices by platform, capability, architecture and features."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment import Device


@dataclass(frozen=True, slots=True)
class Arch:
    """A set of devices: one platform, optionally limited by capability, names or features.

    `low` and `high` are CUDA capabilities times ten, inclusive; 0 is no bound.

    Example:
        >>> str(sm(100, 109)), str(gfx("gfx942")), str(sm(89))
        ('sm100-sm109', 'gfx942', 'sm89 or newer')
    """

    platform: str
    low: int = 0
    high: int = 0
    names: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    def fits(self, device: Device) -> bool:
        """True when `device` is in the set."""
        return (
            device.platform == self.platform
            and (not self.low or device.capability >= self.low)
            and (not self.high or device.capability <= self.high)
            and (not self.names or device.arch in self.names)
            and self.features <= device.features
        )

    def __str__(self) -> str:
        if self.low and self.low == self.high:
            text = f"sm{self.low}"
        elif self.low and self.high:
            text = f"sm{self.low}-sm{self.high}"
        elif self.low:
            text = f"sm{self.low} or newer"
        else:
            text = "/".join(sorted(self.names)) or self.platform
        return " with ".join([text, *sorted(self.features)])


def sm(low: int, high: int = 0) -> Arch:
    """CUDA devices from capability `low` to `high` (inclusive; 0 is no upper bound)."""
    return Arch("cuda", low, high)


def gfx(*names: str) -> Arch:
    """ROCm devices with one of these architecture names."""
    return Arch("rocm", names=frozenset(names))


CUDA, ROCM, XPU, CPU = Arch("cuda"), Arch("rocm"), Arch("xpu"), Arch("cpu")
TPU, OUT_OF_TREE = Arch("tpu"), Arch("out-of-tree")
SM90, SM10X, SM12X = sm(90, 90), sm(100, 109), sm(120, 129)
X86_AMX = Arch("cpu", names=frozenset({"x86"}), features=frozenset({"amx"}))
Archs = tuple[Arch, ...]
