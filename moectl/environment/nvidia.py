"""NVIDIA GPUs of this machine, as the driver lists them: through NVML, or else by `nvidia-smi`.

A driver that is there but gives no answer is an error, `DriverFailure`: a machine with broken GPUs is not a
machine without GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from ..errors import MoectlError
from . import nvidia_listing, nvidia_smi, nvml
from .gpus import Gpu
from .named_devices import Device, device_of, known_names, squeeze
from .nvidia_listing import DriverListing, ListedGpu, ListedSlice, NoAnswer

SLOW = 5.0
"""Seconds of waiting beyond which the driver's slowness is reported."""

DEVICE_FILES = Path("/dev")
"""Directory of ``nvidia0``, ``nvidia1``, ..., the driver's files of the GPUs that a process may use."""

REPAIR = "Repair the driver until nvidia-smi lists the GPUs"
WITHOUT = "`--gpu NAME` names another device to explain, `--device cpu` runs on the CPU"


class DriverFailure(MoectlError):
    """NVIDIA's driver is installed, but does not list its GPUs; `what` has its own words."""


@dataclass(frozen=True, slots=True)
class NvidiaAnswer:
    """What NVIDIA's driver says.

    Attributes:
        gpus: every GPU in its order; a GPU in MIG mode is replaced by its slices.
        through: ``NVML`` or ``nvidia-smi``; empty without a driver.
        seconds: how long it took.
        cuda: highest CUDA version that it supports, such as ``13.0``; empty if unknown.
        warning: what it says besides; empty for nothing.
    """

    gpus: tuple[Gpu, ...] = ()
    through: str = ""
    seconds: float = 0.0
    cuda: str = ""
    warning: str = ""

    @property
    def slowness(self) -> str:
        """The sentence about a driver that took longer than `SLOW`; empty for others."""
        if self.seconds <= SLOW:
            return ""
        return (
            f"the NVIDIA driver took {self.seconds:.0f} s to list the GPUs: persistence mode "
            "(`nvidia-smi -pm 1`, or nvidia-persistenced) keeps them initialized"
        )


def nvidia_answer() -> NvidiaAnswer:
    """The driver's GPUs, by NVML if nvidia-ml-py is installed and works, else by `nvidia-smi`.

    Empty without a driver. Raises DriverFailure if it fails, does not answer within
    `nvidia_listing.SECONDS`, or lists no GPU.
    """
    begin = time.monotonic()
    errors: list[NoAnswer] = []
    for name, ask in (("NVML", _nvml_listing), ("nvidia-smi", nvidia_smi.listing)):
        try:
            listing = ask()
        except NoAnswer as error:
            errors.append(error)
            if error.hung:
                break
            continue
        if listing is not None:
            seconds = time.monotonic() - begin
            return NvidiaAnswer(tuple(_gpus(listing)), name, seconds, listing.cuda, listing.warning)
    if errors:
        # nvidia-smi, the last one asked, explains more than an error of NVML.
        raise DriverFailure(str(errors[-1]), hint=f"{REPAIR}; {WITHOUT}.")
    if device := next(iter(sorted(DEVICE_FILES.glob("nvidia[0-9]*"))), None):
        raise DriverFailure(
            f"{device} exists, but the driver's libnvidia-ml.so.1 and nvidia-smi are not installed",
            hint=f"Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility; {WITHOUT}.",
        )
    return NvidiaAnswer()


def _nvml_listing() -> DriverListing | None:
    """As `nvml.listing`; also NoAnswer after `nvidia_listing.SECONDS`.

    A call that hangs in the driver cannot be ended, so it runs in a thread that is left behind.
    """
    results: list[DriverListing | None] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            results.append(nvml.listing())
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(nvidia_listing.SECONDS)
    if failures:
        raise failures[0]
    if not results:
        raise NoAnswer(f"NVML did not answer within {nvidia_listing.SECONDS:g} s", hung=True)
    return results[0]


def cuda_device(name: str, arch: str, memory_bytes: int = 0, sms: int = 0, bandwidth: float = 0.0) -> Device:
    """The device that a driver calls `name`, with the published figures if it is known.

    What the driver says is 0 if it does not. Its memory counts before what is published, which counts before
    its multiprocessors and bandwidth.
    """
    known = known_names().get(squeeze(name))
    device = device_of(known, arch) if known else Device("cuda", arch, name)
    return replace(
        device,
        name=name,
        sms=device.sms or sms,
        memory_bytes=memory_bytes or device.memory_bytes,
        bandwidth=device.bandwidth or bandwidth,
    )


def _gpus(listing: DriverListing) -> Iterator[Gpu]:
    for listed in listing.gpus:
        device = cuda_device(listed.name, listed.arch, listed.memory_bytes, listed.sms, listed.bandwidth)
        gpu = Gpu(device, listed.index, listed.uuid, listing.driver, remark=listed.failure)
        yield from _slices(gpu, listed) if listed.mig else (gpu,)


def _slices(gpu: Gpu, listed: ListedGpu) -> Iterable[Gpu]:
    """The slices of a GPU in MIG mode, whose rates are unknown.

    One without slices cannot run anything: it is listed with a remark.
    """
    if not listed.slices:
        yield replace(gpu, mig="on", remark="MIG is on and no slice is made: nothing can run on it")
    for number, part in enumerate(listed.slices):
        yield replace(
            gpu,
            device=_slice_device(gpu.device, part),
            index=f"{gpu.index}:{number}",
            uuid=part.uuid,
            mig=part.profile,
        )


def _slice_device(device: Device, part: ListedSlice) -> Device:
    return replace(
        device,
        name=f"{device.name} MIG {part.profile}",
        sms=0,
        memory_bytes=part.memory_bytes,
        bandwidth=0.0,
        bf16_flops=0.0,
        fp8_flops=0.0,
        fp4_flops=0.0,
    )
