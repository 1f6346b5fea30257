"""One pass does what the steps do one after another: same bytes, forth and back."""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moectl.convert.layouts.registry import layout_named
from moectl.convert.layouts.word_orders import E2M1_SHIFTED, NIBBLES_APART
from moectl.convert.onepass import _cpu_kernels, cpu_pass, cuda_pass, executors
from moectl.convert.onepass.compose import STEPS_AS_VIEWS, compose
from moectl.convert.onepass.word_program import WordProgram
from moectl.convert.recipe.chain import Chain
from moectl.convert.steps.transforms import (
    STEPS,
    Add,
    Bits,
    DtypeView,
    Flip,
    PackedCodes,
    Pad,
    Rearrange,
    Widen,
    Xor,
    type_of,
)
from moectl.errors import CheckpointError
from moectl.files.tensor_table import TensorType
from support.layout_cases import EVERY_LAYOUT, as_bytes, moved, problem_for, random_bytes, same
from support.sampling import every_nth

Run = Callable[[WordProgram, torch.Tensor, torch.Tensor], bool]


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Memory of the shape of `like` that holds none of its bytes."""
    return as_bytes(like).clone().bitwise_xor_(0xFF).view(like.dtype).reshape(like.shape)


def check_both_ways(
    chain: Chain, t: torch.Tensor, *, needed: bool, run: Run = cpu_pass.run, device: str = "cpu"
) -> int:
    """How many of the two directions compose; each then gives the bytes of the steps."""
    dtype, shape = type_of(t)
    stored = chain.apply(t)
    done = 0
    for back, source, wanted in ((False, t, stored), (True, stored, chain.undo(stored, dtype, shape))):
        program = compose(chain.steps, TensorType(dtype, (1, *shape[1:])), inverse=back)
        assert program is not None or not needed
        if program is not None:
            made = poisoned(wanted).to(device)
            assert run(program, source.contiguous().to(device), made)
            assert same(made.cpu(), wanted)
            done += 1
    return done


@pytest.mark.parametrize(
    ("layout", "weight", "rows", "hidden", "intermediate"),
    every_nth([(*case.values, *sizes) for case in EVERY_LAYOUT for sizes in ((288, 96), (96, 352))], 13),
)
def test_every_layout_is_one_pass_each_way(layout, weight, rows, hidden, intermediate):
    for name, chain, t in moved(layout, problem_for(layout, weight, rows, hidden, intermediate)):
        check_both_ways(chain, t, needed=composes(name, chain))


def composes(name: str, chain: Chain) -> bool:
    """All but few bytes: zero points, which packing looks at, and scales padded twice or with two values."""
    pads = [step for step in chain.to_json() if step["step"] == "pad"]
    once = len({step["axis"] for step in pads}) == len(pads) and len({step["fill"] for step in pads}) < 2
    return not name.endswith("_zero") and (once or not name.endswith("_scale"))


@pytest.mark.parametrize(("layout", "weight", "rows"), every_nth(EVERY_LAYOUT, 2))
def test_every_layout_has_a_launch_for_gpus(layout, weight, rows):
    for _name, chain, t in moved(layout, problem_for(layout, weight, rows, 288, 96)):
        for back in (False, True):
            program = compose(chain.steps, type_of(t).with_first_axis(1), inverse=back)
            assert program is None or cuda_pass.plan(program, 8).constants["SLOTS"]


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "weight", "rows"), EVERY_LAYOUT)
def test_every_layout_on_a_gpu(layout, weight, rows):
    for name, chain, t in moved(layout, problem_for(layout, weight, rows, 2880, 96)):
        check_both_ways(chain, t, needed=composes(name, chain), run=cuda_pass.run, device="cuda")


@st.composite
def chains(draw):
    """A chain of a few steps, with a shape and dtype that it takes."""
    e, n, k = draw(st.integers(1, 3)), draw(st.integers(1, 12)), 4 * draw(st.integers(1, 12))
    start, dtype = (e, n, k), draw(st.sampled_from(("U8", "U8", "U8", "I32", "BF16")))
    made: list[object] = []
    shape, kind = start, dtype
    for _ in range(draw(st.integers(1, 6))):
        step = draw(_step(shape, kind))
        try:
            after = step.output_type(kind, shape)
        except CheckpointError:
            continue
        if math.prod(after.shape) < 20_000:
            made.append(step)
            kind, shape = after
    return Chain(tuple(made)), start, dtype


def _step(shape, kind):
    axis = st.integers(1, len(shape) - 1)
    last = shape[-1]
    names = [f"a{i}" for i in range(len(shape) - 2)]
    head = " ".join(("e", *names))
    divisors = [i for i in (2, 3, 4, 8) if last % i == 0] or [1]
    rearranged = st.builds(
        lambda d, right: Rearrange(f"{head} (x y) -> {right}", {"y": d}),
        st.sampled_from(divisors),
        st.sampled_from(
            (
                f"{head} (y x)",
                f"e y {' '.join(names)} x".replace("  ", " "),
                f"e (x {' '.join(names)}) y".replace(" )", ")"),
                f"{head} x y",
                f"e ({' '.join((*names, 'x', 'y'))})",
            )
        ),
    )
    return st.one_of(
        rearranged,
        st.builds(
            lambda a, more, fill: Pad(a, shape[a] + more, fill), axis, st.integers(0, 9), st.integers(0, 255)
        ),
        st.builds(lambda a, more: Pad(a, shape[a] + more), axis, st.integers(0, 9)),
        st.builds(Flip, axis),
        st.builds(PackedCodes, st.sampled_from((1, 2, 4)), st.just(True)),
        st.builds(Xor, st.integers(0, 255)),
        st.sampled_from((E2M1_SHIFTED, NIBBLES_APART)),
        st.permutations(range(32)).map(lambda order: Bits(tuple(order))),
        st.builds(DtypeView, st.just(kind), st.sampled_from(("U8", "I32", "I16", "BF16"))),
        st.builds(Add, st.integers(0, 255)),
        st.just(Widen("BF16")),
    )


def test_random_chains():
    composed = []

    @settings(max_examples=150, deadline=None)
    @given(chains(), st.integers(0, 1 << 30))
    def both_ways(case, seed):
        chain, shape, dtype = case
        composed.append(check_both_ways(chain, random_bytes(shape, dtype, seed), needed=False))

    both_ways()
    assert composed.count(2) > len(composed) // 2  # or it would have shown little


def test_codes_taken_apart_and_put_back():
    chain = Chain(
        (
            PackedCodes(4, True),
            Rearrange("e n (k a) -> e (n a) k", {"a": 2}),
            PackedCodes(4, False),
            Xor(0x88),
        )
    )
    assert check_both_ways(chain, random_bytes((3, 5, 24), "U8"), needed=True) == 2


@pytest.mark.parametrize("fill", [0, 127])
def test_padding_of_both_axes_inside_a_word(fill):
    steps = (Pad(1, 9, fill), Pad(2, 16, fill), Xor(0x5A), Rearrange("e n (a b) -> e a n b", {"b": 8}))
    assert check_both_ways(Chain(steps), random_bytes((2, 7, 13), "U8"), needed=True) == 2


def test_bytes_that_are_added_to():
    steps = (Pad(1, 9, 3), Add(6), Rearrange("e n (a b) -> e a n b", {"b": 8}), DtypeView("U8", "I32"))
    assert check_both_ways(Chain(steps), random_bytes((2, 7, 16), "U8"), needed=True) == 2
    assert check_both_ways(Chain((Add(6), Xor(1))), random_bytes((2, 7, 16), "U8"), needed=False) == 1


def test_a_long_prime_axis_is_cut_into_tiles():
    chain = Chain((Rearrange("e n k -> e k n"),))
    assert check_both_ways(chain, random_bytes((1, 1009, 12), "U8"), needed=True) == 2


@pytest.mark.parametrize(
    ("steps", "shape"),
    [
        ((PackedCodes(1, True), Pad(2, (1 << 23) + 1)), (1, 1, 1 << 20)),
        ((PackedCodes(2, True), Pad(2, 1_599_863)), (1, 64, 399_964)),
    ],
)
def test_chains_that_would_need_huge_tables_go_step_by_step(steps, shape):
    tracemalloc.start()
    try:
        assert compose(steps, TensorType("U8", shape)) is None
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_every_step_that_moves_bits_has_a_row():
    assert set(STEPS_AS_VIEWS) == set(STEPS.values())


def test_steps_that_compute_values_do_not_compose():
    assert compose((Widen("F16"),), TensorType("F16", (1, 4))) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_take_the_one_pass(threads, monkeypatch):
    chain = Chain((Pad(1, 80), Rearrange("e (n a) k -> e n (k a)", {"a": 16})))
    t = random_bytes((5, 77, 36), "U8")
    slow = chain.apply(t)
    ran = []
    monkeypatch.setattr(executors, "SMALLEST", 1)
    monkeypatch.setattr(cpu_pass, "thread_count", lambda: threads)
    monkeypatch.setattr(Chain, "_blocks", lambda *_: ran.append("steps"))
    assert same(chain.apply(t), slow)
    assert same(chain.undo(slow, *type_of(t)), t)
    out = torch.full_like(slow, 1)
    assert chain.apply(t, out) is out
    assert same(out, slow)
    assert not ran


def test_tensors_with_gaps_go_step_by_step(monkeypatch):
    monkeypatch.setattr(executors, "SMALLEST", 1)
    chain = Chain((Xor(1),))
    t = random_bytes((2, 6, 8), "U8")
    assert same(chain.apply(t[:, ::2]), t[:, ::2] ^ 1)


def test_without_numba_the_steps_run(monkeypatch):
    monkeypatch.setattr(executors, "SMALLEST", 1)
    monkeypatch.setattr(executors, "EXECUTORS", {"cpu": ("cpu_pass", "no_such_compiler")})
    executors.load.cache_clear()
    try:
        t = random_bytes((2, 6, 8), "U8")
        assert same(Chain((Xor(1),)).apply(t), t ^ 1)
        assert executors.fast_path().startswith(
            "cpu: step by step, because no_such_compiler cannot be imported"
        )
    finally:
        executors.load.cache_clear()


def plus_one(number):
    return number + 1


@pytest.mark.parametrize("length", [0, 60])
def test_compiled_code_cut_short_on_the_disk_is_compiled_again(length, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    hits = []
    for _ in range(3):
        compiled = _cpu_kernels._compiled(plus_one)
        assert compiled(1) == 2
        hits.append(sum(compiled.stats.cache_hits.values()))
        if len(hits) == 1:
            files = list(tmp_path.rglob("*.nb?"))
            assert {file.suffix for file in files} == {".nbi", ".nbc"}
            for file in files:
                os.truncate(file, length)
    assert hits == [0, 0, 1]


def test_compiled_code_that_cannot_be_kept_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def full(*what):
        raise OSError(errno.ENOSPC, "No space left on device")

    compiled = _cpu_kernels._compiled(plus_one)
    monkeypatch.setattr(compiled._cache._cache, "save_overload", full)
    assert compiled(1) == 2


def test_the_fast_path_is_named():
    assert executors.fast_path().startswith("cpu: in one pass, compiled by numba ")


def test_the_pass_for_gpus_in_the_interpreter():
    """Triton's interpreter has to be chosen before Triton is imported."""
    cases = Path(__file__).with_name("interpreted_passes.py")
    root = cases.parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", ["marlin-mxfp4", "triton-hopper", "trtllm-mxfp4"])
def test_tiles_for_gpus_touch_few_sectors(name, back):
    """A tile of a layer of 2880 x 2880 uses what it touches of the memory's 32-byte sectors."""
    layout = layout_named(name)
    problem = problem_for(layout, layout.weights[0], "interleaved", 2880, 2880, experts=1)
    program = compose(layout.chains(problem)["w13"].steps, TensorType("U8", (1, 5760, 1440)), inverse=back)
    launch = cuda_pass.plan(program, 8)
    assert launch.constants["TILE"] == cuda_pass.TILE_WORDS
    for fields, some, size in (("READ", "SLOTS", launch.unit), ("WRITE", "WORDS", launch.width)):
        at = np.array([row[0] for row in launch.constants[some]])
        for _, count, step, *_ in launch.constants[fields]:
            at = (at[:, None] + np.arange(count) * step).reshape(-1)
        touched = np.unique((np.unique(at)[:, None] * size + np.arange(size)).reshape(-1))
        assert len(touched) >= 0.9 * 32 * len(np.unique(touched // 32))


def test_the_script_that_times_it(monkeypatch):
    """A small layer through the script: our bytes are FlashInfer's, and what is absent is said so."""
    script = Path(__file__).parents[3] / "scripts" / "bench_convert"
    loader = SourceFileLoader("bench_convert", str(script))
    bench = module_from_spec(spec_from_loader("bench_convert", loader))
    monkeypatch.setitem(sys.modules, "bench_convert", bench)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader.exec_module(bench)
    small = {"hidden": 512, "intermediate": 256, "experts": 2}
    rows = [row for case in bench.CASES for row in bench.measure(replace(case, **small), 2, "cpu", None)]
    assert [row.case for row in rows] == [case.name for case in bench.CASES]
    assert all(row.rate > 0 and row.back_rate > 0 for row in rows)
    assert rows[1].against.startswith("FlashInfer")
    assert rows[1].ratio if find_spec("flashinfer") else "is missing" in rows[1].against
    assert "is missing: no vllm/" in rows[0].against and rows[0].ratio is None


@pytest.mark.parametrize(
    ("name", "most"),
    [("moectl-mtile64", 34), ("marlin-mxfp4", 18), ("triton-hopper", 56), ("trtllm-mxfp4", 20)],
)
def test_compiled_for_a_gpu_that_is_not_here(name, most, tmp_path):
    """Written 16 bytes at a time, nothing kept on a stack, and few instructions for a word of 4 bytes."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moectl.convert.onepass._cuda_kernels import _convert_kernel

    layout = layout_named(name)
    problem = problem_for(layout, layout.weights[0], "interleaved", 2880, 2880, experts=1)
    program = compose(layout.chains(problem)["w13"].steps, TensorType("U8", (1, 5760, 1440)))
    launch = cuda_pass.plan(program, 8)
    kinds = {1: "*u8", 2: "*u16", 4: "*u32", 8: "*u64"}
    signature = {"source": kinds[launch.unit], "target": kinds[launch.width], "refused": "*i32"}
    constants = launch.constants | {"PERMUTES": True}
    source = ASTSource(
        fn=_convert_kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in range(3)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
    assert "STACK:0" in usage.stdout
    code = subprocess.run([tool, "--dump-sass", file], capture_output=True, text=True, check=True).stdout
    instructions = len(re.findall(r"^ +/\*[0-9a-f]{4}\*/", code, re.MULTILINE))
    words = launch.constants["TILE"] * len(launch.constants["WORDS"]) // (32 * compiled.metadata.num_warps)
    assert launch.width == 4 and 0 < instructions <= most * words, instructions / words
