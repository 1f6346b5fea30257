"""Tokens quantized to E4M3 or INT8 codes with fp32 scales, on the GPU: what enters the GEMMs of FP8 and INT8
layers.

Codes and scales are those of `quantize_tokens`, bit for bit, but the last block of a row may have fewer than
128 columns. A NaN of E4M3 stays alone, where `quantize_tokens` spoils all that share its scale; an INT8 token
with one, or with an infinity, has NaN for a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...later import Later
from ...problem.schemes import FULL, ActFormat
from .row_matrix import BLOCK
from .sort_and_combine import INTERPRETED, launch_options

kernels = Later(f"{__package__}.token_codes_kernels")

NATIVE_FROM = 89
"""The first architecture whose matrix units and conversions know E4M3; before it, codes are bytes."""


@dataclass(frozen=True)
class TokenCodes:
    """Quantized rows.

    Attributes:
        codes: ``[rows, columns]``, int8, or float8_e4m3fn, or uint8 for GPUs without that (`code_dtype`).
        scales: fp32 ``[rows, ceil(columns / 128)]``, ``[rows]`` or ``[1]``.
    """

    codes: Tensor
    scales: Tensor


KINDS: Mapping[str, str] = {"all": "ALL", "sorted": "SORTED", "slots": "SLOTS"}
"""`LiveRows.kind` -> the kernels' constant for it."""


@dataclass(frozen=True)
class LiveRows:
    """Which rows hold tokens.

    Attributes:
        kind: one of `KINDS`: ``all``; ``sorted``, the first ``by[experts]``; or ``slots``, those with ids of
            experts.
        by: int32 offsets ``[experts + 1]`` or ids ``[rows]``; None for all.
    """

    kind: str = "all"
    by: Tensor | None = None
    experts: int = 1


ALL_ROWS = LiveRows()


def code_dtype() -> torch.dtype:
    """The dtype in which kernels of the active GPU take E4M3 codes: float8_e4m3fn, or uint8 before SM89."""
    if INTERPRETED:
        return torch.uint8
    target = triton.runtime.driver.active.get_current_target()
    native = target.backend != "cuda" or target.arch >= NATIVE_FROM
    return torch.float8_e4m3fn if native else torch.uint8


def scale_kind(form: ActFormat) -> str:
    """What has a scale in tokens of `form`: a ``block`` of 128 columns, a ``token``, or the ``tensor``."""
    rows, columns = form.block
    return "tensor" if rows == FULL else "token" if columns == FULL else "block"


RUN = 16
"""Blocks of 128 columns that one program reads at a time."""

LARGEST_PROGRAMS = 1024
"""Programs that look for the largest magnitude of everything; the next kernel reads all their results."""

MOST_PROGRAMS = 4096
"""Programs that quantize rows of which some hold no token, twice as many as run at once. On a rank with an
eighth of the experts, seven of eight would have nothing to do, but it would take time to start them."""


def token_rows(columns: int) -> int:
    """Rows of tokens with a scale each that one program quantizes."""
    widths = (kernels.NARROW.value, kernels.MIDDLE.value)
    return next((kernels.AT_ONCE.value // width for width in widths if columns <= width), 1)


def empty_block_codes(like: Tensor, rows: int, columns: int) -> TokenCodes:
    """Room for codes ``[rows, columns]`` with a scale for each 128 columns, on the device of `like`."""
    codes = like.new_empty(rows, columns, dtype=torch.uint8).view(code_dtype())
    return TokenCodes(codes, like.new_empty(rows, triton.cdiv(columns, BLOCK), dtype=torch.float32))


def quantize_rows(
    x: Tensor,
    form: ActFormat,
    scale: Tensor | None = None,
    live: LiveRows = ALL_ROWS,
    *,
    beside: bool = False,
) -> TokenCodes:
    """`x` ``[rows, columns]`` as codes; one launch, for dynamic scales per tensor two.

    Args:
        x: 16-bit or fp32, contiguous.
        form: an FP8 format with scales by blocks of 128 columns, per token or per tensor; or INT8 per token.
        scale: ``[1]`` fp32, the scale of a static format.
        live: the rows that are read; codes and scales of others are undefined.
        beside: the kernel that was launched before lets this one start once its own inputs are complete, and
            writes nothing that this one reads: they run at the same time.

    Example:
        >>> from moectl.problem.schemes import FP8_ACT_TOKEN
        >>> quantize_rows(torch.ones(2, 256, device="cuda"), FP8_ACT_TOKEN).scales.shape  # doctest: +SKIP
        torch.Size([2])
    """
    rows, columns = x.shape
    kind = scale_kind(form)
    most = rows * columns if live.kind == "all" else MOST_PROGRAMS
    options: dict[str, Any] = {"POWERS": form.rounds_scales, "DIVIDE": INTERPRETED, **launch_options()}
    blocks = triton.cdiv(columns, BLOCK)
    runs = triton.cdiv(rows * blocks, RUN)
    if kind == "block":
        made = empty_block_codes(x, rows, columns)
        ids, *which = _which(live, made.scales)
        kernels._block_codes_kernel[(min(runs, most),)](
            x, made.codes, made.scales, ids, rows, columns, *which, int(beside), BLOCKS=RUN, **options
        )
        return made
    dtype = torch.int8 if form.name == "int8" else code_dtype()
    codes = x.new_empty(rows, columns, dtype=torch.uint8).view(dtype)
    if kind == "token":
        scales = x.new_empty(rows, dtype=torch.float32)
        ids, *which = _which(live, scales)
        runs = triton.cdiv(rows, token_rows(columns))
        kernels._token_codes_kernel[(min(runs, most),)](
            x, codes, scales, ids, rows, columns, *which, int(beside), **options
        )
        return TokenCodes(codes, scales)
    scales = x.new_empty(1, dtype=torch.float32) if scale is None else scale
    ids, *which = _which(live, scales)
    programs = min(runs, LARGEST_PROGRAMS)
    largest = scales
    if scale is None:
        largest = x.new_empty(programs, dtype=torch.float32)
        kernels._largest_kernel[(programs,)](
            x, largest, ids, rows, columns, *which, int(beside), BLOCKS=RUN, **launch_options()
        )
        beside = False
    kernels._tensor_codes_kernel[(min(runs, most),)](
        x,
        codes,
        scales,
        largest,
        ids,
        rows,
        columns,
        *which,
        int(beside),
        programs,
        BLOCKS=RUN,
        BP=LARGEST_PROGRAMS,
        DYNAMIC=scale is None,
        **options,
    )
    return TokenCodes(codes, scales)


def _which(live: LiveRows, unread: Tensor) -> tuple[Tensor, int, int]:
    """IDS, LIVE and E of the kernels; `unread`, in four bytes, stands for ids that are not read."""
    ids = unread.view(torch.int32) if live.by is None else live.by
    return ids, getattr(kernels, KINDS[live.kind]).value, live.experts
