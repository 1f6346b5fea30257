"""Changes of order that several formats share."""

from ...backend import SM90, Arch
from ...backends.humming import HUMMING
from ...backends.marlin import MARLIN
from ...route import Move

CPU, XPU, ROCM = (Arch("cpu"),), (Arch("xpu"),), (Arch("rocm"),)

HUMMING_FIRST = Move(
    HUMMING, (SM90,), before=MARLIN, why="Humming goes before Marlin on compute capability 9.0 only"
)
