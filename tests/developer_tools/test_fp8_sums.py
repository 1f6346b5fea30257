"""What `scripts/fp8_sums` compares: layers whose results are sums alone, their errors, and the verdict."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for

from moectl.kernels.quantize_tokens import quantize
from moectl.kernels.reference import moe_reference
from support.random_layers import layer_of
from support.scripts import loaded

script = loaded("fp8_sums")
CASES = [(form, magnitude) for form in script.FORMATS for magnitude in script.MAGNITUDES]
ROW = script.Row("block", 64, "gaussian", 2048, "moectl", rms=1e-3, max=1e-2)


@pytest.mark.parametrize(("form", "magnitude"), CASES)
def test_activations_and_tokens_are_codes_and_the_reference_is_their_product(
    form: str, magnitude: str
) -> None:
    made = script.layer_with(form, magnitude, 512, "cpu")
    inputs, act = script.inputs_with(9, "cpu"), made.problem.scheme.act
    tokens = quantize(inputs.x, act)
    assert set(tokens.values.float().unique().tolist()) == {0.0, 448.0}
    up = made.roles["w13"][:, 512:].view(torch.float8_e4m3fn)
    assert made.roles["w13"][:, :512].view(torch.float8_e4m3fn).float().unique().tolist() == [0.0, 64.0]
    picked = script.is_picked(torch.device("cpu"))
    for expert in (0, 5):
        scales = made.roles["w13_scale"][expert, -(up.shape[1] // 128) :, 0] if form == "block" else None
        codes = up[expert][:, picked].T.contiguous()
        h = codes.float() * (1 if scales is None else scales.repeat_interleave(128)) * 64
        again = quantize(h.bfloat16(), act).values
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    layer = layer_of(made.problem, made.roles)
    call = inputs.x, inputs.ids, inputs.weights
    exact = moe_reference(*call, layer.reference, made.problem, dtype=torch.float64)
    expected, rounded = script.expected_of(made, inputs)
    size = expected.square().mean().sqrt()
    assert (exact - expected).abs().max() / size < 1e-5
    assert torch.equal(rounded, expected.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("form", script.FORMATS)
def test_exact_sums_have_the_error_of_rounding_alone(form: str) -> None:
    """The emulation adds in fp32; sums of 14 bits, as tensor cores keep them, are seen at once."""
    unit = script.Unit(form, "emulation", (256, 512), (20,), "cpu")
    rows = list(script.measure(unit))
    floor = {script.case_of(row): row for row in script.measure(replace(unit, backend=script.ROUNDED))}
    assert len(rows) == len(floor) == 2 * len(script.MAGNITUDES)
    for row in rows:
        least = floor[script.case_of(row)]
        assert 1e-3 < least.rms < 2e-3
        assert row.rms == pytest.approx(least.rms, rel=0.02) and row.max < 1.1 * least.max


def cut(x: torch.Tensor, bits: int) -> torch.Tensor:
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(fraction * 2**bits), exponent - bits)


def test_sums_in_fewer_bits_are_further_off_most_where_numbers_cancel() -> None:
    errors = {}
    for magnitude in script.MAGNITUDES:
        made = script.layer_with("channel", magnitude, 2048, "cpu")
        up, w2 = (made.roles[role][0].view(torch.float8_e4m3fn).double() for role in ("w13", "w2"))
        h = up[2048:, 1:20].T
        sums = torch.zeros(len(h), len(w2), dtype=torch.float64)
        for at in range(0, 2048, 32):
            sums = cut(sums + h[:, at : at + 32] @ w2[:, at : at + 32].T, 14)
        errors[magnitude] = script.error_of(sums, h @ w2.T)["rms"]
    assert errors["cancel"] > 0.1 > errors["gaussian"] > 1e-3


@pytest.mark.slow
def test_a_result_that_is_lost_has_its_reason_and_stops_no_other() -> None:
    fine = script.Unit("channel", "emulation", (256,), (3,), "cpu")
    units = [fine, replace(fine, device="nowhere"), replace(fine, backend="deep_gemm")]
    passed: list[Any] = []
    rows = script.measured(units, 2, time.monotonic() + 300, passed.append)
    assert passed == rows and len(rows) == 3 * len(script.MAGNITUDES)
    for i, row in enumerate(rows):
        assert (row.rms is not None) == (i < 4) == (not row.note)
    assert script.rows_of(fine, time.monotonic())[0].note == "the time limit was reached"


def test_what_compiles_for_each_size_or_tile_has_processes_of_its_own() -> None:
    options = script.parser().parse_args(["--formats", "block", "--backends", "moectl,humming,cutlass"])
    units = script.units_of(options)
    parts = [(it.backend, len(it.columns), len(it.tokens)) for it in units]
    own = [("humming", 1, 3)] * 4 + [("moectl", 4, 1)] * 3
    assert parts == [*own, ("cutlass", 4, 3), ("bf16", 4, 3)]
    assert {it.columns for it in units[:4]} == {(2048,), (4096,), (8192,), (16384,)}
    assert {it.tokens for it in units[4:7]} == {(64,), (512,), (2048,)}


def test_the_launches_are_all_kinds_of_sums_that_a_layer_has() -> None:
    device = torch.device("cuda")
    with compiling_for(OFFLINE_GPUS[90]):
        found = {
            (form, tokens, name): script.launch_named(name, script.layer_problem(form, 4096), tokens, device)
            for form in script.FORMATS
            for tokens in (64, 512, 2048)
            for name in script.OWN
        }
    sums = {key: None if it is None else getattr(it.tile, "fast_sums", "") for key, it in found.items()}
    assert all(sums["block", n, "moectl"] == 0 for n in (64, 512, 2048))
    assert all(
        sums["block", n, f"moectl {kind} sums"] is None for n in (64, 2048) for kind in ("fp32", "fast")
    )
    for tokens, kinds in ((64, {0}), (512, {0, 1}), (2048, {1})):
        chosen = sums["channel", tokens, "moectl"]
        other = "fp32" if chosen else "fast"
        assert chosen in kinds and sums["channel", tokens, f"moectl {other} sums"] == 1 - chosen
    assert all(it.family in ("decode", "grouped") for key, it in found.items() if "portable" in key[2])
    tiles = {found["block", tokens, "moectl"].tile.tokens for tokens in (64, 512, 2048)}
    assert len(tiles) == 2


def test_moectl_is_above_the_best_other_library_or_failed() -> None:
    humming, cutlass = (
        replace(ROW, backend=name, rms=rms) for name, rms in (("humming", 2e-3), ("cutlass", 9e-4))
    )
    assert script.above([ROW, humming]) == [] == script.above([ROW])
    (said,) = script.above([replace(ROW, rms=1e-3), humming, replace(cutlass, rms=8e-4)])
    assert said == "block, 64 tokens, gaussian, K = 2048: 1.00e-03, cutlass 8.00e-04"
    others = [
        replace(cutlass, columns=4096),
        replace(cutlass, rms=None, note="no"),
        replace(cutlass, rms=float("nan")),
    ]
    assert script.above([ROW, *others, replace(ROW, backend="moectl fast sums", rms=1.0)]) == []
    (said,) = script.above([replace(ROW, rms=None, note="OutOfMemoryError: no"), humming])
    assert said.endswith("OutOfMemoryError: no")
    assert script.above([replace(ROW, rms=float("nan"))])


def test_tables_have_a_line_for_each_magnitude_and_k() -> None:
    rows = [
        ROW,
        replace(ROW, backend="cutlass", rms=None, note="it is not here"),
        replace(ROW, columns=4096, rms=2e-3),
    ]
    table = script.as_table([*rows, replace(ROW, form="channel", backend="bf16")])
    assert "| magnitudes | K | moectl |" in table and "| magnitudes | K | bf16 |" in table
    assert "| gaussian | 2048 | 1.0e-03, 1.0e-02 |\n| gaussian | 4096 | 2.0e-03, 1.0e-02 |" in table
    assert "- cutlass: it is not here" in table


@pytest.mark.gpu
@pytest.mark.parametrize("form", script.FORMATS)
def test_moectl_on_a_gpu(form: str) -> None:
    """What it chooses for few tokens adds in fp32 often enough to be near the error of rounding alone."""
    unit = script.Unit(form, "moectl", (2048,), (64,), "cuda")
    rows = list(script.measure(unit))
    assert len(rows) == len(script.MAGNITUDES) and all(row.rms < 2e-2 for row in rows), rows
    assert all(row.rms < 2e-3 for row in rows if row.magnitude != "cancel"), rows
