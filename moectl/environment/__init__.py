"""The machine: its GPUs and CPU, installed packages, and environment variables of engines."""

from .detection import detect_cpu, detect_device, detect_gpus
from .named_devices import DATA, Device, device_names, find_device
from .packages import INSTALLED, Packages

__all__ = [
    "DATA",
    "INSTALLED",
    "Device",
    "Packages",
    "detect_cpu",
    "detect_device",
    "detect_gpus",
    "device_names",
    "find_device",
]
