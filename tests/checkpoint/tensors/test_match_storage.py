"""What published checkpoints do that a careless reader takes for something else, each with small headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moectl.checkpoint import LayerGroup, TensorInfo, layer_groups
from moectl.checkpoint.tensors.storage import STORAGES, Storage, format_sizes
from moectl.checkpoint.tensors.stored_formats import FORMATS
from moectl.errors import CheckpointError
from moectl.problem.layer_ranges import ranges
from moectl.problem.schemes import FULL, Scheme

E, H, N, LAYERS = 4, 256, 128, 3
CONFIG: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": H,
    "moe_intermediate_size": N,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
ROUTER = {"mlp.gate.weight": ("BF16", (E, H))}
Rows = Mapping[str, tuple[str, tuple[int, ...]]]

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def listing(rows: Rows, layers: tuple[int, ...] = (0, 1, 2), root: str = "model.layers.") -> dict[str, Any]:
    """Tensors of `rows`, names inside a layer with ``{e}`` for each expert, in every one of `layers`."""
    found = {}
    for layer in layers:
        for template, (dtype, shape) in rows.items():
            for expert in range(E) if "{e}" in template else (0,):
                name = f"{root}{layer}.{template.replace('{e}', str(expert))}"
                found[name] = TensorInfo(name, dtype, shape, "model.safetensors", 0, 1)
    return found


def matrices(rows: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]], block: str = "mlp") -> Rows:
    """Per-expert tensors of gate, up and down from (dtype, shape of gate and up, shape of down) by suffix."""
    return {
        f"{block}.experts.{{e}}.{matrix}_proj.{suffix}": (dtype, down if matrix == "down" else up)
        for suffix, (dtype, up, down) in rows.items()
        for matrix in ("gate", "up", "down")
    }


PLAIN = matrices({"weight": ("BF16", (N, H), (H, N))})
BLOCK = matrices({"weight": ("F8_E4M3", (N, H), (H, N)), "weight_scale_inv": ("F32", (1, 2), (2, 1))})
FP4 = matrices({"weight": ("I8", (N, H // 2), (H, N // 2)), "scale": ("F8_E8M0", (N, H // 32), (H, N // 32))})
MODELOPT = {
    "weight": ("U8", (N, H // 2), (H, N // 2)),
    "weight_scale": ("F8_E4M3", (N, H // 16), (H, N // 16)),
    "weight_scale_2": ("F32", (), ()),
}
AWQ = matrices(
    {
        "qweight": ("I32", (H, N // 8), (N, H // 8)),
        "qzeros": ("I32", (H // 128, N // 8), (N // 128, H // 8)),
        "scales": ("F16", (H // 128, N), (N // 128, H)),
    }
)


def read(rows: Rows, quantization: Any = None, **config: Any) -> LayerGroup:
    """The only group of layers that all have `rows` and a router."""
    extra = {} if quantization is None else {"quantization_config": quantization}
    (group,) = layer_groups({**CONFIG, **extra, **config}, listing({**ROUTER, **rows}))
    return group


def refused(rows: Rows, *words: str, quantization: Any = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(rows, quantization)
    for word in words:
        assert word in str(caught.value)


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


def test_prediction_layers_are_left_out_with_a_note() -> None:
    tensors = listing({**ROUTER, **BLOCK})
    tensors |= listing({**ROUTER, **PLAIN}, (LAYERS,))
    tensors |= listing({**ROUTER, **PLAIN}, (0,), root="mtp.layers.")
    tensors |= listing({**ROUTER, **PLAIN}, (0,), root="mtp.")
    (group,) = layer_groups({**CONFIG, "quantization_config": FP8}, tensors)
    assert group.layers == (0, 1, 2)
    (note,) = group.notes
    for block in (f"model.layers.{LAYERS}.mlp", "mtp.layers.0.mlp", "mtp.0.mlp"):
        assert block in note


def test_hash_routed_layers_and_the_bias_that_others_have() -> None:
    expert = matrices({"weight": ("BF16", (N, H), (H, N))}, "ffn")
    router = {"ffn.gate.weight": ("BF16", (E, H))}
    table = {"ffn.gate.tid2eid": ("I64", (1000, 2))}
    bias = {"ffn.gate.bias": ("F32", (E,))}
    tensors = listing({**expert, **router, **table}, (0,), "layers.")
    tensors |= listing({**expert, **router, **bias}, (1, 2), "layers.")
    config = {**CONFIG, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "num_hash_layers": 1}
    first, rest = layer_groups(config, tensors)
    assert (first.problem.routing.hashed, first.problem.routing.correction_bias) == (True, False)
    assert (rest.problem.routing.hashed, rest.problem.routing.correction_bias) == (False, True)
    assert rest.names.router["correction_bias"] == "layers.{layer}.ffn.gate.bias"
    assert first.notes == rest.notes == ()


def test_a_bias_of_the_router_itself() -> None:
    group = read({**PLAIN, "mlp.gate.bias": ("BF16", (E,))})
    assert group.problem.routing.router_bias
    assert not group.problem.routing.correction_bias


def test_correction_bias_with_an_axis_of_one() -> None:
    group = read({**PLAIN, "mlp.moe_statics.e_score_correction_bias": ("F32", (1, E))})
    assert group.problem.routing.correction_bias
    refused({**PLAIN, "mlp.gate.e_score_correction_bias": ("F32", (2, E))}, "e_score_correction_bias")


def test_a_correction_bias_in_the_module_of_the_experts() -> None:
    name = "mlp.experts.e_score_correction_bias"
    group = read({**PLAIN, name: ("F32", (E,))})
    assert group.names.router["correction_bias"] == f"model.layers.{{layer}}.{name}"
    assert group.problem.routing.correction_bias
    refused({**PLAIN, name: ("F32", (E + 1,))}, name)


def test_a_router_outside_of_the_module_that_holds_the_experts() -> None:
    expert = matrices({"weight": ("BF16", (N, H), (H, N))}, "moe")
    router = {"router.proj.weight": ("F32", (E, H)), "router.per_expert_scale": ("BF16", (E,))}
    (group,) = layer_groups(CONFIG, listing({**expert, **router}))
    assert group.names.router["weight"] == "model.layers.{layer}.router.proj.weight"
    assert group.problem.router_dtype == "fp32"
    assert group.problem.routing.expert_scale
    # One inside goes first, and the other is something else.
    inside = {"moe.gate.weight": ("BF16", (E, H))}
    (group,) = layer_groups(CONFIG, listing({**expert, **router, **inside}))
    assert group.names.router == {"weight": "model.layers.{layer}.moe.gate.weight"}


def test_without_a_router_the_config_is_believed() -> None:
    (group,) = layer_groups({**CONFIG, "topk_method": "noaux_tc"}, listing(PLAIN))
    assert group.problem.routing.correction_bias
    assert any("no router" in note for note in group.notes)


def test_a_router_of_another_width_than_the_experts() -> None:
    refused({**PLAIN, "mlp.gate.weight": ("BF16", (E, H + 1))}, f"{H + 1} features", f"experts {H}")


def test_a_router_that_is_odd_beside_experts_that_are_not() -> None:
    refused(
        {**PLAIN, "mlp.gate.weight": ("BF16", (H, E))}, "mlp.gate.weight", f"[{E}, hidden]", f"[{H}, {E}]"
    )


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_experts_whose_scales_are_missing(dtype: str) -> None:
    rows = matrices({"weight": (dtype, (N, H), (H, N))})
    refused(rows, "layer 0", "lack", "down_proj.weight_scale")
    if dtype == "F8_E4M3":
        refused(rows, "lack", "down_proj.weight_scale_inv", quantization=FP8)


def test_rows_of_matrices_that_are_stored_apart_are_not_interleaved() -> None:
    names = {"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}
    bias = matrices({"bias": ("BF16", (N,), (H,))})
    router = {"mlp.gate.bias": ("BF16", (E,))}
    apart = read({**PLAIN, **bias, **router}, **names)
    assert apart.problem.rows == "concatenated"
    together = {
        "mlp.experts.gate_up_proj": ("BF16", (E, H, 2 * N)),
        "mlp.experts.gate_up_proj_bias": ("BF16", (E, 2 * N)),
        "mlp.experts.down_proj": ("BF16", (E, N, H)),
        "mlp.experts.down_proj_bias": ("BF16", (E, H)),
    }
    assert read({**together, **router}, **names).problem.rows == "interleaved"


def test_latent_experts() -> None:
    latent = {
        "mlp.routed_expert_down_proj.weight": ("BF16", (H, 2 * H)),
        "mlp.routed_expert_up_proj.weight": ("BF16", (2 * H, H)),
        "mlp.gate.weight": ("BF16", (E, 2 * H)),
    }
    group = read({**PLAIN, **latent}, hidden_size=2 * H)
    assert (group.problem.dims.hidden, group.problem.model_hidden) == (H, 2 * H)
    assert group.sources["hidden"].startswith("header:")
    assert set(group.names.latent) == {"in", "out"}
    refused({**PLAIN, **latent, "mlp.routed_expert_up_proj.weight": ("BF16", (H, H))}, "routed_expert_up")


@pytest.mark.parametrize(
    ("width", "config", "count"),
    [
        (2 * N, {"n_shared_experts": 2}, 2),
        (512, {"shared_expert_intermediate_size": 512}, 1),
        (512, {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 512}, 1),
        (2 * N, {"n_shared_experts": 1}, 2),
        (N, {}, 1),
    ],
)
def test_shared_experts_by_their_width(width: int, config: dict[str, Any], count: int) -> None:
    shared = {
        f"mlp.shared_experts.{name}_proj.weight": ("BF16", (H, width) if name == "down" else (width, H))
        for name in ("gate", "up", "down")
    }
    group = read({**BLOCK, **shared}, FP8, **config)
    assert group.problem.shared_experts == count
    assert group.details == {"arrangement": "per_expert", "shared_dtype": "BF16"}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_width_of_shared_experts_that_are_stored_transposed(method: str) -> None:
    def columns(rows: int, cols: int) -> Rows:
        packed = (rows // 8, cols) if method == "gptq" else (rows, cols // 8)
        zeros, scales = (rows // 128, cols // 8), (rows // 128, cols)
        return {"qweight": ("I32", packed), "qzeros": ("I32", zeros), "scales": ("F16", scales)}

    rows = {
        f"mlp.{module}.{name}_proj.{suffix}": row
        for module in ("experts.{e}", "shared_expert")
        for name in ("gate", "up", "down")
        for suffix, row in columns(*((N, H) if name == "down" else (H, N))).items()
    }
    quantization = {"quant_method": method, "bits": 4, "group_size": 128}
    assert read(rows, quantization).problem.shared_experts == 1


@pytest.mark.parametrize("lacking", ["gate", "down"])
def test_shared_experts_that_are_not_all_there(lacking: str) -> None:
    names = [name for name in ("gate", "up", "down") if name != lacking]
    shape = {"down": (H, N)}
    rows = {f"mlp.shared_experts.{name}_proj.weight": ("BF16", shape.get(name, (N, H))) for name in names}
    if lacking == "gate":
        del rows["mlp.shared_experts.up_proj.weight"]
    refused({**PLAIN, **rows}, f"no {lacking} matrix")


# What a format's tensors must be.


@pytest.mark.parametrize(
    ("rows", "leaf", "row"),
    [
        (BLOCK, "up_proj.weight_scale_inv", ("F32", (2, 2))),
        (BLOCK, "down_proj.weight", ("F8_E4M3", (H, N + 1))),
        (BLOCK, "gate_proj.weight", ("F8_E5M2", (N, H))),
        (matrices(MODELOPT), "gate_proj.weight_scale", ("F8_E4M3", (N, 3))),
        (matrices(MODELOPT), "down_proj.weight_scale_2", ("F32", (2,))),
        (matrices(MODELOPT), "up_proj.weight", ("I16", (N, H // 2))),
        (FP4, "down_proj.scale", ("F8_E8M0", (H, 3))),
        (AWQ, "gate_proj.qzeros", ("I32", (3, N // 8))),
        (AWQ, "up_proj.scales", ("I32", (H // 128, N))),
    ],
)
def test_odd_tensors_are_named(rows: Rows, leaf: str, row: tuple[str, tuple[int, ...]]) -> None:
    name = f"mlp.experts.{{e}}.{leaf}"
    assert name in rows
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128} if rows is AWQ else None
    refused({**rows, name: row}, leaf, quantization=quantization)


def test_an_ascend_export_says_which_tensor_is_not_understood() -> None:
    rows = matrices(
        {
            "weight": ("I8", (N, H), (H, N)),
            "weight_scale": ("F32", (N, 1), (H, 1)),
            "weight_offset": ("F32", (N, 1), (H, 1)),
        }
    )
    refused(rows, "weight_offset", "not understood")


@pytest.mark.parametrize(
    "storage",
    [it for it in STORAGES if it.arrangement.name not in ("flat", "fused_blocks")],
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


# Lists of modules in every language, read from the config alone.


def precision_by_layer(quantization: dict[str, Any]) -> dict[str, str]:
    groups = layer_groups({**CONFIG, "quantization_config": quantization}, None)
    return {ranges(group.layers): group.problem.scheme.weight.name for group in groups}


EXCLUSIONS = [
    ("modules_to_not_convert", ["gate", "e_score_correction_bias", "lm_head"], {"0-2": "fp8"}),
    ("modules_to_not_convert", [f"model.layers.{n}.mlp.gate" for n in range(3)], {"0-2": "fp8"}),
    ("modules_to_not_convert", ["layers.0.", "shared_expert"], {"0": "bf16", "1-2": "fp8"}),
    ("modules_to_not_convert", ["model.layers.1"], {"0, 2": "fp8", "1": "bf16"}),
    ("ignored_layers", ["model.layers.1.mlp.experts"], {"0, 2": "fp8", "1": "bf16"}),
    (
        "ignored_layers",
        [f"model.layers.2.mlp.experts.{e}.{name}_proj" for e in range(E) for name in ("gate", "up", "down")],
        {"0-1": "fp8", "2": "bf16"},
    ),
    ("ignore", ["re:.*self_attn.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"], {"0-2": "fp8"}),
    ("ignore", [r"re:.*layers\.2\.mlp.*"], {"0-1": "fp8", "2": "bf16"}),
    ("ignore", ["*.mlp.shared_expert.*", "mtp*", "*.attn.*"], {"0-2": "fp8"}),
    ("ignore", ["model.language_model.layers.0.mlp*"], {"0": "bf16", "1-2": "fp8"}),
    ("ignore", ["model.layers.1*"], {"0, 2": "fp8", "1": "bf16"}),
]


@pytest.mark.parametrize(("key", "patterns", "expected"), EXCLUSIONS)
def test_exclusions(key: str, patterns: list[str], expected: dict[str, str]) -> None:
    assert precision_by_layer({**FP8, key: patterns}) == expected


def test_lists_of_other_writers() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert precision_by_layer({**gptq, "dynamic": {r"-:.*layers\.0\..*": {}}}) == {"0": "bf16", "1-2": "int4"}
    listed = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts.0.gate_proj"]]}
    assert precision_by_layer({**gptq, **listed}) == {"0-2": "int4"}
    unlisted = {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}
    assert precision_by_layer({**gptq, **unlisted}) == {"0-2": "bf16"}
    mixed = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
            **{f"model.layers.1.mlp.experts.0.w{n}": {"quant_algo": "MXFP8"} for n in (1, 2, 3)},
            "model.layers.1.mlp.shared_experts.w1": {"quant_algo": "FP8"},
        },
    }
    assert precision_by_layer({"quant_method": "modelopt", **mixed}) == {
        "0": "nvfp4",
        "1": "mxfp8",
        "2": "bf16",
    }


def test_exceptions_of_auto_round() -> None:
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {
            **{
                f"model.layers.0.mlp.experts.{e}.{name}_proj": {"bits": 16}
                for e in range(E)
                for name in ("gate", "up", "down")
            },
            r".*layers\.1\.mlp\.experts.*": {"bits": 8},
            ".*self_attn.*": {"bits": 16},
            "model.layers.2.mlp.shared_experts": {"bits": 16},
        },
    }
    groups = layer_groups({**CONFIG, "quantization_config": config}, None)
    found = {ranges(group.layers): str(group.problem.scheme.weight) for group in groups}
    assert found == {"0": "bf16", "1": "int8 group 128", "2": "int4 group 128"}
    assert [group.problem.storage for group in groups] == ["plain", "gptq", "gptq"]
    assert groups[1].sources["scheme"] == "config:quantization_config.extra_config"


def test_quark_rules_by_layer() -> None:
    fp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
    block = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}
    steps = [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}]
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": fp4, "input_tensors": fp4},
        "layer_quant_config": {
            r"re:.*layers\.1\.ffn\.experts\.\d+\.w[123]": {"weight": block},
            "*layers.2.mlp.experts*": {"weight": steps},
            r"re:mtp\.0\.ffn\.experts\.\d+\.w1": {"weight": block},
        },
        "exclude": [r"re:.*\.gate$"],
    }
    groups = layer_groups({**CONFIG, "quantization_config": config}, None)
    found = {ranges(group.layers): str(group.problem.scheme.weight) for group in groups}
    assert found == {"0": "mxfp4 group 32", "1": "fp8 block 128x128", "2": "int4 per channel"}


def test_groups_of_compressed_tensors_by_module() -> None:
    int4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    int8 = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {**int4, "targets": ["Linear"], "input_activations": None},
            "group_1": {
                **int8,
                "targets": [r"re:.*layers\.0\.mlp\.experts.*"],
                "input_activations": None,
            },
        },
    }
    assert precision_by_layer(config) == {"0": "int8", "1-2": "int4"}


def test_where_the_description_stands() -> None:
    rows = {**ROUTER, **matrices(MODELOPT)}
    inner = {**CONFIG, "quantization_config": NVFP4}
    (nested,) = layer_groups({"text_config": inner}, listing(rows))
    assert nested.sources["scheme"] == "config:text_config.quantization_config.quant_algo"
    apart = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (beside,) = layer_groups(
        CONFIG, listing(rows), quantization=apart, quantization_file="hf_quant_config.json"
    )
    assert beside.problem == nested.problem
    assert beside.sources["scheme"] == "config:hf_quant_config.json.quant_algo"


def test_quark_int4_for_fp8_activations() -> None:
    rows = matrices(
        {
            "weight": ("I32", (N, H // 8), (H, N // 8)),
            "weight_scale": ("F32", (), ()),
            "weight_scale_2": ("F32", (N,), (H,)),
            "input_scale": ("F32", (), ()),
        }
    )
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    weight = [spec, {"dtype": "int4", "qscheme": "per_channel"}]
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": {**spec, "is_dynamic": False}},
    }
    group = read(rows, config)
    assert str(group.problem.scheme) == "int4 per channel, fp8 static activations"
    assert group.notes == ()
    assert read(rows).problem.scheme == group.problem.scheme


def test_sizes_that_are_listed_for_each_layer() -> None:
    group = read(PLAIN, num_experts_per_tok=[2] * LAYERS, moe_intermediate_size=[N] * LAYERS)
    assert (group.problem.top_k, group.problem.dims.intermediate) == (2, N)
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        read(PLAIN, num_experts_per_tok=[2, 1, 2])
