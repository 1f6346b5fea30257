"""The prefill kernels: shapes of programs, which tiles fit which layers, int4 times a power of two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from devtools.inspection.published_kernels import MODELS, layer_without_weights

from moectl.kernels.choice.prefill_launches import REGISTERS, SHAPES, PrefillTile
from moectl.kernels.triton.hopper.fragment_asm import FOLDED_SCALES_ASM, _folded_int4_asm, fold_factor
from moectl.kernels.triton.hopper.prefill import PREFILL_FAMILY
from moectl.problem.moe_problem import Activation

from .test_stream_asm import execute, halves, paired

GPT_OSS = "openai/gpt-oss-120b"


@pytest.mark.parametrize("units", SHAPES)
def test_a_shape_has_a_branch_for_its_widest_tile_and_registers_for_all_threads(units: int) -> None:
    shape = SHAPES[units]
    assert max(shape.widths) == units and list(shape.widths) == sorted(shape.widths)
    assert sum(shape.pieces) == 16 * units and shape.pieces[0] <= 16 * 4
    two = [width for width in shape.widths if width > 8 or shape.blocks == 1]
    assert all(width.bit_count() <= 2 for width in two)
    others = [registers for (*_, most), registers in REGISTERS.items() if most == units]
    for computing, loading in (shape.registers, *others):
        assert 128 * (shape.workers * computing + loading) <= 65536


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_tiles_of_both_shapes(model: str) -> None:
    problem = layer_without_weights(model).problem
    tiles = PREFILL_FAMILY.candidates(problem)
    assert {SHAPES[tile.tokens_x16].workers for tile in tiles} == {2, 3}


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    problem = layer_without_weights(GPT_OSS).problem
    assert not PREFILL_FAMILY.fits(problem, PrefillTile())
    for changed, tile, reason in (
        (problem, PrefillTile(10), "not a supported tile"),
        (replace(problem, dtype="fp16"), PrefillTile(), "does not support fp16 tokens"),
        (replace(problem, activation=Activation("gelu")), PrefillTile(), "activation"),
        (replace(problem, activation=Activation("situ")), PrefillTile(12), "of situ in tiles of 192 tokens"),
    ):
        assert reason in PREFILL_FAMILY.fits(changed, tile)


@pytest.mark.parametrize("scale", [1.0, -0.0078125, 0.3, 2.0**-93, 1e-20, 1.99 * 2.0**31, 0.0, -0.0])
def test_folded_int4_is_the_rounded_weight_times_a_power_of_two(scale: float) -> None:
    rng = np.random.default_rng(0)
    word = rng.integers(0, 2**32, 32, dtype=np.uint32)
    scales = torch.full((32, 2), scale, dtype=torch.float64).bfloat16()
    registers = {"$2": paired(scales)}
    execute(FOLDED_SCALES_ASM.value, registers)
    made = {
        "$4": word,
        "$5": registers["$0"],
        "$9": registers["$0"],
        "$13": registers["$1"],
        "$17": registers["$1"],
    }
    execute(_folded_int4_asm.fn(), made)
    for r in range(4):
        codes = np.stack([word >> (16 * b + 4 * r) & 15 for b in range(2)], 1).astype(np.float64)
        rounded = torch.from_numpy((codes - 8) * scales.double().numpy()).bfloat16().double().numpy()
        np.testing.assert_array_equal(halves(made[f"${r}"], "bf16") * fold_factor("int4"), rounded)
