"""The torch dtypes of the types in `moectl.dtypes`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .dtypes import DTYPES, MODEL_DTYPES

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, dtype.torch) for name, dtype in DTYPES.items() if dtype.torch
}
"""Torch dtypes by safetensors name."""

MODEL_TORCH_DTYPES: Mapping[str, torch.dtype] = {
    short: TORCH_DTYPES[name] for short, name in MODEL_DTYPES.items()
}
"""Torch dtypes by `MoEProblem.dtype`."""
