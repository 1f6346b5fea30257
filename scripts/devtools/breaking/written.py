"""Documents that moectl reads back: rows, answers, caches, manifests, reports, logs, tuned files, traces."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .changes import changed_document, changed_lines
from .headers import changed_header, split_header
from .outcomes import command, function
from .search import Reader

ASK = ("explain", "openai/gpt-oss-20b", "--offline")
ROWS = Path(__file__).resolve().parents[3] / "docs" / "bench_h200.jsonl"

Read = Callable[[], str]


@dataclass(frozen=True)
class Kind:
    """A kind of document.

    Attributes:
        data: a good one.
        readers: by name; each reads what `write` has left, and returns what it printed.
        write: puts changed bytes in their place.
        lines: whether each line is a document.
    """

    data: bytes
    write: Callable[[bytes], object]
    readers: Mapping[str, Read]
    lines: bool = False


def _command(*words: object) -> Read:
    return lambda: command(*words)


def _function(call: Callable[[], object]) -> Read:
    return lambda: function(call)


def written_readers(work: Path) -> Iterator[Reader]:
    """The readers of each kind of document, with a good one below `work`; a document stays for one case."""
    known = {**rows_of_a_bench(work), **answers(work), **caches(work), **folders(work), **others(work)}
    yield from layer_files(work)
    count = sum(len(kind.readers) for kind in known.values())
    for name, kind in known.items():
        for reader, call in kind.readers.items():

            def read(data: bytes, kind: Kind = kind, call: Read = call) -> str:
                kind.write(data)
                try:
                    return call()
                finally:
                    kind.write(kind.data)

            change = changed_lines if kind.lines else changed_document
            yield Reader(f"{name}, {reader}", [kind.data], read, 10 / count, change, kind.lines)


def rows_of_a_bench(work: Path) -> dict[str, Kind]:
    """Rows as JSON lines, JSON and CSV."""
    from moectl.bench.journal import RowJournal

    lines = ROWS.read_bytes().splitlines(True)[:6]
    good = work / "good.jsonl"
    good.write_bytes(b"".join(lines))
    made = {}
    for suffix in ("jsonl", "json", "csv"):
        path = work / f"rows.{suffix}"
        path.write_text(_command("bench", "--rows", good, "--format", suffix)())
        readers = {
            "bench --rows": _command("bench", "--rows", path, "--verbose"),
            "bench --rows --json": _command("bench", "--rows", path, "--json"),
            "bench --rows --format md": _command("bench", "--rows", path, "--format", "md"),
            "compare": _command("compare", good, path, "--verbose"),
            "compare --json": _command("compare", path, good, "--json"),
        }
        if suffix == "jsonl":

            def resume(path: Path = path) -> None:
                with RowJournal.open(path, resume=True):
                    pass

            readers["bench --resume"] = _function(resume)
        made[f"rows {suffix}"] = Kind(path.read_bytes(), path.write_bytes, readers, suffix == "jsonl")
    return made


def answers(work: Path) -> dict[str, Kind]:
    """Documents of explain, of one deployment and of several."""
    made = {}
    for name, options in (("answer", ["--gpu", "h200"]), ("matrix", ["--gpu", "h200,b200", "--tp", "1,2"])):
        path = work / f"{name}.json"
        ask = _command(*ASK, *options, "--json")
        path.write_text(json.dumps(json.JSONDecoder().raw_decode(ask())[0]))
        readers = {
            "explain --replay": _command("explain", "--replay", path, "--verbose"),
            "explain --replay --json": _command("explain", "--replay", path, "--json"),
            "explain --replay --md": _command("explain", "--replay", path, "--md"),
            "explain --diff": _command(
                "explain", "openai/gpt-oss-20b", "--offline", "--gpu", "b200", "--diff", path
            ),
        }
        if name == "answer":
            readers["explain --replay --why"] = _command("explain", "--replay", path, "--why", "marlin")
        made[name] = Kind(path.read_bytes(), path.write_bytes, readers)
    return made


def caches(work: Path) -> dict[str, Kind]:
    """The user's caches of launches and of times."""
    from moectl.cache import backend_times_file, launches_file
    from moectl.cache.backend_times import BackendTime
    from moectl.cache.launches_file import LaunchAttempt, LaunchesStore, LaunchRow
    from moectl.checkpoint import open_checkpoint
    from moectl.environment import find_device

    device = find_device("h200")
    problem = open_checkpoint("openai/gpt-oss-20b", offline=True).groups[0].problem
    launched = LaunchRow(16, "grouped", {"tokens": 16}, 30.0, 40.0, 1e-3, 7, 2, "2026-11-21T00:00:00Z")
    times = [
        BackendTime(name, "t", 16, "uniform", us, 1.0, True, 2e-3)
        for name, us in (("moectl", 30.0), ("triton_kernels", 20.0))
    ]

    def save() -> None:
        backend_times_file.save(device, problem, times, versions={"torch": "2"}, source="moectl bench")

    def tune() -> None:
        store = LaunchesStore.of(problem, device)
        store.finish(launched)
        store.note(64, LaunchAttempt("mid", {"tokens": 16}))

    save()
    tune()
    ask = (*ASK, "--gpu", "h200", "--policy", "moectl")
    readers = {
        "explain": _command(*ask, "--verbose"),
        "explain --json": _command(*ask, "--json"),
        "tune --list": _command("tune", "--list"),
        "tune --list --json": _command("tune", "--list", "--json"),
        "a measurement": _function(save),
        "a tuned launch": _function(tune),
    }
    paths_of = {
        "launches": launches_file.KIND.path(device),
        "times": backend_times_file.KIND.path(device),
    }
    return {name: Kind(path.read_bytes(), path.write_bytes, readers) for name, path in paths_of.items()}


def small_source(work: Path) -> Path:
    """A checkpoint of one small layer below `work`."""
    from moectl.synth import synthesize

    source = work / "source"
    if not source.exists():
        synthesize("openai/gpt-oss-20b", source, layers=1, experts=2, hidden=128, intermediate=128)
    return source


def layer_files(work: Path) -> Iterator[Reader]:
    """The files of a converted directory's tensors, changed with a manifest that has their sizes and hashes."""
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
        "open_layer": _function(lambda: load_manifest(folder).open_layer(0)),
        "verify": _command("verify", folder),
        "run": _command("run", folder, "--device", "cpu", "--backend", "torch", "--tokens", "1"),
        "unconvert": _command("unconvert", folder, work / "back"),
        "parity": _command("parity", folder, folder),
    }.items():

        def read(data: bytes, call: Read = call) -> str:
            write(data)
            try:
                return call()
            finally:
                shutil.rmtree(work / "back", ignore_errors=True)

        share = 4 if name == "open_layer" else 0.2
        yield Reader(f"layer files, {name}", [good], read, share, changed_header, split=split_header)


def folders(work: Path) -> dict[str, Kind]:
    """What conversions leave: manifests, signed again; READY; logs; the report of a portable one; configs."""
    from moectl.convert.manifest.manifest import load_directory
    from moectl.convert.manifest.progress_log import logged_conversion, open_log
    from moectl.convert.portable.report_fragments import report_bytes

    source = small_source(work)
    whole, ranks, portable = work / "marlin", work / "ranks", work / "portable"
    for folder, options in (
        (whole, ["marlin"]),
        (ranks, ["marlin", "--tp-size", 2]),
        (portable, ["int8", "--requantize"]),
    ):
        said = _command("convert", source, folder, "--to", *options)()
        assert folder.exists(), said
    made = {}
    for name, folder in (("manifest", whole), ("manifest of ranks", ranks)):
        manifest, ready = folder / "moectl.json", folder / "READY"

        def sign(data: bytes, manifest: Path = manifest, ready: Path = ready) -> None:
            manifest.write_bytes(data)
            ready.write_text(hashlib.sha256(data).hexdigest() + "\n")

        readers = {
            "verify": _command("verify", folder),
            "verify --json": _command("verify", folder, "--json"),
            "explain": _command("explain", folder, "--gpu", "h200"),
            "parity": _command("parity", folder, whole),
            "a library's user": _function(lambda folder=folder: load_directory(folder)),  # type: ignore[misc]
        }
        made[name] = Kind(manifest.read_bytes(), sign, readers)
        made[f"READY of {name}"] = Kind(ready.read_bytes(), ready.write_bytes, readers)
    report = portable / "moectl-report.json"

    def sign_report(data: bytes) -> None:
        with contextlib.suppress(ValueError, AttributeError, TypeError, UnicodeError, RecursionError):
            document = json.loads(data)
            data = report_bytes({k: v for k, v in document.items() if k not in ("report_version", "sha256")})
        report.write_bytes(data)

    verify = {"verify": _command("verify", portable), "verify --json": _command("verify", portable, "--json")}
    made["report"] = Kind(report.read_bytes(), sign_report, verify)
    log, facts = work / "log", {"layout": "marlin", "moectl": "0.1.0"}
    log.mkdir()
    record = json.loads((whole / "moectl.json").read_bytes())
    opened = open_log(log, facts)
    opened.pin("0" * 64)
    opened.close()
    path = opened.path
    with path.open("a") as file:
        file.writelines(json.dumps({"layer": layer}) + "\n" for layer in record["layers"])
        file.writelines(json.dumps({"rest": rest}) + "\n" for rest in record["rest"])
    made["log of a conversion"] = Kind(
        path.read_bytes(),
        path.write_bytes,
        {
            "convert --resume": _function(lambda: open_log(log, facts).close()),
            "another part": _function(lambda: logged_conversion(path)),
        },
        True,
    )
    config = source / "config.json"
    made["config"] = Kind(
        config.read_bytes(),
        config.write_bytes,
        {
            "explain": _command("explain", source, "--gpu", "h200", "--verbose"),
            "explain --json": _command("explain", source, "--gpu", "h200", "--json"),
            "explain --html": _command("explain", source, "--gpu", "h200", "--html", work / "page.html"),
            "convert --dry-run": _command("convert", source, work / "never", "--to", "marlin", "--dry-run"),
        },
    )
    return made


def others(work: Path) -> dict[str, Kind]:
    """Indices of kernels, tuned files of an engine, and traces."""
    from moectl.bench.routings import read_trace
    from moectl.layer.kernel_files import differences
    from moectl.oracle.registry import engine_named
    from moectl.problem.published_layers import named_problem
    from moectl.tuning.engine_tuned_files import write_choices

    kernels = work / "kernels"
    kernels.mkdir()
    index = kernels / "kernels.json"
    built = {"moectl": "0.1.0", "torch": "2", "triton": "3", "kernels": "0" * 16}
    listed = {"A" * 52: {"name": "k", "files": {"cubin": "0" * 64}}}
    index.write_text(json.dumps({"version": 1, "built": built, "arch": "sm90", "kernels": listed}))
    tuned = work / "E=128,N=768,device_name=NVIDIA_H200.json"
    field = dict.fromkeys(engine_named().tuned_files.choices.values(), 16)  # type: ignore[union-attr]
    write = _function(lambda: write_choices(tuned, {16: field}, "3.0", engine_named()))
    write()
    trace = work / "trace.jsonl"
    _, problem = named_problem("gpt-oss-20b")
    trace.write_text("[0, 1, 2, 3]\n[3, 2, 1, 0]\n")
    weighted = work / "weighted.jsonl"
    weighted.write_text('{"ids": [3, 2, 1, 0], "weights": [0.4, 0.3, 0.2, 0.1]}\n' * 2)
    ask = (
        "explain",
        "qwen/Qwen3-30B-A3B",
        "--offline",
        "--gpu",
        "h200",
        "--env",
        f"VLLM_TUNED_CONFIG_FOLDER={work}",
    )
    return {
        "index of kernels": Kind(
            index.read_bytes(), index.write_bytes, {"warm --from": _function(lambda: differences(kernels))}
        ),
        "tuned file": Kind(
            tuned.read_bytes(),
            tuned.write_bytes,
            {"explain": _command(*ask, "--verbose"), "tune --for": write},
        ),
        "trace": Kind(
            trace.read_bytes(),
            trace.write_bytes,
            {"bench --routing": _function(lambda: read_trace(trace, problem))},
            True,
        ),
        "trace with weights": Kind(
            weighted.read_bytes(),
            weighted.write_bytes,
            {"bench --routing": _function(lambda: read_trace(weighted, problem))},
            True,
        ),
    }
