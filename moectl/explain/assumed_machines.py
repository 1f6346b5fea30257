"""Named and real machines, with their packages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..environment import INSTALLED, Device, Packages, find_device
from ..environment.detection import detect_device_and_driver
from ..environment.python_environments import PythonEnvironment
from ..errors import UsageError
from ..oracle.engine import Engine
from ..oracle.machine_packages import default_profile, installed_version, packages_from
from ..oracle.registry import engine_named, engine_variables


@dataclass(frozen=True)
class AssumedMachine:
    """A device with its packages.

    Attributes:
        key: the name of the device as requested; empty: this machine.
        spec: the specification of the packages.
        assumed: the user gave none, and they are not detected.
        python: the environment that was looked into, as the user named it; empty: this process's.
        installed: version of the engine there: ``""`` if unknown; None without it.
        notes: sentences on what was assumed.
        warnings: sentences on why the answer may be wrong.
    """

    device: Device
    packages: Packages
    key: str = ""
    spec: str = INSTALLED
    assumed: bool = False
    python: str = ""
    installed: str | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def machine(
    name: str | None,
    spec: str | None,
    env: Mapping[str, str],
    engine: Engine | None = None,
    where: PythonEnvironment | None = None,
) -> AssumedMachine:
    """The device called `name` (None: this machine's) with the packages of `spec`.

    ``installed`` packages are those of the environment `where`, or of this process (None). Without `spec`
    they are those of `where` if it is given, else those installed here for this machine's device if `engine`
    (None: the default engine) is one of them, else the engine's default ones.

    Raises UsageError for unknown names, DriverFailure if this machine's GPUs cannot be used.

    Example:
        >>> machine("h200", None, {}).spec
        'full'
    """
    engine = engine or engine_named()
    if where is not None and spec is not None and INSTALLED not in spec.split(","):
        raise UsageError(
            "--python and --packages contradict each other",
            hint=f"leave one out, or add packages with --packages {INSTALLED},NAME",
        )
    device, driver = (find_device(name), None) if name else detect_device_and_driver()
    installed = installed_version(engine, where) if engine.package else None
    notes: list[str] = []
    assumed = (
        spec is None and where is None and (name is not None or (bool(engine.package) and installed is None))
    )
    if assumed:
        spec = default_profile(device.platform, engine)
        notes.append(
            f"assuming the default packages of {engine.title} (--packages {INSTALLED} detects yours)"
            if name
            else f"{engine.title} is not installed in this environment: its default packages (profile "
            f"{spec}) are assumed; --packages {INSTALLED} detects, --python PATH looks elsewhere"
        )
        env = env if name else {**engine_variables(os.environ), **env}
    elif where is not None and engine.package and installed is None:
        notes.append(f"{engine.title} is not installed in {where.name}")
    warning = engine.other_version(installed) if installed is not None else ""
    warnings = [warning] if warning else []
    warnings += filter(None, (driver.warning, driver.slowness) if driver else ())
    spec = spec or INSTALLED
    packages = packages_from(spec, env, engine, where)
    return AssumedMachine(
        device,
        packages,
        name or "",
        spec,
        assumed,
        where.name if where else "",
        installed,
        tuple(notes),
        tuple(warnings),
    )
