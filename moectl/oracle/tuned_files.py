"""Tuned files of an engine's kernels: launch choices by number of tokens, one file a shape and GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .decision import Decision


class TunedFile(Protocol):
    """The name of a tuned file: `str` gives it, `gpu` and `shape` say what it was measured for."""

    @property
    def gpu(self) -> str:
        """The GPU, as file names spell it."""

    @property
    def shape(self) -> str:
        """The sizes, as file names spell them."""


@dataclass(frozen=True, slots=True)
class TunedStatus:
    """What is to be said of tuned files for one decision.

    Attributes:
        reads: the chosen experts look for a file; `why` says when, or why not.
        wanted: the name they look for, `found` where it lies, `folders` where they look.
        other_gpus: files of the same shape for other GPUs, the likest first.
        other_shapes: files of this GPU and format for other shapes, the nearest first.
    """

    reads: bool
    why: str
    wanted: TunedFile | None = None
    found: str = ""
    folders: tuple[str, ...] = ()
    other_gpus: tuple[TunedFile, ...] = ()
    other_shapes: tuple[TunedFile, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, names as file names."""
        return {
            "reads": self.reads,
            "why": self.why,
            "wanted": str(self.wanted) if self.wanted else None,
            "found": self.found or None,
            "folders": list(self.folders),
            "same_shape_on_other_gpus": [str(name) for name in self.other_gpus],
            "other_shapes_on_this_gpu": [str(name) for name in self.other_shapes],
        }


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """What an engine's kernel multiplies: `scaled` FP8 numbers, or 16-bit ones; its `default` choices.

    `default` is of tokens and experts: block_m, block_n, block_k, group_m, num_warps, num_stages.
    """

    says: str
    scaled: bool
    default: Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TunedFiles:
    """The tuned files of one engine.

    Attributes:
        variable: names a folder that is looked in before the engine's own, which is called `shipped`.
        lookup: the status of a decision, given listed folders (path to file names).
        parse: the parts of a file's name; None for another file.
        remark: what is odd about a file, given the version of Triton that is installed; empty: nothing.
        choices: the engine's name of each launch choice, with the field of `plain_gemm.Blocks`.
        kernels: what the files are for, as far as moectl has a kernel of that form; `kernel` gives the one
            of a file's name, or None.
    """

    variable: str
    shipped: str
    lookup: Callable[[Decision, Mapping[str, Iterable[str]]], TunedStatus]
    parse: Callable[[str], TunedFile | None]
    remark: Callable[[Path, str], str]
    choices: Mapping[str, str]
    kernels: tuple[TunedKernel, ...]
    kernel: Callable[[TunedFile], TunedKernel | None]

    def listed(self, env: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """File names in the folder that `env` names; none where it cannot be read, no entry without one."""
        place = env.get(self.variable)
        if place is None:
            return {}
        try:
            return {place: tuple(sorted(entry.name for entry in Path(place).iterdir()))}
        except OSError:
            return {place: ()}


def tuned_status(
    decision: Decision, files: TunedFiles | None, folders: Mapping[str, Iterable[str]] | None = None
) -> TunedStatus:
    """What tuned files mean to the choice of `decision`, for an engine that has `files` or none.

    `folders` are listed folders that are looked in before the engine's own.
    """
    chosen = decision.chosen
    if chosen is None:
        return TunedStatus(False, "there is no backend that could read one")
    if files is None:
        return reads_none(decision)
    return files.lookup(decision, folders or {})


def reads_none(decision: Decision) -> TunedStatus:
    """The status of experts that look for no tuned file."""
    chosen = decision.chosen
    assert chosen is not None
    return TunedStatus(False, f"{chosen.backend.name} ({chosen.variant.experts}) reads no tuned files")
