"""Comparison of recorded packings of checkpoints' codes with the steps of `sources.packings`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from moectl.convert.recipe.chain import Chain
from moectl.convert.sources import packings
from moectl.convert.steps.transforms import PackedCodes, Step

from .recordings import Mismatch, Recording


def _bits(codes: int, words: int) -> int:
    """Bits per code when `codes` codes fill `words` words."""
    for bits in (4, 8):
        if -(-codes * bits // 32) == words:
            return bits
    raise Mismatch(f"{codes} codes of 4 or 8 bits do not fill {words} words")


def _whole(t: Tensor, axis: int, bits: int) -> Tensor:
    """`t` padded with zero codes to whole words along `axis`."""
    missing = -t.shape[axis] % (32 // bits)
    return pad(t, [0, 0] * (-axis - 1) + [0, missing])


def _rows(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[e, n, k]`` as packed rows."""
    return Chain((PackedCodes(4, False),)).apply(codes) if bits == 4 else codes


def _offset(t: Tensor, bits: int) -> Tensor:
    """Signed numbers as offset codes; Mismatch when one has more bits."""
    codes = t.to(torch.int16) + (1 << (bits - 1))
    if bool(((codes < 0) | (codes >= 1 << bits)).any()):
        raise Mismatch(f"numbers of more than {bits} bits")
    return codes.to(torch.uint8)


Packing = tuple[str, tuple[Step, ...], Tensor]
"""The output's name, the steps from it to the canonical role, and the canonical tensor."""

_ZERO = re.compile(r"zp(\w*)_int8")


def _compressed_tensors(recording: Recording) -> Iterator[Packing]:
    """Weights ``STEM_int8`` and zero points ``zpSTEM_int8``, signed, to words along K and along N."""
    for name, t in recording.inputs.items():
        zero = _ZERO.fullmatch(name)
        output = f"weight{zero[1]}_zero_point" if zero else f"{name.removesuffix('_int8')}_packed"
        packed = _output(recording, output)
        axis = -2 if zero else -1
        bits = _bits(t.shape[axis], packed.shape[axis])
        codes = _whole(_offset(t, bits), axis, bits)
        yield (
            output,
            packings.zeros_along_n(bits) if zero else packings.WORDS_ALONG_K,
            codes if zero else _rows(codes, bits),
        )


def _gptq_awq(recording: Recording) -> Iterator[Packing]:
    """One matrix of codes ``[k, n]`` packed along k (GPTQ), along n in AWQ's order, and along n (zeros)."""
    if set(recording.inputs) != {"codes"} or recording.inputs["codes"].ndim != 2:
        raise Mismatch("input codes with two axes is missing, or not alone")
    codes = recording.inputs["codes"].to(torch.uint8).t().unsqueeze(0)
    for output, t in recording.outputs.items():
        if output not in ("gptq_qweight", "awq_qweight", "gptq_qzeros_style"):
            raise Mismatch(f"tensors that are not compared: {output}")
        if output == "gptq_qweight":
            bits = _bits(codes.shape[2], t.shape[0])
            yield output, packings.WORDS_OF_K, _rows(_whole(codes, -1, bits), bits)
        elif output == "awq_qweight":
            yield output, packings.awq_weights(), _rows(_whole(codes, -2, 4), 4)
        else:
            bits = _bits(codes.shape[1], t.shape[1])
            yield output, packings.gptq_zeros(bits), _whole(codes, -2, bits)


PACKINGS: Mapping[str, Callable[[Recording], Iterator[Packing]]] = {
    "helpers.py::pack_to_int32": _compressed_tensors,
    "quant_utils.py::gptq_pack": _gptq_awq,
}
"""The functions whose packings were recorded, by file and name."""


def _output(recording: Recording, name: str) -> Tensor:
    if name not in recording.outputs:
        raise Mismatch(f"{name}: there is no output to compare with")
    return recording.outputs[name]


def compare_packings(recording: Recording, packings: Iterator[Packing]) -> str:
    """What was compared, in words; Mismatch at the first difference or tensor that is not compared."""
    compared: set[str] = set()
    for name, steps, canonical in packings:
        recorded = _output(recording, name)
        if recorded.dtype is not torch.int32:
            raise Mismatch(f"{name}: {recorded.dtype} is recorded, int32 words expected")
        words = recorded.reshape(-1, *recorded.shape[-2:])
        codes = Chain(steps).apply(words)
        if codes.shape != canonical.shape or not torch.equal(codes, canonical):
            raise Mismatch(f"{name}: the codes differ")
        packed = Chain(steps).undo(canonical, "I32", tuple(words.shape))
        if not torch.equal(packed, words):
            raise Mismatch(f"{name}: packing the codes gives other words")
        compared.add(name)
    extra = sorted(set(recording.outputs) - compared)
    if extra:
        raise Mismatch(f"tensors that are not compared: {', '.join(extra)}")
    return f"{len(compared)} tensors equal, round trip exact"
