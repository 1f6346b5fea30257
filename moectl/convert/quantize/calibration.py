"""Recorded activations of experts, and the statistics of them that quantizers use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError
from ...files.safe_reading import open_regular
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
        with open_regular(path, f"calibration file {path}"):
            pass  # a pipe would be waited for
        try:
            with safe_open(path, framework="pt") as file:
                self._names = frozenset(file.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"calibration file {path} cannot be read: {error}.") from error

    def shared(self, layer: int) -> bool:
        """True when all experts of `layer` share the same activations."""
        begin, end = NAMES[0].format(layer=layer, expert="\0").split("\0")
        return not any(name.startswith(begin) and name.endswith(end) for name in self._names)

    def check(self, layer: int, experts: int, hidden: int) -> None:
        """Raises CheckpointError as `tokens` does, for all experts' headers and the first one's numbers."""
        with safe_open(self.path, framework="pt") as file:
            for expert in range(experts):
                self._named(file, layer, expert, hidden)
        self.tokens(layer, 0, hidden)

    def _named(self, file: Any, layer: int, expert: int, hidden: int) -> str:
        """The name of one expert's tensor, after a check of its dtype and shape."""
        names = [name.format(layer=layer, expert=expert) for name in NAMES]
        name = next((name for name in names if name in self._names), None)
        if name is None:
            raise CheckpointError(
                f"calibration file {self.path} has no activations for expert {expert} of layer {layer}.",
                hint=f"Store a tensor [tokens, {hidden}] named {', '.join(names[:-1])} or {names[-1]}.",
            )
        header = file.get_slice(name)
        dtype, shape = header.get_dtype(), header.get_shape()
        if dtype not in FLOATS or len(shape) != 2 or shape[1] != hidden or not shape[0]:
            raise CheckpointError(
                f"calibration tensor {name} of {self.path} must be floats [tokens, {hidden}], "
                f"got {dtype} {shape}.",
                hint="Store the inputs of the layer's experts, one row per token.",
            )
        return name

    def tokens(self, layer: int, expert: int, hidden: int) -> Tensor:
        """``[tokens, hidden]`` float32: the inputs of `expert` of `layer`.

        Raises CheckpointError when there are none, their shape or dtype is wrong, they are not finite, or
        their squares exceed the range of float32.
        """
        with safe_open(self.path, framework="pt") as file:
            name = self._named(file, layer, expert, hidden)
            x: Tensor = file.get_tensor(name)
        least, most = SMALLEST, LARGEST
        if not bool(torch.isfinite(x).all()):
            fault = "has NaN or infinite values"
        elif not least <= (largest := float(x.abs().max())) <= most:
            fault = f"must have magnitudes up to between {least:g} and {most:g}, got {largest:g}"
        else:
            return x.float()
        raise CheckpointError(
            f"calibration tensor {name} of {self.path} {fault}.", hint="Record the activations again."
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
