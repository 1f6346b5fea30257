"""Chains of reversible steps from a canonical tensor to its stored form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ...files.safetensors_writer import nbytes
from ...files.tensor_table import TensorType
from ...lazy_torch import Tensor, torch
from ..onepass.executors import one_pass
from ..steps.transforms import DTYPES, Shape, Step, dtype_name, step_from_json, step_to_json, type_of

MAX_STEPS = 64
MAX_BYTES = 1 << 42
"""Largest tensor of a chain: 4 TiB, above any layer. A manifest that needs more is refused."""

BLOCK_BYTES = 16 << 20
"""Bytes of a block of experts converted at a time, so that working memory does not grow with the batch."""


@dataclass(frozen=True)
class Chain:
    """Steps from a canonical tensor to its stored form, and their inverse.

    Every chain converts each expert independently: converting a slice along axis 0 gives that slice of the
    result. Large tensors are converted in one pass where the steps compose into one (`onepass`), otherwise
    step by step in blocks of experts; the bytes are the same.

    Example:
        >>> import torch
        >>> from moectl.convert.steps.transforms import PackedCodes, Rearrange
        >>> chain = Chain((Rearrange("e n k -> e k n"), PackedCodes(4, unpack=False)))
        >>> codes = torch.tensor([[[1, 2], [3, 4]]], dtype=torch.uint8)
        >>> packed = chain.apply(codes)
        >>> [hex(byte) for byte in packed.flatten().tolist()]
        ['0x31', '0x42']
        >>> torch.equal(chain.undo(packed, "U8", (1, 2, 2)), codes)
        True
    """

    steps: tuple[Step, ...] = ()

    def trace(self, dtype: str, shape: Shape) -> tuple[TensorType, ...]:
        """Dtype and shape before every step and after the last; CheckpointError when they do not fit."""
        types = [TensorType(dtype, tuple(shape))]
        for step in self.steps:
            types.append(step.output_type(*types[-1]))
        for kind, size in types:
            if nbytes(kind, size) > MAX_BYTES:
                raise CheckpointError(f"a tensor of {kind} {size} is larger than any MoE layer.")
        return tuple(types)

    def stored_type(self, dtype: str, shape: Shape) -> TensorType:
        """Stored dtype and shape of a canonical tensor of `shape` and `dtype`."""
        return self.trace(dtype, shape)[-1]

    def apply(self, t: Tensor, out: Tensor | None = None, *, lean: bool = False) -> Tensor:
        """The stored form of canonical `t`: contiguous, on the device of `t`, written to `out` if given.

        With `lean` small tensors take no more memory than they must either, after code is compiled for them.
        """
        target = _output(t, self.stored_type(*type_of(t)), out)
        if one_pass(self.steps, t, target, type_of(t), any_size=lean):
            return target
        return self._blocks(t, target, self._forward)

    def undo(
        self, t: Tensor, dtype: str, shape: Shape, out: Tensor | None = None, *, lean: bool = False
    ) -> Tensor:
        """The canonical tensor of `shape` and `dtype` that is stored as `t`; `lean` as in `apply`.

        Raises CheckpointError when `t` is not of the type in which such a tensor is stored.
        """
        stored = self.stored_type(dtype, shape)
        if type_of(t) != stored:
            raise CheckpointError(
                f"a {dtype} tensor {tuple(shape)} is stored as {stored.dtype} {stored.shape}, "
                f"got {dtype_name(t.dtype)} {tuple(t.shape)}."
            )

        def backward(block: Tensor) -> Tensor:
            types = self.trace(dtype, (block.shape[0], *shape[1:]))
            for step, before in zip(reversed(self.steps), reversed(types[:-1]), strict=True):
                block = step.undo(block, *before)
            return block

        canonical = TensorType(dtype, tuple(shape))
        target = _output(t, canonical, out)
        if one_pass(self.steps, t, target, canonical, inverse=True, any_size=lean):
            return target
        return self._blocks(t, target, backward)

    def _forward(self, t: Tensor) -> Tensor:
        for step in self.steps:
            t = step.apply(t)
        return t

    def _blocks(self, t: Tensor, out: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        experts = t.shape[0]
        largest = max(t.numel() * t.element_size(), out.numel() * out.element_size(), 1) // max(experts, 1)
        count = experts if t.is_cuda else max(BLOCK_BYTES // max(largest, 1), 1)
        for start in range(0, experts, max(count, 1)):
            out[start : start + count] = convert(t[start : start + count])
        return out

    def to_json(self) -> list[dict[str, Any]]:
        """The steps as JSON data, enough to restore tensors without this version of the layout."""
        return [step_to_json(step) for step in self.steps]

    @classmethod
    def from_json(cls, data: Any) -> Chain:
        """The chain that untrusted `data` describes; CheckpointError when a step is unknown or absurd."""
        if not isinstance(data, list) or len(data) > MAX_STEPS:
            raise CheckpointError(f"a chain must be a list of at most {MAX_STEPS} steps.")
        return cls(tuple(step_from_json(item, f"chain step {i}") for i, item in enumerate(data)))


def _output(t: Tensor, expected: TensorType, out: Tensor | None) -> Tensor:
    dtype, shape = expected
    if out is None:
        return torch.empty(shape, dtype=DTYPES[dtype], device=t.device)
    if tuple(out.shape) != shape or out.dtype is not DTYPES[dtype]:
        raise CheckpointError(f"the output must be {dtype} {shape}, got {out.dtype} {tuple(out.shape)}.")
    return out
