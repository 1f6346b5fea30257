"""Recorded activations of experts, and the statistics of them that quantizers use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...errors import CheckpointError
from ...files.safe_reading import open_regular, read_exactly
from ...files.safetensors_header import read_header
from ...files.tensor_table import TensorInfo
from ...lazy_torch import Tensor, torch

Activate = Callable[[Tensor], Tensor]
"""The first GEMM's outputs ``[tokens, rows of w13]`` to the second's inputs ``[tokens, intermediate]``."""

NAMES = ("layers.{layer}.experts.{expert}.x", "layers.{layer}.x", "x")
"""Names of a calibration tensor ``[tokens, hidden]``, the most specific first."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Safetensors dtypes of activations."""

SMALLEST, LARGEST = 1e-15, 1e15
"""Bounds of the largest magnitude of activations: sums of their squares are float32."""

TOKENS = 4096
"""Tokens that are processed at a time."""


class Calibration:
    """Activations ``[tokens, hidden]`` in a safetensors file, in tensors with the names of `NAMES`.

    Raises CheckpointError when the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, f"calibration file {path}") as file:
            try:
                self._tensors = read_header(file, os.fstat(file.fileno()).st_size, path.name)
            except CheckpointError as error:
                raise CheckpointError(
                    f"calibration file {path} cannot be read: {error.what}.",
                    hint="Record the activations again.",
                ) from error

    def shared(self, layer: int) -> bool:
        """True when all experts of `layer` share the same activations."""
        begin, end = NAMES[0].format(layer=layer, expert="\0").split("\0")
        return not any(name.startswith(begin) and name.endswith(end) for name in self._tensors)

    def check(self, layer: int, experts: int, hidden: int) -> None:
        """Raises CheckpointError as `tokens` does, for all experts' headers and the first one's numbers."""
        for expert in range(experts):
            self._tensor(layer, expert, hidden)
        self.tokens(layer, 0, hidden)

    def _tensor(self, layer: int, expert: int, hidden: int) -> TensorInfo:
        """Where one expert's tensor is, after a check of its dtype and shape."""
        names = [name.format(layer=layer, expert=expert) for name in NAMES]
        name = next((name for name in names if name in self._tensors), None)
        if name is None:
            raise CheckpointError(
                f"calibration file {self.path} has no activations for expert {expert} of layer {layer}.",
                hint=f"Store a tensor [tokens, {hidden}] named {', '.join(names[:-1])} or {names[-1]}.",
            )
        info = self._tensors[name]
        shape = info.shape
        if info.dtype not in FLOATS or len(shape) != 2 or shape[1] != hidden or not shape[0]:
            raise CheckpointError(
                f"calibration tensor {name} of {self.path} must be floats [tokens, {hidden}], "
                f"got {info.dtype} {list(shape)}.",
                hint="Store the inputs of the layer's experts, one row per token.",
            )
        return info

    def tokens(self, layer: int, expert: int, hidden: int) -> Tensor:
        """``[tokens, hidden]`` float32: the inputs of `expert` of `layer`.

        Raises CheckpointError when there are none, their shape or dtype is wrong, they are not finite, or
        their squares exceed the range of float32.
        """
        from ...torch_dtypes import TORCH_DTYPES

        info = self._tensor(layer, expert, hidden)
        x = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        with open_regular(self.path, f"calibration file {self.path}") as file:
            view = memoryview(x.view(-1).view(torch.uint8).numpy().data)
            read_exactly(file.fileno(), view, info.start, self.path.name)
        least, most = SMALLEST, LARGEST
        if not bool(torch.isfinite(x).all()):
            fault = "has NaN or infinite values"
        elif not least <= (largest := float(x.abs().max())) <= most:
            fault = f"must have magnitudes up to between {least:g} and {most:g}, got {largest:g}"
        else:
            return x.float()
        raise CheckpointError(
            f"calibration tensor {info.name} of {self.path} {fault}.", hint="Record the activations again."
        )


def hessian(x: Tensor) -> Tensor:
    """``[k, k]`` float32: the mean of x x^T over the rows of `x` ``[tokens, k]``.

    Its diagonal is the `importance` of each column of weights.

    Example:
        >>> hessian(torch.tensor([[1.0, 2.0], [3.0, 0.0]])).tolist()
        [[5.0, 1.0], [1.0, 2.0]]
    """
    total = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float32)
    for part in torch.split(x, TOKENS):
        total.addmm_(part.float().T, part.float())
    return total.div_(len(x))


def importance(x: Tensor) -> Tensor:
    """``[k]`` float32: the mean square of every column of `x` ``[tokens, k]``.

    Example:
        >>> importance(torch.tensor([[1.0, 2.0], [3.0, 0.0]])).tolist()
        [5.0, 2.0]
    """
    return x.float().square().mean(0)


def intermediate(x: Tensor, w13: Tensor, activate: Activate, bias: Tensor | None = None) -> Tensor:
    """``[tokens, intermediate]`` float32: the inputs of ``w2`` of one expert, for the expert's inputs `x`.

    `w13` ``[rows, hidden]`` and `bias` ``[rows]`` are the expert's unquantized first matrix.
    """
    parts = []
    for part in torch.split(x, TOKENS):
        rows = part.float() @ w13.float().T
        parts.append(activate(rows if bias is None else rows + bias.float()))
    return torch.cat(parts)
