"""Emulation in plain torch: any format, with activations rounded as the checkpoint declares them."""

from ..archs import CPU, SM90
from ..backend import NAIVE, Backend, Capability, Variant
from .native import TORCH_ARCHS

EMULATION = Backend(
    name="emulation",
    engine_name="emulation",
    variants=(Variant("emulation", Capability(arch=TORCH_ARCHS, spread=NAIVE, act_order=False)),),
    runner="emulation",
    note="The slow twin of kernels that quantize activations: weights are decoded, activations rounded to "
    "the format that the checkpoint declares.",
    verified=(SM90, CPU),
)
