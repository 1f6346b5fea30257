"""Each stress case fails for a backend that is wrong where the case looks, and for no right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moectl.capabilities import own_kernels
from moectl.kernels.modular.prepare_finalize import PrepareFinalize
from moectl.kernels.prepared_layer import PreparedMoE, local_ids
from moectl.kernels.reference import route
from moectl.kernels.registry import RUNNERS
from moectl.layer.experts import ExpertLayer
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import (
    A16,
    BF16,
    FP8_ACT_GROUP_128,
    FP8_ACT_TENSOR,
    FP8_ACT_TENSOR_STATIC,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
    Scheme,
)
from moectl.run import plan_stress, this_machine
from moectl.run.backend_failures import device_failure
from moectl.run.layer_variants import poisoned_padding
from moectl.run.one_layer import prepare_layer
from moectl.run.stress import CaseResult, PlannedCase, poisoned_memory, stress
from moectl.run.stress_cases import CASES
from support.absent_backends import refusals, skip_if_absent
from support.fake_backends import CPU, Compute, register, right, routing
from support.peer_cases import layer_for
from support.random_layers import GPT_OSS, KIMI, random_layer

SMALL = replace(KIMI, dims=Dims(64, 32), experts=5, local_experts=5, top_k=2)
"""Without biases, so that a token of tiny or zero activations gives next to nothing."""


@pytest.fixture(scope="module")
def layer() -> ExpertLayer:
    return random_layer(SMALL)


@pytest.fixture(scope="module")
def planned(layer: ExpertLayer) -> tuple[PlannedCase, ...]:
    return plan_stress(layer, CPU.torch)


def results(layer: ExpertLayer, cases: tuple[PlannedCase, ...], name: str) -> dict[str, CaseResult]:
    held = prepare_layer(layer, name, CPU)
    return {found.case: found for found in stress(held, cases, CPU.torch, lambda text: None)}


def failing(found: dict[str, CaseResult]) -> set[str]:
    return {name for name, result in found.items() if result.failed}


def wrong_at(count: int) -> Compute:
    """Loses the last token of a batch of `count`."""

    def compute(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = right(prepared, x, ids, weights)
        if len(y) == count:
            y[-1] = 0
        return y

    return compute


def needs_every_expert(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    problem = prepared.problem
    whole = len(x) > 64 and problem.local_experts == problem.experts
    if whole and bool((ids >= 0).all()) and len(ids.unique()) == problem.top_k:
        raise ZeroDivisionError("an expert has no tokens")
    return right(prepared, x, ids, weights)


def full_at_64(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Has room for 64 tokens of the last expert."""
    last = ids == prepared.problem.local_experts - 1
    return right(prepared, x, torch.where(last & (last.cumsum(0) > 64), -1, ids), weights)


def takes_minus_one_as_zero(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(prepared, x, ids.clamp(min=0), weights)


def writes_nothing_without_work(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(x) if bool((ids < 0).all()) else right(prepared, x, ids, weights)


def counts_from_the_first_again(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    ids = local_ids(ids, prepared.first_expert, prepared.problem.local_experts)
    return right(prepared, x, ids, weights)


def takes_rows_to_lie_together(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(prepared, x.as_strided(x.shape, (x.shape[1], 1)), ids, weights)


def saturates(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(prepared, x.clamp(-1000, 1000), ids, weights)


def flushes(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(prepared, torch.where(x.abs() < 2.0**-14, 0, x), ids, weights)


def scales_by_the_largest(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    largest = x.abs().amax(1, keepdim=True)
    return right(prepared, x / largest * largest, ids, weights)


class Unsteady:
    """Flips a bit in every second result."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = right(prepared, x, ids, weights)
        self.calls += 1
        if self.calls % 2:
            y.view(torch.int16)[:1] ^= 1
        return y


BROKEN: dict[str, Compute] = {
    **{case.name: wrong_at(int(case.name.split()[0])) for case in CASES if case.name[0] in "123456789"},
    "empty experts": needs_every_expert,
    "one expert": full_at_64,
    "skipped ids": takes_minus_one_as_zero,
    "no ids": writes_nothing_without_work,
    "rank's share": counts_from_the_first_again,
    "padding": takes_rows_to_lie_together,
    "large": saturates,
    "tiny": flushes,
    "zeros": scales_by_the_largest,
    "repeated": Unsteady(),
}
"""A backend for each case but those that have a test of their own."""

ALSO: dict[str, set[str]] = {
    "repeated": {"zeros"},
    "65 tokens": {case.name for case in CASES} - {"0 tokens", "1 token", "2 tokens", "3 tokens", "17 tokens",
                                                  "63 tokens", "257 tokens", "no ids", "zeros"},
    "one expert": {"257 tokens", "empty experts"},
    "skipped ids": {"no ids", "one expert", "rank's share", "expert map"},
    "rank's share": {"expert map"},
    "tiny": {"empty experts"},
}  # fmt: skip
"""What else such a backend may fail, besides its case."""


def test_a_right_backend_passes_every_case(layer: ExpertLayer, planned: tuple[PlannedCase, ...]) -> None:
    found = results(layer, planned, "torch")
    assert list(found) == [case.name for case in CASES]
    assert all(it.ok for it in found.values()), [it for it in found.values() if not it.ok]
    assert found["257 tokens"].tokens == 257 and found["257 tokens"].check is not None


@pytest.mark.parametrize("case", BROKEN)
def test_each_case_fails_a_backend_that_is_wrong_there(
    case: str, layer: ExpertLayer, planned: tuple[PlannedCase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "broken", BROKEN[case])
    found = results(layer, planned, "broken")
    assert found[case].failed, found[case]
    assert found[case].note and found[case].backend == "broken"
    assert failing(found) <= {case} | ALSO.get(case, set()), {n: found[n].note for n in failing(found)}


def test_ties_fail_a_backend_that_prefers_the_higher_id(
    layer: ExpertLayer, planned: tuple[PlannedCase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(prepared: PreparedMoE, x: Tensor, logits: Tensor, bias: Tensor | None) -> Tensor:
        ids, weights = route(logits.flip(1), prepared.problem, None if bias is None else bias.flip(0))
        ids = prepared.problem.experts - 1 - ids
        return right(prepared, x.contiguous(), prepared.local_ids(ids), weights)

    register(monkeypatch, "routes", None, monolithic=routing)
    register(monkeypatch, "turned", None, monolithic=turned)
    found = results(layer, planned, "routes")
    by_ids = {case.name for case in CASES if case.by_ids}
    assert {name for name, it in found.items() if it.ok is None} == by_ids == {
        "one expert", "skipped ids", "no ids", "expert map"
    }  # fmt: skip
    assert all("routes by itself" in found[name].note for name in by_ids) and not failing(found)
    assert failing(results(layer, planned, "turned")) == {"ties"}


def test_an_empty_batch_fails_what_returns_a_row(
    layer: ExpertLayer, planned: tuple[PlannedCase, ...]
) -> None:
    held = prepare_layer(layer, "torch", CPU)

    class OneRowAtLeast:
        runner, monolithic, prepared = held.kernel.runner, False, held.prepared

        def run(self, inputs: object, bias: object) -> Tensor:
            y = held.kernel.run(inputs, bias)  # type: ignore[arg-type]
            return y if len(y) else y.new_zeros(1, y.shape[1])

    odd = replace(held, kernel=OneRowAtLeast())  # type: ignore[arg-type]
    found = {it.case: it for it in stress(odd, planned[:2], CPU.torch, lambda text: None)}
    assert failing(found) == {"0 tokens"}
    assert "expected torch.bfloat16 [0, 64] on cpu, got torch.bfloat16 [1, 64]" in found["0 tokens"].note


def test_the_expert_map_is_the_kernels_own(
    layer: ExpertLayer, planned: tuple[PlannedCase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps: list[list[int]] = []

    def unmapped(self: PrepareFinalize, ids: Tensor) -> Tensor:
        if self.expert_map is None:
            return ids
        maps.append(self.expert_map.tolist())
        return torch.where(ids < self.prepared.problem.local_experts, ids, -1)

    monkeypatch.setattr(PrepareFinalize, "_local", unmapped)
    assert failing(results(layer, planned, "torch")) == {"expert map"}
    assert maps and all(it == [-1, 1, -1, 0, -1] for it in maps)


def spoils(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(prepared, x, ids, weights)
    x.zero_()
    return y


def loses_one(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return right(prepared, x, ids, weights)[1:]


def breaks(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    raise RuntimeError("no kernel image is available\nmore of it")


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (spoils, "it wrote into its input x"),
        (loses_one, "expected torch.bfloat16 [3, 64] on cpu, got torch.bfloat16 [2, 64]"),
        (breaks, "RuntimeError: no kernel image is available"),
    ],
)
def test_what_is_wrong_is_told(
    compute: Compute,
    words: str,
    layer: ExpertLayer,
    planned: tuple[PlannedCase, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(monkeypatch, "broken", compute)
    three = tuple(it for it in planned if it.case.name == "3 tokens")
    found = results(layer, three, "broken")["3 tokens"]
    assert found.failed and words in found.note and "more of it" not in found.note


def test_after_a_lost_device_no_case_counts_as_passed(
    layer: ExpertLayer, planned: tuple[PlannedCase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "broken", wrong_at(2))
    monkeypatch.setattr("moectl.run.stress.device_failure", lambda device: "the GPU is gone")
    found = results(layer, planned[:6], "broken")
    assert [it.ok for it in found.values()] == [True, True, False, False, False, False]
    assert found["17 tokens"].note == "not run, the GPU is gone"
    assert device_failure(CPU.torch) == ""


def test_numbers_in_the_weights_padding_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that claims to mask its padding, and adds up all that is stored."""
    layer = random_layer(GPT_OSS)
    usual = layer.prepared("moectl", "cpu")
    poisoned = poisoned_padding(layer, "moectl", CPU.torch)
    assert poisoned is not None and poisoned.layout == usual.layout and poisoned.problem == usual.problem
    for role, t in usual.weights.items():
        assert t.shape == poisoned.weights[role].shape
        assert torch.equal(t, poisoned.weights[role]) == (role == "w2_bias"), role

    def sums_up(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = right(usual, x, ids, weights)
        same = torch.equal(prepared.weights["w2"], usual.weights["w2"])
        return y if same else y + 1

    fields = {"layout": usual.layout, "refusal": lambda problem, device: "", "masks_padding": True}
    register(monkeypatch, "sums", sums_up, **fields)
    register(monkeypatch, "masks", lambda p, x, ids, w: right(usual, x, ids, w), **fields)
    cases = tuple(it for it in plan_stress(layer, CPU.torch) if it.case.name == "padding")
    assert failing(results(layer, cases, "sums")) == {"padding"}
    assert not failing(results(layer, cases, "masks"))


def test_what_cannot_be_asked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    one = random_layer(replace(SMALL, experts=1, local_experts=1, top_k=1))
    asked = {it.case.name: it.skipped for it in plan_stress(one, CPU.torch)}
    apart = {"rank's share", "expert map"}
    assert {name for name, why in asked.items() if why == "there are 1 experts"} == apart
    found = results(one, tuple(plan_stress(one, CPU.torch)), "torch")
    assert {name for name, it in found.items() if it.ok is None} == apart and not failing(found)


def test_a_refusal_is_no_wrong_answer(
    layer: ExpertLayer, planned: tuple[PlannedCase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(problem: MoEProblem, device: torch.device) -> str:
        return "" if problem.local_experts == problem.experts else "it runs whole layers"

    register(monkeypatch, "whole", right, refusal=refusal)
    found = results(layer, planned, "whole")
    refused = {name: it.note for name, it in found.items() if it.ok is None}
    assert refused.keys() == {"rank's share", "expert map"} and not failing(found)
    assert all(note.startswith("refused: ") and "it runs whole layers" in note for note in refused.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("base", [GPT_OSS, KIMI], ids=["gpt-oss", "kimi"])
def test_both_families_pass_in_both_dtypes(base: MoEProblem, dtype: str) -> None:
    layer = random_layer(replace(base, dtype=dtype))
    cases = tuple(it for it in plan_stress(layer, CPU.torch, seed=3) if it.workload.tokens <= 65)
    found = results(layer, cases, "torch")
    assert not failing(found), [it for it in found.values() if it.failed]
    assert all(it.ok for it in found.values())


def test_memory_that_is_not_initialized_is_nan_in_poisoned_memory() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    like = torch.zeros(7)
    makers: list[Callable[[], Tensor]] = [
        lambda: torch.empty(100),
        lambda: torch.empty_like(like),
        lambda: like.new_empty(5),
    ]
    with poisoned_memory(CPU.torch):
        assert all(bool(make().isnan().all()) for make in makers)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_page_names_every_case() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    listed = {name.strip() for cell in cells for name in cell.split(",")}
    listed |= {f"{name} tokens" for name in listed if name.isdecimal()}
    assert {case.name for case in CASES} <= listed


@pytest.mark.gpu
def test_memory_of_the_allocator_is_poisoned_on_a_gpu(
    layer: ExpertLayer, planned: tuple[PlannedCase, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "broken", writes_nothing_without_work)
    register(monkeypatch, "steady", right)
    machine = replace(CPU, torch=torch.device("cuda"))
    for name, wrong in (("steady", set()), ("broken", {"no ids"})):
        held = prepare_layer(layer, name, machine)
        found = {it.case: it for it in stress(held, planned, machine.torch, lambda text: None)}
        assert failing(found) == wrong, {case: found[case].note for case in failing(found)}
    assert "65 of 65 tokens are not finite" in found["no ids"].note
    for size in (100, 5_000_000):
        first = torch.empty(size, device="cuda")
        del first
        with poisoned_memory(machine.torch):
            assert bool(torch.empty(size, device="cuda").isnan().all())


FAMILIES = {
    "gpt-oss": GPT_OSS,
    "kimi": replace(KIMI, dims=Dims(256, 96)),
    "mixtral": replace(KIMI, dims=Dims(256, 128), scheme=Scheme(BF16)),
    "deepseek": replace(KIMI, dims=Dims(256, 128), scheme=Scheme(FP8_BLOCK, FP8_ACT_GROUP_128)),
    "qwen3": replace(KIMI, dims=Dims(256, 128), scheme=Scheme(FP8_CHANNEL, FP8_ACT_TOKEN)),
    "nvfp4": replace(KIMI, dims=Dims(256, 128), scheme=Scheme(NVFP4)),
    "mxfp8": replace(KIMI, dims=Dims(256, 128), scheme=Scheme(MXFP8)),
    "fp8 tensor": replace(KIMI, dims=Dims(256, 128), scheme=Scheme(FP8_TENSOR, FP8_ACT_TENSOR)),
    "fp8 static": replace(KIMI, dims=Dims(256, 128), scheme=Scheme(FP8_TENSOR, FP8_ACT_TENSOR_STATIC)),
}


def test_families_have_every_float_format_of_moectls_kernels() -> None:
    floats = {it for it in own_kernels.TRITON.formats if not it.number.grid.integer}
    schemes = [problem.scheme for problem in FAMILIES.values()]
    assert {scheme.weight for scheme in schemes} >= floats
    fp8 = {(scheme.weight, scheme.act) for scheme in schemes if scheme.weight.name == "fp8"}
    acts = next(row.acts for row in own_kernels.TRITON.weights if row.layout == "moectl-fp8")
    assert {act for _, act in fp8} == set(acts) - {A16}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", RUNNERS)
def test_a_backend_that_is_here_serves_a_layer(backend: str, device: str) -> None:
    skip_if_absent(GPT_OSS, backend, device)
    machine = this_machine(device)
    told = {name: refusals(problem, backend, machine) for name, problem in FAMILIES.items()}
    served = [name for name, why in told.items() if not why]
    for name in served:
        layer = layer_for(FAMILIES[name])
        (one,) = (it for it in plan_stress(layer, machine.torch) if it.case.name == "3 tokens")
        held = prepare_layer(layer, backend, machine)
        (found,) = stress(held, [one], machine.torch, lambda text: None)
        assert found.ok, found.note
    assert served, f"{backend} is here, and refuses every layer: {told}"
    assert machine.torch.type == "cpu" or served == SERVED.get(backend, served)


SERVED = {"torch": list(FAMILIES)}
"""Backends that serve every family on a GPU."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_on_a_gpu_pass(family: str, backend: str, dtype: str) -> None:
    layer, machine = layer_for(replace(FAMILIES[family], dtype=dtype)), this_machine("cuda")
    if why := refusals(layer.problem, backend, machine):
        pytest.skip(f"{backend} refuses such a layer here: {why}")
    held = prepare_layer(layer, backend, machine)
    found = list(stress(held, plan_stress(layer, machine.torch), machine.torch, lambda text: None))
    assert not any(it.failed for it in found), [(it.case, it.note) for it in found if it.failed]
