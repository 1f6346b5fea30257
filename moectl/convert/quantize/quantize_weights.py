"""Weights to codes and scales, expert by expert, with a report of what it cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UsageError
from ..codecs import Codec, Encoded, Scaled, check_weights, codec_for, from_halves, in_halves
from ..codecs.blocks import ScaleBlocks
from . import gptq
from .error_report import QuantizationReport
from .error_tally import ErrorSums, ErrorTally, block_sums
from .matrix_quantizer import MatrixCalibration, MatrixQuantizer
from .quantizer_options import Quantizer


@dataclass(frozen=True)
class QuantizedRoles:
    """Canonical tensors by role (``w13``, ``w13_scale``, ...) and what they cost."""

    roles: dict[str, Tensor]
    report: QuantizationReport


def quantize(
    weights: Tensor,
    options: Quantizer,
    role: str = "w13",
    *,
    halves: int = 1,
    importance: Tensor | None = None,
    hessian: Tensor | None = None,
    first_expert: int = 0,
) -> QuantizedRoles:
    """The canonical tensors of `role` for a batch of experts, on the device of `weights`.

    The same input gives the same result, however experts are batched. Working memory beyond input and
    output: ten float32 for each weight that is worked on. Pieces are whole
    rows of scales, `work.PIECE` weights by all threads together, `work.LEAST` by each; where all rows
    share a scale and for ``gptq`` one matrix, with four float32 for each number of the Hessian.

    Args:
        weights: ``[e, n, k]`` of any float dtype, finite.
        options: format, method, rule.
        role: names the results.
        halves: 2 for ``w13`` of gate rows, then up rows: each half has blocks (of several rows),
            per-tensor scales and global scales of its own.
        importance: ``[k]`` or ``[e, k]``, not negative: weights the squared errors of the search; the
            mean square of the activations is what makes sense.
        hessian: ``[k, k]`` or ``[e, k, k]``: the mean of x x^T of the activations, for ``gptq``; its
            diagonal is the importance where none is given. Adds output errors to the report.
        first_expert: number of the first expert, for the report.

    Raises:
        CheckpointError: weights that are no numbers, or that do not fill whole groups.
        UsageError: importance or Hessian of another shape, or missing for ``gptq``.
    """
    check_weights(weights)
    e, n, k = weights.shape
    if n % halves:
        raise UsageError(f"{n} rows do not make {halves} halves.")
    _check_calibration(options, importance, hessian, e, k)
    if importance is None and hessian is not None:
        importance = hessian.diagonal(dim1=-2, dim2=-1)
    codec = codec_for(options.weight, options.rule)
    if not isinstance(codec, Scaled):
        return _rounded(weights, codec, ErrorTally(options, role), role, hessian, first_expert)
    matrices = in_halves(Encoded(weights), halves).codes if halves > 1 else weights
    work = MatrixQuantizer(codec, options, codec.blocks(matrices), weights.device)
    upper = None
    if options.method == "gptq" and hessian is not None and hessian.ndim == 2:
        upper = gptq.factor(hessian, options.damping)
    out: Encoded | None = None
    tally = ErrorTally(options, role)
    for i, matrix in enumerate(matrices):
        expert, half = divmod(i, halves)
        calibration = MatrixCalibration(_of(importance, expert, 1), _of(hessian, expert, 2), upper)
        tally.begin(first_expert + expert, half * (n // halves))
        encoded = work.matrix(matrix, calibration, tally)
        if out is None:
            out = _room(encoded, len(matrices))
        for whole, part in zip(out, encoded, strict=True):
            if whole is not None and part is not None:
                whole[i] = part[0]
    if out is None:
        raise UsageError("there are no experts to quantize.")
    return QuantizedRoles(from_halves(out, halves).roles(role), tally.report())


def _rounded(
    weights: Tensor, codec: Codec, tally: ErrorTally, role: str, hessian: Tensor | None, first_expert: int
) -> QuantizedRoles:
    """The result of a format without scales, where there is nothing to choose; arguments of `quantize`."""
    _, n, k = weights.shape
    encoded = codec.encode(weights)
    for i, matrix in enumerate(weights):
        w = matrix[None].float()
        tally.begin(first_expert + i, 0)
        lost = codec.decode(encoded.codes[i : i + 1]) - w
        rows, h = ScaleBlocks(n, k, 1, k), _of(hessian, i, 2)
        outputs = None if h is None else [gptq.output_errors(t[0], h) for t in (w, lost, lost)]
        sums = block_sums(rows, lost)
        tally.add(ErrorSums(w.numel(), block_sums(rows, w), sums, sums, rows, 0, outputs))
    return QuantizedRoles(encoded.roles(role), tally.report())


def _room(one: Encoded, matrices: int) -> Encoded:
    """Unwritten tensors for as many `matrices` like `one`."""
    codes, *rest = (t if t is None else t.new_empty(matrices, *t.shape[1:]) for t in one)
    assert codes is not None
    return Encoded(codes, *rest)


def _of(calibration: Tensor | None, expert: int, one: int) -> Tensor | None:
    """What belongs to one expert: `one` is how many axes it has."""
    if calibration is None:
        return None
    return (calibration if calibration.ndim == one else calibration[expert]).float()


def _check_calibration(
    options: Quantizer, importance: Tensor | None, hessian: Tensor | None, e: int, k: int
) -> None:
    if options.method == "gptq" and hessian is None:
        raise UsageError(
            "gptq needs the Hessian of calibration activations, got none.",
            hint="Give calibration activations, or choose the search.",
        )
    for name, t, shape in (("importance", importance, (k,)), ("Hessian", hessian, (k, k))):
        if t is None:
            continue
        if tuple(t.shape) not in (shape, (e, *shape)):
            raise UsageError(f"the {name} must be {list(shape)} or {[e, *shape]}, got {list(t.shape)}.")
        if not bool(torch.isfinite(t).all()) or bool(
            (t if name == "importance" else t.diagonal(0, -2, -1)).lt(0).any()
        ):
            raise UsageError(f"the {name} must be finite and not negative (on its diagonal).")
