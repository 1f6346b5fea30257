"""Tuned files of an engine's kernels: kernel configs by number of tokens, one file per shape and GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .decision import Decision


class TunedFile(Protocol):
    """The name of a tuned file (`str`), with the `gpu` and `shape` that it was measured for."""

    @property
    def gpu(self) -> str:
        """The GPU, as spelled in file names."""

    @property
    def shape(self) -> str:
        """The sizes, as spelled in file names."""


@dataclass(frozen=True, slots=True)
class TunedStatus:
    """Which tuned file the choice of one decision looks up, and whether it exists.

    Attributes:
        reads: the chosen experts look up a file; `why` says when, or why not.
        wanted: the name they look up; `found`: the directory that has it; `folders`: those searched.
        other_gpus: files of the same shape for other GPUs, most similar first.
        other_shapes: files of this GPU and format for other shapes, nearest first.
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
    """An engine's kernel: `scaled` FP8 weights or 16-bit ones, and its `default` config.

    `default` takes tokens and experts, and returns block_m, block_n, block_k, group_m, num_warps,
    num_stages.
    """

    says: str
    scaled: bool
    default: Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TunedFiles:
    """The tuned files of one engine.

    Attributes:
        variable: names a directory that is searched before the engine's own, which is called `shipped`.
        lookup: the status for a decision, given directory listings (path to file names).
        parse: the parts of a file's name; None for other files.
        remark: a warning about a file, given the installed version of Triton; empty if there is none.
        choices: the engine's name of each config entry, with the field of `plain_gemm.Blocks`.
        kernels: the engine's kernels that moectl has an equivalent of; `kernel` returns the one for a
            file's name, or None.
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
        """The listing of the directory that `env` names: empty if unset, no names if unreadable."""
        directory = env.get(self.variable)
        if directory is None:
            return {}
        try:
            return {directory: tuple(sorted(entry.name for entry in Path(directory).iterdir()))}
        except OSError:
            return {directory: ()}


def tuned_status(
    decision: Decision, files: TunedFiles | None, folders: Mapping[str, Iterable[str]] | None = None
) -> TunedStatus:
    """The tuned-file status of `decision` for an engine with `files` (None if it has none).

    `folders` are listings of directories that are searched before the engine's own.
    """
    chosen = decision.chosen
    if chosen is None:
        return TunedStatus(False, "no backend is chosen, so no tuned file is read")
    if files is None:
        return reads_none(decision)
    return files.lookup(decision, folders or {})


def reads_none(decision: Decision) -> TunedStatus:
    """The status for experts that look up no tuned file."""
    chosen = decision.chosen
    assert chosen is not None
    return TunedStatus(False, f"{chosen.backend.name} ({chosen.variant.experts}) reads no tuned files")
