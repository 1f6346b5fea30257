"""What NVIDIA's driver lists, however it was asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

SECONDS = 60.0
"""Longest wait for the driver: without persistence mode it initializes each GPU first, a second or more."""

_GIGABYTES = re.compile(r"\.(\d+)gb")
_MOST = 300


class NoAnswer(Exception):
    """The driver is there, but gives no list of GPUs; the text has its own words.

    `hung`: it did not answer in time.
    """

    def __init__(self, words: str, *, hung: bool = False) -> None:
        super().__init__(words)
        self.hung = hung


@dataclass(frozen=True, slots=True)
class ListedSlice:
    """A MIG slice: its profile, such as ``1g.10gb``, and its UUID."""

    profile: str
    uuid: str

    @property
    def memory_bytes(self) -> int:
        """Nominal memory by the profile's name; 0 if that does not say."""
        match = _GIGABYTES.search(self.profile)
        return int(match[1]) << 30 if match else 0


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """One GPU in the driver's list.

    Attributes:
        arch: ``sm90``; ``sm0`` if unknown.
        memory_bytes: whole MiB; 0 if the driver does not say.
        mig: whether it is in MIG mode.
        failure: why the driver cannot use it; empty if it can.
        sms: streaming multiprocessors; 0 if the driver does not say.
        bandwidth: peak memory bandwidth, bytes/s; 0 if the driver does not say.
    """

    index: str
    uuid: str
    name: str
    arch: str
    memory_bytes: int
    mig: bool = False
    slices: tuple[ListedSlice, ...] = ()
    failure: str = ""
    sms: int = 0
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class DriverListing:
    """The driver's list: GPUs, its version, the highest CUDA version that it supports, and a warning."""

    gpus: tuple[ListedGpu, ...]
    driver: str
    cuda: str = ""
    warning: str = ""


def one_line(text: str) -> str:
    """`text` of a driver in one line, without control characters, and of limited length."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    joined = " ".join(line for line in lines if line)
    printable = "".join(character for character in joined if character.isprintable())
    return printable if len(printable) <= _MOST else f"{printable[:_MOST]}..."
