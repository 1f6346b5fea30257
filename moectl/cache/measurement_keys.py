"""What measurements depend on besides the device: the layer, and the software versions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..files.records import Count, to_json
from ..problem.moe_problem import MoEProblem

PACKAGES = ("torch", "triton")

KERNELS = Path(__file__).parents[1] / "kernels" / "triton"


@dataclass(frozen=True, slots=True)
class LayerKey:
    """The properties of one rank's layer that decide how long its experts take.

    Attributes:
        scales: dtype of the scales; empty without any.
        experts: on the rank; `of`: on all ranks, None if this one has all.
    """

    scheme: str
    scales: str
    hidden: Count
    intermediate: Count
    experts: Count
    top_k: Count
    activation: str
    bias: bool
    dtype: str
    of: Count | None = None

    def __str__(self) -> str:
        of = "" if self.of is None else f" of {self.of}"
        sizes = f"{self.hidden}x{self.intermediate}"
        return f"{self.experts}{of} experts, top-{self.top_k}, {sizes}, {self.scheme}"

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data, without `of` where it is None."""
        return {name: value for name, value in to_json(self).items() if value is not None}


def layer_key(problem: MoEProblem) -> LayerKey:
    """The key of one rank's layer."""
    weight = problem.scheme.weight
    return LayerKey(
        scheme=str(problem.scheme),
        scales="" if weight.block == (0, 0) else weight.scale_dtype or problem.dtype,
        hidden=problem.dims.hidden,
        intermediate=problem.dims.intermediate,
        experts=problem.local_experts,
        top_k=problem.top_k,
        activation=str(problem.activation),
        bias=problem.bias,
        dtype=problem.dtype,
        of=None if problem.local_experts == problem.experts else problem.experts,
    )


@cache
def built() -> dict[str, str]:
    """Versions of moectl, torch and Triton, and a hash of the kernels' sources."""
    return {"moectl": __version__, **{name: _version(name) for name in PACKAGES}, "kernels": kernel_hash()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def kernel_hash(folder: Path = KERNELS) -> str:
    """16 hexadecimal digits that change with any kernel's source, or with what tiles are compiled to."""
    digest = hashlib.sha256()
    for file in sorted((*folder.rglob("*.py"), *folder.parent.glob("choice/*_launches.py"))):
        name = file.relative_to(folder.parent).as_posix()
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
