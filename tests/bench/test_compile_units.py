"""What is compiled before a bench, and what a bench without costs prepares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moectl.bench.bench_rows import PreparationCosts
from moectl.bench.compile_units import CompileUnit, compile_unit, compile_units, reason_in, refused_cases
from moectl.errors import NoBackend
from moectl.layer.random_layer import RandomLayer
from moectl.problem.moe_problem import SILU, Dims, MoEProblem
from moectl.problem.roofline import MeasuredRates
from moectl.problem.schemes import FP8_ACT_TOKEN, FP8_CHANNEL, Scheme
from support.random_layers import GPT_OSS, random_layer

FP8_LAYER = MoEProblem(
    Dims(64, 32), experts=8, top_k=2, scheme=Scheme(FP8_CHANNEL, FP8_ACT_TOKEN), activation=SILU
)


def test_products_of_fp8_tokens_have_a_floor_of_their_own(bench_of):
    fp8, wide = RandomLayer(FP8_LAYER, torch.device("cpu")).experts, random_layer(GPT_OSS)
    slow = MeasuredRates(1e15, 1e9, "test", 4e9)

    def floor(layer, rates):
        bench = replace(bench_of(layer=layer, tokens=(40,)), rates=rates)
        (row,) = bench.measured()
        assert row.bound == "compute"
        return row.floor_us

    assert floor(fp8, slow) * 4 == pytest.approx(floor(fp8, replace(slow, fp8_flops=0.0)))
    assert floor(wide, slow) == floor(wide, replace(slow, fp8_flops=0.0))


def test_what_is_compiled_is_what_will_be_measured(bench_of, add_runner):
    def fails(prepared, x, ids, weights):
        raise RuntimeError("no compiler")

    add_runner("broken", compute=fails)
    bench = bench_of(("torch", "broken"), tokens=(1, 2, 3, 4, 5))
    done = {row.key for row in bench.measured() if row.backend == "broken" or row.tokens in (2, 5)}
    units = compile_units(bench, done)
    assert units == [CompileUnit("torch", 0, (1, 3, 4))]
    assert [unit.tokens for unit in compile_units(bench)] == [(1, 3, 5), (1, 3, 5), (2, 4), (2, 4)]
    lines = [line for unit in compile_units(bench) for line in compile_unit(bench, unit)]
    said = dict(filter(None, (reason_in(line.text) for line in lines)))
    weight = str(GPT_OSS.scheme.weight)
    assert {name for name, reason in said.items() if not reason} == {
        f"tiny - {weight} torch M={tokens}" for tokens in (1, 2, 3, 4, 5)
    }
    assert said[f"tiny - {weight} broken M=4"] == "RuntimeError: no compiler"
    assert sum(line.failed for line in lines) == 5
    assert reason_in("part 1 of 2 failed with status 3") is None


def test_backends_without_kernels_for_a_layer_have_nothing_to_compile(monkeypatch, bench_of):
    bench = bench_of(tokens=(1, 2))
    bench._choices[0] = replace(bench._choices[0], refused={"humming": NoBackend("it has no kernel")})
    lines = [line.text for line in refused_cases(bench)]
    assert [reason_in(line) for line in lines] == [
        (f"tiny - {GPT_OSS.scheme.weight} humming M={tokens}", "") for tokens in (1, 2)
    ]


def test_without_costs_a_layer_is_prepared_once(bench_of, add_runner):
    ready = []
    add_runner("counted", ready=lambda prepared: ready.append(prepared))
    (row, _) = replace(bench_of(("counted",)), costs=False).measured()
    assert row.timed and row.costs == PreparationCosts() and len(ready) == 1
