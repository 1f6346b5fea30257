"""Documents that moectl reads back: rows, answers, caches, tuned files, traces, an engine's reply."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from .changes import changed_document, changed_lines
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


def prints(*words: object) -> Read:
    """What a command prints, each time that it is called."""
    return lambda: command(*words)


def says(call: Callable[[], object]) -> Read:
    """The sentence of the error that a function raises, each time that it is called."""
    return lambda: function(call)


def readers_of(kinds: Mapping[str, Kind], share: float) -> Iterator[Reader]:
    """The readers of each kind, which share `share`; a changed document stays for one case."""
    count = sum(len(kind.readers) for kind in kinds.values())
    for name, kind in kinds.items():
        for reader, call in kind.readers.items():

            def read(data: bytes, kind: Kind = kind, call: Read = call) -> str:
                kind.write(data)
                try:
                    return call()
                finally:
                    kind.write(kind.data)

            change = changed_lines if kind.lines else changed_document
            yield Reader(f"{name}, {reader}", [kind.data], read, share / count, change, kind.lines)


def written_readers(work: Path) -> Iterator[Reader]:
    """The readers of each kind of document, with a good one below `work`."""
    yield from readers_of({**rows_of_a_bench(work), **answers(work), **caches(work), **others(work)}, 7)


def rows_of_a_bench(work: Path) -> dict[str, Kind]:
    """Rows as JSON lines, JSON and CSV."""
    from moectl.bench.journal import RowJournal

    lines = ROWS.read_bytes().splitlines(True)[:6]
    good = work / "good.jsonl"
    good.write_bytes(b"".join(lines))
    made = {}
    for suffix in ("jsonl", "json", "csv"):
        path = work / f"rows.{suffix}"
        path.write_text(prints("bench", "--rows", good, "--format", suffix)())
        readers = {
            "bench --rows": prints("bench", "--rows", path, "--verbose"),
            "bench --rows --json": prints("bench", "--rows", path, "--json"),
            "bench --rows --format md": prints("bench", "--rows", path, "--format", "md"),
            "compare": prints("compare", good, path, "--verbose"),
            "compare --json": prints("compare", path, good, "--json"),
        }
        if suffix == "jsonl":

            def resume(path: Path = path) -> None:
                with RowJournal.open(path, resume=True):
                    pass

            readers["bench --resume"] = says(resume)
        made[f"rows {suffix}"] = Kind(path.read_bytes(), path.write_bytes, readers, suffix == "jsonl")
    return made


def answers(work: Path) -> dict[str, Kind]:
    """Documents of explain, of one deployment and of several."""
    made = {}
    for name, options in (("answer", ["--gpu", "h200"]), ("matrix", ["--gpu", "h200,b200", "--tp", "1,2"])):
        path = work / f"{name}.json"
        ask = prints(*ASK, *options, "--json")
        path.write_text(json.dumps(json.JSONDecoder().raw_decode(ask())[0]))
        readers = {
            "explain --replay": prints("explain", "--replay", path, "--verbose"),
            "explain --replay --json": prints("explain", "--replay", path, "--json"),
            "explain --replay --md": prints("explain", "--replay", path, "--md"),
            "explain --diff": prints(
                "explain", "openai/gpt-oss-20b", "--offline", "--gpu", "b200", "--diff", path
            ),
        }
        if name == "answer":
            readers["explain --replay --why"] = prints("explain", "--replay", path, "--why", "marlin")
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
        "explain": prints(*ask, "--verbose"),
        "explain --json": prints(*ask, "--json"),
        "tune --list": prints("tune", "--list"),
        "tune --list --json": prints("tune", "--list", "--json"),
        "a measurement": says(save),
        "a tuned launch": says(tune),
    }
    paths_of = {
        "launches": launches_file.KIND.path(device),
        "times": backend_times_file.KIND.path(device),
    }
    return {name: Kind(path.read_bytes(), path.write_bytes, readers) for name, path in paths_of.items()}


def others(work: Path) -> dict[str, Kind]:
    """Indices of kernels, tuned files of an engine, traces, an engine's reply, what was compiled before."""
    from moectl.bench.routings import read_trace
    from moectl.capabilities.vllm_launches import read_launches
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
    write = says(lambda: write_choices(tuned, {16: field}, "3.0", engine_named()))
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
            index.read_bytes(), index.write_bytes, {"warm --from": says(lambda: differences(kernels))}
        ),
        "tuned file": Kind(
            tuned.read_bytes(),
            tuned.write_bytes,
            {
                "explain": prints(*ask, "--verbose"),
                "tune --to": write,
                "bench": says(lambda: read_launches(tuned)),
            },
        ),
        "trace": Kind(
            trace.read_bytes(),
            trace.write_bytes,
            {"bench --routing": says(lambda: read_trace(trace, problem))},
            True,
        ),
        "trace with weights": Kind(
            weighted.read_bytes(),
            weighted.write_bytes,
            {"bench --routing": says(lambda: read_trace(weighted, problem))},
            True,
        ),
        "reply of an engine": _reply(work),
        "what was compiled": _compiled(work),
    }


def _reply(work: Path) -> Kind:
    """What an engine's own code writes when it is asked."""
    from moectl.checkpoint import open_checkpoint
    from moectl.environment import find_device
    from moectl.environment.python_environments import python_environment
    from moectl.explain import Question, explain
    from moectl.explain.engine_answer import ask_engine
    from moectl.oracle import engine_named, packages_from
    from support.engine_environments import environment

    engine, checkpoint = engine_named("vllm"), open_checkpoint("openai/gpt-oss-20b", offline=True)
    installed = {"vllm/__init__.py": "__version__ = '0.33.0'\n", "vllm/_C.abi3.so": ""}
    where = python_environment(environment(work / "engine", installed))
    profile = packages_from("full", {}, engine)
    explanation = explain(checkpoint, find_device("h200"), profile, Question(engine.policy))
    path = work / "reply.json"
    rows = []
    for group in explanation.groups:
        chosen, dims = group.decision.chosen, group.decision.problem.dims
        assert chosen is not None
        padded = {"hidden": dims.padded_hidden, "intermediate_per_partition": dims.padded_intermediate}
        refused = {"backend": "MARLIN", "experts_cls": "MarlinExperts", "reason": "no", "code": "shape"}
        rows.append(
            {
                "selected": chosen.engine_name,
                "experts_cls": chosen.variant.experts,
                "monolithic": chosen.variant.monolithic,
                "padded": padded,
                "priority": list(group.decision.order),
                "error": None,
                "gates": [],
                "rejected": [refused],
                "forced": None,
            }
        )
    good = json.dumps({"version": "0.33.0", "own_device": True, "rows": rows}).encode()

    def replied(command: list[str], text: str, said: Path, timeout_s: float) -> int:
        Path(json.loads(text)["out"]).write_bytes(path.read_bytes())
        return 0

    def ask() -> None:
        with mock.patch("moectl.explain.engine_answer._run", replied):
            ask_engine(explanation, checkpoint, engine, where)

    return Kind(good, path.write_bytes, {"explain --ask-engine": says(ask)})


def _compiled(work: Path) -> Kind:
    """What `moectl warm` keeps of the kernels that it compiled."""
    from moectl.environment import find_device
    from moectl.kernels.triton.offline_gpu import OfflineGpu
    from moectl.layer.compile_ahead import CompileRequest, CompileResult, remember, remembered
    from moectl.problem.published_layers import named_problem

    _, problem = named_problem("gpt-oss-20b")
    request = CompileRequest(problem, "moectl", OfflineGpu.of(find_device("h200")), 16)
    remember(request, CompileResult(2, 0, 2, 1.0, binaries=(("k", "A" * 52, "standard", 1),)))
    (path,) = (Path(os.environ["MOECTL_CACHE"]) / "compiling").glob("*.json")
    return Kind(path.read_bytes(), path.write_bytes, {"warm": says(lambda: remembered(request))})
