"""Tuned files of an engine's Triton kernels: which one a layer's experts read, and writing it.

A file maps numbers of tokens to the six fields of `grouped_gemm.GemmConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment import Device, Packages, device_names, find_device
from ..errors import NoBackend, Unavailable, UsageError
from ..files.atomic import replace_file
from ..files.lock import folder_lock
from ..files.output_folder import create_folder
from ..files.safe_reading import read_given
from ..files.strict_json import parse_document
from ..oracle.decision import Decision
from ..oracle.engine import Engine
from ..oracle.registry import newest_engines
from ..oracle.select import select
from ..oracle.tuned_files import TunedFile, TunedFiles, TunedKernel, tuned_status
from ..oracle.verdict_sentences import makers_spelling
from ..problem.moe_problem import MoEProblem

MOST_NAMES = 3
"""Architectures to name of those with one reason."""


@dataclass(frozen=True)
class TunedFileTarget:
    """The file that a layer's experts read, the operands of their kernel, and the backend decision."""

    name: TunedFile
    form: TunedKernel
    decision: Decision


def tunable_engines() -> dict[str, Engine]:
    """Engines whose experts read tuned files, by the name of the family."""
    return {engine.family: engine for engine in newest_engines() if engine.tuned_files}


def files_of(engine: Engine) -> TunedFiles:
    """The tuned files of `engine`; UsageError if it reads none."""
    if engine.tuned_files is None:
        raise UsageError(
            f"{engine.name} reads no tuned files", hint=f"choose one of {', '.join(tunable_engines())}"
        )
    return engine.tuned_files


def target_of(problem: MoEProblem, device: Device, packages: Packages, engine: Engine) -> TunedFileTarget:
    """The file that `engine` reads for one rank's `problem` on `device`.

    Raises NoBackend when the chosen experts read none, or one for a kernel that moectl has no equivalent
    of; UsageError when the engine has no such files.
    """
    files = files_of(engine)
    decision = select(problem, device, packages, engine.policy)
    status = tuned_status(decision, files)
    if not status.reads or status.wanted is None:
        raise NoBackend(
            f"a tuned file would change nothing: {status.why}",
            hint="`moectl explain CKPT` says which backend runs the layer, and why",
        )
    form = files.kernel(status.wanted)
    if form is None:
        known = " and ".join(form.says for form in files.kernels)
        raise NoBackend(
            f"{engine.title} reads a tuned file, and moectl has no kernel of that form: "
            f"it has one for {known}",
            reason=f"The file is {status.wanted}. Tiles of moectl's own kernels mean nothing to the "
            "engine's, which has another layout.",
            hint="tune it with the engine's own benchmark",
        )
    return TunedFileTarget(status.wanted, form, decision)


def check_some_gpu(problem: MoEProblem, packages: Packages, engine: Engine) -> None:
    """Raises NoBackend, with each reason of `target_of`, when there is no file to tune on any named GPU."""
    refused: dict[str, list[str]] = {}
    for name in device_names():
        device = find_device(name)
        if device.platform not in ("cuda", "rocm"):
            continue
        try:
            target_of(problem, device, packages, engine)
        except NoBackend as error:
            refused.setdefault(error.what, []).append(makers_spelling(device.arch))
        else:
            return
    raise NoBackend(
        f"moectl can tune nothing that {engine.title} would read for this layer, on any GPU",
        reason=" ".join(f"On {_shortened(archs)}, {what}." for what, archs in refused.items()),
        hint="`moectl explain CKPT --gpu NAME` says which backend runs the layer, and why",
    )


def _shortened(names: Iterable[str]) -> str:
    """Different `names`, the first ones of many: ``SM75 and SM80``, ``SM89, SM90, SM100 and 8 more``."""
    each = list(dict.fromkeys(names))
    more = len(each) - MOST_NAMES
    *first, last = [*each[:MOST_NAMES], f"{more} more"] if more > 0 else each
    return f"{', '.join(first)} and {last}" if first else last


def tuned_file_path(target: Path, name: TunedFile) -> Path:
    """Path of the file: `target` itself if it ends in ``.json``, else inside the directory `target`."""
    return target if target.suffix == ".json" else target / str(name)


def wrong_name_note(path: Path, name: TunedFile, engine: Engine) -> str:
    """A note that `engine` would not look for a file of this name; empty when it would."""
    parsed = files_of(engine).parse(path.name)
    return "" if parsed == name else f"{path.name} is not what {engine.title} looks for: {name}"


def check_choices(path: Path, triton: str, engine: Engine) -> None:
    """UsageError if `path` exists and is not a tuned file, or is one of another Triton version."""
    if path.exists() and (remark := files_of(engine).remark(path, triton)):
        raise UsageError(remark, hint="choose another place, or remove the file")


def write_choices(path: Path, rows: Mapping[int, Mapping[str, int]], triton: str, engine: Engine) -> None:
    """Writes `engine`'s choices by number of tokens to `path`; other numbers of tokens in the file are kept.

    Raises UsageError as `check_choices`, Unavailable when it cannot be written.
    """
    choices = files_of(engine).choices
    create_folder(path.parent)
    try:
        with folder_lock(path.parent):  # of two writers neither loses the other's rows
            kept: dict[str, Any] = {}
            check_choices(path, triton, engine)
            if path.exists():
                data = read_given(path, "a tuned file")
                kept = parse_document(data, str(path), UsageError)
                kept.pop("triton_version", None)
            for tokens, tile in rows.items():
                kept[str(tokens)] = {name: tile[field] for name, field in choices.items()}
            document = {"triton_version": triton, **{key: kept[key] for key in sorted(kept, key=int)}}
            replace_file(path, (json.dumps(document, indent=4) + "\n").encode())
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror or error}") from error
