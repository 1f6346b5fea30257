"""Every command of moectl that writes, with small inputs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .child_process import moectl

GPT_OSS = "openai/gpt-oss-20b"
SMALL: Mapping[str, Any] = {"layers": 2, "experts": 4, "hidden": 128, "intermediate": 128}
WORDS = [word for name, size in SMALL.items() for word in (f"--{name}", str(size))]

Writes = Callable[[Path, Path, bool], object]
"""Runs a command: the directory of inputs, that of a case, whether it goes on with what is there."""


def nothing(inputs: Path, case: Path) -> None:
    """What is there before a command that begins with nothing."""


@dataclass(frozen=True)
class WritingCommand:
    """A command that writes.

    Attributes:
        run: writes below the directory of a case.
        begin: makes what is there before.
        out: the directory that it fills, in that of the case; empty if it replaces files, one by one.
        mark: the file in `out` by which readers take it for finished.
        resumes: whether it goes on in a directory where it was interrupted; if not, it must refuse that.
        needs: commands whose results are its inputs.
        lasting: whether what it has written stays after a power cut, once it has ended.
    """

    run: Writes
    begin: Callable[[Path, Path], None] = nothing
    out: str = "out"
    mark: str = "READY"
    resumes: bool = True
    needs: tuple[str, ...] = ()
    lasting: bool = True


def result_of(inputs: Path, name: str) -> Path:
    """What the command `name` wrote undisturbed."""
    return inputs / "results" / name


def make_inputs(inputs: Path) -> None:
    """The checkpoints that the commands read."""
    import torch
    from safetensors.torch import save

    from moectl.checkpoint import open_checkpoint
    from moectl.synth import synthesize

    source = synthesize(GPT_OSS, inputs / "source", **SMALL, shard_bytes=120_000)
    (source / "tokenizer.json").write_text("{}\n")
    (source / "README.md").write_text("A model.\n")
    newer = inputs / "newer"
    shutil.copytree(source, newer)
    tensors = open_checkpoint(str(newer)).tensors
    for name in ("model.layers.1.mlp.experts.down_proj_blocks", "model.norm.weight"):
        with (newer / tensors[name].file).open("r+b") as file:
            file.seek(tensors[name].start)
            file.write(b"\x05\x06")
    synthesize("Qwen/Qwen3-30B-A3B", inputs / "bf16", **{**SMALL, "layers": 1})
    (inputs / "y.safetensors").write_bytes(save({"x": torch.ones(4, 128)}))
    lines = (Path(__file__).parents[3] / "docs" / "bench_h200.jsonl").read_bytes().splitlines(True)[:5]
    (inputs / "rows.jsonl").write_bytes(b"".join(lines))


def conversion(source: str, target: str, *options: str) -> Writes:
    """`moectl convert` of one of the inputs."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        words = ("--threads", "1", "-q", *options, *(["--resume"] if again else []))
        moectl("convert", inputs / source, case / "out", "--to", target, *words)

    return run


def part(text: str) -> Writes:
    """One part of a conversion."""
    return conversion("source", "marlin", "--part", text)


def parts(inputs: Path, case: Path, again: bool) -> None:
    """Both parts of a conversion, then --finish."""
    from moectl.convert.worker_partition import parse_partition

    out = case / "out"
    for text in ("1/2", "2/2"):
        if not (again and (out / "READY").exists()):
            part(text)(inputs, case, again and (out / parse_partition(text).log).exists())
    moectl("convert", inputs / "source", out, "--to", "marlin", "--finish", "-q")


def finish(inputs: Path, case: Path, again: bool) -> None:
    """`moectl convert --finish`."""
    moectl("convert", inputs / "source", case / "out", "--to", "marlin", "--finish", "-q")


def restored(name: str) -> Writes:
    """`moectl unconvert` of the result of a command."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        moectl("unconvert", result_of(inputs, name) / "out", case / "out", "-q")

    return run


def copied(name: str) -> Callable[[Path, Path], None]:
    """The result of a command is there before."""

    def begin(inputs: Path, case: Path) -> None:
        shutil.copytree(result_of(inputs, name), case, dirs_exist_ok=True)

    return begin


def refit(inputs: Path, case: Path, again: bool) -> None:
    """`moectl refit` with a newer checkpoint."""
    moectl("refit", case / "out", inputs / "newer", "-q")


def synth(inputs: Path, case: Path, again: bool) -> None:
    """`moectl synth`, in several files."""
    from moectl.synth import synthesize

    synthesize(GPT_OSS, case / "out", **SMALL, seed=1, shard_bytes=120_000)


def rows(inputs: Path, case: Path, again: bool) -> None:
    """What `moectl bench -o FILE.jsonl` appends, with times that were measured before."""
    from moectl.bench.journal import RowJournal, RunHeader
    from moectl.bench.read_rows import read_rows

    known = read_rows(inputs / "rows.jsonl")
    machine = {key: value for key, value in known.about.items() if key not in ("settings", "kind")}
    with RowJournal.open(case / "rows.jsonl", resume=again) as journal:
        journal.begin(RunHeader(known.settings, machine))
        had = {row.key for row in journal.before.rows} if journal.before else set()
        for row in known.rows:
            if row.key not in had:
                journal.add(row)


def tables(inputs: Path, case: Path, again: bool) -> None:
    """`moectl bench --rows -o`, of every suffix, and --plot."""
    names = [word for suffix in ("json", "csv", "md") for word in ("-o", case / f"rows.{suffix}")]
    moectl("bench", "--rows", inputs / "rows.jsonl", *names, "--plot", case / "rows.svg", "-q")


def earlier(*names: str) -> Callable[[Path, Path], None]:
    """Files with other contents are there before."""

    def begin(inputs: Path, case: Path) -> None:
        for name in names:
            (case / name).write_bytes(b"what was there before\n" * 3000)

    return begin


def page(inputs: Path, case: Path, again: bool) -> None:
    """`moectl explain --html`."""
    moectl("explain", GPT_OSS, "--gpu", "h200", "--offline", "--html", case / "page.html", "-q")


def ran(inputs: Path, case: Path, again: bool) -> None:
    """`moectl run --output`."""
    words = ("--backend", "torch", "--tokens", "4", "-q", "--output", case / "y.safetensors")
    moectl("run", inputs / "source", *words)


def dumped(inputs: Path, case: Path, again: bool) -> None:
    """A dump for `moectl parity`."""
    import torch

    from moectl.parity.parameter_dump import dump_parameters

    dump_parameters({"w": torch.arange(5000.0), "b": torch.ones(3)}, case / "dump.safetensors")


def device_and_problem() -> tuple[Any, Any]:
    """A GPU and a layer that measurements are of."""
    from moectl.environment import find_device
    from moectl.problem.published_layers import named_problem

    return find_device("h200"), named_problem("gpt-oss-20b")[1]


def saved_times(*names: str) -> Writes:
    """What `moectl bench --save` keeps, of each of these backends in turn."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        from moectl.cache.backend_times import BackendTime
        from moectl.cache.backend_times_file import save

        device, problem = device_and_problem()
        for name in names:
            row = BackendTime(name, "t", 16, "uniform", 30.0, 1.0, True, 2e-3)
            when = "2026-11-21T00:00:00Z"
            save(device, problem, [row], versions={"torch": "2"}, source="moectl bench", when=when)

    return run


def launches(*tokens: int) -> Writes:
    """What `moectl tune` keeps of each of these numbers of tokens: an attempt, then the fastest launch."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        from moectl.cache.launches_file import LaunchAttempt, LaunchesStore, LaunchRow

        store = LaunchesStore.of(*reversed(device_and_problem()))
        for number in tokens:
            store.note(number, LaunchAttempt("mid", {"tokens": 16}))
            when = "2026-11-21T00:00:00Z"
            store.finish(LaunchRow(number, "grouped", {"tokens": 16}, 30.0, 40.0, 1e-3, 7, 2, when))

    return run


def cleared(inputs: Path, case: Path, again: bool) -> None:
    """`moectl tune --clear`."""
    moectl("tune", "--clear", "-q")


def tuned_file(*tokens: int) -> Writes:
    """What `moectl tune --to` writes for an engine."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        from moectl.oracle.registry import engine_named
        from moectl.tuning.engine_tuned_files import write_choices

        engine = engine_named()
        assert engine.tuned_files is not None
        tile = dict.fromkeys(engine.tuned_files.choices.values(), 16)
        path = case / "tuned" / "E=128,N=768,device_name=NVIDIA_H200.json"
        write_choices(path, dict.fromkeys(tokens, tile), "3.0", engine)

    return run


def compiled(*keys: str) -> list[Any]:
    """Kernels in Triton's cache of this process, which nothing has compiled."""
    from moectl.kernels.runner import ActivationFormat
    from moectl.kernels.triton.layer_binaries import Binary
    from moectl.layer.compile_ahead import cache_directory

    found = []
    for key in keys:
        folder = cache_directory() / (key * 52)
        if not folder.exists():
            folder.mkdir(parents=True)
            for name in ("k.json", "k.cubin", "__grp__k.json"):
                (folder / name).write_bytes(f"{key} {name}".encode() * 50)
        found.append(Binary("k", key * 52, ActivationFormat.STANDARD, 1, lambda: None))
    return found


def exported(*keys: str) -> Writes:
    """`moectl warm --to`, of kernels that were compiled before."""

    def run(inputs: Path, case: Path, again: bool) -> None:
        from moectl.layer.kernel_files import export_kernels

        export_kernels(compiled(*keys), case / "kernels")

    return run


def imported(inputs: Path, case: Path, again: bool) -> None:
    """`moectl warm --from`, into an empty cache."""
    import triton

    from moectl.layer.kernel_files import import_kernels

    binaries = compiled("A", "B")
    triton.knobs.cache.dir = str(case / "triton")
    import_kernels(binaries, result_of(inputs, "warm --to") / "kernels")


def remembered(inputs: Path, case: Path, again: bool) -> None:
    """What `moectl warm` keeps of what it compiled."""
    from moectl.environment import find_device
    from moectl.kernels.triton.offline_gpu import OfflineGpu
    from moectl.layer.compile_ahead import CompileRequest, CompileResult, remember

    _, problem = device_and_problem()
    binaries = tuple((b.name, b.key, b.form.value, 1) for b in compiled("A", "B"))
    request = CompileRequest(problem, "moectl", OfflineGpu.of(find_device("h200")), 16)
    remember(request, CompileResult(2, 0, 2, 1.0, binaries=binaries))


def headers(inputs: Path, case: Path, again: bool) -> None:
    """The headers of a checkpoint on the Hub, as they are cached."""
    from huggingface_hub import constants

    from moectl.checkpoint.source.hub_cache import HeaderCache

    constants.HF_ASSETS_CACHE = str(case / "assets")
    cache = HeaderCache("org/name", "0" * 40)
    cache.write("model.safetensors", b"\2\0\0\0\0\0\0\0{}", 10)
    cache.write_listing({"model.safetensors": 10})


def fetched(inputs: Path, case: Path, again: bool) -> None:
    """`moectl peers`, from a server on this machine."""
    from moectl.peers.fetch import fetch

    from .local_peers import pinned_at

    fetch([pinned_at(inputs)], case / "peers")


def earlier_peer(inputs: Path, case: Path) -> None:
    """Another version of the library is there before."""
    for name in ("humming/__init__.py", "humming/old.py", "humming_kernels-0.1.18.dist-info/METADATA"):
        path = case / "peers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old\n")


FAMILIES = (
    "trtllm", "moectl", "humming", "humming-sm100", "triton-hopper", "triton-blackwell", "cutlass",
    "cutlass-sm90", "cutlass-sm100", "aiter", "cpu",
)  # fmt: skip
"""Targets of layouts that hold the weights of `source`, besides Marlin's."""

PORTABLE = {
    "int4-g128": ("bf16", "int4-g128"),
    "gptq": ("bf16", "int4-g128", "--container", "gptq"),
    "fp8-block native": ("bf16", "fp8-block", "--container", "native"),
    "int8": ("source", "int8", "--requantize"),
    "mxfp4 native": ("source", "mxfp4", "--container", "native"),
    "bf16": ("source", "bf16"),
}
"""Conversions to portable formats: source, target and options."""


def _commands() -> Iterator[tuple[str, WritingCommand]]:
    yield "marlin", WritingCommand(conversion("source", "marlin"))
    yield "marlin, newer", WritingCommand(conversion("newer", "marlin"))
    yield "experts only", WritingCommand(conversion("source", "marlin", "--experts-only"))
    for target in FAMILIES:
        yield target, WritingCommand(conversion("source", target))
    for name, (source, target, *options) in PORTABLE.items():
        yield name, WritingCommand(conversion(source, target, *options), mark="config.json")
    ranks = conversion("source", "marlin", "--tp-size", "2")
    yield "ranks", WritingCommand(ranks)
    yield "rank 0", WritingCommand(conversion("source", "marlin", "--tp-size", "2", "--rank", "0"))
    last = conversion("source", "marlin", "--tp-size", "2", "--rank", "1")
    yield "rank 1", WritingCommand(last, begin=copied("rank 0"), needs=("rank 0",))
    yield "ep ranks", WritingCommand(conversion("source", "marlin", "--ep-size", "2"))
    yield "parts", WritingCommand(parts)
    yield (
        "unconvert",
        WritingCommand(restored("marlin"), mark="config.json", resumes=False, needs=("marlin",)),
    )
    yield (
        "unconvert ranks",
        WritingCommand(restored("ranks"), mark="config.json", resumes=False, needs=("ranks",)),
    )
    yield "refit", WritingCommand(refit, begin=copied("marlin"), needs=("marlin",))
    yield "refit ranks", WritingCommand(refit, begin=copied("ranks"), needs=("ranks",))
    yield "synth", WritingCommand(synth, mark="config.json", resumes=False)
    yield "rows", WritingCommand(rows, out="")
    names = ("rows.json", "rows.csv", "rows.md", "rows.svg")
    yield "tables", WritingCommand(tables, begin=earlier(*names), out="")
    yield "page", WritingCommand(page, begin=earlier("page.html"), out="")
    yield "run", WritingCommand(ran, begin=earlier("y.safetensors"), out="")
    yield "parity", WritingCommand(dumped, out="")
    yield "times", WritingCommand(saved_times("moectl", "triton", "moectl"), out="", lasting=False)
    yield "launches", WritingCommand(launches(16, 64), out="", lasting=False)
    yield (
        "clear",
        WritingCommand(cleared, begin=copied("launches"), out="", needs=("launches",), lasting=False),
    )
    yield "tuned file", WritingCommand(tuned_file(16, 64), out="")
    yield "warm --to", WritingCommand(exported("A", "B"), out="")
    yield "warm --from", WritingCommand(imported, out="", needs=("warm --to",), lasting=False)
    yield "warm record", WritingCommand(remembered, out="", lasting=False)
    yield "headers", WritingCommand(headers, out="", lasting=False)
    yield "peers", WritingCommand(fetched, out="")
    yield "peers, replaced", WritingCommand(fetched, begin=earlier_peer, out="")


COMMANDS: Mapping[str, WritingCommand] = dict(_commands())
"""Every command that writes, in its modes, by name."""


def environment_of(case: Path, inputs: Path) -> None:
    """Puts the caches of this process below the directory of a case."""
    os.environ |= {
        "MOECTL_CACHE": str(case / "cache"),
        "HF_HUB_OFFLINE": "1",
        "SOURCE_DATE_EPOCH": "1",
        "TRITON_CACHE_DIR": str(inputs / "triton"),
    }
