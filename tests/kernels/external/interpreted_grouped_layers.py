"""Layers from grouped products of other libraries, replaced by plain torch, under Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moectl.kernels.external import deep_gemm, humming, humming_formats, torch_grouped
from moectl.kernels.external.gemm_glue import weighted_sum
from moectl.kernels.prepared_layer import PreparedMoE
from moectl.kernels.quantize_tokens import quantize
from moectl.problem.moe_problem import Dims
from moectl.problem.schemes import ActFormat
from support import peer_cases as cases
from support.kernel_cases import poison_new_memory
from support.random_layers import inputs_of, judged
from support.sampling import in_turn

BLOCKS, CHANNEL = "fp8 blocks, fp8 tokens", "fp8 channel, fp8 tokens"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def decoded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows ``[n, k]`` with scales ``[n, groups]`` in fp32."""
    return (rows.float().unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]).flatten(1)


def blocks_decoded(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A matrix with a scale for each block of 128 by 128 in fp32."""
    return weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


class StandIn:
    """DeepGEMM's functions on a CPU, with its conditions on what it is given."""

    def __init__(self, align: int) -> None:
        self.align, self.expected = align, 0
        self._C = SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: align)

    def _operands(self, a: Any, b: Any, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(a, tuple):
            assert not options and a.dtype == b.dtype == torch.bfloat16
            return a.float(), b.float()
        (rows, scales), (weight, blocks) = a, b
        assert options == {"disable_ue8m0_cast": True}
        assert scales.shape == (*rows.shape[:-1], rows.shape[-1] // 128)
        assert scales.stride(-2) == 1 and scales.stride(-1) % 4 == 0  # whole words for TMA
        assert blocks.dtype == scales.dtype == torch.float32 and blocks.is_contiguous()
        shape = rows.shape
        dense = decoded(rows.reshape(-1, shape[-1]), scales.reshape(-1, scales.shape[-1])).view(shape)
        return dense, torch.stack([blocks_decoded(*pair) for pair in zip(weight, blocks, strict=True)])

    def contiguous(
        self, a: Any, b: Any, y: torch.Tensor, ends: torch.Tensor, *, use_psum_layout: bool, **options: Any
    ) -> None:
        assert use_psum_layout and len(y) % self.align == 0
        rows, weights = self._operands(a, b, options)
        begin = 0
        for weight, end in zip(weights, ends.tolist(), strict=True):
            begin = -(-begin // self.align) * self.align
            assert begin <= end <= len(y)
            y[begin:end] = (rows[begin:end] @ weight.T).to(y.dtype)
            begin = end

    def masked(
        self, a: Any, b: Any, y: torch.Tensor, counts: torch.Tensor, expected: int, **options: Any
    ) -> None:
        assert expected >= 16 and y.shape[1] % 128 == 0
        self.expected = expected
        rows, weights = self._operands(a, b, options)
        for expert, (weight, count) in enumerate(zip(weights, counts.tolist(), strict=True)):
            y[expert, :count] = (rows[expert, :count] @ weight.T).to(y.dtype)

    m_grouped_fp8_gemm_nt_contiguous = m_grouped_bf16_gemm_nt_contiguous = contiguous
    m_grouped_fp8_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked = masked


@pytest.mark.parametrize(
    ("backend", "name", "kind"),
    in_turn(
        product(["deep_gemm", "batched_deep_gemm"], ["bf16, not gated", "bf16, interleaved", BLOCKS]),
        ["skipped", "none"],
    ),
)
def test_a_layer_from_deepgemm(backend: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(cases.GROUPED[name], experts=4, local_experts=4, top_k=2)
    layer = cases.layer_for(problem)
    prepared = layer.prepared(backend, "cpu")
    monkeypatch.setattr(deep_gemm, "library", lambda: StandIn(16))
    inputs = cases.with_ids(inputs_of(problem, 5), kind, problem.local_experts)
    run = deep_gemm.compute if backend == "deep_gemm" else deep_gemm.compute_masked
    y = run(prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok if kind != "none" else not y.any()
    said = "64 rows, experts at multiples of 16" if backend == "deep_gemm" else "128 rows per expert"
    assert deep_gemm.tactic(prepared, 1 if backend == "batched_deep_gemm" else 2) == said


@pytest.mark.parametrize("name", ["bf16", BLOCKS])
def test_batches_by_expert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch are those of single calls with one expert each."""
    problem = replace(cases.GROUPED[name], experts=3, local_experts=3, top_k=1)
    layer = cases.layer_for(problem)
    prepared = layer.prepared("batched_deep_gemm", "cpu")
    library = StandIn(16)
    monkeypatch.setattr(deep_gemm, "library", lambda: library)
    counts, most = torch.tensor([2, 0, 4]), 4
    x = torch.full((3, most, problem.dims.hidden), float("nan")).bfloat16()
    for expert, count in enumerate(counts.tolist()):
        x[expert, :count] = torch.randn(count, problem.dims.hidden).bfloat16()
    y = deep_gemm.batched(prepared, x, counts)
    assert y.shape == x.shape
    wide = torch.zeros(3, 40, problem.dims.hidden).bfloat16()
    for expected, told in ((None, 40), (20, 32), (1, 16)):
        deep_gemm.batched(prepared, wide, counts, expected)
        assert library.expected == told
    for expert, count in enumerate(counts.tolist()):
        ids, ones = torch.full((count, 1), expert, dtype=torch.int32), torch.ones(count, 1)
        if count:
            assert torch.equal(
                y[expert, :count], deep_gemm.compute_masked(prepared, x[expert, :count], ids, ones)
            )


def products() -> tuple[Any, Any]:
    """torch's products, the one of FP8 decoded first, as a CPU has none."""

    def scaled(
        x: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        offs: torch.Tensor,
        **given: Any,
    ) -> torch.Tensor:
        assert a.shape == x.shape[:1] and b.shape == (len(weight), weight.shape[2])
        y = torch.full((len(x), weight.shape[2]), float("nan"), dtype=given["out_dtype"])
        begin = 0
        for expert, end in enumerate(offs.tolist()):
            dense = (x[begin:end].float() * a[begin:end, None]) @ (weight[expert].float() * b[expert])
            y[begin:end] = dense.to(y.dtype)
            begin = end
        return y

    return torch._grouped_mm, scaled


@pytest.mark.parametrize("kind", ["skipped", "none"])
@pytest.mark.parametrize("name", ["bf16, interleaved", CHANNEL])
def test_a_layer_from_torchs_products(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.GROUPED[name]
    layer = cases.layer_for(problem)
    prepared: PreparedMoE = layer.prepared("torch_grouped", "cpu")
    monkeypatch.setattr(torch_grouped, "products", products)
    inputs = cases.with_ids(inputs_of(problem, 5), kind, problem.local_experts)
    y = torch_grouped.compute_in_rows(prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok if kind != "none" else not y.any()


def test_sums_of_rows_leave_out_skipped_ones() -> None:
    ids = torch.tensor([1, -1, 0, 2], dtype=torch.int32)
    rows = torch.tensor([3, -1, 0, 7], dtype=torch.int32)
    parts = torch.full((8, 64), float("nan")).half()
    for row in (3, 0, 7):
        parts[row] = row
    y = torch.empty(2, 64).half()
    weighted_sum(parts, y, ids, 3, torch.tensor([2.0, 9.0, 5.0, 0.5]), rows)
    assert y[:, 0].tolist() == [6.0, 3.5]


class HummingStandIn:
    """Humming's functions on a CPU: it quantizes with torch, and multiplies decoded weights."""

    def __init__(self, prepared: PreparedMoE, form: ActFormat) -> None:
        self.prepared, self.form = prepared, form
        self.forward = SimpleNamespace(humming_forward=self.gemm, may_process_input=self.process)
        self.activated = False

    def process(
        self, config: Any, *, inputs: torch.Tensor, outputs: torch.Tensor, **activation: str
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if activation:
            assert activation == humming_formats.FUSED
            gate, up = inputs.float().chunk(2, 1)
            inputs, self.activated = torch.nn.functional.silu(gate) * up, True
        made = quantize(inputs.nan_to_num(), self.form)
        outputs.copy_(made.values)
        by_group = config.input_quant_mode.has_group_scale
        return outputs, made.scales if by_group else None, None if by_group else made.scales

    def gemm(self, config: Any, **given: Any) -> None:
        x, y, scales = given["inputs"], given["outputs"], given["input_scale"]
        assert x.dtype in (torch.float8_e4m3fn, torch.int8) and scales.shape[0] == len(x)
        assert scales.stride(0) == scales.shape[1] and json.loads(given["compute_config"])
        dense = decoded(x, scales)
        ends = given.get("expert_layout")
        if ends is None:
            slots, experts = given["sorted_ids"], given["expert_ids"]
            valid = [
                (int(slot), int(experts[at // config.block]))
                for at, slot in enumerate(slots[: int(given["num_tokens_padded"])])
                if slot < len(y)
            ]
        else:
            assert ends.dtype == torch.int64 and int(ends[0]) == 0
            valid = [(r, e) for e in range(len(ends) - 1) for r in range(int(ends[e]), int(ends[e + 1]))]
        for slot, expert in valid:
            weight = getattr(self.prepared.expert(expert), config.role)
            y[slot] = (dense[slot // given.get("top_k", 1)] @ weight.float().T).to(y.dtype)


@pytest.mark.parametrize(
    ("backend", "name", "kind"),
    in_turn(
        [
            *(("humming", name) for name in (BLOCKS, CHANNEL, "int8, int8 tokens")),
            *(("humming_grouped", name) for name in (BLOCKS, CHANNEL)),
        ],
        ["skipped", "none"],
    ),
)
def test_a_layer_from_hummings_products_of_quantized_tokens(
    backend: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(cases.FORMATS[name], dims=Dims(256, 128), experts=4, local_experts=4, top_k=2)
    if name == CHANNEL:  # without an activation in Humming's own kernel
        problem = replace(problem, activation=replace(problem.activation, limit=2.0))
    layer = cases.layer_for(problem)
    prepared = layer.prepared(backend, "cpu")
    assert prepared.layout == ("canonical" if "int8" in name else "humming-fp8-act-fp8")
    stand_in = HummingStandIn(prepared, problem.scheme.act)
    mode = SimpleNamespace(has_group_scale=name == BLOCKS)
    rows = [(0, 1 << 30, {"block_shape": [8, 64, 64]})]
    prepared.derived[humming.NAME] = tuple(
        humming.HummingMatrix(
            SimpleNamespace(role=role, input_quant_mode=mode, block=8),
            {"weight": prepared.weights[role], "weight_scale": prepared.weights[role]},
            *humming.matrix_sizes(prepared, role),
            rows,
            '{"gemm_type": "any"}',
        )
        for role in ("w13", "w2")
    )
    monkeypatch.setattr(humming, "library", lambda: stand_in)
    inputs = cases.with_ids(inputs_of(problem, 5), kind, problem.local_experts)
    run = humming.compute if backend == "humming" else humming.compute_grouped
    y = run(prepared, inputs.x, inputs.ids, inputs.weights)
    assert judged(layer, prepared, y, inputs).ok if kind != "none" else not y.any()
    assert stand_in.activated == (backend == "humming" and name != CHANNEL)
