"""Named and real machines with the packages that a decision may count on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..environment import INSTALLED, Device, Packages, detect_device, find_device
from ..oracle.engine import Engine
from ..oracle.machine_packages import default_profile, packages_from
from ..oracle.registry import engine_named


@dataclass(frozen=True)
class AssumedMachine:
    """A device with its packages.

    `key` is the name it was asked by (empty: this machine), `spec` how the packages were asked for, and
    `assumed` tells that they were not.
    """

    device: Device
    packages: Packages
    key: str = ""
    spec: str = INSTALLED
    assumed: bool = False


def machine(
    name: str | None, spec: str | None, env: Mapping[str, str], engine: Engine | None = None
) -> AssumedMachine:
    """The device called `name` (None: this machine's) with the packages of `spec`.

    Without `spec`, a named device has the default packages of `engine` (the default one for None), and
    this machine what is installed.
    Raises UsageError for unknown names.
    """
    engine = engine or engine_named()
    device = find_device(name) if name else detect_device()
    assumed = spec is None
    if spec is None:
        spec = default_profile(device.platform, engine) if name else INSTALLED
    return AssumedMachine(device, packages_from(spec, env, engine), name or "", spec, assumed and bool(name))
