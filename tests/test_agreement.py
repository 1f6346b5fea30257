"""What the oracle says runs here is what the runners and their layouts take."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from moectl.convert.layouts.registry import layout_named
from moectl.environment import Packages, find_device
from moectl.kernels.external import (
    deep_gemm,
    humming,
    sonic_moe,
    torch_grouped,
    triton_kernels,
    vllm_cutlass,
    vllm_marlin,
    vllm_triton,
)
from moectl.kernels.prepared_layer import CANONICAL
from moectl.kernels.registry import runner_for
from moectl.oracle import policy_named, select
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation, Dims, MoEProblem, Routing
from moectl.problem.padding import padding
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
    FULL,
    MXFP4,
    MXFP8,
    MXFP8_ACT,
    NVFP4,
    Scheme,
    act_format,
    int_format,
    weight_format,
)
from support.sampling import every_nth

WEIGHTS = [
    MXFP4,
    BF16,
    *(
        int_format(bits, group, scales, zero)
        for bits, group, scales, zero in product(
            (4, 8), (16, 32, 64, 128, FULL), ("BF16", "F16", "F32"), (False, True)
        )
    ),
]
FP8_SCHEMES = [
    Scheme(replace(weight, scale_dtype=scales), act)
    for weight, scales, act in (
        (FP8_BLOCK, "F32", FP8_ACT_GROUP_128),
        (FP8_BLOCK, "E8M0", FP8_ACT_GROUP_128),
        (FP8_BLOCK, "BF16", A16),
        (FP8_BLOCK, "F32", MXFP8_ACT),
        (FP8_CHANNEL, "F32", FP8_ACT_TOKEN),
        (FP8_TENSOR, "F32", FP8_ACT_TENSOR_STATIC),
        (FP8_TENSOR, "F16", FP8_ACT_TENSOR),
        (weight_format("fp8", (64, 64)), "F32", A16),
    )
]
ACTIVATIONS = [
    SILU,
    SWIGLU_OAI,
    Activation("silu", limit=10.0),
    Activation("gelu_tanh"),
    Activation("gelu"),
    Activation("situ"),
    Activation("relu2", gated=False),
    Activation("silu", gated=False),
]
PROBLEMS = [
    MoEProblem(Dims(hidden, 256), 8, 4, Scheme(weight), activation, bias=bias, dtype=dtype, act_order=order)
    for weight, activation, bias, dtype, order, hidden in product(
        WEIGHTS, ACTIVATIONS, (False, True), ("bf16", "fp16"), ("", "group"), (256, 2880)
    )
    if weight.group in (0, FULL) or hidden % weight.group == 0
]


def chosen_on(device, problem):
    """The runner of the tool's own policy for a problem, or None."""
    chosen = select(problem, find_device(device), Packages(), policy_named("moectl")).chosen
    return chosen.backend.runner if chosen else None


PARTS = pytest.mark.parametrize("part", every_nth(range(3), 3))
"""Thirds of the problems of a sweep, of which each has every value of every choice; by default the first."""


@PARTS
def test_triton_is_chosen_exactly_where_it_runs(monkeypatch, part):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    runner, taken = runner_for("moectl"), 0
    floats = [replace(problem, scheme=scheme) for problem in PROBLEMS[:48:2] for scheme in FP8_SCHEMES]
    problems = (*PROBLEMS[5 * part :: 15], *floats[part::3])
    for problem in problems:
        layout = layout_named(runner.layout_of(problem))
        align = padding(layout.name, problem.scheme.weight)
        padded = replace(problem, dims=align.apply(problem.dims))
        reasons = [runner.refusal(problem, torch.device("cuda")), *layout.refusals(padded)]
        runs = not any(reasons)
        assert (chosen_on("h100", problem) == "moectl") == runs, (problem, reasons)
        taken += runs
    assert 20 < taken < len(problems)


@PARTS
def test_moectl_marlin_is_usable_exactly_where_it_runs(monkeypatch, part):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    runner, layout = runner_for("moectl_marlin"), layout_named("marlin-int4")
    taken = 0
    for problem in PROBLEMS[part::3]:
        align = padding(layout.name, problem.scheme.weight)
        padded = replace(problem, dims=align.apply(problem.dims))
        reasons = [runner.refusal(problem, torch.device("cuda")), *layout.refusals(padded)]
        runs = not any(reasons)
        decided = select(problem, find_device("h100"), Packages(), policy_named("moectl"), "moectl_marlin")
        assert (decided.chosen is not None) == runs, (problem, reasons, decided.error)
        taken += runs
    assert 20 < taken < len(PROBLEMS) // 3


EXTERNAL = {
    "marlin": vllm_marlin,
    "humming": humming,
    "humming_grouped": humming,
    "triton_kernels": triton_kernels,
    "triton": vllm_triton,
    "cutlass": vllm_cutlass,
    "torch_grouped": torch_grouped,
    "sonic_moe": sonic_moe,
    "deep_gemm": deep_gemm,
    "batched_deep_gemm": deep_gemm,
}
FLOATS = (
    *map(Scheme, (BF16, NVFP4, MXFP8, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK)),
    *(Scheme(FP8_BLOCK, act) for act in (FP8_ACT_GROUP_128, FP8_ACT_TOKEN)),
    *(Scheme(FP8_CHANNEL, act) for act in (FP8_ACT_GROUP_128, FP8_ACT_TOKEN)),
    *(Scheme(FP8_TENSOR, act) for act in (FP8_ACT_TOKEN, FP8_ACT_TENSOR, FP8_ACT_TENSOR_STATIC)),
)
"""Schemes of numbers that some of the kernels take."""
INT8_TOKENS = tuple(Scheme(int_format(bits, FULL), act_format("int8", (1, FULL))) for bits in (4, 8))


@PARTS
@pytest.mark.parametrize("name", EXTERNAL)
def test_external_kernels_are_usable_exactly_where_they_run(name, part, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(EXTERNAL[name], "unavailable_reason", lambda load: "")
    there = dict.fromkeys(("vllm", "deep_gemm", "nvcc", "humming", "sonicmoe", name), "")
    packages, device, policy = Packages(there), find_device("h100"), policy_named("moectl")
    floats = [replace(problem, scheme=scheme) for problem in PROBLEMS[:24] for scheme in FLOATS]
    if EXTERNAL[name] is humming:
        floats += [replace(problem, scheme=scheme) for problem in PROBLEMS[:24] for scheme in INT8_TOKENS]
    floats += [replace(problem, dims=Dims(272, 80)) for problem in floats[:: len(FLOATS) + 1]]
    on_input = [replace(problem, routing=Routing(weight_on_input=True)) for problem in PROBLEMS[::7]]
    runner, taken = runner_for(name), 0
    for problem in (*PROBLEMS[3 * part :: 9], *floats, *on_input[part::3]):
        layout = runner.layout_of(problem)
        reasons = [runner.refusal(problem, torch.device("cuda"))]
        if not any(reasons) and layout != CANONICAL:
            align = padding(layout, problem.scheme.weight)
            reasons += layout_named(layout).refusals(replace(problem, dims=align.apply(problem.dims)))
        decided = select(problem, device, packages, policy, name)
        assert (decided.chosen is not None) == (not any(reasons)), (problem, reasons, decided.error)
        taken += not any(reasons)
    assert taken >= 2


@PARTS
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_torch_is_chosen_only_where_it_runs(device, part):
    for problem in PROBLEMS[5 * part :: 15]:
        if chosen_on(device, problem) == "torch":
            assert not runner_for("torch").refusal(problem, torch.device("cpu")), problem


@pytest.mark.parametrize(
    ("capability", "change", "message"),
    [
        ((7, 5), {}, "it needs compute capability 8.0 or newer"),
        (
            (8, 0),
            {"scheme": Scheme(weight_format("fp8", (64, 64)))},
            "it supports fp8 block 128x128, fp8 per",
        ),
        ((8, 0), {"scheme": Scheme(FP8_BLOCK, MXFP8_ACT)}, "with fp8 weights it takes 16-bit, fp8 dynamic, "),
        ((8, 0), {"scheme": Scheme(BF16, FP8_ACT_TOKEN)}, "with bf16 weights it takes 16-bit activations;"),
        ((8, 0), {"scheme": Scheme(BF16)}, ""),
        ((8, 0), {"scheme": Scheme(int_format(4, 16))}, "it supports scale groups of 16, 32, 64 and 128"),
        ((8, 0), {"scheme": Scheme(int_format(4, 32, "F32"))}, "E8M0 and 16-bit scales; the layer has F32"),
        ((8, 0), {"activation": Activation("gelu")}, "gated experts it has silu, swigluoai, swiglustep, "),
        ((8, 0), {"activation": Activation("silu", gated=False)}, "for experts without a gate it has relu2"),
        ((8, 0), {}, ""),
        ((12, 0), {"dtype": "fp16"}, ""),
    ],
)
def test_the_kernels_refuse_in_one_sentence(monkeypatch, capability, change, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    problem = replace(MoEProblem(Dims(256, 256), 8, 4, Scheme(MXFP4)), **change)
    reason = runner_for("moectl").refusal(problem, torch.device("cuda"))
    assert reason.startswith(message) if message.startswith(("it", "for")) else message in reason
    assert bool(reason) == bool(message) and "\n" not in reason
