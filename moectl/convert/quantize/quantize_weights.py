"""Quantization of a batch of experts, with a report of the errors."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError
from ...lazy_torch import Tensor, torch
from ..codecs import Codec, Encoded, Scaled, check_weights, codec_for, from_halves, in_halves
from ..codecs.blocks import ScaleBlocks
from . import gptq
from .error_report import QuantizationReport
from .error_tally import ErrorSums, ErrorTally, block_sums
from .matrix_quantizer import MatrixCalibration, MatrixQuantizer
from .quantizer_options import Quantizer


@dataclass(frozen=True)
class QuantizedRoles:
    """Canonical tensors by role (``w13``, ``w13_scale``, ...) and the report of their errors."""

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

    Results do not depend on how experts are batched. Working memory beyond input and output: ten float32
    for each weight in progress. A piece is whole rows of scales, `matrix_quantizer.PIECE` weights in all
    threads together and at least `MIN_PIECE` in each; if all rows share a scale, and for ``gptq``, it is one
    matrix, with four more float32 for each element of the Hessian.

    Args:
        weights: ``[e, n, k]`` of any float dtype, finite.
        options: format, method, rule.
        role: canonical role of the results.
        halves: 2 for ``w13`` with gate rows before up rows: each half has its own blocks (of several
            rows), per-tensor scales and global scales.
        importance: ``[k]`` or ``[e, k]``, not negative: weights of the squared errors in the search,
            usually the mean square of the activations.
        hessian: ``[k, k]`` or ``[e, k, k]``: the mean of x x^T of the activations, for ``gptq``; its
            diagonal is the default importance. Adds output errors to the report.
        first_expert: number of the first expert, for the report.

    Raises:
        CheckpointError: weights are not finite, or not whole groups.
        UsageError: importance or Hessian have the wrong shape, or are missing for ``gptq``.

    Example:
        >>> from moectl.problem.schemes import MXFP4
        >>> quantized = quantize(torch.linspace(-1, 1, 64).reshape(1, 2, 32), Quantizer(MXFP4), "w2")
        >>> {role: tuple(t.shape) for role, t in quantized.roles.items()}
        {'w2': (1, 2, 16), 'w2_scale': (1, 2, 1)}
        >>> quantized.report.summary()["snr_db"] > 15
        True
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
    quantizer = MatrixQuantizer(codec, options, codec.blocks(matrices), weights.device)
    upper = None
    if options.method == "gptq" and hessian is not None and hessian.ndim == 2:
        upper = gptq.factor(hessian, options.damping)
    out: Encoded | None = None
    tally = ErrorTally(options, role)
    for i, matrix in enumerate(matrices):
        expert, half = divmod(i, halves)
        calibration = MatrixCalibration(
            _of_expert(importance, expert, 1), _of_expert(hessian, expert, 2), upper
        )
        tally.begin(first_expert + expert, half * (n // halves))
        encoded = quantizer.matrix(matrix, calibration, tally)
        if out is None:
            out = _empty_like(encoded, len(matrices))
        for whole, part in zip(out, encoded, strict=True):
            if whole is not None and part is not None:
                whole[i] = part[0]
    if out is None:
        raise UsageError("there are no experts to quantize.")
    return QuantizedRoles(from_halves(out, halves).roles(role), tally.report())


def _rounded(
    weights: Tensor, codec: Codec, tally: ErrorTally, role: str, hessian: Tensor | None, first_expert: int
) -> QuantizedRoles:
    """`quantize` for a format without scales."""
    _, n, k = weights.shape
    encoded = codec.encode(weights)
    for i, matrix in enumerate(weights):
        w = matrix[None].float()
        tally.begin(first_expert + i, 0)
        difference = codec.decode(encoded.codes[i : i + 1]) - w
        rows, h = ScaleBlocks(n, k, 1, k), _of_expert(hessian, i, 2)
        outputs = None if h is None else [gptq.output_errors(t[0], h) for t in (w, difference, difference)]
        errors = block_sums(rows, difference)
        tally.add(ErrorSums(w.numel(), block_sums(rows, w), errors, errors, rows, 0, outputs))
    return QuantizedRoles(encoded.roles(role), tally.report())


def _empty_like(encoded: Encoded, matrices: int) -> Encoded:
    """Uninitialized tensors for `matrices` matrices like `encoded`."""
    codes, *rest = (t if t is None else t.new_empty(matrices, *t.shape[1:]) for t in encoded)
    assert codes is not None
    return Encoded(codes, *rest)


def _of_expert(calibration: Tensor | None, expert: int, axes: int) -> Tensor | None:
    """The calibration of one expert, a tensor of `axes` axes; one with more axes is indexed by expert."""
    if calibration is None:
        return None
    return (calibration if calibration.ndim == axes else calibration[expert]).float()


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
