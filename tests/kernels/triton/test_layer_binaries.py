"""Which binaries layers need: how many, found completely, and equal on machines with a GPU and without."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from threading import Thread

import pytest
import torch
import triton
from devtools.inspection.published_kernels import MODELS, layer_without_weights
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moectl.convert.rank_slice import RankSlice, shard_of
from moectl.environment import find_device
from moectl.errors import UsageError
from moectl.kernels.choice.launch_table import GpuModel, own_rows
from moectl.kernels.registry import runner_for
from moectl.kernels.runner import ActivationFormat
from moectl.kernels.triton.expert_batches import CHOSEN_FOR
from moectl.kernels.triton.kernel_family import LAYER, layer_of
from moectl.kernels.triton.layer_binaries import (
    OWN,
    Binary,
    _Walk,
    binaries_at,
    binaries_of,
    ranges_needed,
    recording,
    rely_on,
    scale_forms,
    without_weights,
)
from moectl.kernels.triton.offline_gpu import OfflineGpu, standing_in
from moectl.kernels.triton.triton_runner import launch_on, run_into
from moectl.layer.compile_ahead import CompileRequest
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.published_layers import model_problem
from moectl.problem.schemes import FP8_ACT_TOKEN, MXFP4, Scheme, int_format
from support.sampling import every_nth

CUDA = torch.device("cuda")
H200, A100 = (OfflineGpu.of(find_device(name)) for name in ("h200", "a100"))
GEMMS = ("gemm", "prefill", "layer_kernel")

UNTUNED = {
    "small mxfp4": MoEProblem(Dims(1856, 704), 12, 3, Scheme(MXFP4)),
    "int8": MoEProblem(Dims(4096, 1024), 64, 6, Scheme(int_format(8, 128))),
    "one expert a token": MoEProblem(Dims(2048, 8192), 16, 1, Scheme(int_format(4, 32))),
}


def needed(problem: MoEProblem, gpu: OfflineGpu, most: int = 16384, backend: str = "moectl") -> list[Binary]:
    with standing_in(gpu):
        return [*binaries_of(empty_layer(problem, backend), runner_for(backend), CUDA, most)]


@pytest.mark.parametrize(
    ("name", "gpu"), every_nth([(name, gpu) for name in (*MODELS, *UNTUNED) for gpu in (H200, A100)], 3)
)
def test_numbers_of_tokens_share_binaries(name: str, gpu: OfflineGpu) -> None:
    problem = UNTUNED.get(name) or layer_without_weights(name).problem
    binaries = needed(problem, gpu)
    products = [binary for binary in binaries if any(part in binary.name for part in GEMMS)]
    # The rest is lists, sums, and codes of FP8 tokens.
    assert 4 <= len(products) <= 13, products
    assert len(binaries) - len(products) <= 5, binaries
    assert len({binary.key for binary in binaries}) == len(binaries)


def rank(problem: MoEProblem, tp: int = 1, ep: int = 1) -> MoEProblem:
    return RankSlice(problem, shard_of(0, tp_size=tp, ep_size=ep)).problem


BOUNDED = {
    "gpt-oss-20b": model_problem("gpt-oss-20b"),
    "gpt-oss-120b tp8": rank(model_problem("gpt-oss-120b"), tp=8),
    "kimi-k2 ep8 int4-g32": rank(model_problem("kimi-k2"), ep=8),
    "qwen3-30b int4-g128": model_problem("qwen3-30b"),
    "mixtral int4-g128": model_problem("mixtral-8x7b", "int4-g128"),
    "deepseek-v3 tp8 nvfp4": rank(model_problem("deepseek-v3", "nvfp4"), tp=8),
    "one expert a token": UNTUNED["one expert a token"],
    "qwen3-30b bf16": model_problem("qwen3-30b", "bf16"),
    "qwen3-235b ep8 fp8-channel": rank(model_problem("qwen3-235b", "fp8-channel"), ep=8),
    "deepseek-v3 tp8 fp8-block": rank(model_problem("deepseek-v3", "fp8-block"), tp=8),
    "qwen3-30b fp8-tensor": model_problem("qwen3-30b", "fp8-tensor"),
    "deepseek-v3 tp8 fp8-block-a16": rank(model_problem("deepseek-v3", "fp8-block-a16"), tp=8),
    "qwen3-30b mxfp8": model_problem("qwen3-30b", "mxfp8"),
    "qwen3-235b int8-channel-a8": model_problem("qwen3-235b", "int8-channel-a8"),
    "qwen3-30b int4-g128-a8": model_problem("qwen3-30b", "int4-g128-a8"),
    "kimi-k2 tp8 int8-channel": rank(model_problem("kimi-k2", "int8-channel"), tp=8),
}
"""Layers with launches of their own in the table, and without."""

MOST_BINARIES, MOST_IF_MEASURED = 12, 16
"""Binaries of a layer whose launches the model of time chooses, for any number of tokens, and of one that has
rows in the table."""

MEASURED = (
    *("gpt-oss-20b", "qwen3-30b int4-g128", "deepseek-v3 tp8 nvfp4"),
    *("qwen3-30b bf16", "deepseek-v3 tp8 fp8-block"),
)
"""Those of `BOUNDED` that have rows."""


@pytest.mark.parametrize("name", BOUNDED)
def test_a_layer_has_few_binaries_for_all_numbers_of_tokens(name: str) -> None:
    request = CompileRequest(BOUNDED[name], "moectl", H200)
    with standing_in(H200):
        binaries = request.binaries()
    assert request.tokens == 16384
    assert len(binaries) <= (MOST_IF_MEASURED if name in MEASURED else MOST_BINARIES), binaries
    small = [binary.name for binary in binaries if not any(part in binary.name for part in GEMMS)]
    # One quantizes what enters either GEMM.
    quantizing = {
        "fp8-block": ["_block_codes_kernel"],
        "fp8-channel": ["_token_codes_kernel"],
        "fp8-tensor": ["_largest_kernel", "_tensor_codes_kernel"],
        "int8-channel-a8": ["_token_codes_kernel"],
        "int4-g128-a8": ["_token_codes_kernel"],
    }
    codes = quantizing.get(name.rpartition(" ")[2], [])
    lists_and_sums = (["_combine_kernel"] * sums + ["_list_kernel"] for sums in (1, 2))
    assert sorted(small) in [sorted([*codes, *kinds]) for kinds in lists_and_sums]


ONE_IN_BLOCKS = Scheme(model_problem("qwen3-30b", "fp8-block").scheme.weight, FP8_ACT_TOKEN)
PORTABLE = {
    "gpt-oss-20b fp16": (replace(model_problem("gpt-oss-20b"), dtype="fp16"), H200),
    "qwen3-30b int4 fp16": (replace(model_problem("qwen3-30b"), dtype="fp16"), H200),
    "qwen3-30b fp8, tokens with one scale": (replace(model_problem("qwen3-30b"), scheme=ONE_IN_BLOCKS), H200),
    **{f"{name} on an A100": (problem, A100) for name, problem in BOUNDED.items()},
}
"""Layers that portable kernels run with many tokens on an H200, or on another GPU."""


@pytest.mark.parametrize("name", every_nth(PORTABLE, 2))
def test_portable_kernels_of_a_layer_are_as_few(name: str) -> None:
    problem, gpu = PORTABLE[name]
    with standing_in(gpu):
        binaries = CompileRequest(problem, "moectl", gpu).binaries()
    assert any("_grouped_gemm1" in binary.name for binary in binaries)
    rows = own_rows(problem, GpuModel(gpu.capability, gpu.sms))
    assert len(binaries) <= (MOST_IF_MEASURED if rows else MOST_BINARIES), binaries


@pytest.mark.parametrize(
    ("backend", "model"),
    [*((backend, "Qwen/Qwen3-30B-A3B-GPTQ-Int4") for backend in OWN), ("moectl", "Qwen/Qwen3-30B-A3B-FP8")],
)
@pytest.mark.parametrize("gpu", [H200, pytest.param(A100, marks=pytest.mark.slow)], ids=["h200", "a100"])
def test_no_number_of_tokens_needs_another_binary(backend: str, model: str, gpu: OfflineGpu) -> None:
    problem = layer_without_weights(model).problem
    layer, runner = empty_layer(problem, backend), runner_for(backend)
    others = random.Random(5).sample(range(300, 16385), 60)
    with standing_in(gpu):
        found = {binary.key for binary in binaries_of(layer, runner, CUDA)}
        asked = [(ActivationFormat.STANDARD, tokens) for tokens in (*range(1, 300), *others)]
        assert {binary.key for binary in binaries_at(layer, runner, CUDA, asked)} <= found
    batched = (ActivationFormat.BATCHED,)
    with standing_in(gpu):
        found = {binary.key for binary in binaries_of(layer, runner, CUDA, 512, batched)}
        asked = [(*batched, rows) for rows in range(1, 513, 3)]
        assert {binary.key for binary in binaries_at(layer, runner, CUDA, asked)} <= found
        for most, expected in ((512, 1), (512, 9), (509, 130), (64, 20)):
            x = torch.empty(
                problem.local_experts, most, problem.dims.hidden, dtype=torch.bfloat16, device="meta"
            )
            counts = torch.empty(problem.local_experts, dtype=torch.int32, device="meta")
            assert runner.batched is not None
            with recording() as launched:
                runner.batched(layer, x, counts, expected)
            assert {it.binary(*batched, most).key for it in launched} <= found


def test_calls_of_the_binaries_launch_all_of_them() -> None:
    layer, runner = layer_without_weights("openai/gpt-oss-20b"), runner_for("moectl")
    with standing_in(H200):
        binaries = binaries_of(layer, runner, CUDA, 4096)
        calls = {(binary.form, binary.tokens) for binary in binaries}
        assert len(calls) < 25
        again = binaries_at(layer, runner, CUDA, calls)
    assert {binary.key for binary in again} == {binary.key for binary in binaries}


class GpuDriver:
    """Triton's driver of a machine with an H200, as far as launches ask it before they compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


@pytest.mark.parametrize("tokens", [1, 3, 16, 17])
def test_a_process_with_the_gpu_computes_the_same_keys(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tensors, some not aligned, and the driver of a machine with a GPU."""
    problem = replace(layer_without_weights("openai/gpt-oss-20b").problem, experts=8, dims=Dims(512, 256))
    problem = replace(problem, local_experts=8)
    runner = runner_for("moectl")
    with standing_in(H200):
        ahead = binaries_at(
            empty_layer(problem, "moectl"), runner, CUDA, [(ActivationFormat.STANDARD, tokens)]
        )
    real = empty_layer(problem, "moectl", "cpu")
    for tensor in real.weights.values():
        tensor.view(torch.uint8).fill_(127)
    bare = without_weights(real)
    assert bare.weights["w13"].is_meta and scale_forms(bare) == scale_forms(real)
    with standing_in(H200):
        real.derived[CHOSEN_FOR] = CUDA
        walk = _Walk(real, runner, ActivationFormat.STANDARD)
        launch = launch_on(real, tokens)
        monkeypatch.setattr(triton.runtime.driver, "_active", GpuDriver())
        keys = []
        for offset in (0, 1):
            x = torch.zeros(tokens * 512 + 8, dtype=torch.bfloat16)[offset:][: tokens * 512].view(tokens, 512)
            ids = torch.zeros(tokens * 4 + 4, dtype=torch.int32)[offset:][: tokens * 4].view(tokens, 4)
            weights = torch.zeros(tokens * 4 + 4)[offset:][: tokens * 4].view(tokens, 4)
            y = torch.zeros(tokens * 512 + 8, dtype=torch.bfloat16)[offset:][: tokens * 512].view(tokens, 512)
            with recording() as launched:
                run_into(y, real, x, ids, weights, launch)
            keys.append({it.binary(walk.form, tokens).key for it in launched})
    assert keys[0] == keys[1] == {binary.key for binary in ahead}


@pytest.mark.parametrize(("gpu", "needs"), [(H200, True), (A100, False)], ids=["h200", "a100"])
def test_ranges_that_binaries_need_are_those_they_were_chosen_by(gpu: OfflineGpu, needs: bool) -> None:
    layer = layer_without_weights("openai/gpt-oss-20b")
    bare = without_weights(layer)
    with standing_in(gpu):
        binaries_of(bare, runner_for("moectl"), CUDA, 64)
    needed = ranges_needed(bare)
    assert all(needed) == needs == any(needed)
    rely_on(layer, needed)
    made = layer_of(layer)
    assert (made.w13.relied_on, made.w2.relied_on) == needed


def test_scales_out_of_range_need_other_binaries() -> None:
    layer = layer_without_weights("openai/gpt-oss-20b")
    made = layer_of(layer)
    odd = replace(layer, derived={LAYER: replace(made, w13=replace(made.w13, exponents=(1, 254)))})
    assert scale_forms(odd) != scale_forms(layer) == scale_forms(without_weights(layer))
    assert scale_forms(without_weights(odd)) == scale_forms(odd)
    runner = runner_for("moectl")
    with standing_in(H200):
        usual, others = (
            {binary.key for binary in binaries_of(without_weights(it), runner, CUDA, 64)}
            for it in (layer, odd)
        )
    assert usual != others and usual & others


def test_architectures_have_their_own_binaries_and_gpus_of_one_share_them() -> None:
    problem = layer_without_weights("openai/gpt-oss-20b").problem
    keys = {
        name: {it.key for it in needed(problem, OfflineGpu.of(find_device(name)), 4)}
        for name in ("h200", "h100", "b200", "a100")
    }
    assert keys["h100"] & keys["h200"]
    assert not keys["b200"] & keys["h200"] and not keys["a100"] & keys["b200"]


def test_other_threads_launch_while_this_one_records(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_now(self, key, signature, device, constexprs, options, attrs, warmup):  # type: ignore[no-untyped-def]
        compiled.append(key)

    monkeypatch.setattr("moectl.kernels.triton.layer_binaries._compile", compile_now)
    with recording() as launched:
        for name in ("other", "this"):
            launch = partial(JITFunction._do_compile, None, name, {}, 0, {}, None, {}, True)
            if name == "this":
                launch()
            else:
                thread = Thread(target=launch)
                thread.start()
                thread.join()
    assert compiled == ["other"] and [it.key for it in launched] == ["this"]


def test_what_cannot_be_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no kernels of moectl's"):
        _Walk(layer_without_weights("openai/gpt-oss-20b"), runner_for("torch"), ActivationFormat.STANDARD)
    with pytest.raises(UsageError, match="moectl has no kernels for Tesla V100"):
        OfflineGpu.of(find_device("v100"))
    monkeypatch.setattr("moectl.kernels.triton.layer_binaries._compile", lambda kernel, other: None)
    with pytest.raises(UsageError, match="cannot be compiled ahead"), recording():
        pass
