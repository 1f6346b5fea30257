"""Parameters of a live module in a safetensors file, with how they lie in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError
from ..files.atomic import replacing, write_exactly
from ..files.safetensors_writer import TensorSpec, plan_file
from ..torch_dtypes import TORCH_DTYPES

PLACES = "moectl.parameters"
"""Key of the metadata with ``{name: [strides, storage offset]}`` as JSON."""


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter: its type and place, and a function that reads its bytes in row-major order.

    Attributes:
        dtype: safetensors spelling.
        stride, offset: in elements, as in torch; None if unknown.
        read: its elements as a flat uint8 tensor on the CPU.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int | None
    read: Callable[[], Tensor]

    @property
    def sha256(self) -> str:
        """The hash of its bytes in row-major order."""
        return hashlib.sha256(self.read().numpy().data).hexdigest()


def live_parameters(source: torch.nn.Module | Mapping[str, Tensor]) -> dict[str, ParameterRecord]:
    """The parameters and buffers of a module, or the tensors of a mapping, by name.

    Raises UsageError for a tensor that is sparse, on the meta device, or of a dtype that safetensors lacks.
    """
    if isinstance(source, torch.nn.Module):
        source = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    found = {}
    for name, t in source.items():
        if t.layout is not torch.strided or t.is_meta or t.dtype not in names:
            raise UsageError(f"{name} is {t.dtype}, {t.layout}, on {t.device}, which safetensors cannot hold")
        held = t.detach()
        found[name] = ParameterRecord(
            name,
            names[t.dtype],
            tuple(t.shape),
            tuple(t.stride()),
            int(t.storage_offset()),
            lambda held=held: held.cpu().contiguous().reshape(-1).view(torch.uint8),  # type: ignore[misc]
        )
    return found


def dump_parameters(source: torch.nn.Module | Mapping[str, Tensor], path: str | Path) -> Path:
    """Writes a module's parameters and buffers, or a mapping's tensors, to a safetensors file.

    The file holds every tensor in row-major order under its name; the metadata ``moectl.parameters`` has
    ``{name: [strides, storage offset]}`` as JSON, in elements. Nothing is pickled. `moectl parity` reads it.

    Args:
        source: a ``torch.nn.Module`` as an engine holds it after loading, or tensors by name.
        path: the file to write; an existing one is replaced once the new one is complete.

    Raises:
        UsageError: a tensor that is sparse, on the meta device, or of a dtype that safetensors lacks.
        Unavailable: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = dump_parameters({"w": torch.ones(2, 3).T}, Path(folder) / "layer.safetensors")
        ...     load_file(file)["w"].shape
        torch.Size([3, 2])
    """
    path, records = Path(path), live_parameters(source)
    places = {name: [record.stride, record.offset] for name, record in records.items()}
    specs = [TensorSpec(name, record.dtype, record.shape) for name, record in records.items()]
    plan = plan_file(path.name, specs, {"format": "pt", PLACES: json.dumps(places)})
    with replacing(path, plan.size) as fd:
        write_exactly(fd, memoryview(plan.header), 0)
        for name, info in plan.tensors.items():
            write_exactly(fd, records[name].read().numpy().data, info.start)
    return path
