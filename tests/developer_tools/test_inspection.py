"""Reading machine code: what is counted, what follows what, and registers of wgmmas in flight."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from devtools.inspection.barriers import overwritten_barriers
from devtools.inspection.handovers import early_handovers, late_reads
from devtools.inspection.hazards import a_registers, hazards, result_registers
from devtools.inspection.kernel_report import KernelReport, _serialized, report_of
from devtools.inspection.offline_gpu import OFFLINE_GPUS, LaunchedKernel, compiling_for
from devtools.inspection.published_kernels import gpu_of, layer_without_weights
from devtools.inspection.sass import SassCode, parse

from moectl.errors import UsageError
from support.pinned_kernels import _bytes_by_bf16_kernel

OVERWRITES_IN_A_LOOP = """
.text._kernel:
.L_x_1:
        /*0100*/                   LOP3.LUT R24, R8, 0x1, R9, 0xf8, !PT ;
        /*0110*/                   HGMMA.64x16x16.F32.BF16 R56, R24, gdesc[UR4], R56, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0130*/              @!P0 BRA `(.L_x_1) ;
        /*0140*/                   EXIT ;
"""

GROUP_OF_TWO = """
        /*0100*/                   HGMMA.64x16x16.F32.BF16 R56, R24, gdesc[UR4], R56 ;
        /*0110*/                   HGMMA.64x16x16.F32.BF16 R56, R28, gdesc[UR4], R56, gsb0 ;
        /*0120*/                   HGMMA.64x16x16.F32.BF16 R64, R32, gdesc[UR4], R64, gsb0 ;
        /*0130*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0140*/                   {write} ;
        /*0150*/                   EXIT ;
"""

TAKES_A_DETOUR = """
        /*0100*/                   HGMMA.64x16x16.F32.BF16 R56, R24, gdesc[UR4], R56, gsb0 ;
        /*0110*/              @!P0 BRA `(.L_x_6) ;
.L_x_31:
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0130*/                   MOV R24, RZ ;
        /*0140*/                   EXIT ;
.L_x_6:
        /*0150*/                   {waiting} ;
        /*0160*/              @!P0 BRA `(.L_x_6) ;
        /*0170*/                   BRA `(.L_x_31) ;
"""


@pytest.mark.parametrize(("left", "found"), [("0x0", 0), ("0x1", 1)])
def test_a_register_overwritten_over_the_loop_edge(left: str, found: int) -> None:
    hazardous = hazards(parse(OVERWRITES_IN_A_LOOP.replace("{left}", left)))
    assert [(h.instruction.split(":")[0], h.wgmma.split(":")[0]) for h in hazardous] == [
        ("0100", "0110")
    ] * found


@pytest.mark.parametrize(
    ("left", "write", "found"),
    [
        ("0x1", "MOV R24, RZ", 0),  # its group was waited for
        ("0x1", "MOV R28, RZ", 0),
        ("0x1", "MOV R35, RZ", 1),  # the last of four A registers of the group that was not
        ("0x1", "MOV R36, RZ", 0),
        ("0x2", "MOV R24, RZ", 1),
        ("0x2", "LDS.128 R20, [R2]", 0),
        ("0x2", "LDS.128 R21, [R2]", 1),  # writes R21 to R24
        ("0x2", "@P1 IMAD.WIDE R30, R2, R3, R4", 1),  # R30 and R31, under a predicate
        ("0x2", "ISETP.NE.AND P0, PT, R24, RZ, PT", 0),  # reading A does no harm
        ("0x2", "STS [R2], R24", 0),
        ("0x2", "SHFL.BFLY PT, R25, R2, 0x1, 0x1f", 1),
        ("0x1", "FADD R2, R64, R64", 1),  # a result that is not there yet
        ("0x1", "FADD R2, R63, R63", 0),
        ("0x1", "STG.E [R2.64], R71", 1),
        ("0x0", "STG.E [R2.64], R71", 0),
    ],
)
def test_groups_and_widths(left: str, write: str, found: int) -> None:
    code = parse(GROUP_OF_TWO.replace("{left}", left).replace("{write}", write))
    assert len(hazards(code)) == found


def test_paths_out_of_a_loop_and_back_are_followed() -> None:
    assert not hazards(
        parse(TAKES_A_DETOUR.replace("{waiting}", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3"))
    )
    (found,) = hazards(parse(TAKES_A_DETOUR.replace("{waiting}", "MOV R27, RZ")))
    assert "0150" in found.instruction and "the A operand" in str(found)


HANDS_ON = """
.L_x_1:
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0110*/              @!P0 BRA `(.L_x_1) ;
        /*0120*/              {guard} LDS.128 R24, [R8] ;
        /*0130*/              @!P2 BRA `(.L_x_2) ;
        /*0140*/              {barrier} ;
.L_x_2:
        /*0150*/              {later} ;
        /*0160*/              @!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ ;
        /*0170*/              @!P3 BRA `(.L_x_1) ;
        /*0180*/                   EXIT ;
"""
WAITS = "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"


@pytest.mark.parametrize(
    ("guard", "barrier", "later", "found"),
    [
        ("", "NOP", WAITS, 0),
        ("", WAITS, "NOP", 1),  # the jump goes round it
        ("", "NOP", f"@P4 {WAITS}", 1),
        ("", "NOP", "NOP", 1),
        ("@!PT", "NOP", "NOP", 0),
        ("@!PT", "NOP", "STS [R8], R9", 1),
        ("", WAITS, "STSM.16.M88.4 [R8], R12", 2),
        ("@!PT", "NOP", "LDGSTS.E.BYPASS.128 [R39], desc[UR36][R22.64]", 0),
        ("@!PT", "NOP", "WARPGROUP.DEPBAR.LE gsb0, 0x0", 1),
    ],
)
def test_what_is_handed_on_is_waited_for_by_all(guard: str, barrier: str, later: str, found: int) -> None:
    text = HANDS_ON.replace("{guard}", guard).replace("{barrier}", barrier).replace("{later}", later)
    early = early_handovers(parse(text))
    assert [it.arrival.split(":")[0] for it in early] == ["0160"] * found
    assert all("0120" in str(it) or "0150" in str(it) for it in early)


GIVES_BACK = """
.L_x_1:
        /*0100*/                   LDS R24, [R8] ;
        /*0110*/                   LDSM.16.M88.2 R26, [R9] ;
        /*0120*/              @!P2 BRA `(.L_x_2) ;
        /*0130*/                   {use} ;
.L_x_2:
        /*0140*/                   {later} ;
        /*0150*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*0160*/                   {after} ;
        /*0170*/              @!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ ;
        /*0180*/                   FADD R30, R24, R26 ;
        /*0190*/              @!P3 BRA `(.L_x_1) ;
        /*01a0*/                   EXIT ;
"""
USES_FIRST, USES_LAST = "FMUL R4, R24, R2", "FMUL R4, R27, R2"


@pytest.mark.parametrize(
    ("use", "later", "after", "late"),
    [
        ("NOP", "NOP", "NOP", ["0100", "0110"]),
        ("NOP", USES_FIRST, "NOP", ["0110"]),
        ("NOP", USES_LAST, "NOP", []),  # loads are done in order
        ("NOP", "NOP", USES_LAST, ["0100", "0110"]),  # in the arriving thread alone
        ("NOP", USES_LAST, "LDS R24, [R10]", ["0160"]),
        (USES_LAST, "NOP", "NOP", ["0100", "0110"]),  # the jump goes round it
        (USES_FIRST, USES_LAST, "NOP", []),
        ("NOP", "NOP", WAITS, ["0100", "0110"]),
        ("NOP", USES_FIRST, f"@P4 {WAITS}", ["0110"]),
        (
            "NOP",
            "LDS R24, [R10]",
            "NOP",
            ["0110", "0140"],
        ),  # it waits for the first to write the same register
        ("NOP", "@!PT LDS R24, [R10]", "NOP", ["0110"]),
    ],
)
def test_what_is_given_back_has_been_read(use: str, later: str, after: str, late: list[str]) -> None:
    code = parse(GIVES_BACK.replace("{use}", use).replace("{later}", later).replace("{after}", after))
    found = late_reads(code)
    assert [f"{it.load.address:04x}" for it in found] == late
    assert all(it.arrival.address == 0x170 and "may precede the end of" in str(it) for it in found)


READS_AHEAD = """
        /*0100*/                   LDS R24, [R8] ;
.L_x_1:
        /*0110*/                   {first} ;
        /*0120*/                   FADD R30, R24, R30 ;
        /*0130*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7+0x1b4a0], R10 ;
        /*0140*/                   {then} ;
        /*0150*/                   LDS R24, [R8] ;
        /*0160*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*0170*/              @!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ ;
        /*0180*/              @!P3 BRA `(.L_x_1) ;
        /*0190*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("first", "then", "late"),
    [
        ("NOP", "NOP", {0x150: True}),
        ("LDS R26, [R9]", "NOP", {0x110: False, 0x150: True}),
        ("LDS R26, [R9]", "FADD R31, R26, R31", {0x150: True}),
        ("NOP", "LDS R26, [R9]", {0x140: True, 0x150: True}),
        ("NOP", "@P2 BRA `(.L_x_1)", {0x150: True}),
    ],
)
def test_what_is_read_ahead_is_told_from_what_is_given_back(
    first: str, then: str, late: dict[int, bool]
) -> None:
    found = late_reads(parse(READS_AHEAD.replace("{first}", first).replace("{then}", then)))
    assert {it.load.address: it.ahead for it in found} == late


KEEPS_A_VALUE = """
        /*0100*/              @!UP4 SYNCS.EXCH.64 URZ, [UR7+0x1b4a0], UR38 ;
        /*0110*/              @!UP4 SYNCS.EXCH.64 URZ, [UR7+0x1b000], UR40 ;
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7+0x1b4a0], R10 ;
        /*0130*/                   {store} ;
        /*0140*/                   LDS R3, [UR7+0x1b000] ;
        /*0150*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("store", "found"),
    [
        ("STS [UR7+0x1b000], R2", 1),
        ("STSM.16.M88.2 [R3+UR7+0x1b000], R18", 1),
        ("STSM.16.M88.2 [R3+UR7+0x1b4a0], R18", 0),  # after the last wait for it
        ("STS [UR7+0x1b008], R2", 0),
        ("STS [R2], R0", 0),
        ("STG.E desc[UR16][R2.64+0x1b000], R4", 0),
    ],
)
def test_barriers_keep_their_memory_to_themselves(store: str, found: int) -> None:
    overwritten = overwritten_barriers(parse(KEEPS_A_VALUE.replace("{store}", store)))
    assert [it.split(":")[0] for it in overwritten] == ["0130"] * found


THROUGH_A_TABLE = """
        /*0100*/                   BRX R18 -0x370 {targets};
.L_x_1:
        /*0110*/                   EXIT ;
.L_x_2:
        /*0120*/                   HGMMA.64x16x16.F32.BF16 R56, R24, gdesc[UR4], R56, gsb0 ;
        /*0130*/                   MOV R24, RZ ;
        /*0140*/                   EXIT ;
.L_x_3:
        /*0150*/                   BRA `(.L_x_3);
        /*0160*/                   NOP;
"""


def test_jumps_through_a_table_are_followed_where_they_are_listed() -> None:
    listed = parse(THROUGH_A_TABLE.replace("{targets}", '(*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'))
    assert listed.following[0] == (1, 2) and len(hazards(listed)) == 1 and not listed.unreached
    blind = parse(THROUGH_A_TABLE.replace("{targets}", ""))
    assert not hazards(blind) and [i.address for i in blind.unreached] == [0x120, 0x130, 0x140]


def test_operands_of_a_wgmma() -> None:
    def wgmma(text: str) -> SassCode:
        return parse(f"        /*0100*/                   {text} ;")

    (it,) = wgmma("HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR12], R88, gsb0").instructions
    assert a_registers(it) == {152, 153, 154, 155} and len(result_registers(it)) == 64
    (it,) = wgmma("HGMMA.64x64x16.F16 R24, gdesc[UR4].tnspA, R24, !UPT").instructions
    assert not a_registers(it) and len(result_registers(it)) == 16


def test_code_is_taken_apart() -> None:
    code = parse(OVERWRITES_IN_A_LOOP.replace("{left}", "0x0"))
    assert code.families == {"LOP3": 1, "HGMMA": 1, "WARPGROUP": 1, "BRA": 1, "EXIT": 1}
    assert code.following == ((1,), (2,), (3,), (4, 0), ())
    (loop,) = code.loops
    assert len(loop.instructions) == 4 and loop.count("HGMMA") == 1
    # Waiting is a loop; the jump back to .L_x_31, from behind the end, is none.
    (waits,) = parse(TAKES_A_DETOUR.replace("{waiting}", "NANOSLEEP 0x20")).loops
    assert len(waits.instructions) == 2


def compiled(pinned: bool, rows: int, tokens: int) -> LaunchedKernel:
    def one(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device="meta")

    with compiling_for(OFFLINE_GPUS[90]) as launched:
        _bytes_by_bf16_kernel[(1,)](
            one(torch.int8), one(torch.bfloat16), one(torch.float32), 4096,
            BN=rows, BM=tokens, BK=64, PINNED=pinned, num_warps=4,
        )  # fmt: skip
    return launched[0]


def test_a_pipelined_product_races_unless_its_sum_is_pinned() -> None:
    """Triton 3.6.0 overwrites A registers over the loop edge; 3.9.0 does not, nor does a pinned sum."""
    free, pinned = (report_of(compiled(it, 128, 64)) for it in (False, True))
    assert pinned.wgmma and pinned.wgmma == pinned.wgmma_a and not pinned.faults, pinned
    assert free.wgmma_a == pinned.wgmma_a
    if triton.__version__.startswith("3.6."):
        assert any("the A operand" in it for it in free.hazards) and "hazards" in " ".join(free.faults)
    else:
        assert not free.hazards, free.hazards[:3]


def test_serialized_wgmmas_are_reported() -> None:
    free = report_of(compiled(False, 64, 16))
    assert free.warnings and "serialized" in " ".join(free.faults)
    launched = compiled(True, 64, 16)
    assert report_of(launched).warnings == ()
    # The same code with its sum read while it runs.
    ptx = launched.kernel.asm["ptx"]
    first = re.search(r"wgmma\.mma_async[^;]*?\{(%r\d+)[^;]*?(%rd\d+)[^;]*;", ptx)
    assert first
    reads = f"{first[0]}\n\tst.global.b32 [{first[2]}], {first[1]};\n"
    spoilt = SimpleNamespace(metadata=launched.kernel.metadata, asm={"ptx": ptx.replace(first[0], reads, 1)})
    assert _serialized(spoilt)


def test_faults_are_said_in_words() -> None:
    plain = report_of(compiled(True, 64, 16))
    opcodes = {**plain.opcodes, "STL": 2}
    for change, said in (
        ({"opcodes": opcodes}, "2 spill instructions"),
        ({"stack": 24}, "24 bytes of stack"),
        ({"stack": 16}, ""),
        ({"shared": 1 << 20}, "1048576 bytes of shared memory"),
        ({"wgmma_a": 0}, "wgmmas without A in registers"),
        ({"handovers": ("one", "two")}, "2 early handovers, the first: one"),
        ({"overwritten": ("one",)}, "1 overwritten barriers, the first: one"),
        ({"unreached": 7}, "7 products or accesses that no known path"),
    ):
        faulty: KernelReport = replace(plain, **change)
        assert said in "; ".join(faulty.faults) and bool(faulty.faults) == bool(said)


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(UsageError, match="choose from 80, 86, 89, 90"):
        gpu_of(75)
    with pytest.raises(UsageError, match="no built-in model"):
        layer_without_weights("nobody/nothing")
    with pytest.raises(UsageError, match="no weights to decode"):
        layer_without_weights("openai/gpt-oss-20b").expert(0)


def test_interpreted_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="Unset TRITON_INTERPRET"), compiling_for(OFFLINE_GPUS[90]):
        pass
