"""The shipped launches, compiled without a GPU: no spills, no serialized wgmma, no register hazard."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS
from devtools.inspection.published_kernels import IN_ROWS, MODELS, Inspected, layer_without_weights
from devtools.inspection.shipped_kernels import Examined, candidates, inspect, inspect_run, shipped

from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_plan import TILE_FAMILIES
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.registry import runner_for
from moectl.kernels.triton.hopper.gemm_spec import exact_weights
from moectl.kernels.triton.kernel_family import layer_of
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.layer.experts import empty_layer
from moectl.problem.moe_problem import Activation, Dims, MoEProblem
from moectl.problem.padding import pad
from moectl.problem.published_layers import model_problem
from moectl.problem.schemes import FULL, MXFP8, NVFP4, Scheme, WeightFormat, int_format

WITHOUT_WGMMA = frozenset({"stream", "warpwise"})
"""Families whose products on sm_90 are mma.sync by design: too few tokens to fill a wgmma."""


def families(arch: int) -> list[str]:
    """The families of kernels whose code exists for `arch`."""
    capability = OFFLINE_GPUS[arch].capability
    return [name for name, it in FAMILIES.items() if it.capability[0] <= capability <= it.capability[1]]


def check(call: Inspected, *, strict: bool = True) -> None:
    """The kernels of a call multiply on tensor cores as they should, and `strict`: have no fault."""
    print(call)
    products = [kernel for kernel in call.kernels if kernel.wgmma or kernel.mma]
    assert products, "no kernel multiplies on tensor cores"
    if call.arch == 90 and call.launch.family not in WITHOUT_WGMMA:
        assert all(kernel.wgmma and not kernel.mma for kernel in products), products
    assert not strict or not call.faults


def call_of(model: str, arch: int, family: str, *, place: int) -> Inspected | None:
    """A call of a model's layer on `arch` with `family`; None when the family does not fit it.

    As the table says that ships, or one of the family's candidates where it gives the family to nobody.
    `place` 0 is the launch for the fewest tokens, -1 for the most: the smallest and the largest tile.
    """
    layer, gpu = layer_without_weights(model), OFFLINE_GPUS[arch]
    for offered in (shipped, candidates):
        launches = [it for it in offered(layer, gpu) if it.launch.family == family]
        if launches:
            break
    else:
        return None
    it = launches[place]
    return Inspected(model, arch, it.launch, it.tokens[0], inspect(layer, it.tokens[0], it.launch, gpu))


@pytest.mark.parametrize(
    "family",
    # hopper/test_compiled_* compile these for checks of their own.
    [
        pytest.param(family, marks=pytest.mark.slow if family in ("mid", "prefill", "tma") else ())
        for family in families(90)
    ],
)
def test_on_sm90_wgmma_from_registers_without_faults(family: str) -> None:
    # Formats take turns, but `warpwise` has INT4 alone; all of them are compiled in the slow tests.
    models = IN_ROWS if family == "tma" else ("openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking")
    model = models[1 if family == "warpwise" else families(90).index(family) % 2]
    call = call_of(model, 90, family, place=-1)
    assert call is not None, f"the {family} kernels do not fit {model}"
    check(call)


@pytest.mark.parametrize(
    "family", ["stream", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mid", "prefill"))]
)
@pytest.mark.parametrize("weight", [NVFP4, MXFP8], ids=str)
def test_small_floats_with_small_scales_have_no_faults(weight: WeightFormat, family: str) -> None:
    problem = pad("moectl-mtile64", MoEProblem(Dims(4096, 1536), 128, 8, Scheme(weight)))
    tiles = [it for it in FAMILIES[family].candidates(problem) if not FAMILIES[family].fits(problem, it)]
    launch = Launch(family, tiles[-1])
    kernels = inspect(empty_layer(problem, "moectl"), 64, launch, OFFLINE_GPUS[90])
    check(Inspected(str(weight), 90, launch, 64, kernels))


@pytest.mark.slow
@pytest.mark.parametrize("family", families(90))
def test_every_family_is_somebodys_launch(family: str) -> None:
    """What no model takes on any GPU, nothing here examines; the portable ones serve GPUs without rows."""
    layers = map(layer_without_weights, (*MODELS, *IN_ROWS))
    places = (OFFLINE_GPUS[arch] for arch in (90, 80))
    assert any(
        it.launch.family == family for layer, gpu in product(layers, places) for it in shipped(layer, gpu)
    )


ELSEWHERE = [arch for arch in OFFLINE_GPUS if arch != 90]
OTHERS = [(arch, family) for arch in ELSEWHERE for family in families(arch)]


def _by_default(arch: int, family: str) -> bool:
    """Each GPU with one family, and each family with some GPU."""
    there = families(arch)
    return -ELSEWHERE.index(arch) % len(there) == there.index(family)


@pytest.mark.parametrize(
    ("arch", "family"),
    [pytest.param(*case, marks=() if _by_default(*case) else pytest.mark.slow) for case in OTHERS],
    ids=[f"sm_{arch} {name}" for arch, name in OTHERS],
)
def test_other_architectures_compile(arch: int, family: str) -> None:
    # Formats take turns: each family is compiled with every one of them somewhere.
    models = ("openai/gpt-oss-120b", "Qwen/Qwen3-30B-A3B-GPTQ-Int4")
    turn = OTHERS.index((arch, family)) % 2
    calls = (call_of(model, arch, family, place=0) for model in (models[turn], models[1 - turn]))
    check(next(call for call in calls if call))


@pytest.mark.parametrize(
    ("arch", "tokens"),
    [
        (80, 1),
        (90, 64),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((90, 1), (90, 4096), (100, 64))),
    ],
)
def test_marlin_weights_read_in_place_compile(arch: int, tokens: int) -> None:
    layer = empty_layer(layer_without_weights("moonshotai/Kimi-K2-Thinking").problem, "moectl_marlin")
    kernels = inspect_run(layer, tokens, OFFLINE_GPUS[arch], runner_for("moectl_marlin").compute)
    assert sum(bool(kernel.wgmma or kernel.mma) for kernel in kernels) == 2
    assert not [fault for kernel in kernels for fault in kernel.faults], kernels


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_launch_on_sm90(model: str) -> None:
    layer, gpu = layer_without_weights(model), OFFLINE_GPUS[90]
    for it in shipped(layer, gpu):
        for tokens in it.tokens:
            kernels = inspect(layer, tokens, it.launch, gpu)
            check(Inspected(model, 90, it.launch, tokens, kernels))


QWEN = layer_without_weights("Qwen/Qwen3-30B-A3B-GPTQ-Int4").problem
GPT_OSS = layer_without_weights("openai/gpt-oss-20b").problem
NOT_GATED = replace(QWEN, activation=Activation("relu2", gated=False))
VARIANTS = {
    "int4 group 32": replace(QWEN, scheme=Scheme(int_format(4, 32))),
    "int4 group 64": replace(QWEN, scheme=Scheme(int_format(4, 64))),
    "int4 per channel": replace(QWEN, scheme=Scheme(int_format(4, FULL))),
    "int4 with zero points": replace(QWEN, scheme=Scheme(int_format(4, 128, zero_point=True))),
    "int8 group 128": replace(QWEN, scheme=Scheme(int_format(8, 128))),
    "int8 group 32 with a bias": replace(QWEN, scheme=Scheme(int_format(8, 32)), bias=True),
    "int4 group 32 with zero points and a bias": replace(
        QWEN, scheme=Scheme(int_format(4, 32, zero_point=True)), bias=True
    ),
    "int8 per channel": replace(QWEN, scheme=Scheme(int_format(8, FULL))),
    "int4 fp16": replace(QWEN, scheme=Scheme(int_format(4, 128, "F16")), dtype="fp16"),
    "mxfp4 fp16": replace(GPT_OSS, dtype="fp16"),
    "mxfp4 without a bias": replace(GPT_OSS, bias=False),
    "mxfp4 not gated": replace(NOT_GATED, scheme=GPT_OSS.scheme),
    "int4 clamped": replace(QWEN, activation=Activation("silu", limit=10.0)),
    "int4 gelu": replace(QWEN, activation=Activation("gelu_tanh")),
    "int4 step": replace(QWEN, activation=Activation("swiglustep", limit=7.0)),
    "mxfp4 SiTU": replace(GPT_OSS, activation=Activation("situ", beta=4.0, linear_beta=25.0), bias=False),
    "int4 SiTU": replace(QWEN, activation=Activation("situ", beta=4.0, linear_beta=25.0)),
    "weights on the input": replace(QWEN, routing=replace(QWEN.routing, weight_on_input=True)),
    "a size that fills no tile": replace(GPT_OSS, dims=Dims(1856, 704)),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", families(90))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_format_and_activation_on_sm90(variant: str, family: str) -> None:
    layer, gpu = empty_layer(VARIANTS[variant], "moectl"), OFFLINE_GPUS[90]
    launches = [it for it in (*shipped(layer, gpu), *candidates(layer, gpu)) if it.launch.family == family]
    if not launches:
        pytest.skip(f"the {family} kernels do not take {variant}")
    it = launches[-1]
    kernels = inspect(layer, it.tokens[0], it.launch, gpu)
    check(Inspected(variant, 90, it.launch, it.tokens[0], kernels))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mid", "prefill"])
def test_int4_with_scales_that_do_not_fold_on_sm90(family: str) -> None:
    layer, gpu = layer_without_weights("moonshotai/Kimi-K2-Thinking"), OFFLINE_GPUS[90]
    made = layer_of(layer)
    unknown = replace(made, w13=replace(made.w13, exponents=None), w2=replace(made.w2, exponents=None))
    assert exact_weights(made.problem, unknown.w13) and not exact_weights(made.problem, made.w13)
    layer = replace(layer, derived={"moectl": unknown})
    it = [it for it in candidates(layer, gpu) if it.launch.family == family][-1]
    kernels = inspect(layer, it.tokens[0], it.launch, gpu)
    check(Inspected("int4, not folded", 90, it.launch, it.tokens[0], kernels))


OTHER_FORMATS = {
    f"qwen3-30b:{format}": model_problem("qwen3-30b", format)
    for format in (
        "mxfp8",
        "nvfp4",
        "int8-g128",
        "int8-channel",
        "bf16",
        "fp8-block",
        "fp8-channel",
        "fp8-tensor",
    )
}
"""A layer in formats that none of `MODELS` has."""


def compiles_and_fits(name: str, layer: PreparedMoE, it: Examined, arch: int) -> None:
    """The kernels of a call compile and fit into shared memory; a spilled register is only slow there."""
    gpu = OFFLINE_GPUS[arch]
    call = Inspected(name, arch, it.launch, it.tokens[0], inspect(layer, it.tokens[0], it.launch, gpu))
    check(call, strict=False)
    assert all(kernel.shared <= gpu.shared for kernel in call.kernels), call


def shared_by_count(layer: PreparedMoE, it: Examined) -> int:
    """Bytes of shared memory of the launch, as choices count them."""
    shape = TILE_FAMILIES[it.launch.family].shape(layer.problem, it.launch.tile)
    return max(gemm.shared for gemm in shape.gemms)


def test_the_launch_of_most_shared_memory_fits_where_there_is_least() -> None:
    arch = min(OFFLINE_GPUS, key=lambda arch: OFFLINE_GPUS[arch].shared)
    layers = ((name, empty_layer(problem, "moectl")) for name, problem in OTHER_FORMATS.items())
    calls = [(name, layer, it) for name, layer in layers for it in shipped(layer, OFFLINE_GPUS[arch])]
    widest = max(calls, key=lambda call: shared_by_count(*call[1:]))
    compiles_and_fits(*widest, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ELSEWHERE)
@pytest.mark.parametrize("name", [*MODELS, *OTHER_FORMATS])
def test_every_shipped_launch_elsewhere(name: str, arch: int) -> None:
    other = OTHER_FORMATS.get(name)
    layer = empty_layer(other, "moectl") if other else layer_without_weights(name)
    for it in shipped(layer, OFFLINE_GPUS[arch]):
        compiles_and_fits(name, layer, it, arch)


@pytest.mark.slow
def test_the_newest_triton_compiles_them_too() -> None:
    """It compiles everything without hazards; tiles were chosen for registers as Triton 3.6 gives them.

    pip puts the newest release beside the environment the first time, hundreds of megabytes.
    """
    script = Path(__file__).parents[3] / "scripts" / "inspect_kernels"
    command = [sys.executable, str(script), "--triton", "newest", "--arch", "all", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr)
    kernels = [kernel for call in json.loads(done.stdout)["calls"] for kernel in call["kernels"]]
    assert {kernel["arch"] for kernel in kernels} == set(OFFLINE_GPUS)
    for kernel in kernels:
        print(kernel["name"], kernel["arch"], kernel["faults"])
        assert not kernel["hazards"] and not kernel["warnings"] and kernel["wgmma"] == kernel["wgmma_a"], (
            kernel
        )


def test_compiling_needs_no_memory_and_leaves_nothing_behind() -> None:
    layer = layer_without_weights("openai/gpt-oss-120b")
    assert {t.device.type for t in layer.weights.values()} == {"meta"}
    before = torch.cuda.get_device_properties
    shipped(layer, OFFLINE_GPUS[80])
    assert torch.cuda.get_device_properties is before
