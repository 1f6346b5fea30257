"""Tuned files of vLLM's Triton kernels: which one a layer's experts read, and how it is written.

A file maps numbers of tokens to the six choices of `kernels.triton.plain_gemm.Blocks`. vLLM 0.33.0 takes
the nearest number, and passes over ``triton_version``. Its default choices are those of its
`get_default_config`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment import Device, Packages, device_names, find_device
from ..errors import NoBackend, Unavailable, UsageError
from ..oracle.decision import Decision
from ..oracle.registry import policy_named
from ..oracle.select import select
from ..problem import MoEProblem
from ..tuned import TunedName, file_remark, parse_name, tuned_status

ENGINE = "vllm"
POLICY = "vllm-0.33.0"

CHOICES: Mapping[str, str] = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""The engine's name of each of `Blocks`' fields."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an engine's kernel multiplies: `scaled` FP8 numbers, or 16-bit ones; its `default` choices.

    `default` is of tokens and experts: block_m, block_n, block_k, group_m, num_warps, num_stages.
    """

    says: str
    scaled: bool
    default: Callable[[int, int], tuple[int, ...]]


def _plain_default(tokens: int, experts: int) -> tuple[int, ...]:
    rows = next((size for most, size in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    columns, depth = (64, 128) if tokens <= 64 else (128, 64)
    group = 16 if tokens // max(experts, 1) > 128 else 1
    return rows, columns, depth, group, 4 if tokens <= 128 else 8, 4 if tokens <= 32 else 3


def _block_default(tokens: int, experts: int) -> tuple[int, ...]:
    columns = 64 if tokens <= 8 else 128
    return 16 if tokens <= 64 else 64, columns, 128, 1 if tokens <= 16 else 32, 4, 4 if tokens <= 4 else 3


FORMS: Mapping[tuple[str, tuple[int, int]], Form] = {
    ("", (0, 0)): Form("16-bit weights", False, _plain_default),
    ("fp8_w8a8", (128, 128)): Form("FP8 weights in blocks of 128x128", True, _block_default),
}
"""By dtype and block in the file's name: what moectl has a kernel for. Other files' kernels unpack integers
or have other scales: their choices follow from that, and times of another kernel would say nothing."""


@dataclass(frozen=True)
class Target:
    """The file that a layer's experts read, what their kernel multiplies, and the decision behind it."""

    name: TunedName
    form: Form
    decision: Decision


def target_of(problem: MoEProblem, device: Device, packages: Packages) -> Target:
    """The file that the engine reads for one rank's `problem` on `device`.

    Raises NoBackend when the experts that it chooses read none, or one whose kernel moectl cannot stand
    in for.
    """
    decision = select(problem, device, packages, policy_named(POLICY))
    status = tuned_status(decision)
    if not status.reads or status.wanted is None:
        raise NoBackend(
            f"a tuned file would change nothing: {status.why}",
            hint="`moectl explain CKPT` says which backend runs the layer, and why",
        )
    form = FORMS.get((status.wanted.dtype, status.wanted.block))
    if form is None:
        known = " and ".join(form.says for form in FORMS.values())
        raise NoBackend(
            f"{POLICY} reads {status.wanted}, and moectl has no kernel of that form: it has one for {known}",
            reason="Tiles of moectl's own kernels mean nothing to the engine's, which has another layout.",
            hint="tune it with the engine's own benchmark",
        )
    return Target(status.wanted, form, decision)


def check_some_gpu(problem: MoEProblem, packages: Packages) -> None:
    """Raises the NoBackend of `target_of` when the experts read no file on any GPU that has a name."""
    errors = []
    for name in device_names():
        device = find_device(name)
        if device.platform not in ("cuda", "rocm"):
            continue
        try:
            target_of(problem, device, packages)
        except NoBackend as error:
            errors.append(error)
        else:
            return
    raise errors[0]


def place_of(target: Path, name: TunedName) -> Path:
    """Where the file goes: `target` itself when it ends in ``.json``, else in the folder it names."""
    return target if target.suffix == ".json" else target / str(name)


def misnamed(place: Path, name: TunedName) -> str:
    """What is to be said of a file that the engine would not look for; empty when it would."""
    found = parse_name(place.name)
    return "" if found == name else f"{place.name} is not what vLLM looks for: {name}"


def check_choices(place: Path, triton: str) -> None:
    """UsageError for a file at `place` that is no tuned file, or was measured with another Triton."""
    if place.exists() and (remark := file_remark(place, triton)):
        raise UsageError(remark, hint="choose another place, or remove the file")


def write_choices(place: Path, rows: Mapping[int, Mapping[str, int]], triton: str) -> None:
    """Writes choices by number of tokens to `place`; other numbers that are there stay.

    Raises UsageError as `check_choices`, Unavailable where it cannot be written.
    """
    kept: dict[str, Any] = {}
    check_choices(place, triton)
    if place.exists():
        kept = json.loads(place.read_text(encoding="utf-8"))
        kept.pop("triton_version", None)
    for tokens, tile in rows.items():
        kept[str(tokens)] = {name: tile[field] for name, field in CHOICES.items()}
    document = {"triton_version": triton, **{key: kept[key] for key in sorted(kept, key=int)}}
    part = place.with_name(f"{place.name}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(document, indent=4) + "\n", encoding="utf-8")
        part.replace(place)
    except OSError as error:
        raise Unavailable(f"cannot write {place}: {error.strerror or error}") from error
