"""What differs between transformers' releases, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .data import Models, models


@dataclass(frozen=True, slots=True)
class Release:
    """One release.

    Attributes:
        version: its version.
        kernels: the first version of the package `kernels` that it accepts, and the first that it does not.
        reads_global_scales: NVFP4 experts of compressed-tensors get their global scales.
    """

    version: str
    kernels: tuple[str, str]
    reads_global_scales: bool = True

    @property
    def models(self) -> Models:
        """The models that it knows."""
        return models(self.version)


V5_23_0 = Release("5.23.0", kernels=("0.18.2", "0.19.0"))
V5_17_0 = replace(V5_23_0, version="5.17.0", kernels=("0.16.0", "0.17.0"), reads_global_scales=False)
RELEASES = (V5_23_0, V5_17_0)
"""The newest first."""
