"""Machines, installed packages and engine variables: values, and reading the real ones at the edge."""

from .detection import detect_cpu, detect_device
from .devices import DATA, Device, device_names, find_device
from .packages import PROBES, PROFILES_FILE, Packages, packages_from

__all__ = [
    "DATA",
    "PROBES",
    "PROFILES_FILE",
    "Device",
    "Packages",
    "detect_cpu",
    "detect_device",
    "device_names",
    "find_device",
    "packages_from",
]
