"""The GPUs of a machine, and which of them are visible to a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import Unavailable
from .named_devices import Device

HIDDEN = ("", "-1", "none", "NoDevFiles", "void")
"""Values of a visibility variable that hide every GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or MIG slice, as its driver lists it.

    Attributes:
        device: its properties.
        index: the driver's number; ``0:2`` is the third slice of GPU 0.
        uuid: empty if the driver reports none.
        driver: the driver's version.
        mig: profile of the slice; ``on`` for a GPU in MIG mode without slices.
        remark: why it cannot be used; empty if it can.
    """

    device: Device
    index: str
    uuid: str = ""
    driver: str = ""
    mig: str = ""
    remark: str = ""


VISIBILITY: Mapping[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
"""Environment variables that hide GPUs, by platform. On ROCm the first filters the GPUs, and the first of the
other two that is set selects from the rest."""


def visibility_set(env: Mapping[str, str]) -> dict[str, str]:
    """The variables in `env` that hide GPUs of any vendor."""
    names = dict.fromkeys(name for names in VISIBILITY.values() for name in names)
    return {name: env[name] for name in names if name in env}


def visible_gpus(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs, all of one platform, that are visible to a process with `env`, in its order.

    As in the drivers, a list is cut at the first GPU that does not exist (see `cut_short`). Unavailable when
    that is its first entry.
    """
    if not gpus:
        return ()
    names = VISIBILITY[gpus[0].device.platform]
    first, *others = [name for name in names if name in env] or [""]
    stages = [first, *others[:1]] if first.startswith("ROCR") else [first]
    for name in filter(None, stages):
        gpus = _select(gpus, env[name], name)
    return gpus


def cut_short(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    """The entries of a visibility variable that are ignored: from the first GPU that does not exist on."""
    if not gpus:
        return ()
    for name in VISIBILITY[gpus[0].device.platform]:
        entries = [item.strip() for item in env.get(name, "").split(",")]
        for index, entry in enumerate(entries):
            if name in env and entries[0] not in HIDDEN and not any(_names(gpu, entry) for gpu in gpus):
                return tuple(entries[index:])
    return ()


def _select(gpus: tuple[Gpu, ...], value: str, variable: str) -> tuple[Gpu, ...]:
    if value.strip() in HIDDEN:
        return ()
    selected: list[Gpu] = []
    for item in value.split(","):
        entry = item.strip()
        gpu = next((gpu for gpu in gpus if _names(gpu, entry)), None)
        if gpu is None and selected:
            break
        if gpu is None:
            raise Unavailable(
                f"{variable} asks for GPU {entry!r}, and this machine has "
                f"{', '.join(gpu.index for gpu in gpus)}",
                hint=f"Unset {variable}, or name a device with --gpu.",
            )
        selected.append(gpu)
    return tuple(selected)


def _names(gpu: Gpu, entry: str) -> bool:
    """True when `entry` is the number of `gpu` (or of its board, for slice 0) or a prefix of its UUID."""
    if entry.startswith(("GPU-", "MIG-")):
        return gpu.uuid.startswith(entry)
    number, _, part = gpu.index.partition(":")
    return entry == gpu.index or (entry == number and part in ("", "0"))
