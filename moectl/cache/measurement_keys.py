"""What measurements depend on besides the device: the layer, and the software versions."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..problem.moe_problem import MoEProblem

PACKAGES = ("torch", "triton")

KERNELS = Path(__file__).parents[1] / "kernels" / "triton"
NO_KERNELS = ("inspection", "table.py")
"""Files and directories next to the kernels' sources that do not affect them."""


def layer_key(problem: MoEProblem) -> dict[str, Any]:
    """The properties of one rank's layer that decide how long its experts take."""
    weight = problem.scheme.weight
    total = {} if problem.local_experts == problem.experts else {"of": problem.experts}
    return {
        "scheme": str(problem.scheme),
        "scales": "" if weight.block == (0, 0) else weight.scale_dtype or problem.dtype,
        "hidden": problem.dims.hidden,
        "intermediate": problem.dims.intermediate,
        "experts": problem.local_experts,
        **total,
        "top_k": problem.top_k,
        "activation": str(problem.activation),
        "bias": problem.bias,
        "dtype": problem.dtype,
    }


def layer_words(layer: dict[str, Any]) -> str:
    """A `layer_key` as a short phrase."""
    of = f" of {layer['of']}" if "of" in layer else ""
    return (
        f"{layer['experts']}{of} experts, top-{layer['top_k']}, {layer['hidden']}x{layer['intermediate']}, "
        f"{layer['scheme']}"
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
    """16 hexadecimal digits that change with any kernel's source."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder)
        if name.parts[0] not in NO_KERNELS:
            digest.update(f"{name.as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
