"""What published checkpoints do that a careless reader takes for something else, each with small headers."""

from __future__ import annotations

import pytest

from moectl.checkpoint import layer_groups
from moectl.checkpoint.tensors.storage import Storage, format_sizes, storages
from moectl.checkpoint.tensors.stored_formats import FORMATS
from moectl.problem.schemes import FULL, Scheme
from support.small_headers import (
    AWQ,
    CONFIG,
    FP4,
    FP8,
    MODELOPT,
    NVFP4,
    PLAIN,
    ROUTER,
    E,
    H,
    N,
    Rows,
    listing,
    matrices,
    read,
)

# The method's name is not the experts' format.


def test_fp8_method_with_packed_pairs() -> None:
    stated = read(FP4, FP8, expert_dtype="fp4")
    assert (stated.problem.storage, str(stated.problem.scheme.weight)) == ("mxfp4", "mxfp4 group 32")
    assert stated.sources["scheme"] == "config:expert_dtype"
    assert stated.notes == ()
    silent = read(FP4, FP8)
    assert silent.problem == stated.problem
    assert any("fp8 block 128x128" in note and "mxfp4" in note for note in silent.notes)


def test_expert_dtype_gives_way_to_what_is_stored() -> None:
    group = read(matrices(MODELOPT), {**FP8, "moe_quant_algo": "NVFP4"}, expert_dtype="fp4")
    assert (group.problem.storage, group.problem.scheme.weight.name) == ("modelopt", "nvfp4")


def test_block_scales_of_one_row_are_mxfp8() -> None:
    rows = matrices(
        {
            "weight": ("F8_E4M3", (N, H), (H, N)),
            "weight_scale_inv": ("U8", (N, H // 32), (H, N // 32)),
        }
    )
    for config in ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, FP8, None):
        assert read(rows, config).problem.scheme.weight.name == "mxfp8"


def test_headers_alone_show_a_format_and_its_activations() -> None:
    weights = read(matrices(MODELOPT))
    assert str(weights.problem.scheme) == "nvfp4 group 16, a16 activations"
    both = read(matrices({**MODELOPT, "input_scale": ("F32", (), ())}))
    assert str(both.problem.scheme) == "nvfp4 group 16, nvfp4 dynamic activations"
    assert both.problem.storage == "modelopt"
    assert both.sources["scheme"].startswith("header:")


def test_the_config_decides_about_activations() -> None:
    rows = matrices({**MODELOPT, "input_scale": ("F32", (), ())})
    group = read(rows, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
    assert group.problem.scheme.act.name == "a16"


@pytest.mark.parametrize(
    ("scale", "block"),
    [((), (FULL, FULL)), ((1,), (FULL, FULL)), ((N, 1), (1, FULL)), ((N,), (1, FULL)), ((1, 2), (128, 128))],
)
def test_weight_scale_means_what_its_shape_says(scale: tuple[int, ...], block: tuple[int, int]) -> None:
    down = {(N, 1): (H, 1), (N,): (H,), (1, 2): (2, 1)}.get(scale, scale)
    rows = matrices({"weight": ("F8_E4M3", (N, H), (H, N)), "weight_scale": ("F32", scale, down)})
    assert read(rows).problem.scheme.weight.block == block


@pytest.mark.parametrize(
    ("said", "scales", "block"), [([128, 128], (1, 2), (128, 128)), ([128, 128], (4, 8), (32, 32))]
)
def test_block_sides_come_from_the_scales(
    said: list[int], scales: tuple[int, int], block: tuple[int, int]
) -> None:
    rows = matrices(
        {"weight": ("F8_E4M3", (N, H), (H, N)), "weight_scale_inv": ("BF16", scales, scales[::-1])}
    )
    group = read(rows, {**FP8, "weight_block_size": said})
    assert group.problem.scheme.weight.block == block
    assert bool(group.notes) == (list(block) != said)


# Arrangements.


@pytest.mark.parametrize("hidden", [H, 2 * N, 96])
def test_fused_and_transposed_are_told_by_the_second_matrix(hidden: int) -> None:
    fused = {"gate_up_proj": (E, 2 * N, hidden), "down_proj": (E, hidden, N)}
    turned = {name: (shape[0], shape[2], shape[1]) for name, shape in fused.items()}
    router = {"mlp.gate.weight": ("BF16", (E, hidden))}
    for shapes, name in ((fused, "fused"), (turned, "fused_transposed")):
        rows = {f"mlp.experts.{leaf}": ("BF16", shape) for leaf, shape in shapes.items()}
        (group,) = layer_groups({**CONFIG, "hidden_size": hidden}, listing({**rows, **router}))
        assert group.storage.arrangement.name == name
        assert (group.problem.dims.hidden, group.problem.dims.intermediate) == (hidden, N)
        assert group.notes == ()


def fused_nvfp4(transposed: bool, scalar: tuple[int, ...]) -> Rows:
    shapes = {
        "gate_up_proj": (2 * N, H // 2),
        "gate_up_proj_weight_scale": (2 * N, H // 16),
        "down_proj": (H, N // 2),
        "down_proj_weight_scale": (H, N // 16),
    }
    rows: dict[str, tuple[str, tuple[int, ...]]] = {}
    for leaf, (n, k) in shapes.items():
        dtype = "F8_E4M3" if leaf.endswith("scale") else "U8"
        rows[f"mlp.experts.{leaf}"] = (dtype, (E, k, n) if transposed else (E, n, k))
    for matrix in ("gate_up_proj", "down_proj"):
        for suffix in ("weight_scale_2", "input_scale"):
            rows[f"mlp.experts.{matrix}_{suffix}"] = ("F32", scalar)
    return rows


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scalar", [(), (1,), (E,), (E, 1), (E, 1, 1)])
def test_fused_nvfp4(transposed: bool, scalar: tuple[int, ...]) -> None:
    group = read(fused_nvfp4(transposed, scalar), NVFP4)
    assert group.storage.arrangement.name == ("fused_transposed" if transposed else "fused")
    assert (group.problem.dims.hidden, group.problem.dims.intermediate) == (H, N)
    assert set(group.names.experts) == {
        f"{matrix}{role}" for matrix in ("w13", "w2") for role in ("", "_scale", "_global", "_input")
    }


def test_other_spellings_of_fused_experts() -> None:
    granite = {
        "block_sparse_moe.input_linear.weight": ("BF16", (E, 2 * N, H)),
        "block_sparse_moe.output_linear.weight": ("BF16", (E, H, N)),
        "block_sparse_moe.router.layer.weight": ("BF16", (E, H)),
    }
    step = {
        "moe.gate_proj.weight": ("BF16", (E, N, H)),
        "moe.up_proj.weight": ("BF16", (E, N, H)),
        "moe.down_proj.weight": ("BF16", (E, H, N)),
        "moe.gate.weight": ("F32", (E, H)),
        "moe.router_bias": ("F32", (E,)),
        "share_expert.gate_proj.weight": ("BF16", (N, H)),
        "share_expert.up_proj.weight": ("BF16", (N, H)),
        "share_expert.down_proj.weight": ("BF16", (H, N)),
    }
    dbrx = {
        "ffn.experts.mlp.w1": ("BF16", (E * N, H)),
        "ffn.experts.mlp.v1": ("BF16", (E * N, H)),
        "ffn.experts.mlp.w2": ("BF16", (E * N, H)),
        "ffn.router.layer.weight": ("BF16", (E, H)),
    }
    gemma = {
        "experts.gate_up_proj": ("BF16", (E, 2 * N, H)),
        "experts.down_proj": ("BF16", (E, H, N)),
        "router.proj.weight": ("BF16", (E, H)),
        "router.scale": ("BF16", (H,)),
        "router.per_expert_scale": ("BF16", (E,)),
        "mlp.gate_proj.weight": ("BF16", (512, H)),
    }
    roots = {"dbrx": "transformer.blocks.", "gemma": "model.language_model.layers."}
    found = {}
    for name, rows in {"granite": granite, "step": step, "dbrx": dbrx, "gemma": gemma}.items():
        (group,) = layer_groups(CONFIG, listing(rows, root=roots.get(name, "model.layers.")))
        assert (group.problem.experts, group.problem.dims.hidden, group.problem.dims.intermediate) == (
            E,
            H,
            N,
        )
        found[name] = group
    assert {name: group.storage.arrangement.name for name, group in found.items()} == {
        "granite": "fused",
        "step": "fused_apart",
        "dbrx": "flat",
        "gemma": "fused",
    }
    assert found["step"].problem.routing.correction_bias
    assert (found["step"].problem.router_dtype, found["step"].problem.shared_experts) == ("fp32", 1)
    assert found["dbrx"].names.experts["w2"] == "transformer.blocks.{layer}.ffn.experts.mlp.w2"
    assert found["gemma"].problem.routing.expert_scale
    assert found["gemma"].problem.shared_experts == 0


def test_experts_without_a_gate() -> None:
    rows = {name: row for name, row in PLAIN.items() if "gate_proj" not in name}
    group = read(rows, mlp_hidden_act="relu2")
    assert not group.problem.activation.gated
    assert set(group.names.experts) == {"w1", "w2"}
    assert read(PLAIN).problem.activation.gated
    odd = read(rows)
    assert not odd.problem.activation.gated
    assert odd.sources["activation.gated"].startswith("header:")


# Layers that are not like the others.


def test_a_layer_of_another_precision_and_arrangement() -> None:
    first = {
        "mlp.experts.gate_up_proj": ("BF16", (E, 2 * N, H)),
        "mlp.experts.down_proj": ("BF16", (E, H, N)),
    }
    tensors = listing({**ROUTER, **first}, (0,)) | listing({**ROUTER, **AWQ}, (1, 2))
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "modules_to_not_convert": ["layers.0.", "mlp.gate", "shared_expert"],
    }
    groups = layer_groups({**CONFIG, "quantization_config": quantization}, tensors)
    assert [(group.layers, group.problem.storage) for group in groups] == [((0,), "plain"), ((1, 2), "awq")]
    assert all(group.notes == () for group in groups)
    assert str(groups[1].problem.scheme.weight) == "int4 group 128 with zero points"
    silent = {**quantization, "modules_to_not_convert": []}
    (first_group, _) = layer_groups({**CONFIG, "quantization_config": silent}, tensors)
    assert any("headers say bf16" in note for note in first_group.notes)


@pytest.mark.parametrize(
    "storage",
    [it for it in storages() if it.arrangement.name not in ("flat", "fused_blocks")],
    ids=lambda it: "",
)
def test_every_storage_is_found_by_its_own_tensors(storage: Storage) -> None:
    """What a row describes is read as that row, or one that says the same of the same tensors."""
    weight = storage.weight
    block = tuple({0: 0, FULL: FULL, -2: 128}.get(side, side) for side in weight.block)
    sizes = {"experts": E, "hidden": H, "intermediate": 128 * 3, **format_sizes(Scheme(weight))}
    sizes |= {"rows": block[0] or 1, "group": block[1] or 1}
    stem = "mlp.experts." if storage.fused else "mlp.experts.{e}."
    rows = {
        stem + leaf: (stored.dtypes[0], tuple(axis.value(sizes) for axis in stored.shape))
        for leaf, stored in storage.tensors.items()
        if stored.required
    }
    (group,) = layer_groups({**CONFIG, "moe_intermediate_size": 384}, listing({**ROUTER, **rows}, (0, 1, 2)))
    found = group.problem
    assert (found.dims.hidden, found.dims.intermediate, found.experts) == (H, 384, E)
    assert (found.scheme.weight.name, found.scheme.weight.block) == (weight.name, block)
    assert found.activation.gated == storage.gated
    assert group.storage.arrangement.name == storage.arrangement.name


def test_formats_are_no_two_alike() -> None:
    keys = [(form.weight, tuple(form.suffixes), form.suffixes.keys()) for form in FORMATS]
    dtypes = [tuple(suffix.dtypes for suffix in form.suffixes.values()) for form in FORMATS]
    assert len({repr(pair) for pair in zip(keys, dtypes, strict=True)}) == len(FORMATS)
