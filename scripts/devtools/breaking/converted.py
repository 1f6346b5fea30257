"""What conversions leave: layer files, manifests, reports and their parts, logs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from .headers import changed_header, split_header
from .outcomes import command
from .search import Reader
from .written import Kind, Read, prints, readers_of, says


def converted_readers(work: Path) -> Iterator[Reader]:
    """The readers of what conversions leave, in directories below `work`."""
    yield from layer_files(work)
    yield from readers_of({**manifests(work), **reports(work), **logs(work)}, 5)


def small_source(work: Path, layers: int = 1) -> Path:
    """A checkpoint of small layers below `work`."""
    from moectl.synth import synthesize

    source = work / "source"
    if not source.exists():
        synthesize("openai/gpt-oss-20b", source, layers=layers, experts=2, hidden=128, intermediate=128)
    return source


def layer_files(work: Path) -> Iterator[Reader]:
    """The files of a directory's layers, changed with a manifest that has their sizes and hashes."""
    from moectl.convert.manifest.manifest import load_manifest

    folder = work / "layers"
    said = command("convert", small_source(work), folder, "--to", "marlin", "--experts-only")
    assert (folder / "READY").exists(), said
    (path,) = folder.glob("*.experts")
    good, manifest = path.read_bytes(), json.loads((folder / "moectl.json").read_bytes())

    def write(file: bytes) -> None:
        path.write_bytes(file)
        manifest["layers"][0]["size"] = len(file)
        data = json.dumps(manifest).encode()
        (folder / "moectl.json").write_bytes(data)
        (folder / "READY").write_text(hashlib.sha256(data).hexdigest() + "\n")

    for name, call in {
        "open_layer": says(lambda: load_manifest(folder).open_layer(0)),
        "verify": prints("verify", folder),
        "run": prints("run", folder, "--device", "cpu", "--backend", "torch", "--tokens", "1"),
        "unconvert": prints("unconvert", folder, work / "back"),
        "parity": prints("parity", folder, folder),
    }.items():

        def read(data: bytes, call: Read = call) -> str:
            write(data)
            try:
                return call()
            finally:
                shutil.rmtree(work / "back", ignore_errors=True)

        share = 4 if name == "open_layer" else 0.2
        yield Reader(f"layer files, {name}", [good], read, share, changed_header, split=split_header)


def manifests(work: Path) -> dict[str, Kind]:
    """Manifests of a directory and of one of ranks, signed again, and what signs them."""
    from moectl.convert.manifest.manifest import load_directory

    whole, ranks = work / "marlin", work / "ranks"
    made = {}
    for name, folder, options in (
        ("manifest", whole, ("marlin",)),
        ("manifest of ranks", ranks, ("marlin", "--tp-size", 2)),
    ):
        _converted(work, folder, *options)
        manifest, ready = folder / "moectl.json", folder / "READY"

        def sign(data: bytes, manifest: Path = manifest, ready: Path = ready) -> None:
            manifest.write_bytes(data)
            ready.write_text(hashlib.sha256(data).hexdigest() + "\n")

        readers = {
            "verify": prints("verify", folder),
            "verify --json": prints("verify", folder, "--json"),
            "explain": prints("explain", folder, "--gpu", "h200"),
            "parity": prints("parity", folder, whole),
            "a library's user": says(lambda folder=folder: load_directory(folder)),  # type: ignore[misc]
        }
        made[name] = Kind(manifest.read_bytes(), sign, readers)
        made[f"READY of {name}"] = Kind(ready.read_bytes(), ready.write_bytes, readers)
    return made


def _converted(work: Path, folder: Path, *options: object) -> None:
    said = command("convert", small_source(work), folder, "--to", *options)
    assert folder.exists(), said


def reports(work: Path) -> dict[str, Kind]:
    """The report of a portable checkpoint, signed again, and one layer's part of it."""
    from moectl.convert.portable.report_fragments import report_bytes

    folder, begun = work / "portable", work / "begun"
    _converted(work, folder, "int8", "--requantize")
    _converted(work, begun, "int8", "--requantize", "--part", "1/1")
    report = folder / "moectl-report.json"

    def sign(data: bytes) -> None:
        with contextlib.suppress(ValueError, AttributeError, TypeError, UnicodeError, RecursionError):
            document = json.loads(data)
            data = report_bytes({k: v for k, v in document.items() if k not in ("report_version", "sha256")})
        report.write_bytes(data)

    verify = {"verify": prints("verify", folder), "verify --json": prints("verify", folder, "--json")}
    finish = ("convert", small_source(work), begun, "--to", "int8", "--requantize", "--finish")
    (part,) = begun.glob("moectl-report-part-*.json")
    return {
        "report": Kind(report.read_bytes(), sign, verify),
        "part of a report": Kind(part.read_bytes(), _beside(part), {"convert --finish": prints(*finish)}),
    }


def logs(work: Path) -> dict[str, Kind]:
    """Logs of a conversion, of a part of one, and of an update."""
    from moectl.checkpoint import open_checkpoint
    from moectl.checkpoint.source.open_checkpoint import interrupted_command
    from moectl.convert.execute.update_folder import plan_update
    from moectl.convert.manifest.progress_log import LOG, log_line, logged_conversion, open_log
    from moectl.convert.plan.conversion_plan import conversion_facts

    source, begun, updated = small_source(work), work / "parts", work / "updated"
    _converted(work, begun, "marlin", "--part", "1/1")
    _converted(work, updated, "marlin")
    plan = plan_update(updated, open_checkpoint(str(source))).parts[0].plan
    layers = json.loads((updated / "moectl.json").read_bytes())["layers"]
    facts = conversion_facts(plan)
    log = open_log(updated, facts)
    log.pin("0" * 64)
    log.close()
    path = updated / LOG
    with path.open("ab") as file:
        file.writelines(log_line({"layer": layer}) for layer in layers)
    (part,) = begun.glob("progress*.jsonl")
    readers = {
        "refit": prints("refit", updated, source),
        "convert --resume": says(lambda: open_log(updated, facts).close()),
        "another part": says(lambda: logged_conversion(path)),
        "run": says(lambda: interrupted_command(updated)),
    }
    finish = ("convert", source, begun, "--to", "marlin", "--finish")
    return {
        "log": Kind(_unsigned(path), _signing(path), readers, True),
        "log of a part": Kind(_unsigned(part), _signing(part), {"convert --finish": prints(*finish)}, True),
    }


def _unsigned(log: Path) -> bytes:
    """A log without the hashes of its lines."""
    entries = [json.loads(line) for line in log.read_bytes().splitlines()]
    return b"".join(
        json.dumps({k: v for k, v in e.items() if k != "sha256"}).encode() + b"\n" for e in entries
    )


def _signing(log: Path) -> Callable[[bytes], object]:
    """Puts a log in its place, with the hash of each line that can have one."""
    from moectl.convert.manifest.progress_log import log_line

    write = _beside(log)

    def sign(data: bytes) -> None:
        lines = data.splitlines(keepends=True)
        for number, line in enumerate(lines):
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry and line.endswith(b"\n"):
                    lines[number] = log_line(entry)
        write(b"".join(lines))

    return sign


def _beside(path: Path) -> Callable[[bytes], object]:
    """Puts bytes in the place of a file, and its directory as it was around it: readers change it."""
    folder = path.parent
    kept = folder.with_name(f"{folder.name} before")
    shutil.copytree(folder, kept)

    def write(data: bytes) -> None:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        path.write_bytes(data)

    return write
