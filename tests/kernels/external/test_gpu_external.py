"""Backends made of other libraries on a GPU: every format that each takes, odd routings, graphs, streams.

A library that is not here skips its tests with the reason; ``MOECTL_PEERS`` may name a folder with it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moectl.capabilities.vllm_launches import FIELDS, FOLDER_VARIABLE
from moectl.kernels.external import humming, vllm_triton
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel
from moectl.kernels.prepared_layer import CANONICAL, PreparedMoE
from moectl.kernels.reference import route
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat, Runner
from moectl.problem.moe_problem import Routing
from support import peer_cases as cases
from support.absent_backends import skip_if_absent
from support.kernel_cases import poison_new_memory
from support.random_layers import inputs_of, judged, random_layer
from support.runners import apply

pytestmark = pytest.mark.gpu

CODES = [name for name in cases.FORMATS if name not in cases.PLAIN | cases.INT8_TOKENS]
WITHOUT_INPUT = [
    name for name in CODES if "on the input" not in name and name not in ("nvfp4, bias", "fp8 tensor")
]
FP8_TOKENS = [name for name in cases.GROUPED if name.startswith("fp8")]
TAKEN = {
    "humming": [*WITHOUT_INPUT, *FP8_TOKENS, *cases.INT8_TOKENS],
    "humming_grouped": [*WITHOUT_INPUT, *FP8_TOKENS],
    "marlin": [name for name in CODES if name != "int8, zero points"],
    "triton_kernels": [name for name in CODES if name.startswith("mxfp4")],
    "triton": list(cases.PLAIN),
    "cutlass": [
        "fp8 channel, fp8 tokens",
        *("fp8 tensor, one scale of tokens", "fp8 tensor, static scale"),
    ],
    "torch_grouped": [name for name in cases.GROUPED if "blocks" not in name],
    "deep_gemm": [name for name in cases.GROUPED if "channel" not in name],
    "batched_deep_gemm": [name for name in cases.GROUPED if "channel" not in name],
}
"""By backend, the layers of `peer_cases` that it does not refuse."""

PAIRS = [(backend, name) for backend, names in TAKEN.items() for name in names]
BACKENDS = pytest.mark.parametrize("backend", TAKEN)
TOKENS = (1, 63, 300)


def runner_of(backend: str) -> Runner:
    """The runner, which takes layers; or a skip with the reason for which its library is not here."""
    runner, problem = runner_for(backend), cases.FORMATS[TAKEN[backend][0]]
    skip_if_absent(problem, backend)
    assert not runner.refusal(problem, torch.device("cuda"))
    return runner


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is poisoned, but where kernels are to follow each other with nothing between."""
    if "close" not in request.fixturenames:
        poison_new_memory(monkeypatch)


@pytest.fixture
def close() -> None:
    """Nothing is launched between the kernels of a call."""


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_agrees_with_the_reference(backend: str, name: str) -> None:
    runner, problem = runner_of(backend), cases.FORMATS[name]
    layer = cases.layer_for(problem)
    prepared = layer.prepared(backend, "cuda")
    for tokens in TOKENS:
        error = cases.run_agrees(runner, layer, prepared, tokens, "uniform")
        print(f"{backend} {name} {tokens} tokens: {error:.1e} {runner.tactic(prepared, tokens)}")


@pytest.mark.parametrize("name", [*CODES[:9], *FP8_TOKENS])
def test_humming_computes_the_same_from_conversions_and_from_its_own_transformation(name: str) -> None:
    runner_of("humming")
    problem = cases.FORMATS[name]
    layer = cases.layer_for(problem)
    converted = layer.prepared("humming", "cuda")
    if converted.layout == CANONICAL:
        pytest.skip("Humming lays this format out itself on this GPU")
    canonical = {role: t.cuda() for role, t in layer.canonical(range(problem.local_experts)).items()}
    transformed = PreparedMoE(problem, "humming", CANONICAL, canonical, converted.dense)
    for mine, own in zip(humming.ready(converted), humming.ready(transformed), strict=True):
        assert (mine.n, mine.k) == (own.n, own.k) and mine.tensors.keys() == own.tensors.keys()
        for kind, t in own.tensors.items():
            assert mine.tensors[kind].shape == t.shape and mine.tensors[kind].dtype == t.dtype, kind
            assert torch.equal(mine.tensors[kind].view(torch.uint8), t.view(torch.uint8)), kind
    for tokens in TOKENS:
        inputs = inputs_of(problem, tokens, device="cuda")
        both = [humming.compute(it, inputs.x, inputs.ids, inputs.weights) for it in (converted, transformed)]
        assert torch.equal(*both)


@pytest.mark.parametrize("kind", ["skipped", "one", "none"])
@BACKENDS
def test_odd_routings(backend: str, kind: str) -> None:
    runner = runner_of(backend)
    for top_k in (1, 4):
        problem = replace(cases.FORMATS[TAKEN[backend][0]], top_k=top_k)
        for tokens in (1, 17, 200):
            cases.agrees(runner, problem, tokens, kind, "cuda")


@BACKENDS
def test_no_tokens_and_other_dtypes(backend: str) -> None:
    from moectl.errors import UsageError

    runner, problem = runner_of(backend), cases.FORMATS[TAKEN[backend][0]]
    prepared = cases.layer_for(problem).prepared(backend, "cuda")
    inputs = inputs_of(problem, 3, device="cuda")
    y = apply(runner, prepared, inputs.x[:0], inputs.ids[:0], inputs.weights[:0])
    assert y.shape == (0, problem.dims.hidden)
    with pytest.raises(UsageError, match="the model's dtype"):
        apply(runner, prepared, inputs.x.half(), inputs.ids, inputs.weights)


@BACKENDS
def test_graphs_and_two_streams(backend: str, close: None) -> None:
    """A replay with another routing is that routing's result; two streams do not disturb each other."""
    runner, problem = runner_of(backend), cases.FORMATS[TAKEN[backend][0]]
    layer = cases.layer_for(problem)
    prepared = layer.prepared(backend, "cuda")
    inputs = inputs_of(problem, 37, device="cuda")
    other = cases.with_ids(inputs_of(problem, 37, distribution="zipf:1.2", device="cuda"), "skipped", 0)
    wanted = apply(runner, prepared, other.x, other.ids, other.weights)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
    for mine, theirs in ((inputs.x, other.x), (inputs.ids, other.ids), (inputs.weights, other.weights)):
        mine.copy_(theirs)
    graph.replay()
    assert torch.equal(y.view(torch.int16), wanted.view(torch.int16))
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for place in (stream, torch.cuda.current_stream()):
            with torch.cuda.stream(place):
                results.append(apply(runner, prepared, other.x, other.ids, other.weights))
    torch.cuda.synchronize()
    assert all(torch.equal(found.view(torch.int16), wanted.view(torch.int16)) for found in results)


@pytest.mark.parametrize("renormalize", [True, False])
def test_triton_kernels_route_by_themselves(renormalize: bool) -> None:
    runner = runner_of("triton_kernels")
    problem = replace(cases.MX, routing=Routing(renormalize=renormalize))
    layer = random_layer(problem)
    prepared = layer.prepared(runner.name, "cuda")
    inputs = inputs_of(problem, 33, device="cuda")
    logits = inputs.logits.bfloat16()
    y = FusedMoEKernel(prepared, runner, ActivationFormat.MONOLITHIC).apply_monolithic(inputs.x, logits)
    ids, weights = route(logits.float(), problem)
    result = judged(layer, prepared, y, replace(inputs, ids=ids, weights=weights))
    assert result.ok, result


@pytest.mark.parametrize("top_k", [1, 4])
@BACKENDS
def test_kernels_that_follow_each_other_closely(backend: str, top_k: int, close: None) -> None:
    """Routings that change from call to call, in one graph: each call's result is that routing's."""
    runner = runner_of(backend)
    problem = replace(cases.FORMATS[TAKEN[backend][0]], top_k=top_k)
    prepared = cases.layer_for(problem).prepared(backend, "cuda")
    every = [inputs_of(problem, tokens, device="cuda") for tokens in (1, 200, 17, 600, 3) * 4]
    wanted = []
    for inputs in every:
        wanted.append(apply(runner, prepared, inputs.x, inputs.ids, inputs.weights))
        torch.cuda.synchronize()
    for _ in range(10):
        found = [apply(runner, prepared, it.x, it.ids, it.weights) for it in every]
        assert all(torch.equal(y, right) for y, right in zip(found, wanted, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [apply(runner, prepared, it.x, it.ids, it.weights) for it in every]
    for _ in range(10):
        graph.replay()
        assert all(torch.equal(y, right) for y, right in zip(replayed, wanted, strict=True))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("triton", "bf16"),
        ("triton", "fp8 blocks, fp8 tokens"),
        ("triton", "fp8 tensor, static scale"),
        ("cutlass", "fp8 channel, fp8 tokens"),
        ("cutlass", "fp8 tensor, static scale"),
    ],
)
def test_what_is_not_finite_stays_in_its_row(backend: str, name: str) -> None:
    runner, problem = runner_of(backend), cases.FORMATS[name]
    prepared = cases.layer_for(problem).prepared(backend, "cuda")
    for tokens in (3, 65):
        inputs = inputs_of(problem, tokens, device="cuda")
        inputs.x[1, 7] = float("nan")
        y = apply(runner, prepared, inputs.x, inputs.ids, inputs.weights)
        finite = torch.isfinite(y).all(1).tolist()
        assert not finite[1] and all(finite[:1] + finite[2:])


def test_triton_launches_come_from_tuned_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch unlike vLLM's own, from a directory of the user's, computes the same."""
    runner, problem = runner_of("triton"), cases.FORMATS["bf16"]
    layer = cases.layer_for(problem)
    name = vllm_triton.tuned_name(problem, torch.cuda.get_device_name())
    entry = dict(zip(FIELDS, (16, 32, 32, 2, 2, 2), strict=True))
    (tmp_path / str(name)).write_text(json.dumps({"triton_version": "0", "8": entry}))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    prepared = layer.prepared("triton", "cuda")
    assert runner.tactic(prepared, 65) == "16x32x32, group 2, 2 warps, 2 stages, tuned file"
    cases.run_agrees(runner, layer, prepared, 65, "uniform")
