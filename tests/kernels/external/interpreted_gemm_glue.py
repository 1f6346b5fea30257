"""moectl's own kernels around the GEMMs of other libraries, under Triton's interpreter."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moectl.kernels.external import humming, vllm_marlin
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.triton.sort_and_combine import INTERPRETED
from moectl.problem.moe_problem import SILU, SWIGLU_OAI, Activation
from support import peer_cases as cases
from support.kernel_cases import poison_new_memory
from support.random_layers import inputs_of, judged, random_layer
from support.sampling import every_nth, in_turn


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def test_runs_in_the_interpreter() -> None:
    assert INTERPRETED


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize(("slots", "experts", "size"), [(1, 4, 8), (45, 20, 16), (300, 3, 48)])
def test_blocks(kind: str, slots: int, experts: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.makes_blocks(kind, slots, experts, size, "cpu")
    monkeypatch.setattr("moectl.kernels.external.gemm_glue.FEW", 0)
    cases.makes_blocks(kind, slots, experts, size, "cpu")


@pytest.mark.parametrize(
    ("sizes", "kind"), every_nth(product([(1, 4), (45, 7), (300, 20), (9, 300)], cases.KINDS), 3)
)
def test_ragged(sizes: tuple[int, int], kind: str) -> None:
    slots, experts = sizes
    cases.sorts_ragged(kind, slots, experts, "cpu")


@pytest.mark.parametrize("rows", ["interleaved", "concatenated"])
@pytest.mark.parametrize(
    "activation",
    [
        SILU,
        Activation("silu", limit=0.5),
        SWIGLU_OAI,
        Activation("gelu_tanh"),
        Activation("swiglustep", limit=0.5),
        Activation("situ", beta=4.0, linear_beta=25.0),
        Activation("situ", beta=0.5),
        Activation("relu2", gated=False),
    ],
    ids=str,
)
def test_activation(activation: Activation, rows: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        cases.activates(activation, rows, dtype, "cpu")


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_sum(tokens: int, weigh: bool) -> None:
    cases.sums(weigh, tokens, "cpu")


def indexed_gemm(
    prepared: PreparedMoE, role: str, x: torch.Tensor, y: torch.Tensor, blocks: tuple[Any, ...], top_k: int
) -> list[tuple[int, int]]:
    """What an indexed GEMM of any library does, slowly: rows of `y` for slots in blocks of one expert.

    Padded columns are those of zero weights; the (slot, expert) pairs that were computed are returned.
    """
    slots, experts, total, size = blocks
    done = []
    for at, slot in enumerate(slots[: int(total)].tolist()):
        if slot >= len(y):
            continue
        expert = int(experts[at // size])
        dense = prepared.expert(expert)
        w, b = (dense.w13, dense.w13_bias) if role == "w13" else (dense.w2, dense.w2_bias)
        row = x[slot // top_k, : w.shape[1]].float() @ w.T + (0.0 if b is None else b)
        y[slot] = torch.nn.functional.pad(row, (0, y.shape[1] - len(row))).to(y.dtype)
        done.append((slot, expert))
    return done


@pytest.mark.parametrize(
    ("name", "kind"),
    in_turn(
        ["int4, group 128, bias", "int4, weight on the input", "mxfp4", "nvfp4", "nvfp4, bias"],
        ["skipped", "none"],
    ),
)
def test_a_layer_from_marlins_gemms(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.FORMATS[name]
    layer = cases.layer_for(problem)
    prepared = layer.prepared("marlin", "cpu")
    roles = {
        matrix.codes.data_ptr(): role
        for matrix, role in zip(vllm_marlin.ready(prepared), ("w13", "w2"), strict=True)
    }
    inputs = cases.with_ids(inputs_of(problem, 5), kind, problem.local_experts)

    def gemm(**given: Any) -> None:
        assert given.keys() == set(vllm_marlin.ARGUMENTS) and not given["workspace"].any()
        x, y, top_k = given["a"], given["c_or_none"], given["top_k"]
        assert x.shape == (given["size_m"], given["size_k"]) and y.shape[1] == given["size_n"]
        blocks = (given["sorted_token_ids"], given["expert_ids"], given["num_tokens_past_padded"])
        role = roles[given["b_q_weight"].data_ptr()]
        assert len(y) == len(x) * top_k and (role == "w2" or not x[:, problem.dims.hidden :].any())
        for slot, _ in indexed_gemm(prepared, role, x, y, (*blocks, given["moe_block_size"]), top_k):
            if given["mul_topk_weights"]:
                y[slot] *= given["topk_weights"][slot]
                if given["b_bias_or_none"] is not None and given["global_scale"] is not None:
                    y[slot] += 1e31  # as the library does

    monkeypatch.setattr(vllm_marlin, "operator", lambda: gemm)
    y = vllm_marlin.compute(prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok if kind != "none" else not y.any()


@pytest.mark.parametrize("kind", ["skipped", "none"])
@pytest.mark.parametrize("name", ["int4, group 128, bias", "mxfp4"])
def test_a_layer_from_hummings_gemms(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.FORMATS[name]
    layer = random_layer(problem)
    prepared = layer.prepared("humming", "cpu")
    rows = [(0, 8, {"block_shape": [8, 64, 64]}), (8, 1 << 30, {"block_shape": [16, 64, 64]})]
    table = {"w13": rows, "w2": [(0, 1 << 30, {"block_shape": [16, 64, 64]})]}
    prepared.derived[humming.NAME] = tuple(
        humming.HummingMatrix(
            role,
            {"weight": prepared.weights[role], "weight_scale": prepared.weights[role]},
            *humming.matrix_sizes(prepared, role),
            table[role],
        )
        for role in table
    )
    inputs = cases.with_ids(inputs_of(problem, 5), kind, problem.local_experts)
    sizes = dict.fromkeys(table, 16)

    def forward(role: str, **given: Any) -> None:
        assert given["valid_shape_m"] == len(given["outputs"]) and not given["locks"].any()
        blocks = (given["sorted_ids"], given["expert_ids"], given["num_tokens_padded"], sizes[role])
        indexed_gemm(prepared, role, given["inputs"], given["outputs"], blocks, given["top_k"])

    found = SimpleNamespace(forward=SimpleNamespace(humming_forward=forward))
    monkeypatch.setattr(humming, "library", lambda: found)
    y = humming.compute(prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok if kind != "none" else not y.any()
    assert humming.tactic(prepared, 1) == ("8x64x64" if problem.top_k <= 8 else "16x64x64") + ", 16x64x64"
