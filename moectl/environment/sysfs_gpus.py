"""AMD and Intel GPUs of this machine, read from sysfs; no driver library is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..files.safe_reading import text_or_empty
from .gpus import Gpu
from .named_devices import Device, device_of, known_names, squeeze

KFD = Path("/sys/class/kfd/kfd/topology/nodes")
DRM = Path("/sys/class/drm")
AMDGPU_VERSION = Path("/sys/module/amdgpu/version")

_AMD_NAMES: Mapping[int, str] = {
    0x740C: "AMD Instinct MI250X",
    0x7408: "AMD Instinct MI250X",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74B5: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x74B9: "AMD Instinct MI325X",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
    0x744C: "AMD Radeon RX 7900 XTX",
    0x7551: "AMD Radeon R9700",
}
"""Names by PCI device id, for GPUs without a product name in sysfs."""

_INTEL = "0x8086"
_INTEL_NAMES: Mapping[int, str] = {
    0x0BD5: "Intel(R) Data Center GPU Max 1550",
    0x0BDA: "Intel(R) Data Center GPU Max 1100",
    0x56A0: "Intel(R) Arc(TM) A770 Graphics",
    0x56C0: "Intel(R) Data Center GPU Flex 170",
    0xE20B: "Intel(R) Arc(TM) B580 Graphics",
    0xE211: "Intel(R) Arc(TM) Pro B60",
    0xE212: "Intel(R) Arc(TM) Pro B50",
}
"""Intel GPUs with matrix units and dedicated memory, by PCI device id; others are ignored."""


def amd_gpus() -> tuple[Gpu, ...]:
    """Every AMD GPU in the kernel's compute topology, in its order."""
    nodes = sorted((node for node in _entries(KFD) if node.name.isdigit()), key=lambda node: int(node.name))
    gpus = [
        _amd_gpu(properties, node) for node in nodes if (properties := _properties(node)).get("simd_count")
    ]
    driver = _line(AMDGPU_VERSION)
    return tuple(replace(gpu, index=str(number), driver=driver) for number, gpu in enumerate(gpus))


def intel_gpus() -> tuple[Gpu, ...]:
    """Every Intel GPU that experts could run on, in the kernel's order."""
    gpus: list[Gpu] = []
    for name in _intel_names():
        key = known_names().get(squeeze(name))
        device = replace(device_of(key), name=name) if key else Device("xpu", "xpu", name)
        gpus.append(Gpu(device, str(len(gpus))))
    return tuple(gpus)


def _amd_gpu(properties: Mapping[str, int], node: Path) -> Gpu:
    arch = gfx_name(properties.get("gfx_target_version", 0))
    name = _AMD_NAMES.get(properties.get("device_id", 0)) or _product(properties) or arch
    units = properties["simd_count"] // max(1, properties.get("simd_per_cu", 1))
    key = known_names().get(squeeze(name))
    device = replace(device_of(key, arch), name=name) if key else Device("rocm", arch, name)
    banks = [_properties(bank) for bank in _entries(node / "mem_banks")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks)
    unique = properties.get("unique_id", 0)
    return Gpu(
        replace(device, sms=units or device.sms, memory_bytes=memory or device.memory_bytes),
        "",
        f"GPU-{unique:016x}" if unique else "",
    )


def gfx_name(version: int) -> str:
    """The name of an AMD architecture from the kernel's version number.

    Example:
        >>> gfx_name(90402), gfx_name(90010)
        ('gfx942', 'gfx90a')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _product(properties: Mapping[str, int]) -> str:
    return _line(DRM / f"renderD{properties.get('drm_render_minor', 0)}" / "device" / "product_name")


def _intel_names() -> Iterator[str]:
    for card in sorted(_entries(DRM)):
        if card.name.startswith("renderD") and _line(card / "device" / "vendor") == _INTEL:
            number = _line(card / "device" / "device")
            if name := _INTEL_NAMES.get(int(number, 16) if number.startswith("0x") else 0):
                yield name


def _properties(folder: Path) -> dict[str, int]:
    """The ``name number`` lines of a ``properties`` file; other lines are skipped."""
    pairs = [line.split() for line in text_or_empty(folder / "properties").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _line(file: Path) -> str:
    return text_or_empty(file).strip()
