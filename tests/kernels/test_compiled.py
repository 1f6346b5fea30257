"""The shipped launches, compiled without a GPU: no spills, no serialized wgmma, no register hazard."""

from __future__ import annotations

import pytest

from moectl.kernels.triton.launch import DECODE, GROUPED, Launch, is_legal, launch_for, token_tiles
from moectl.problem import SILU, SWIGLU_OAI, Dims, MoEProblem, Routing
from moectl.schemes import MXFP4, Scheme, int_format

from .aot import compile_call, overwritten_a_registers

GPT_OSS_120B = MoEProblem(
    Dims(2880, 2880),
    128,
    4,
    Scheme(MXFP4),
    SWIGLU_OAI,
    Routing(after_topk=True, router_bias=True),
    rows="interleaved",
    bias=True,
)
KIMI_K2 = MoEProblem(
    Dims(7168, 2048),
    384,
    8,
    Scheme(int_format(4, 32)),
    SILU,
    Routing("sigmoid", correction_bias=True, scale=2.827),
)
MODELS = {"gpt-oss-120b": GPT_OSS_120B, "kimi-k2": KIMI_K2}

SHIPPED = {
    **{f"decode up to {most} tokens": Launch("decode", tile) for most, tile in DECODE},
    **{f"grouped up to {most} per expert": Launch("grouped", tile) for most, tile in GROUPED},
}


@pytest.mark.parametrize("launch", SHIPPED)
@pytest.mark.parametrize("model", MODELS)
def test_on_sm90_uses_wgmma_from_registers_without_hazards(
    model: str, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = compile_call(MODELS[model], 8, SHIPPED[launch], 90, monkeypatch)
    gemms = [k for k in kernels if "gemm" in k.name]
    assert len(gemms) == 2 and all(k.wgmma and k.wgmma == k.wgmma_a for k in gemms), kernels
    for kernel in kernels:
        assert kernel.stack == 0, kernel
        assert kernel.warnings == (), kernel
        assert kernel.hazards == (), kernel


@pytest.mark.parametrize("launch", ["decode up to 8 tokens", "grouped up to inf per expert"])
@pytest.mark.parametrize("model", MODELS)
def test_compiles_for_sm80_without_spills(model: str, launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_call(MODELS[model], 8, SHIPPED[launch], 80, monkeypatch)
    assert sum(k.mma > 0 for k in kernels) == 2
    assert all(k.stack == 0 for k in kernels), kernels


OVERWRITES = """
.L_x_1:
        /*0100*/                   LOP3.LUT R24, R8, 0x1, R9, 0xf8, !PT ;
        /*0110*/                   HGMMA.64x16x16.F32.BF16 R56, R24, gdesc[UR4], R56, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0130*/              @!P0 BRA `(.L_x_1) ;
"""


def test_the_hazard_check_sees_an_overwritten_register() -> None:
    assert overwritten_a_registers(OVERWRITES.replace("{left}", "0x0")) == []
    assert overwritten_a_registers(OVERWRITES.replace("{left}", "0x1")) != []


def test_launches_depend_on_sizes_alone_and_are_legal() -> None:
    for problem in MODELS.values():
        for tokens in (1, 2, 3, 8, 9, 63, 64, 65, 500, 2000, 8192, 70_000):
            assert is_legal(launch_for(problem, tokens).tile, problem.scheme.weight.group)
        assert launch_for(problem, 1).regime == "decode"
        assert launch_for(problem, 8192).regime == "grouped"


@pytest.mark.parametrize("assignments", [1, 5, 16, 17, 100])
def test_token_tiles_bound_every_routing(assignments: int) -> None:
    experts, tokens = 4, 16
    worst = 0
    for a in range(assignments + 1):
        for b in range(assignments + 1 - a):
            rest = assignments - a - b
            for counts in ((a, b, rest, 0), (a, b, rest // 2, rest - rest // 2)):
                worst = max(worst, sum(-(-count // tokens) for count in counts))
    assert worst <= token_tiles(assignments, experts, tokens) <= worst + 1
