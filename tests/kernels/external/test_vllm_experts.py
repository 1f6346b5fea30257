"""vLLM's experts without vLLM: arguments, launches, layouts, refusals, where they are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moectl.capabilities.unpacked_libraries import (
    CUTLASS_PEER,
    TRITON_EXPERTS_PEER,
    find_peers,
    library_file,
    peers_folder,
)
from moectl.capabilities.vllm_launches import FIELDS, VllmLaunch, default_launch
from moectl.errors import Unavailable, UsageError
from moectl.kernels.external import vllm_cutlass, vllm_triton
from moectl.kernels.external.fp8_rows import ExpertRows
from moectl.kernels.external.gemm_glue import ExpertBlocks
from moectl.kernels.registry import runner_for
from moectl.kernels.tolerance import DECLARED, tolerance_for
from moectl.problem.moe_problem import Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import (
    FP8_ACT_GROUP_128,
    FP8_ACT_TOKEN,
    FP8_BLOCK,
    FP8_CHANNEL,
    MXFP4,
    Scheme,
)
from support import peer_cases as cases
from support.stand_in_experts import write_experts
from support.vllm_launch_choice import vllm_folder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, BLOCKS, CHANNEL = cases.PLAIN["bf16"], cases.BLOCKS, cases.CHANNEL
STATIC, DYNAMIC = cases.PLAIN["fp8 tensor, static scale"], cases.PLAIN["fp8 tensor, one scale of tokens"]
ON_INPUT = Routing(weight_on_input=True)

REFUSALS: list[tuple[Any, MoEProblem, str]] = [
    (
        vllm_triton,
        cases.MX,
        "bf16, fp8 block 128x128, fp8 per channel, fp8 per tensor weights; the layer has mxfp4",
    ),
    (
        vllm_triton,
        replace(BLOCKS, scheme=Scheme(FP8_BLOCK)),
        "fp8 block 128x128 weights it takes fp8 dynamic by 128 columns tokens; the layer has 16-bit ones",
    ),
    (
        vllm_triton,
        replace(CHANNEL, scheme=Scheme(FP8_CHANNEL, FP8_ACT_GROUP_128)),
        "it takes fp8 dynamic per token tokens; the layer has fp8 dynamic by 128 columns ones",
    ),
    (
        vllm_triton,
        replace(BLOCKS, dims=Dims(384, 192)),
        "multiples of 128; the layer's intermediate size is 192",
    ),
    (vllm_triton, replace(BLOCKS, dims=Dims(320, 256)), "multiples of 128; the layer's hidden size is 320"),
    (vllm_triton, replace(BF16, bias=True, routing=ON_INPUT), "multiply the first GEMM's bias"),
    (vllm_triton, replace(BF16, act_order="group"), "columns are permuted (act_order)"),
    (vllm_triton, replace(BF16, activation=Activation("gelu")), "for gated experts it has silu"),
    (vllm_cutlass, BF16, "it supports fp8 per channel, fp8 per tensor weights; the layer has bf16"),
    (vllm_cutlass, BLOCKS, "it supports fp8 per channel, fp8 per tensor weights; the layer has fp8 block"),
    (vllm_cutlass, cases.TENSOR, "fp8 static per tensor or fp8 dynamic per tensor tokens; the layer has"),
    (vllm_cutlass, replace(CHANNEL, bias=True), "its GEMMs add no bias"),
    (vllm_cutlass, replace(CHANNEL, routing=ON_INPUT), "the layer applies them to its input"),
    (vllm_cutlass, replace(CHANNEL, activation=cases.UNGATED), "the layer's have no gate"),
    (
        vllm_cutlass,
        replace(CHANNEL, dims=Dims(256, 72)),
        "multiples of 16; the layer's intermediate size is 72",
    ),
    (vllm_cutlass, replace(CHANNEL, activation=Activation("gelu")), "for gated experts it has silu"),
]


@pytest.mark.parametrize(("peer", "problem", "says"), REFUSALS)
def test_what_it_cannot_do_is_refused_in_a_sentence(peer: Any, problem: MoEProblem, says: str) -> None:
    reason = peer.problem_refusal(problem)
    assert says in reason and "\n" not in reason


@pytest.mark.parametrize(
    ("peer", "capability", "problem", "says"),
    [
        (vllm_triton, (7, 5), BF16, "it needs compute capability 8.0 or newer; the GPU has 7.5"),
        (vllm_triton, (8, 0), BLOCKS, "fp8 tokens need compute capability 8.9 or newer; the GPU has 8.0"),
        (vllm_triton, (8, 0), BF16, ""),
        (vllm_triton, (8, 9), BLOCKS, ""),
        (vllm_cutlass, (8, 9), CHANNEL, "it needs compute capability 9.0; the GPU has 8.9"),
        (vllm_cutlass, (10, 0), CHANNEL, "it needs compute capability 9.0; the GPU has 10.0"),
        (vllm_cutlass, (9, 0), CHANNEL, ""),
    ],
)
def test_gpus_without_its_kernels_are_refused(
    peer: Any, capability: tuple[int, int], problem: MoEProblem, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(peer, "unavailable_reason", lambda load: "")
    assert peer.refusal(problem, CUDA) == says
    assert peer.refusal(problem, CPU) == "it needs a CUDA GPU; the weights are on cpu"


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for libraries, which is searched; it has none yet."""
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    return tmp_path


def test_what_is_missing_is_said_with_what_to_do(peers: Path) -> None:
    for load, what, hint in (
        (
            vllm_triton.kernel,
            "vLLM's Triton experts are neither in the directory MOECTL_PEERS",
            "peers triton",
        ),
        (vllm_cutlass.operators, "the _C library is neither in the directory MOECTL_PEERS", "peers cutlass"),
    ):
        with pytest.raises(Unavailable, match=what) as caught:
            load()
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize("place", ["vllm_triton", "vllm/model_executor/layers/fused_moe"])
def test_files_are_found_where_wheels_have_them(place: str, peers: Path) -> None:
    folder = peers / place
    folder.mkdir(parents=True)
    (folder / "fused_moe.py").write_text("")
    (peers / "vllm-0.33.0.dist-info").mkdir()
    library = peers / "_C_stable_libtorch.abi3.so"
    library.write_text("")
    assert library_file(peers_folder(), TRITON_EXPERTS_PEER) == folder
    assert library_file(peers_folder(), CUTLASS_PEER) == library
    found = {one.name: one for one in find_peers(peers)}
    assert found["MOECTL_PEERS/vllm_triton"].version == "0.33.0"
    assert found["MOECTL_PEERS/vllm_cutlass"].version.startswith("sha256:")
    assert not any(one.lacks for one in found.values())


def test_a_kernel_of_another_version_is_refused(peers: Path) -> None:
    write_experts(peers, tuple(name for name in vllm_triton.PARAMETERS if name != "USE_TD"))
    with pytest.raises(
        Unavailable, match=r"parameters of fused_moe_kernel .* differ from vLLM 0\.33\.0's: USE_TD"
    ):
        vllm_triton.kernel()


def test_vllms_own_kernel_has_the_parameters() -> None:
    vllm_folder()
    assert tuple(vllm_triton.kernel().arg_names) == vllm_triton.PARAMETERS


def test_layers_from_vllms_own_kernel_in_the_interpreter() -> None:
    vllm_folder()
    program = [sys.executable, "-m", "support.interpreted_layers"]
    tests = Path(__file__).parents[2]
    path = os.pathsep.join((str(tests.parent), str(tests)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}: agrees" for name in cases.PLAIN]


def blocks_of(slots: int) -> ExpertBlocks:
    words = torch.zeros(slots, dtype=torch.int32)
    return ExpertBlocks(words, words[: slots // 16], words[:1], 16, words[:0])


LAUNCH = VllmLaunch(16, 64, 256, 8, 4, 3)


def arguments_of(problem: MoEProblem, role: str, tokens: int = 5, **given: Any) -> dict[str, Any]:
    """The kernel's arguments for one GEMM of a random layer."""
    prepared = cases.layer_for(problem).prepared("triton", "cpu")
    matrix, k = (
        vllm_triton.matrix_of(prepared, role),
        problem.dims.hidden if role == "w13" else problem.dims.intermediate,
    )
    rows = tokens if role == "w13" else tokens * problem.top_k
    fp8 = matrix.scales is not None
    x = torch.zeros(rows, k, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scale = {(1, 128): torch.zeros(rows, k // 128), (1, -1): torch.zeros(rows, 1)}.get(
        problem.scheme.act.block
    )
    scale = (torch.zeros(1) if scale is None else scale) if fp8 else None
    y = torch.zeros(tokens * problem.top_k, matrix.weight.shape[1], dtype=torch.bfloat16)
    top_k = problem.top_k if role == "w13" else 1
    return vllm_triton.kernel_arguments(matrix, LAUNCH, x, scale, y, blocks_of(64), None, top_k, **given)


@pytest.mark.parametrize("name", cases.PLAIN)
@pytest.mark.parametrize("role", ["w13", "w2"])
def test_arguments_are_the_kernels_parameters(name: str, role: str) -> None:
    problem = cases.PLAIN[name]
    found = arguments_of(problem, role)
    assert found.keys() == {*vllm_triton.PARAMETERS, "num_warps", "num_stages"}
    halves = 2 if problem.activation.gated else 1
    sizes = (halves * problem.dims.intermediate, problem.dims.hidden)
    assert (found["N"], found["K"]) == (
        sizes if role == "w13" else (problem.dims.hidden, problem.dims.intermediate)
    )
    assert found["b_ptr"].shape == (problem.experts, found["N"], found["K"]) and found["EM"] == 64
    assert found["num_valid_tokens"] == 5 * problem.top_k and found["stride_cm"] == found["N"]
    assert found["HAS_BIAS"] == problem.bias == (found["b_bias_ptr"] is not None)
    assert not any(
        found[flag] for flag in ("naive_block_assignment", "use_int8_w8a8", "use_int8_w8a16", "USE_TD")
    )
    assert found["use_fp8_w8a8"] == (problem.scheme.weight.name == "fp8")


def test_scales_are_indexed_as_vllm_does() -> None:
    """Strides, and flags, by kind of scale; blocks limit the depth of a tile."""
    names = ("stride_asm", "stride_ask", "stride_bse", "stride_bsk", "stride_bsn", "group_n", "group_k")
    block = arguments_of(BLOCKS, "w13")
    assert [block[name] for name in names] == [3, 1, 4 * 3, 1, 3, 128, 128]
    assert block["BLOCK_SIZE_K"] == 128 and not block["per_channel_quant"]
    channel = arguments_of(CHANNEL, "w13")
    assert [channel[name] for name in names] == [1, 1, 256, 1, 1, 0, 0]
    assert channel["BLOCK_SIZE_K"] == 256 and channel["per_channel_quant"]
    static = arguments_of(STATIC, "w2")
    assert [static[name] for name in names] == [0, 0, 1, 0, 0, 0, 0] and not static["per_channel_quant"]
    both = arguments_of(STATIC, "w13")  # gate and up have scales of their own
    assert [both[name] for name in names] == [0, 0, 256, 1, 1, 0, 0] and both["per_channel_quant"]
    per_token = arguments_of(cases.TENSOR, "w2")
    assert [per_token[name] for name in names] == [1, 1, 1, 0, 0, 0, 0] and per_token["per_channel_quant"]
    plain = arguments_of(BF16, "w2")
    assert plain["a_scale_ptr"] is plain["b_scale_ptr"] is None and not any(plain[name] for name in names)


def test_operands_are_swapped_in_small_blocks_of_fp8_on_sm90() -> None:
    assert arguments_of(BLOCKS, "w13", swaps=True)["SWAP_AB"]
    assert not arguments_of(BLOCKS, "w13", swaps=False)["SWAP_AB"]
    assert not arguments_of(BF16, "w13", swaps=True)["SWAP_AB"]


def test_static_scales_are_the_layers_largest_and_each_half_keeps_its_own() -> None:
    prepared = cases.layer_for(STATIC).prepared("triton", "cpu")
    canonical = cases.layer_for(STATIC).canonical(range(STATIC.experts))
    w13, w2 = (vllm_triton.matrix_of(prepared, role) for role in ("w13", "w2"))
    assert w13.input_scale is not None and w13.input_scale.tolist() == [float(canonical["w13_input"].max())]
    halves = canonical["w13_scale"].view(STATIC.experts, 2)
    assert w13.scales is not None and w13.scales.shape == (STATIC.experts, 256, 1)
    assert torch.equal(w13.scales[:, 0, 0], halves[:, 0]) and torch.equal(w13.scales[:, -1, 0], halves[:, 1])
    assert w2.scales is not None and torch.equal(w2.scales, canonical["w2_scale"].flatten())


def test_scales_of_other_dtypes_are_widened() -> None:
    weight = replace(FP8_BLOCK, scale_dtype="BF16")
    prepared = cases.layer_for(replace(BLOCKS, scheme=Scheme(weight, FP8_ACT_GROUP_128))).prepared(
        "triton", "cpu"
    )
    assert prepared.weights["w13_scale"].dtype == torch.bfloat16
    matrix = vllm_triton.matrix_of(prepared, "w13")
    assert matrix.scales is not None and torch.equal(matrix.scales, prepared.weights["w13_scale"].float())


@pytest.fixture
def h200(peers: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of vLLM's files on a machine whose GPU is an H200; layers are on the CPU all the same."""
    folder = write_experts(peers)
    monkeypatch.setattr(vllm_triton, "gpu_of", lambda device: ("NVIDIA H200", True))
    return folder


def tuned(folder: Path, problem: MoEProblem, **launches: VllmLaunch) -> Path:
    """Writes the layer's tuned file, launches by number of tokens (``at4=...``)."""
    file = folder / str(vllm_triton.tuned_name(problem, "NVIDIA H200"))
    entries = {key[2:]: dict(zip(FIELDS, launch, strict=True)) for key, launch in launches.items()}
    file.write_text(json.dumps({"triton_version": "3.6.0", **entries}))
    return file


def test_launches_are_those_of_the_tuned_file_or_defaults(
    h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = VllmLaunch(16, 64, 128, 1, 4, 4), VllmLaunch(128, 128, 64, 16, 8, 3)
    prepared = cases.layer_for(BLOCKS).prepared("triton", "cpu")
    assert vllm_triton.tactic(prepared, 100) == f"{default_launch(100, 7, 'fp8_w8a8', (128, 128))}, default"
    file = tuned(h200 / "configs", BLOCKS, at4=small, at256=large)
    assert file.name == "E=7,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    layer = vllm_triton.ready(replace(prepared, derived={}))
    assert [layer.launch_for(tokens) for tokens in (1, 130, 131, 9999)] == [small, small, large, large]
    mine = h200.parent / "mine"
    mine.mkdir()
    other = VllmLaunch(64, 64, 64, 1, 4, 2)
    tuned(mine, BLOCKS, at1=other)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(mine))
    again = replace(prepared, derived={})
    assert vllm_triton.tactic(again, 9999) == "64x64x64, group 1, 4 warps, 2 stages, tuned file"
    bf16 = cases.layer_for(BF16).prepared("triton", "cpu")
    assert vllm_triton.tactic(bf16, 9999) == f"{default_launch(9999, 7)}, default"


def test_a_broken_tuned_file_is_refused_when_a_layer_is_prepared(h200: Path) -> None:
    prepared = cases.layer_for(BF16).prepared("triton", "cpu")
    tuned(h200 / "configs", BF16, at1=VllmLaunch(24, 64, 64, 1, 4, 3))
    with pytest.raises(UsageError, match=r"BLOCK_SIZE_M for 1 tokens in .* must be a power of two"):
        vllm_triton.ready(prepared)


SCHEMAS = """cutlass_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, Tensor a_scales,
Tensor b_scales, Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides,
Tensor c_strides, bool per_act_token, bool per_out_ch) -> ()
get_cutlass_moe_mm_problem_sizes_from_expert_offsets(Tensor expert_first_token_offset, Tensor! problem_sizes1,
Tensor! problem_sizes2, int n, int k, bool swap_ab) -> ()"""
"""What vLLM 0.33.0's library registers."""


@pytest.fixture
def fake_operators() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """Operators of those schemas that keep what they are called with, in place of vLLM's library."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    library = torch.library.Library("_C", "FRAGMENT")
    for schema in SCHEMAS.replace("\n", " ").replace("-> () ", "-> ()\n").split("\n"):
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, lambda *arguments, name=name: calls.append((name, arguments)), "CPU")
    vllm_cutlass.operators.cache_clear()
    yield calls
    library._destroy()
    vllm_cutlass.operators.cache_clear()


@pytest.mark.parametrize("problem", [CHANNEL, STATIC, DYNAMIC], ids=["channel", "static", "dynamic"])
def test_cutlass_arguments_are_those_of_the_operator(
    problem: MoEProblem, fake_operators: list[tuple[str, tuple[Any, ...]]]
) -> None:
    prepared = cases.layer_for(problem).prepared("cutlass", "cpu")
    w13, w2 = vllm_cutlass.ready(prepared)
    experts, rows = problem.experts, 30
    words = torch.zeros(rows, dtype=torch.int32)
    order = ExpertRows(words, words[: experts + 1], torch.arange(experts + 1), words)
    by_token = problem is CHANNEL
    scale = torch.zeros(rows, 1) if by_token else torch.zeros(1)
    x, y = torch.zeros(rows, 256, dtype=torch.float8_e4m3fn), torch.zeros(rows, 256).bfloat16()
    first, second = vllm_cutlass.problem_sizes(order, problem, rows)
    vllm_cutlass.operators().gemm(**vllm_cutlass.gemm_arguments(w13, x, scale, y, order, first))
    vllm_cutlass.operators().gemm(**vllm_cutlass.gemm_arguments(w2, x[:, :128], scale, y, order, second))
    (sizes, given), (_, one), (_, two) = fake_operators
    assert sizes == vllm_cutlass.SIZES and given[3:] == (128, 256, True)
    assert first.shape == second.shape == (experts, 3) and first.dtype == torch.int32
    assert one[2].shape == (experts, 256, 256) and two[2].shape == (experts, 256, 128)
    assert one[5].tolist() == list(range(experts)) and one[10] is two[10] is by_token
    assert [one[11], two[11]] == [True, by_token]
    assert one[4].shape == (experts, 256, 1) and two[4].shape == (
        (experts, 256, 1) if by_token else (experts,)
    )
    assert [int(it[0]) for it in (*one[7:10], *two[7:10])] == [256, 256, 256, 128, 128, 256]
    assert vllm_cutlass.problem_sizes(order, problem, 65) and fake_operators[-1][1][-1] is False
    assert vllm_cutlass.tactic(prepared, 21) == "operands swapped" and "in order" in vllm_cutlass.tactic(
        prepared, 22
    )


def test_operators_of_another_version_are_refused() -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("cutlass_moe_mm(Tensor a, Tensor b) -> ()")
    vllm_cutlass.operators.cache_clear()
    try:
        with pytest.raises(Unavailable, match=r"arguments of cutlass_moe_mm in this vLLM's library differ"):
            vllm_cutlass.operators()
    finally:
        library._destroy()
        vllm_cutlass.operators.cache_clear()


def test_tolerances_follow_what_is_rounded() -> None:
    runner = runner_for("triton")
    plain, quantized = (tolerance_for(it, runner.accumulation_of(it)) for it in (BF16, BLOCKS))
    assert plain == tolerance_for(BF16, "steps") and plain.rms == 1e-2
    assert quantized.rms > 0.1 and "3 bits of mantissa" in quantized.reason
    assert runner_for("cutlass").accumulation_of(CHANNEL) == runner.accumulation_of(CHANNEL) == DECLARED


def test_layouts_are_the_checkpoints_own_with_gates_first() -> None:
    interleaved = cases.PLAIN["bf16, bias"]
    prepared = cases.layer_for(interleaved).prepared("triton", "cpu")
    canonical = cases.layer_for(interleaved).canonical(range(interleaved.experts))
    for role in ("w13", "w13_bias"):
        pairs = canonical[role].unflatten(1, (-1, 2))
        assert torch.equal(prepared.weights[role], torch.cat((pairs[:, :, 0], pairs[:, :, 1]), 1))
    assert prepared.layout == "plain-bf16" and vllm_triton.layout(cases.MX) == "plain-bf16"
    assert runner_for("cutlass").layout_of(STATIC) == "plain-fp8-halves"
    assert (
        runner_for("cutlass").layout_of(replace(CHANNEL, scheme=Scheme(MXFP4, FP8_ACT_TOKEN))) == "plain-fp8"
    )
