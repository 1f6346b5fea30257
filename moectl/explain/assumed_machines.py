"""Named and real machines, with their packages."""

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

    `key` is the name of the device as requested (empty: this machine), `spec` the specification of the
    packages, and `assumed` is True if the user gave none.
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

    Without `spec`, a named device has the default packages of `engine` (None: the default engine), and
    this machine what is installed. Raises UsageError for unknown names.

    Example:
        >>> machine("h200", None, {}).spec
        'full'
    """
    engine = engine or engine_named()
    device = find_device(name) if name else detect_device()
    assumed = spec is None
    if spec is None:
        spec = default_profile(device.platform, engine) if name else INSTALLED
    return AssumedMachine(device, packages_from(spec, env, engine), name or "", spec, assumed and bool(name))
