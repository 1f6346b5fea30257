"""How the NVIDIA GPUs of a machine are connected, by NVML or else by ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from . import nvidia_smi, nvml
from .nvidia_listing import NoAnswer

MEANINGS: Mapping[str, str] = {
    "PIX": "a single PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge of a CPU",
    "NODE": "PCIe host bridges within a NUMA node",
    "SYS": "PCIe and the interconnect between NUMA nodes",
}
"""What is between two GPUs, by the abbreviation of nvidia-smi; ``NV18`` is 18 NVLinks."""

_LEVELS = ((10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"))
"""Abbreviations by the largest of NVML's topology levels that they stand for."""

_MOST_LINKS = 18
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")

Links = Mapping[tuple[int, int], str]
"""Abbreviations by pairs of the driver's GPU numbers, the lower one first."""


def gpu_links() -> Links:
    """The connection of every pair of GPUs; empty for fewer than two, or if the driver does not say."""
    library = nvml.library()
    if library is not None:
        try:
            with nvml.initialized() as initialized:
                if initialized is not None:
                    return _nvml_links(initialized)
        except library.NVMLError:
            pass
    try:
        return parse_topology(nvidia_smi.topology())
    except NoAnswer:
        return {}


def _nvml_links(library: Any) -> Links:
    boards = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
    if len(boards) < 2:
        return {}
    buses = [_bus(nvml.value_or(library, None, library.nvmlDeviceGetPciInfo, board)) for board in boards]
    remotes = [_remotes(library, board) for board in boards]
    links: dict[tuple[int, int], str] = {}
    for one, other in combinations(range(len(boards)), 2):
        direct = remotes[one].count(buses[other]) if buses[other] else 0
        # Links that end at no GPU lead to a switch, which connects all GPUs that have such links.
        switched = min(sum(bus not in buses for bus in remotes[i]) for i in (one, other))
        if bonded := direct or switched:
            links[one, other] = f"NV{bonded}"
            continue
        level = nvml.value_or(
            library, None, library.nvmlDeviceGetTopologyCommonAncestor, boards[one], boards[other]
        )
        if level is not None:
            links[one, other] = next((name for most, name in _LEVELS if level <= most), "SYS")
    return links


def _remotes(library: Any, board: Any) -> list[str]:
    """The bus address at the other end of each active NVLink; empty for an unknown one."""
    remotes = []
    for number in range(_MOST_LINKS):
        if nvml.value_or(library, 0, library.nvmlDeviceGetNvLinkState, board, number):
            there = nvml.value_or(library, None, library.nvmlDeviceGetNvLinkRemotePciInfo, board, number)
            remotes.append(_bus(there))
    return remotes


def _bus(info: Any) -> str:
    """The PCI address in NVML's record, without leading zeros, whose number differs; empty for None."""
    if info is None:
        return ""
    text = info.busId.decode(errors="replace") if isinstance(info.busId, bytes) else str(info.busId)
    domain, _, rest = text.upper().partition(":")
    return f"{domain.lstrip('0')}:{rest}"


def parse_topology(text: str) -> Links:
    """The connections in the output of ``nvidia-smi topo -m``.

    Example:
        >>> parse_topology("     GPU0 GPU1 NIC0\\nGPU0  X   NV18 SYS\\nGPU1 NV18  X   SYS\\n")
        {(0, 1): 'NV18'}
    """
    lines = _COLOR.sub("", text).splitlines()
    columns = next((re.findall(r"\bGPU(\d+)", line) for line in lines if "GPU1" in line), [])
    links: dict[tuple[int, int], str] = {}
    for line in lines:
        row = line.split()
        if match := re.fullmatch(r"GPU(\d+)", row[0] if row else ""):
            for column, cell in zip(columns, row[1:], strict=False):
                one, other = int(match[1]), int(column)
                if one < other and _LINK.fullmatch(cell):
                    links[one, other] = cell
    return links


def link_words(links: Links) -> str:
    """The connections in one line, with the most frequent one for the rest; empty without any.

    Example:
        >>> link_words({(0, 1): "NV4", (0, 2): "SYS", (1, 2): "SYS"})
        'NV4 (4 NVLinks): 0-1; SYS (PCIe and the interconnect between NUMA nodes): all other pairs'
    """
    counts = Counter(links.values())
    if not counts:
        return ""
    usual = counts.most_common(1)[0][0]
    parts = []
    for name in sorted(counts, key=lambda name: name == usual):
        pairs = ", ".join(f"{one}-{other}" for (one, other), link in links.items() if link == name)
        everywhere = "all pairs" if len(counts) == 1 else "all other pairs"
        parts.append(f"{name} ({_meaning(name)}): {everywhere if name == usual else pairs}")
    return "; ".join(parts)


def _meaning(name: str) -> str:
    if not name.startswith("NV"):
        return MEANINGS[name]
    return f"{name[2:]} NVLink{'' if name == 'NV1' else 's'}"
