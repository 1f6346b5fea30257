"""Quantization of one matrix, in pieces of whole rows of scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...lazy_torch import Tensor, torch
from ...problem.schemes import FULL
from ..codecs import Encoded, Scaled
from ..codecs.blocks import WITHIN, ScaleBlocks
from ..onepass.cpu_pass import thread_count
from . import gptq
from .error_loops import Loops, loops_for
from .error_tally import ErrorSums, ErrorTally, block_sums
from .quantizer_options import Quantizer
from .scale_search import search, with_headroom
from .threads import run_on_threads

PIECE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Weights in progress at a time, in all threads together: enough to hide the overhead of calls."""

MIN_PIECE = 1 << 17
"""Smallest number of weights of a thread's piece."""


@dataclass(frozen=True)
class MatrixCalibration:
    """Statistics of the inputs of one matrix, each None if unknown.

    Attributes:
        importance: ``[k]`` weights of squared errors.
        hessian: ``[k, k]``, the mean of x x^T.
        upper: ``[k, k]``, `gptq.factor` of the Hessian, if all experts share it.
    """

    importance: Tensor | None = None
    hessian: Tensor | None = None
    upper: Tensor | None = None


class _BlockedWeights(NamedTuple):
    """Blocked weights with the global scale divided out, and the usual scales and zeros of their blocks."""

    x: Tensor
    scale: Tensor
    zero: Tensor | None


class _Encoding(NamedTuple):
    """One encoding of some rows: blocked codes (one per byte), stored scales and zeros."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


class MatrixQuantizer:
    """Quantizes matrices of one shape."""

    def __init__(self, codec: Scaled, options: Quantizer, blocks: ScaleBlocks, device: torch.device) -> None:
        self.codec, self.options, self.blocks = codec, options, blocks
        all_rows = options.method == "gptq" or options.weight.block[0] == FULL
        self._threads = thread_count() if device.type == "cpu" and not all_rows else 1
        piece = max(MIN_PIECE, PIECE.get(device.type, PIECE["cpu"]) // self._threads)
        rows = max(1, piece // (blocks.k * blocks.rows)) * blocks.rows
        self._rows = blocks.n if all_rows else min(rows, blocks.n)

    def matrix(self, matrix: Tensor, calibrated: MatrixCalibration, tally: ErrorTally) -> Encoded:
        """Canonical tensors of `matrix` ``[n, k]``, as a batch of one; its errors are added to `tally`."""
        usual, chosen = self._global_scales(matrix)
        hessian = calibrated.hessian
        if self.options.method == "gptq" and calibrated.upper is None and hessian is not None:
            calibrated = replace(calibrated, upper=gptq.factor(hessian, self.options.damping))

        def piece(first: int) -> tuple[Encoded, ErrorSums]:
            w = matrix[None, first : first + self._rows].float()
            blocks = replace(self.blocks, n=w.shape[1])
            blocked = blocks.split(w)
            start = self._usual(blocked, chosen)
            rtn = start if usual is chosen else self._usual(blocked, usual)
            best = self._quantize(start, blocks, calibrated)
            encoded = Encoded(self.codec.pack(blocks, best.codes), best.scale, best.zero, chosen)
            difference = self.codec.decode(*encoded).sub_(w)
            if hessian is None:
                nearest, outputs = self._nearest_errors(rtn, usual), None
            else:
                rounded = self._nearest(rtn, blocks, usual).sub_(w)
                outputs = [gptq.output_errors(t[0], hessian) for t in (w, difference, rounded)]
                nearest = block_sums(blocks, rounded)
            signal, errors = block_sums(blocks, w), block_sums(blocks, difference)
            return encoded, ErrorSums(w.numel(), signal, errors, nearest, blocks, first, outputs)

        results = run_on_threads(piece, range(0, self.blocks.n, self._rows), self._threads)
        for _, sums in results:
            tally.add(sums)
        parts = [encoded for encoded, _ in results]
        zeros = [part.zero for part in parts if part.zero is not None]
        scales = [part.scale for part in parts if part.scale is not None]
        return Encoded(
            torch.cat([part.codes for part in parts], 1),
            torch.cat(scales, 1),
            torch.cat(zeros, 1) if zeros else None,
            chosen,
        )

    def _global_scales(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The usual global scale ``[1, 1, 1]`` and the one used; None if the format has none."""
        if not self.codec.two_level:
            return None, None
        blocked = self.blocks.split(matrix[None])
        largest = torch.maximum(blocked.amax(WITHIN), -blocked.amin(WITHIN)).float()
        usual = self.codec.global_scale(largest.flatten(1).amax(1))
        return usual, usual if self.options.method == "rtn" else with_headroom(self.codec, usual, largest)

    def _usual(self, blocked: Tensor, global_scale: Tensor | None) -> _BlockedWeights:
        x = blocked if global_scale is None else blocked / global_scale[..., None, None]
        return _BlockedWeights(x, *self.codec.usual_scales(x))

    def _nearest(self, weights: _BlockedWeights, blocks: ScaleBlocks, usual: Tensor | None) -> Tensor:
        """``[1, n, k]``: the weights rounded to nearest at the usual scales."""
        values = self.codec.rounded(*weights)
        return blocks.join(values if usual is None else values.mul_(usual[..., None, None]))

    def _nearest_errors(self, weights: _BlockedWeights, usual: Tensor | None) -> Tensor:
        """``[1, block rows, block columns]``: the squared errors of `_nearest`."""
        x, scale, zero = weights
        errors = self._loops(x).errors(self.codec.grid, x, *self._numbers(scale, zero), None)
        return errors if usual is None else errors.mul_(usual.square())

    def _codes(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> _Encoding:
        codes = self._loops(x).codes(self.codec.grid, x, *self._numbers(scale, zero))
        return _Encoding(codes, scale, zero)

    def _numbers(self, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.codec.store.load(scale), None if zero is None else self.codec.shift(zero)

    def _loops(self, x: Tensor) -> Loops:
        return loops_for(x.device, self.blocks.n * self.blocks.k)

    def _quantize(
        self, weights: _BlockedWeights, blocks: ScaleBlocks, calibrated: MatrixCalibration
    ) -> _Encoding:
        """The encoding that the method chooses."""
        x, scale, zero = weights
        if self.options.method == "rtn":
            return self._codes(x, scale, zero)
        importance = calibrated.importance
        weight = None if importance is None else replace(blocks, n=1, rows=1).split(importance[None, None])
        searched = self._codes(x, *search(self.codec, x, scale, zero, weight, self._loops(x).errors))
        if self.options.method == "search" or calibrated.hessian is None:
            return searched
        nearest = self._codes(x, scale, zero)
        compensated = self._compensated(x, blocks, searched, calibrated)
        return self._best((searched, nearest, compensated), x, blocks, calibrated)

    def _compensated(
        self, x: Tensor, blocks: ScaleBlocks, searched: _Encoding, calibrated: MatrixCalibration
    ) -> _Encoding:
        """The encoding by GPTQ, from the scales of `searched`."""
        assert calibrated.upper is not None and calibrated.importance is not None
        codes, scale, zero = gptq.feed_back(
            self.codec,
            blocks.join(x)[0].clone(),
            calibrated.upper,
            calibrated.importance,
            searched.scale[0],
            None if searched.zero is None else searched.zero[0],
        )
        return _Encoding(blocks.split(codes[None]), scale[None], None if zero is None else zero[None])

    def _best(
        self, encodings: tuple[_Encoding, ...], x: Tensor, blocks: ScaleBlocks, calibrated: MatrixCalibration
    ) -> _Encoding:
        """For every row of blocks the encoding with the smallest output error, the first of equals."""
        assert calibrated.hessian is not None
        best, least = encodings[0], self._row_errors(encodings[0], x, blocks, calibrated.hessian)
        for encoding in encodings[1:]:
            error = self._row_errors(encoding, x, blocks, calibrated.hessian)
            better = error < least
            least = torch.where(better, error, least)
            row = better[:, :, None]
            best = _Encoding(
                torch.where(row[..., None, None], encoding.codes, best.codes),
                torch.where(row, encoding.scale, best.scale),
                None
                if encoding.zero is None or best.zero is None
                else torch.where(row, encoding.zero, best.zero),
            )
        return best

    def _row_errors(self, encoding: _Encoding, x: Tensor, blocks: ScaleBlocks, hessian: Tensor) -> Tensor:
        """``[1, block rows]``: the squared errors of the outputs, in units of the squared global scale."""
        difference = blocks.join(self.codec.valued(*encoding).sub_(x))[0]
        rows = gptq.output_errors(difference, hessian)
        whole = torch.nn.functional.pad(rows, (0, blocks.scales[0] * blocks.rows - blocks.n))
        return whole.reshape(1, -1, blocks.rows).sum(-1)
