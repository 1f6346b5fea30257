"""Backends made of other libraries, without those libraries: arguments, refusals, where they are found."""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moectl.capabilities.unpacked_libraries import find_peers, library_file, peers_folder
from moectl.errors import BackendFailed, NoBackend, Unavailable, UsageError
from moectl.kernels.external import (
    deep_gemm,
    humming,
    humming_formats,
    import_library,
    sonic_moe,
    torch_grouped,
    triton_kernels,
    vllm_marlin,
)
from moectl.kernels.external.gemm_glue import ExpertBlocks
from moectl.kernels.prepared_layer import CANONICAL
from moectl.kernels.registry import RUNNERS, runner_for
from moectl.oracle.machine_packages import packages_from
from moectl.problem.moe_problem import Activation, Dims, MoEProblem, Routing
from moectl.problem.schemes import (
    BF16,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FULL,
    MXFP4,
    MXFP8,
    NVFP4,
    Scheme,
    int_format,
)
from support import peer_cases as cases
from support.random_layers import canonical_roles, random_layer

CPU = torch.device("cpu")
INT4, MX, BF = cases.FORMATS["int4"], cases.MX, cases.GROUPED["bf16"]


def of(weight: object, **changes: object) -> MoEProblem:
    return replace(INT4, scheme=Scheme(weight), **changes)  # type: ignore[arg-type]


REFUSALS = [
    (
        vllm_marlin,
        of(BF16),
        "it supports int4, int4 with zero points, int8, mxfp4, nvfp4, mxfp8, fp8; the layer has bf16",
    ),
    (
        vllm_marlin,
        of(replace(FP8_BLOCK, block=(64, 64))),
        "a whole matrix, whole rows, 128 rows by 128 columns",
    ),
    (vllm_marlin, of(MXFP8, dtype="fp16"), "with mxfp8 weights it supports bf16 models; this one is fp16"),
    (vllm_marlin, of(NVFP4, dtype="fp16"), "with nvfp4 weights it supports bf16 models; this one is fp16"),
    (vllm_marlin, of(int_format(8, 32, zero_point=True)), "the layer has int8 group 32 with zero points"),
    (vllm_marlin, of(int_format(4, 96)), "int4 scales of whole rows, 32 columns, 64 columns, 128 columns"),
    (vllm_marlin, replace(MX, dtype="fp16"), "with mxfp4 weights it supports bf16 models; this one is fp16"),
    (vllm_marlin, replace(INT4, act_order="group"), "columns are permuted (act_order)"),
    (
        vllm_marlin,
        replace(INT4, bias=True, routing=Routing(weight_on_input=True)),
        "multiply the first GEMM's bias",
    ),
    (vllm_marlin, of(int_format(4, 32, "F16")), "scales in the model's dtype, BF16; the layer has F16"),
    (vllm_marlin, replace(INT4, activation=Activation("gelu")), "for gated experts it has silu"),
    (
        humming,
        of(int_format(4, 96)),
        "int4 per channel with zero points, int4 group 32,",
    ),
    (humming, of(BF16), "it supports int4, int8, mxfp4, nvfp4, mxfp8, fp8 weights; the layer has bf16"),
    (humming, of(FP8_BLOCK, dims=Dims(256, 96)), "multiples of 128; the layer's intermediate size is 96"),
    (humming, of(FP8_TENSOR), "it supports fp8 block 128x128, fp8 per channel weights; the layer has fp8"),
    (humming, replace(of(NVFP4), dtype="fp16"), "with nvfp4 weights it supports bf16 models"),
    (humming, replace(MX, dtype="fp16"), "with mxfp4 weights it supports bf16 models; this one is fp16"),
    (humming, replace(INT4, act_order="group"), "columns are permuted (act_order)"),
    (humming, replace(INT4, routing=Routing(weight_on_input=True)), "the layer applies them to its input"),
    (humming, replace(INT4, dims=Dims(256, 80)), "the layer's intermediate size is 80"),
    (humming, of(int_format(4, 32, "F16")), "scales in the model's dtype"),
    (
        humming,
        replace(INT4, activation=Activation("relu", gated=False)),
        "experts without a gate it has relu2",
    ),
    (triton_kernels, INT4, "moectl uses it with mxfp4 weights"),
    (triton_kernels, replace(MX, activation=Activation("relu2", gated=False)), "for gated experts"),
    (triton_kernels, replace(MX, dtype="fp16"), "it supports bf16 models"),
    (triton_kernels, replace(MX, routing=Routing(weight_on_input=True)), "to its input"),
    (triton_kernels, replace(MX, activation=Activation("gelu")), "it has silu"),
    (deep_gemm, of(FP8_BLOCK), "it takes fp8 dynamic group 128 tokens; the layer has 16-bit ones"),
    (deep_gemm, replace(BF, dims=Dims(256, 192)), "of 128; the layer's intermediate size is 192"),
    (deep_gemm, replace(BF, act_order="group"), "columns are permuted (act_order)"),
    (sonic_moe, of(FP8_CHANNEL), "it supports bf16 weights; the layer has fp8 per channel"),
    (sonic_moe, replace(BF, bias=True), "its products add no bias"),
    (sonic_moe, replace(BF, activation=Activation("gelu_tanh")), "for gated experts it has silu"),
    (torch_grouped, INT4, "it supports bf16, fp8 per channel weights; the layer has int4 group 32"),
    (torch_grouped, of(FP8_CHANNEL), "it takes fp8 dynamic per token tokens; the layer has 16-bit ones"),
    (torch_grouped, replace(BF, dtype="fp16"), "with bf16 weights it supports bf16 models"),
    (torch_grouped, replace(BF, bias=True), "its products add no bias"),
    (
        torch_grouped,
        replace(BF, dims=Dims(256, 120)),
        "multiples of 16; the layer's intermediate size is 120",
    ),
    (torch_grouped, replace(BF, routing=Routing(weight_on_input=True)), "to its input"),
    (torch_grouped, replace(BF, activation=Activation("gelu")), "for gated experts it has silu"),
]


@pytest.mark.parametrize(("peer", "problem", "says"), REFUSALS)
def test_what_it_cannot_do_is_refused_in_a_sentence(peer: object, problem: MoEProblem, says: str) -> None:
    assert says in peer.problem_refusal(problem)  # type: ignore[attr-defined]


@pytest.mark.parametrize("peer", [humming, vllm_marlin, triton_kernels])
def test_a_cpu_is_refused_before_a_library_is_looked_for(peer: object) -> None:
    assert peer.refusal(MX, CPU) == "it needs a CUDA GPU; the weights are on cpu"  # type: ignore[attr-defined]
    assert not peer.problem_refusal(MX)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("routing", "says"),
    [
        (Routing("sigmoid"), "the layer has Routing"),
        (Routing(groups=4, topk_groups=2), "the layer has Routing"),
        (Routing(scale=2.0), "the layer has Routing"),
        (Routing(expert_scale=True), "the layer has Routing"),
    ],
)
def test_logits_that_triton_kernels_cannot_route(routing: Routing, says: str) -> None:
    assert says in triton_kernels.routing_refusal(replace(MX, routing=routing))
    assert not triton_kernels.routing_refusal(replace(MX, routing=Routing(renormalize=False)))
    assert "the layer has Routing" in triton_kernels.routing_refusal(MX, torch.zeros(6))
    assert "power of two" in triton_kernels.routing_refusal(replace(MX, routing=Routing(), top_k=3))
    assert "has some of them" in triton_kernels.routing_refusal(
        replace(MX, routing=Routing(), local_experts=MX.experts // 2)
    )


@pytest.mark.parametrize("assignments", [1, 20, 40, 80, 200, 4000])
def test_blocks_of_marlin_are_those_that_an_expert_fills(assignments: int) -> None:
    size = vllm_marlin.block_size(assignments, 8)
    smaller = [it for it in vllm_marlin.BLOCKS if it < size]
    assert all(assignments / 8 >= 0.9 * it for it in smaller)
    assert size == vllm_marlin.BLOCKS[-1] or assignments / 8 < 0.9 * size


SCHEMA = """moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none,
Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor! workspace,
Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded, Tensor! topk_weights,
int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k,
bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, int blocks_per_sm
) -> Tensor"""
"""What vLLM 0.33.0's library registers."""


@pytest.fixture
def fake_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """An operator of that schema that keeps what it is called with, in place of vLLM's library."""
    calls: list[dict[str, object]] = []

    def keep(*arguments: object) -> torch.Tensor:
        calls.append(dict(zip(vllm_marlin.ARGUMENTS, arguments, strict=True)))
        return torch.empty(0)

    library = torch.library.Library("_moe_C", "FRAGMENT")
    library.define(SCHEMA.replace("\n", " "))
    library.impl("moe_wna16_marlin_gemm", keep, "CPU")
    vllm_marlin.operator.cache_clear()
    yield calls
    library._destroy()
    vllm_marlin.operator.cache_clear()


def test_marlins_arguments_are_those_of_the_operator(fake_operator: list[dict[str, object]]) -> None:
    problem = cases.integers(4, 32, bias=True, dims=Dims(256, 96))
    prepared = random_layer(problem).prepared("marlin", "cpu")
    w13, w2 = vllm_marlin.ready(prepared)
    assert (w13.n, w13.k, w2.n, w2.k) == (2 * 128, 256, 256, 128)
    words = torch.zeros(8, dtype=torch.int32)
    blocks = ExpertBlocks(words, words, words[:1], 8, words.clone())
    x, y = torch.zeros(5, 256).bfloat16(), torch.zeros(15, 256).bfloat16()
    found = vllm_marlin.gemm_arguments(w13, x, y, blocks, torch.ones(15), 3, apply_weights=False)
    vllm_marlin.operator()(**found)
    (call,) = fake_operator
    assert call.keys() == found.keys()
    names = ("size_m", "size_n", "size_k", "top_k", "moe_block_size", "b_type_id")
    assert [call[name] for name in names] == [5, 256, 256, 3, 8, vllm_marlin.SCALAR_TYPES["int4", False]]
    assert call["c_or_none"] is y or torch.equal(call["c_or_none"], y)  # type: ignore[arg-type]
    assert call["b_zeros_or_none"] is None and call["mul_topk_weights"] is False
    assert call["b_bias_or_none"].shape == (problem.experts, 256)  # type: ignore[attr-defined]


def test_marlins_mxfp4_scales_are_handed_over_as_e8m0() -> None:
    prepared = random_layer(MX).prepared("marlin", "cpu")
    w13, _ = vllm_marlin.ready(prepared)
    assert w13.scales.dtype == torch.float8_e8m0fnu and w13.k % 256 == 0 and w13.n % 256 == 0
    assert vllm_marlin.ready(prepared)[0] is w13


def test_an_operator_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("_moe_C", "FRAGMENT")
    library.define("moe_wna16_marlin_gemm(Tensor a, Tensor? g_idx) -> Tensor")
    vllm_marlin.operator.cache_clear()
    try:
        with pytest.raises(Unavailable, match=r"arguments .* differ from vLLM 0\.33\.0's: .*g_idx"):
            vllm_marlin.operator()
    finally:
        library._destroy()
        vllm_marlin.operator.cache_clear()


@pytest.mark.parametrize("bits", [4, 8])
def test_hummings_zero_points_are_packed_along_rows(bits: int) -> None:
    zeros = torch.randint(0, 1 << bits, (3, 64, 5), dtype=torch.uint8)
    words = humming_formats.pack_zeros(zeros, bits)
    assert words.shape == (3, 64 * bits // 32, 5) and words.dtype == torch.int32
    each = 32 // bits
    back = torch.stack([(words >> (bits * i)) & ((1 << bits) - 1) for i in range(each)], 2)
    assert torch.equal(back.flatten(1, 2).to(torch.uint8), zeros)


def test_hummings_tensors_are_the_canonical_ones_by_its_names() -> None:
    problem = cases.integers(4, 64, zero=True, bias=True)
    roles = canonical_roles(problem)
    made = humming.source_tensors(problem, roles, "w13")
    assert made["weight"].dtype == torch.int32 and made["weight"].shape == (7, 256, 256 // 8)
    assert torch.equal(made["weight"].view(torch.uint8), roles["w13"])
    assert made["zero_point"].shape == (7, 256 // 8, 4) and made["bias"] is roles["w13_bias"]
    assert humming.source_tensors(MX, canonical_roles(MX), "w2")["weight_scale"].dtype == torch.float8_e8m0fnu
    assert humming.schema_arguments(problem) == {
        "b_dtype": "uint4",
        "bs_dtype": "bfloat16",
        "weight_scale_group_size": 64,
        "has_zero_point": True,
    }
    assert humming.schema_arguments(cases.integers(8, FULL))["weight_scale_group_size"] == 0


def test_hummings_rows_are_those_of_the_call_and_the_one_that_every_call_asks_for() -> None:
    table = [(0, 4, "a"), (4, 64, "b"), (64, 512, "c"), (512, 1 << 30, "d")]
    assert [row[2] for row in humming.rows_for(table, [8])] == ["a", "b"]
    assert [row[2] for row in humming.rows_for(table, [512, 9999])] == ["a", "c", "d"]
    assert [row[2] for row in humming.rows_for(table, [1])] == ["a"]


def test_humming_reads_layers_in_its_layout_as_they_are() -> None:
    for problem, name in (
        (INT4, "humming-int4"),
        (MX, "humming-mxfp4"),
        (cases.integers(8, 64), "humming-int8"),
    ):
        layer = random_layer(problem)
        first = layer.prepared("humming", "cpu")
        assert (first.layout, first.relaid) == (name, "")
        again = replace(
            layer,
            layout=name,
            recipe=recipe_of(layer, name),
            stored=lambda device, first=first: first.weights,  # type: ignore[misc]
        ).prepared("humming", "cpu")
        assert not again.relaid
        for role in ("w13", "w2"):
            made = humming.converted_tensors(again, role)
            assert {t.data_ptr() for t in made.values()} <= {t.data_ptr() for t in first.weights.values()}
            n, k = humming.matrix_sizes(again, role)
            words = -(-k // 128) * 128 // 16 * -(-n // 256) * 256 * 16 * problem.scheme.weight.bits // 32
            assert made["weight"][0].numel() == words
        if problem is MX:
            assert made["weight_scale"].dtype is torch.float8_e8m0fnu


def test_humming_takes_layers_in_other_layouts() -> None:
    layer = random_layer(INT4)
    stored = layer.prepared("marlin", "cpu")
    again = replace(
        layer,
        layout=stored.layout,
        recipe=recipe_of(layer, stored.layout),
        stored=lambda device: stored.weights,
    )
    back = again.prepared("humming", "cpu")
    assert back.relaid == "marlin-int4 -> humming-int4"
    direct = layer.prepared("humming", "cpu")
    assert all(torch.equal(back.weights[role], t) for role, t in direct.weights.items())


def test_humming_lays_out_itself_what_depends_on_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    assert humming.layout(MX) == "humming-mxfp4"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (10, 0))
    assert (humming.layout(MX), humming.layout(INT4)) == (CANONICAL, "humming-int4")
    whole_rows = cases.integers(4, FULL, zero=True)
    assert humming.layout(whole_rows) == "humming-int4"
    assert humming.layout(replace(whole_rows, dims=Dims(256, 96))) == CANONICAL


def recipe_of(layer: object, layout: str) -> object:
    from moectl.convert.rank_slice import RankSlice
    from moectl.layer.experts import layout_recipe

    return layout_recipe(layout, RankSlice(layer.problem), layer.recipe.shapes)  # type: ignore[attr-defined]


def test_nothing_of_a_folder_but_what_is_asked_for_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("humming", "other_package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"__version__ = '9.{len(name)}'\nfrom . import inner\n")
        (tmp_path / name / "inner.py").write_text("here = __file__\n")
    (tmp_path / "humming" / "layer.py").write_text("")
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    monkeypatch.delitem(sys.modules, "humming", raising=False)
    path = list(sys.path)
    try:
        found = import_library.package("humming")
        assert found.inner.here == str(tmp_path / "humming" / "inner.py")
        assert import_library.package("humming") is found and sys.path == path
        with pytest.raises(Unavailable, match=r"humming.forward cannot be imported: ModuleNotFoundError"):
            import_library.module("humming.forward")
        with pytest.raises(ImportError):
            __import__("other_package")
        (installed,) = find_peers(peers_folder())
        assert (installed.name, installed.version) == ("MOECTL_PEERS/humming", "9.7")
        assert "forward.humming_forward" in installed.lacks
        assert packages_from(None).has("MOECTL_PEERS/humming")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "humming"]:
            del sys.modules[name]


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of unpacked libraries; what is imported from it is forgotten afterwards."""
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    before = set(sys.modules)
    for peer in (humming, triton_kernels):
        peer.library.cache_clear()
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    for peer in (humming, triton_kernels):
        peer.library.cache_clear()


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_versions_with_other_functions_are_refused_by_name(unpacked: Path) -> None:
    write(unpacked, "triton_kernels/__init__.py", "triton_kernels/matmul.py")
    with pytest.raises(Unavailable, match=r"is not compatible with the one in vLLM .*matmul_ogs"):
        triton_kernels.library()
    assert "is not compatible" in import_library.unavailable_reason(triton_kernels.library)
    names = ("forward", "schema", "transform", "tune", "layer", "__init__")
    write(unpacked, *(f"humming/{name}.py" for name in names))
    (unpacked / "humming/schema.py").write_text("class HummingWeightSchema: pass\n")
    with pytest.raises(Unavailable, match=r"lacks humming\.forward\.humming_forward, ") as caught:
        humming.library()
    assert "humming-kernels==0.1.19" in str(caught.value)


def test_another_package_of_the_name_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "triton_kernels/__init__.py", "triton_kernels/kernels.py")
    monkeypatch.delenv("MOECTL_PEERS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unavailable, match="is not the package that kernels need, but Kernelize AI"):
        import_library.package("triton_kernels")
    assert "triton_kernels" not in sys.modules


def test_a_package_of_another_place_is_not_mixed_in(unpacked: Path) -> None:
    write(unpacked, "humming/__init__.py", "humming/layer.py")
    import_library.package("humming")
    other = unpacked / "other"
    write(other, "humming/__init__.py", "humming/layer.py")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MOECTL_PEERS", str(other))
        with pytest.raises(Unavailable, match="this process has already imported it from"):
            import_library.package("humming")


def test_a_broken_package_is_unavailable_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "humming").mkdir()
    (tmp_path / "humming" / "__init__.py").write_text("raise OSError('no such driver')\n")
    (tmp_path / "humming" / "layer.py").write_text("")
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    monkeypatch.delitem(sys.modules, "humming", raising=False)
    with pytest.raises(Unavailable, match="cannot be imported: OSError: no such driver"):
        import_library.package("humming")
    assert "humming" not in sys.modules
    assert "no such driver" in import_library.unavailable_reason(lambda: import_library.package("humming"))


def test_folders_and_libraries_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="MOECTL_PEERS must name a folder with unpacked libraries"):
        peers_folder()
    monkeypatch.setenv("MOECTL_PEERS", str(tmp_path))
    assert find_peers(peers_folder()) == ()
    with pytest.raises(Unavailable, match="humming is neither in the directory MOECTL_PEERS nor installed"):
        import_library.package("humming")
    with pytest.raises(Unavailable, match="_moe_C library is neither in"):
        import_library.marlin_operator()
    packed = tmp_path / "moe_C.so.xz"
    packed.write_bytes(lzma.compress(b"not a library"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert library_file(peers_folder()) == packed
    with pytest.raises(Unavailable, match=r"cannot load \S+moe_C.so.xz"):
        import_library.marlin_operator()
    (made,) = (tmp_path / "temporary").iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    with pytest.raises(Unavailable, match="that only you can write to"):
        import_library.marlin_operator()


def test_a_library_that_breaks_is_an_error_of_its_backend() -> None:
    says = "the marlin backend failed: RuntimeError: CUDA error"
    with pytest.raises(BackendFailed, match=says) as caught, import_library.failing_as("marlin"):
        raise RuntimeError("CUDA error\nat line 5")
    assert caught.value.on(3).what.startswith("the marlin backend failed on layer 3")
    with pytest.raises(NoBackend), import_library.failing_as("marlin"):
        raise NoBackend("as it was")


def test_mxfp4_sizes_of_openais_layout_are_the_padding_tables() -> None:
    prepared = random_layer(replace(MX, scheme=Scheme(MXFP4))).prepared("triton_kernels", "cpu")
    assert prepared.layout == triton_kernels.LAYOUT


@pytest.mark.parametrize(
    "name", [name for name in RUNNERS if name.startswith("flashinfer") or name == "triton_kernels"]
)
def test_a_library_that_chooses_by_itself_is_told(name: str) -> None:
    """The column of a bench that says what is launched is empty where there is no choice, and only there."""
    prepared = random_layer(MX).prepared("torch", CPU)
    tuned = name == "flashinfer_cutlass"
    for tokens, power in ((0, 1), (1, 1), (5, 4), (4096, 4096)):
        said = runner_for(name).tactic(prepared, tokens)
        assert said == (f"chosen by its tuner at {power} tokens" if tuned else "chosen by the library")
