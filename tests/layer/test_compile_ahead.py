"""Kernels compiled in advance: by worker processes, beside a server's loading, and on another machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from moectl.environment import find_device
from moectl.errors import CheckpointError, MoectlError, NoBackend, UsageError
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat
from moectl.kernels.triton.expert_batches import CHOSEN_FOR
from moectl.kernels.triton.kernel_family import layer_of
from moectl.kernels.triton.layer_binaries import binaries_at, counting
from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in
from moectl.kernels.triton.triton_runner import launch_on, run_with
from moectl.layer import background_compile, compile_ahead
from moectl.layer.background_compile import started
from moectl.layer.compile_ahead import CompileRequest, CompileResult, cache_directory
from moectl.layer.experts import empty_layer
from moectl.layer.kernel_files import INDEX, differences, export_kernels, import_kernels
from moectl.layer.refit import refit
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.problem.schemes import MXFP4, Scheme
from support.random_layers import canonical_roles
from support.random_layers import layer_of as layer_of_roles

A100 = OfflineGpu.of(find_device("a100"))
PROBLEM = MoEProblem(Dims(512, 512), 8, 2, Scheme(MXFP4))
REQUEST = CompileRequest(PROBLEM, "moectl", A100, tokens=2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("MOECTL_CACHE", str(tmp_path / "moectl"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cache_directory() == tmp_path / "triton"
    return tmp_path / "triton"


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Triton remembers nothing of earlier launches in this process."""
    from moectl.kernels.triton import portable_kernels, sort_and_combine_kernels

    for module in (portable_kernels, sort_and_combine_kernels):
        for kernel in vars(module).values():
            if isinstance(kernel, triton.runtime.JITFunction):
                kernel.device_caches.clear()
    yield


def bare_layer() -> PreparedMoE:
    layer = empty_layer(PROBLEM, "moectl")
    layer.derived[CHOSEN_FOR] = torch.device("cuda")
    return layer


def launch(tokens: int) -> None:
    """Compiles what a call of `tokens` tokens launches, by Triton's ordinary way, and runs nothing."""
    from devtools.inspection.offline_gpu import compiling_for

    layer = bare_layer()
    x = torch.empty(tokens, PROBLEM.dims.hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, PROBLEM.top_k, dtype=torch.int32, device="meta")
    with compiling_for(A100):
        run_with(layer, x, ids, torch.empty(tokens, PROBLEM.top_k, device="meta"), launch_on(layer, tokens))


def test_launches_find_what_workers_compiled(cache: Path, forgetful: None, tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    result = compile_ahead.compile_ahead(REQUEST, 2, lambda *at: said.append(at))
    assert (result.kernels, result.cached, result.compiled, result.processes) == (3, 0, 3, 2)
    assert not result.failed and [at[:2] for at in said] == [(1, 3), (2, 3), (3, 3)]
    assert str(result).startswith("3 kernels, 0 from the cache, 3 compiled in ")
    with counting() as count:
        launch(1)
        launch(2)
    assert (count.compiled, count.cached) == (0, 3)
    # A second start compiles nothing, and starts no process for it.
    again = compile_ahead.compile_ahead(REQUEST)
    assert (again.cached, again.compiled, again.processes) == (3, 0, 0)

    # Another machine, with the directory that this one wrote.
    with standing_in(A100):
        binaries = REQUEST.binaries()
        assert export_kernels(binaries, tmp_path / "kernels") == 3
        assert export_kernels(binaries, tmp_path / "kernels") == 3  # beside what is there
    assert not differences(tmp_path / "kernels")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "elsewhere")
    with standing_in(A100):
        assert import_kernels(binaries, tmp_path / "kernels") == 3
        assert import_kernels(binaries, tmp_path / "kernels") == 0
    with counting() as count, standing_in(A100):
        for binary in REQUEST.binaries():
            assert len(binary.compile().asm["cubin"]) > 1000
    assert (count.compiled, count.cached) == (0, 3)

    # What was changed on the way is not taken.
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "third")
    code = next((tmp_path / "kernels").rglob("*.cubin"))
    code.write_bytes(code.read_bytes()[:-1] + b"x")
    with standing_in(A100), pytest.raises(CheckpointError, match="does not have the contents"):
        import_kernels(binaries, tmp_path / "kernels")
    assert not (tmp_path / "third" / code.parent.name).exists()


def test_indices_of_kernels_are_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no kernels\.json"):
        import_kernels([], tmp_path)
    (tmp_path / "other").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        export_kernels([], tmp_path)
    index = {"version": 1, "built": {"triton": "0"}, "kernels": {"../../up": {"name": "k", "files": {}}}}
    for change, message in (
        ({}, "not a key"),
        ({"version": 9}, "has version 9"),
        ({"kernels": 3}, "kernels"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({**index, **change}))
        with pytest.raises(CheckpointError, match=message):
            import_kernels([], tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({**index, "kernels": {}}))
    assert any("triton 0 there" in line for line in differences(tmp_path))


@pytest.mark.parametrize(("before", "processes"), [(set(), 0), ({80}, 0), ({100}, 1), ({80, 100}, 1)])
def test_a_process_compiles_for_one_architecture(
    before: set[int], processes: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = set(before)
    monkeypatch.setattr(compile_ahead, "_compiled_here", compiled)
    monkeypatch.setattr(compile_ahead, "_compile_in", lambda *about: [])
    monkeypatch.setattr(compile_ahead, "_failure", lambda binary: "")
    result = compile_ahead.compile_ahead(REQUEST, jobs=1)
    assert (result.processes, result.failed) == (processes, ())
    assert compiled == (before if processes else before | {80})


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compilation in this process, replaced by a list of what is asked for."""
    here: list[str] = []

    def compiled(binary: compile_ahead.Binary) -> str:
        here.append(binary.name)
        return "it does not compile" if "combine" in binary.name else ""

    monkeypatch.setattr(compile_ahead, "_failure", compiled)
    return here


@pytest.mark.parametrize(
    "code", ["raise SystemExit(3)", "import time; print('{}', flush=True)", "print('x')"]
)
def test_kernels_of_workers_that_fail_are_compiled_here(
    code: str, cache: Path, uncompiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "WORKER_CODE", code)
    result = compile_ahead.compile_ahead(REQUEST, 2)
    assert len(uncompiled) == 3 and result.compiled == 2 and result.failed == ("it does not compile",)


def test_without_processes_one_compiles_and_says_why(
    cache: Path, uncompiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **named: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    for module in (compile_ahead, background_compile):
        monkeypatch.setattr(module, "python_process", refused)
    result = compile_ahead.compile_ahead(REQUEST, 4)
    assert result.processes == 0 and len(uncompiled) == 3
    assert result.note == "worker processes cannot be started: Resource temporarily unavailable"
    load = started(REQUEST)
    assert load.process is None and "no process to compile kernels can be started" in load.trouble


def test_workers_fit_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, most in ((None, 64), (0, 1), (compile_ahead.WORKER_BYTES * 5, 5), (1 << 50, 64)):
        monkeypatch.setattr(compile_ahead, "_free_memory", lambda free=free: free)
        monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: range(64), raising=False)
        assert compile_ahead.most_workers() == most


def test_other_libraries_kernels_are_refused() -> None:
    with standing_in(A100), pytest.raises(UsageError, match="are not moectl's: its library compiles them"):
        replace(REQUEST, backend="triton_kernels").binaries()


def test_a_server_has_its_kernels_before_the_first_call(cache: Path, forgetful: None) -> None:
    load = started(REQUEST)
    os.environ["TRITON_CACHE_DIR"] = str(cache / "of torch.compile")  # as servers do later
    with standing_in(A100):
        said = load.ready(bare_layer())
        assert said.startswith("3 kernels, 3 from the cache, 0 compiled in ")
        assert "; 3 were compiled by " in said and load.ready(bare_layer()) == ""
    assert load.result is not None and load.result.calls == ((ActivationFormat.STANDARD, 1),)
    with counting() as count:
        launch(1)
        launch(2)
    assert (count.compiled, count.cached) == (0, 0)

    # The next start needs no process to know what it needs, as long as the cache has it.
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    again = started(REQUEST)
    assert again.process is None and again.result is not None and again.result.cached == 3
    with standing_in(A100):
        assert again.ready(bare_layer()).startswith("3 kernels, 3 from the cache, 0 compiled in ")
    assert compile_ahead.remembered(replace(REQUEST, tokens=3)) is None
    assert compile_ahead.remembered(replace(REQUEST, batched=True)) is None
    next(cache.glob("*/*.json")).unlink()
    assert compile_ahead.remembered(REQUEST) is None
    for record in (cache.parent / "moectl" / "compiling").glob("*.json"):
        for text in ('{"kernels": 3}', "[1]", '{"tokens": 2, "result": {"binaries": 3}}'):
            record.write_text(text)
            assert compile_ahead.remembered(REQUEST) is None


def test_what_was_compiled_for_more_tokens_serves_fewer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = OfflineGpu.of(find_device("h200"))
    most = CompileRequest(replace(PROBLEM, dims=Dims(2880, 2880)), "moectl", h200, tokens=4096)

    def recorded(request: CompileRequest) -> CompileResult:
        with standing_in(h200):
            binaries = request.binaries()
        return CompileResult(
            len(binaries),
            0,
            0,
            0.0,
            binaries=tuple((b.name, b.key, b.form.value, b.tokens) for b in binaries),
        )

    def hold(result: CompileResult) -> None:
        for name, key, *_ in result.binaries:
            (cache / key).mkdir(parents=True, exist_ok=True)
            for file in (f"{name}.json", f"__grp__{name}.json"):
                (cache / key / file).write_text("{}")

    everything = recorded(most)
    hold(everything)
    compile_ahead.remember(most, everything)
    for tokens in (1, 2, 31, 32, 33, 700, 1000, 4095, 4096):
        wanted = recorded(replace(most, tokens=tokens))
        known = compile_ahead.remembered(replace(most, tokens=tokens))
        assert known is not None and known.cached == known.kernels == wanted.kernels
        assert {key for _, key, *_ in known.binaries} == {key for _, key, *_ in wanted.binaries}
        # The calls that a server makes to find its kernels launch all of them.
        layer = empty_layer(most.problem, "moectl")
        with standing_in(h200):
            found = binaries_at(layer, runner_for("moectl"), torch.device("cuda"), known.calls)
        assert {binary.key for binary in found} == {key for _, key, *_ in wanted.binaries}
    assert known is not None and known.kernels > compile_ahead.remembered(replace(most, tokens=1)).kernels  # type: ignore[union-attr]
    # What only more tokens need may be missing, and a later record for fewer replaces none for more.
    last = next(key for _, key, _, tokens in everything.binaries if tokens > 64)
    (cache / last / "gone").parent.rename(cache / "gone")
    assert compile_ahead.remembered(most) is None
    few = replace(most, tokens=64)
    assert compile_ahead.remembered(few) is not None
    compile_ahead.remember(few, recorded(few))
    (cache / "gone").rename(cache / last)
    assert compile_ahead.remembered(most) is not None
    # A deployment is no property of a rank's kernels, nor is the GPU's name while nothing is tuned for it.
    rank = replace(most.problem, parallel=Parallel(8, ep=True))
    assert compile_ahead.remembered(replace(most, problem=rank, gpu=replace(h200, name="X"))) is not None
    assert compile_ahead.remembered(replace(most, gpu=replace(h200, sms=114))) is None
    # Nor does another Python find the kernels, whose keys differ.
    monkeypatch.setattr(compile_ahead.sys, "version_info", (3, 99, 0))
    assert compile_ahead.remembered(most) is None


def test_one_process_compiles_for_all_that_wait(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_ahead.compile_one_at_a_time(REQUEST)
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda request: pytest.fail("it compiles again"))
    second = compile_ahead.compile_one_at_a_time(REQUEST)
    assert (first.compiled, second.compiled, second.cached) == (3, 0, 3)


def test_refits_keep_to_the_ranges_of_kernels_that_were_compiled_ahead(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = range(64, 191)

    def fake(bare: PreparedMoE, *arguments: object) -> tuple[object, ...]:
        assert layer_of(bare).w13.exponents_within(folded)
        return ()

    monkeypatch.setattr(background_compile, "binaries_of", fake)
    load = background_compile.KernelLoad(REQUEST, cache)
    roles = canonical_roles(PROBLEM)
    roles["w13_scale"].fill_(120)
    layers = [layer_of_roles(PROBLEM, roles).prepared("moectl", "cpu") for _ in range(2)]
    said = [load.ready(layer) for layer in layers]
    assert said[0].startswith("0 kernels") and said[1] == ""
    scale = torch.full((1, 1, 1), 191, dtype=torch.uint8)
    for layer in layers:
        assert (layer_of(layer).w13.relied_on, layer_of(layer).w2.relied_on) == ({folded}, set())
        with pytest.raises(NoBackend, match=r"right for scales from 2\^-63 to below 2\^64"):
            refit(layer).update("w13_scale", scale, experts=1, rows=3, columns=0)
        assert refit(layer).update("w2_scale", scale, experts=1, rows=3, columns=0)


class FakeProcess:
    """A process that has ended with some output."""

    stdin = None
    returncode = 2

    def __init__(self, output: str) -> None:
        self.output = output

    def communicate(self) -> tuple[str, None]:
        return self.output, None


@pytest.mark.parametrize("output", ["", "{}", '{"kernels": "3"}', "[1]"])
def test_a_process_that_fails_is_said_and_replaced(
    output: str, cache: Path, forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    load = background_compile.KernelLoad(REQUEST, cache, FakeProcess(output))  # type: ignore[arg-type]
    load.log.write("Traceback\nKilled\n")

    def fake(*arguments: object) -> tuple[object, ...]:
        class One:
            def compile(self) -> None:
                compiled.append("one")

        return (One(),)

    monkeypatch.setattr(background_compile, "binaries_of", fake)
    with standing_in(A100):
        said = load.ready(bare_layer())
    assert compiled == ["one"] and said.endswith("(the process that compiles kernels failed: Killed)")


CHATTY = """
from moectl.layer import background_compile, compile_ahead

def chatty(request):
    print("a library says hello")
    return compile_ahead.CompileResult(3, 2, 1, 0.5)

background_compile.compile_one_at_a_time = chatty
background_compile.serve()
"""


def test_what_libraries_print_is_no_answer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "PROCESS_CODE", CHATTY)
    load = started(REQUEST)
    load._wait()
    assert load.result == CompileResult(3, 2, 1, 0.5) and not load.trouble


def test_requests_of_equal_layers_share_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[CompileRequest] = []
    monkeypatch.setattr(background_compile, "_loads", {})
    monkeypatch.setattr(background_compile, "started", lambda request: requests.append(request) or request)
    cuda = torch.device("cuda")
    with standing_in(A100):
        first = background_compile.start(PROBLEM, "moectl", cuda, 100)
        assert background_compile.start(PROBLEM, "moectl", cuda, 100) is first
        assert background_compile.start(PROBLEM, "moectl", cuda, 200) is not first
        assert background_compile.start(PROBLEM, "marlin", cuda) is None
    assert background_compile.start(PROBLEM, "moectl", torch.device("cpu")) is None
    assert [request.tokens for request in requests] == [100, 200] and requests[0].gpu == A100


def test_results_travel_as_json() -> None:
    from moectl.files.records import from_json, to_json

    result = CompileResult(3, 1, 1, 0.5, ("no",), (("k", "A", "compute", 1),), 2, "note")
    for value in (result, REQUEST):
        assert from_json(type(value), json.loads(json.dumps(to_json(value))), "it", MoectlError) == value
    assert str(result) == "3 kernels, 1 from the cache, 1 compiled in 0.5 s, 1 failed"


def test_a_layer_without_weights_takes_no_slow_import() -> None:
    code = """
import sys, torch
from moectl.kernels.triton.layer_binaries import without_weights
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.problem.schemes import MXFP4, Scheme
layer = empty_layer(MoEProblem(Dims(512, 256), 8, 2, Scheme(MXFP4)), "moectl", "cpu")
for t in layer.weights.values():
    t.view(torch.uint8).fill_(120)
bare = without_weights(layer)
assert all(t.is_meta and t.stride() == layer.weights[role].stride() for role, t in bare.weights.items())
print("sympy" in sys.modules)
"""
    process = compile_ahead.python_process(code, subprocess.DEVNULL)
    assert process.communicate()[0].strip() == "False"
