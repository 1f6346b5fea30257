"""Several backends on one layer: differences, what fails, what takes over, and other forms of a layer."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moectl.errors import BackendFailed, ExitCode, NoBackend, UsageError
from moectl.kernels.prepared_layer import PreparedMoE, Router
from moectl.layer.experts import ExpertLayer
from moectl.problem.moe_problem import Dims
from moectl.run import compare_backends, run_layer, workload_of
from moectl.run.backend_comparison import first_that_runs
from moectl.run.backend_failures import guarded
from moectl.run.layer_variants import expert_shard, in_dtype
from moectl.run.result_difference import difference
from moectl.run.workload import expected_of
from support.fake_backends import CPU, register, right, routing
from support.random_layers import FAMILIES, GPT_OSS, KIMI, QWEN, inputs_of, random_layer


@pytest.fixture(scope="module")
def layer() -> ExpertLayer:
    return random_layer(QWEN)


def louder(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = right(prepared, x, ids, weights)
    y[2] *= 1.5
    return y


def breaks(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image\nand more")


def test_differences_are_of_direction_and_size() -> None:
    reference = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    y = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [0.0, 2.5]])
    found = difference(y, reference)
    assert [(it.token, round(it.l2, 6)) for it in found.worst] == [(1, 1.414214), (3, 0.25), (0, 0.0)]
    assert [round(it.cosine, 6) for it in found.worst] == [0.0, 1.0, 1.0]
    assert math.isclose(found.l2, math.sqrt((2 + 0.25) / 30)) and found.max == 1.0
    assert math.isclose(found.cosine, (25 + 5) / math.sqrt((25 + 1 + 6.25) * 30))
    assert difference(reference, reference).cosine == pytest.approx(1.0)
    assert difference(torch.zeros(1, 4), torch.zeros(1, 4)).cosine == 1.0
    assert difference(torch.ones(1, 4), torch.zeros(1, 4)).l2 == math.inf
    nothing = difference(torch.zeros(0, 4), torch.zeros(0, 4))
    assert (nothing.cosine, nothing.l2, nothing.max, nothing.worst) == (1.0, 0.0, 0.0, ())
    broken = difference(torch.tensor([[1.0, 0.0], [math.nan, 0.0]]), torch.ones(2, 2))
    assert broken.worst[0].token == 1 and math.isnan(broken.cosine) and math.isnan(broken.l2)


def test_every_backend_is_held_to_the_reference_and_to_the_others(
    layer: ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "louder", louder)
    register(monkeypatch, "breaks", breaks)
    register(monkeypatch, "routes", None, monolithic=routing)
    said: list[str] = []
    names = ["torch", "louder", "breaks", "routes"]
    found = compare_backends(layer, names, CPU, workload_of(layer, 5), repeats=1, progress=said.append)
    torch_, loud, broken, routes = found.outcomes
    assert said == names and not found.ok
    assert torch_.ok and routes.ok and not loud.ok and not broken.ok
    assert torch_.result and loud.result and routes.result
    assert torch.equal(torch_.result.y, routes.result.y) and torch_.result.median_us > 0
    assert loud.result.check.worst_token == 2 and loud.result.difference.worst[0].token == 2
    assert loud.error is None and loud.result.difference.worst[0].l2 == pytest.approx(0.5, rel=0.02)
    assert broken.result is None and isinstance(broken.error, BackendFailed)
    assert str(broken.error).startswith(
        "the breaks backend failed on layer 0: RuntimeError: CUDA error: no kern"
    )
    assert "and more" not in str(broken.error) and broken.error.exit_code == ExitCode.FOUND
    pairs = {(it.one, it.other): it.difference for it in found.pairs}
    assert set(pairs) == {("torch", "louder"), ("torch", "routes"), ("louder", "routes")}
    assert pairs["torch", "routes"].l2 == 0.0 and pairs["torch", "louder"].worst[0].token == 2
    assert pairs["torch", "louder"].l2 == pytest.approx(loud.result.difference.l2, rel=0.05)


def test_what_fails_is_an_error_unless_another_may_take_over(
    layer: ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "breaks", breaks)
    register(monkeypatch, "louder", louder)
    workload = workload_of(layer, 3)
    with pytest.raises(BackendFailed, match="the breaks backend failed on layer 0: RuntimeError"):
        first_that_runs(layer, ["breaks"], CPU, workload)
    found = first_that_runs(layer, ["breaks", "torch", "louder"], CPU, workload, repeats=1)
    assert [it.backend for it in found.outcomes] == ["torch"] and found.ok
    assert [(it.backend, it.error is not None) for it in found.tried] == [("breaks", True)]
    with pytest.raises(NoBackend, match=r"every backend that was tried failed: .*breaks.*; .*breaks"):
        first_that_runs(layer, ["breaks", "breaks"], CPU, workload)
    # A wrong result is no failure: nothing takes over.
    found = first_that_runs(layer, ["louder", "torch"], CPU, workload, repeats=1)
    assert [it.backend for it in found.outcomes] == ["louder"] and not found.ok and not found.tried


def test_nothing_runs_after_the_device_is_lost(layer: ExpertLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "breaks", breaks)
    monkeypatch.setattr("moectl.run.backend_comparison.device_failure", lambda device: "the GPU is gone")
    found = compare_backends(layer, ["torch", "breaks", "torch"], CPU, workload_of(layer, 2), repeats=1)
    assert [it.error is None for it in found.outcomes] == [True, False, False]
    assert "not run, the GPU is gone" in str(found.outcomes[2].error)


def test_what_a_failed_backend_held_is_given_back(
    layer: ExpertLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[PreparedMoE]] = []
    left: list[bool] = []

    def holds(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        held.append(weakref.ref(prepared))
        raise RuntimeError("out of luck")

    def looks(prepared: PreparedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        left.append(held[-1]() is not None)
        return right(prepared, x, ids, weights)

    register(monkeypatch, "holds", holds)
    register(monkeypatch, "looks", looks)
    for run in (compare_backends, first_that_runs):
        left.clear()
        run(layer, ["holds", "looks"], CPU, workload_of(layer, 2), repeats=1)
        assert left and not any(left)


def test_a_runner_that_knows_no_layer_gets_its_number() -> None:
    with (
        pytest.raises(BackendFailed, match="the x backend failed on layer 7: out of words") as caught,
        guarded("x", 7),
    ):
        raise BackendFailed("x", "out of words")
    assert (caught.value.backend, caught.value.layer, caught.value.why) == ("x", 7, "out of words")
    with pytest.raises(BackendFailed, match="on layer 3: its own"), guarded("x", 7):
        raise BackendFailed("x", "its own", layer=3)
    with pytest.raises(OSError, match="disk"), guarded("x", 7):
        raise OSError("disk")
    with pytest.raises(KeyboardInterrupt), guarded("x", 7):
        raise KeyboardInterrupt


def test_a_backend_that_routes_gets_the_correction_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "routes", None, monolithic=routing)
    made = random_layer(KIMI)
    generator = torch.Generator().manual_seed(0)
    router = Router(
        torch.randn(9, 192, generator=generator) * 0.1, None, 3 * torch.randn(9, generator=generator)
    )
    layer = replace(made, router=router)
    result = run_layer(layer, "routes", CPU, tokens=6, repeats=1)
    assert result.check.ok and result.workload.routed_by == "router"
    plain = workload_of(made, 6)
    assert plain.routed_by == "random" and not plain.correction_bias.any()  # type: ignore[union-attr]
    assert not torch.equal(plain.inputs.ids, result.workload.inputs.ids)


def test_ids_of_a_file_are_not_for_a_backend_that_routes(
    layer: ExpertLayer, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    register(monkeypatch, "routes", None, monolithic=routing)
    made = inputs_of(QWEN, 4)
    file = tmp_path / "x.safetensors"  # type: ignore[operator]
    save_file({"x": made.x, "ids": made.ids, "weights": made.weights}, file)
    with pytest.raises(UsageError, match="the routes backend routes by itself, and the input gives ids"):
        run_layer(layer, "routes", CPU, source=file)
    found = compare_backends(layer, ["routes", "torch"], CPU, workload_of(layer, source=file), repeats=1)
    assert [it.ok for it in found.outcomes] == [False, True]
    for name, wrong, words in (
        ("ids", made.ids[:2], "must be \\[4, 2\\]"),
        ("ids", made.ids.clone().fill_(1), "token 0 of ids in .* has an expert twice"),
        ("ids", made.ids + 5, "token 0 of ids in .* neither an expert, 0 to 4, nor -1 for none"),
        ("ids", made.ids - 7, "neither an expert, 0 to 4, nor -1"),
        ("ids", made.ids.float(), "whole numbers, got float32"),
        ("ids", made.ids > 1, "whole numbers, got bool"),
        ("weights", made.weights * torch.nan, "must be finite numbers"),
        ("weights", made.weights * 1j, "must be finite numbers"),
    ):
        save_file({"x": made.x, "ids": made.ids, "weights": made.weights, name: wrong}, file)
        with pytest.raises(UsageError, match=words):
            workload_of(layer, source=file)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_in_another_dtype_is_the_same_but_for_its_16_bit_numbers(family: str) -> None:
    layer = random_layer(FAMILIES[family])
    other = in_dtype(layer, "fp16")
    assert in_dtype(layer, "bf16") is layer and other.problem.dtype == "fp16"
    result = run_layer(other, "torch", CPU, tokens=4, repeats=1)
    assert result.y.dtype == torch.float16 and result.check.ok
    # Rounded to fp16, results have three more bits: they are nearer to the reference than bf16's.
    assert result.check.rms < run_layer(layer, "torch", CPU, tokens=4, repeats=1).check.rms / 3
    for role, t in layer.canonical(range(2)).items():
        moved = other.canonical(range(2))[role]
        assert torch.equal(moved, t.half() if role.endswith("_bias") else t), role
    prepared = other.prepared("moectl", "cpu")
    kinds = {role: t.dtype for role, t in prepared.weights.items() if role.endswith("_bias")}
    assert set(kinds.values()) <= {torch.float16}
    assert torch.equal(prepared.expert(1).w13, layer.reference(1).w13)


def test_numbers_that_a_dtype_does_not_hold_are_refused() -> None:
    layer = random_layer(GPT_OSS)

    def loud(ids: object, device: torch.device | None = None) -> dict[str, Tensor]:
        batch = dict(layer.canonical(ids, device))  # type: ignore[arg-type]
        return batch | {"w2_bias": batch["w2_bias"] + 1e6}

    with pytest.raises(UsageError, match=r"w2_bias of layer 0 has values up to .*, which fp16 cannot hold"):
        run_layer(in_dtype(replace(layer, canonical=loud), "fp16"), "torch", CPU)


def test_shares_add_up_to_the_layer() -> None:
    layer = random_layer(replace(KIMI, dims=Dims(64, 32), experts=5, local_experts=5, top_k=3))
    whole = workload_of(layer, 6, seed=2)
    parts = [expert_shard(layer, 2, rank) for rank in (0, 1)]
    assert [part.problem.local_experts for part in parts] == [3, 2]
    assert [part.first_expert for part in parts] == [0, 3]
    results = [compare_backends(part, ["torch"], CPU, whole, repeats=1) for part in parts]
    ys = [found.outcomes[0].result.y.float() for found in results if found.outcomes[0].result]
    assert all(found.ok for found in results) and all(y.any() for y in ys)
    torch.testing.assert_close(
        ys[0] + ys[1], expected_of(layer, whole.inputs, CPU.torch), rtol=0.02, atol=0.05
    )
