"""The torch dtypes of the types in `moectl.dtypes`. Imports torch when one of them is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .dtypes import DTYPES, MODEL_DTYPES
from .lazy_torch import torch


class TorchDtypes(Mapping[str, "torch.dtype"]):
    """Torch dtypes by a name; `torch_names` are their names in torch."""

    def __init__(self, torch_names: Mapping[str, str]) -> None:
        self._torch_names = torch_names
        self._known: dict[str, torch.dtype] = {}

    def __getitem__(self, name: str) -> torch.dtype:
        if name not in self._known:
            self._known[name] = getattr(torch, self._torch_names[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._torch_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._torch_names)

    def __len__(self) -> int:
        return len(self._torch_names)


TORCH_DTYPES: Mapping[str, torch.dtype] = TorchDtypes(
    {name: dtype.torch for name, dtype in DTYPES.items() if dtype.torch}
)
"""Torch dtypes by safetensors name."""

MODEL_TORCH_DTYPES: Mapping[str, torch.dtype] = TorchDtypes(
    {short: DTYPES[name].torch for short, name in MODEL_DTYPES.items()}
)
"""Torch dtypes by `MoEProblem.dtype`."""
