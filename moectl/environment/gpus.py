"""The GPUs of this machine as values, and which of them this process is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import Unavailable
from .named_devices import Device

HIDDEN = ("", "-1", "none", "NoDevFiles", "void")
"""Values of a visibility variable that show no GPU at all."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one slice of a GPU, as its driver lists it.

    Attributes:
        device: as the oracle sees it.
        index: its number; ``0:2`` is the third slice of GPU 0.
        uuid: empty where the driver gives none.
        driver: the driver's version.
        mig: profile of the slice; ``on`` for a split GPU without slices.
        remark: what keeps it from being used.
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
"""Environment variables that hide GPUs, by platform; each counts in what the one before it shows.

Of the two that HIP reads, the first one that is set holds.
"""


def visibility_set(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of `env` that hide GPUs of any maker."""
    names = dict.fromkeys(name for names in VISIBILITY.values() for name in names)
    return {name: env[name] for name in names if name in env}


def visible_gpus(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those of `gpus`, all of one platform, that a process with `env` is shown, in its order.

    As drivers do, a list counts up to the first GPU that is not there (`cut_short` tells). Unavailable
    when that is the first of all.
    """
    if not gpus:
        return ()
    names = VISIBILITY[gpus[0].device.platform]
    first, *others = [name for name in names if name in env] or [""]
    stages = [first, *others[:1]] if first.startswith("ROCR") else [first]
    for name in filter(None, stages):
        gpus = _shown(gpus, env[name], name)
    return gpus


def cut_short(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    """Names in a list of `env` that do not count: a GPU that is not there, and what stands behind it."""
    if not gpus:
        return ()
    for name in VISIBILITY[gpus[0].device.platform]:
        asked = [item.strip() for item in env.get(name, "").split(",")]
        for place, wanted in enumerate(asked):
            if name in env and asked[0] not in HIDDEN and not any(_names(gpu, wanted) for gpu in gpus):
                return tuple(asked[place:])
    return ()


def _shown(gpus: tuple[Gpu, ...], value: str, variable: str) -> tuple[Gpu, ...]:
    if value.strip() in HIDDEN:
        return ()
    found: list[Gpu] = []
    for item in value.split(","):
        wanted = item.strip()
        gpu = next((gpu for gpu in gpus if _names(gpu, wanted)), None)
        if gpu is None and found:
            break
        if gpu is None:
            raise Unavailable(
                f"{variable} asks for GPU {wanted!r}, and this machine has "
                f"{', '.join(gpu.index for gpu in gpus)}",
                hint=f"Unset {variable}, or name a device with --gpu.",
            )
        found.append(gpu)
    return tuple(found)


def _names(gpu: Gpu, wanted: str) -> bool:
    """True when `wanted` is the number of `gpu` or of its GPU (first slice), or begins its UUID."""
    if wanted.startswith(("GPU-", "MIG-")):
        return gpu.uuid.startswith(wanted)
    number, _, part = gpu.index.partition(":")
    return wanted == gpu.index or (wanted == number and part in ("", "0"))
