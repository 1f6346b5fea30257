"""Machines, installed packages and engine variables: values, and reading the real ones at the edge."""

from .detection import detect_cpu, detect_device, detect_gpus
from .devices import DATA, Device, device_names, find_device
from .packages import INSTALLED, PROFILES_FILE, Packages, packages_from
from .probes import PROBES

__all__ = [
    "DATA",
    "INSTALLED",
    "PROBES",
    "PROFILES_FILE",
    "Device",
    "Packages",
    "detect_cpu",
    "detect_device",
    "detect_gpus",
    "device_names",
    "find_device",
    "packages_from",
]
