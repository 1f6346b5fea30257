"""In place of SGLang's compiled kernels, which exist for GPUs and for CPUs with AMX: two operators in torch.

On a CPU, SGLang serves gpt-oss with the attention backend ``intel_amx`` alone; its two operators are here.
Any other kernel can be imported, and says that it is missing when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor keys, Tensor values, "
    "float k_scale, float v_scale, Tensor tokens, Tensor rows, Tensor lengths, Tensor new, Tensor starts, "
    "int longest, float scaling, float cap, bool cross, "
    "int window, Tensor? encoder_lengths, Tensor? sinks, Tensor? tree, "
    "bool causal) -> ()"
)
_LIBRARY.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) keys, Tensor(b!) values, float k_scale, float v_scale, "
    "Tensor(c!) o, Tensor? k, Tensor? v, Tensor places, Tensor(d!) scratch, Tensor tokens, Tensor rows, "
    "Tensor lengths, float scaling, float cap, bool cross, int window, Tensor? encoder_lengths, "
    "Tensor? sinks) -> ()"
)


def _attended(
    q: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int, sinks: Tensor | None
) -> Tensor:
    """Causal attention of the last ``len(q)`` tokens to all of ``keys``, in float32; `window` 0 is none."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(repeat, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scaling
    behind = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (behind < 0) | (behind >= window if window > 0 else False)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)


def _extend(
    q: Tensor, k: Any, v: Any, o: Tensor, keys: Tensor, values: Tensor, k_scale: float, v_scale: float,
    tokens: Tensor, rows: Tensor, lengths: Tensor, new: Tensor, starts: Tensor, longest: int,
    scaling: float, cap: float, cross: bool, window: int, encoder_lengths: Any, sinks: Any, tree: Any,
    causal: bool,
) -> None:  # fmt: skip
    assert causal and not cross and tree is None and cap == 0 and k_scale == v_scale == 1
    for row, length, start, count in zip(
        rows.tolist(), lengths.tolist(), starts.tolist(), new.tolist(), strict=True
    ):
        places, mine = tokens[row, :length].long(), slice(start, start + count)
        o[mine] = _attended(q[mine], keys[places], values[places], scaling, window, sinks).to(o.dtype)


def _decode(
    q: Tensor, keys: Tensor, values: Tensor, k_scale: float, v_scale: float, o: Tensor, k: Any, v: Any,
    places: Tensor, scratch: Tensor, tokens: Tensor, rows: Tensor, lengths: Tensor, scaling: float,
    cap: float, cross: bool, window: int, encoder_lengths: Any, sinks: Any,
) -> None:  # fmt: skip
    assert not cross and cap == 0 and k_scale == v_scale == 1
    if k is not None:
        keys[places], values[places] = k.view(-1, *keys.shape[1:]), v.view(-1, *values.shape[1:])
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        seen = tokens[row, :length].long()
        o[i : i + 1] = _attended(q[i : i + 1], keys[seen], values[seen], scaling, window, sinks).to(o.dtype)


_LIBRARY.impl("extend_attention_cpu", _extend, "CPU")
_LIBRARY.impl("decode_attention_cpu", _decode, "CPU")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on this machine")

    return missing
