"""What scripts/sanitize_kernels runs under the sanitizer; the runs themselves need a GPU."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from devtools.inspection.offline_gpu import OFFLINE_GPUS, compiling_for

from moectl.kernels.choice.launch_table import entries
from moectl.kernels.triton.marlin import TILES as MARLIN_TILES
from moectl.kernels.triton.triton_runner import FAMILIES
from moectl.problem.schemes import FULL
from support.scripts import loaded


@pytest.fixture
def script() -> ModuleType:
    return loaded("sanitize_kernels")


def asked(**changes: object) -> Namespace:
    """The script's options."""
    defaults = {"families": None, "most": None, "each": None, "shipped": False, "where": None}
    return Namespace(**(defaults | changes))


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("format", ["mxfp4", "int4-g32", "int4-g128-relu2", "int8-channel"])
def test_small_layers_and_their_configurations(script: ModuleType, format: str) -> None:
    layer = script.small_layer(format)
    assert layer.device.type == "cpu" and layer.expert(5).w2.shape == (1408, 1152)
    assert layer.problem == script.LAYERS[format]
    options = asked(families=["decode", "grouped"], most=2)
    # On this device stand those that the interpreter can run.
    found = list(script.configurations(format, CPU, options))
    wanted = {name for name in options.families if FAMILIES[name].interpreted}
    assert {it.family for it in found} == wanted and len(found) == 2 * len(wanted)
    assert all(2 <= it.tokens <= 600 for it in found)
    assert {it.tokens for it in script.configurations(format, CPU, asked(each=100))} == {300}


def test_marlin_s_layout_is_read_where_it_lies(script: ModuleType) -> None:
    layer = script.small_layer("int4-g128-zeros", "moectl_marlin")
    assert layer.backend == "moectl_marlin" and layer.weights["w13_zero"].dtype == torch.int32
    with compiling_for(OFFLINE_GPUS[90]):
        found = list(script.configurations("int4-g128-zeros", CUDA, asked(families=["moectl_marlin"])))
    assert {it.tile for it in found} <= {tile for _, _, tile in MARLIN_TILES} and len(found) > 1


def test_there_is_a_layer_of_every_kind(script: ModuleType) -> None:
    weights = {(p.scheme.weight.name, p.scheme.weight.zero_point) for p in script.LAYERS.values()}
    integers = {("int4", False), ("int4", True), ("int8", False), ("int8", True)}
    others = ("mxfp4", "nvfp4", "mxfp8", "bf16", "fp8")
    assert weights == integers | {(name, False) for name in others}
    for kinds in (
        {(p.scheme.weight.bits, p.scheme.weight.group == FULL) for p in script.LAYERS.values()},
        {(p.dtype, p.activation.gated) for p in script.LAYERS.values()},
    ):
        assert len(kinds) >= 3
    assert len(set(map(str, script.LAYERS.values()))) == len(script.LAYERS)


@pytest.mark.parametrize(
    "format",
    [
        "mxfp4",
        "mxfp4-fp16",
        "int4-channel",
        "int4-g32-zeros",
        "int8-g128",
        "nvfp4",
        "bf16",
        "fp8-block",
        "int8-channel-a8",
    ],
)
def test_every_family_is_asked_for_what_it_takes(script: ModuleType, format: str) -> None:
    with compiling_for(OFFLINE_GPUS[90]):
        found = {it.family for it in script.configurations(format, CUDA, asked(most=1))}
    in_rows = format in ("bf16", "fp8-block", "int8-channel-a8")
    wanted = {"decode", "grouped", "tma" if in_rows else "stream"}
    wanted |= {"mid", "prefill"} if format != "mxfp4-fp16" and not in_rows else set()
    wanted |= {"warpwise", "moectl_marlin"} if format.startswith("int4") else set()
    assert found == wanted


def test_only_tiles_whose_field_has_a_value(script: ModuleType) -> None:
    with compiling_for(OFFLINE_GPUS[90]):
        for format, count in (("fp8-block", 2), ("bf16", 0), ("int4-g32", 0)):
            options = asked(where=script.field_and_value("turned=1"))
            found = list(script.configurations(format, CUDA, options))
            assert len(found) == count and all(it.tile.turned for it in found)
    for text in ("turned", "turned=x", "=1", "a b=1"):
        with pytest.raises(ArgumentTypeError, match="no field of a tile and a number"):
            script.field_and_value(text)


def test_only_tiles_that_ship_for_the_format(script: ModuleType) -> None:
    with compiling_for(OFFLINE_GPUS[90]):
        found = list(script.configurations("int4-g32", CUDA, asked(shipped=True)))
        none = list(script.configurations("int8-g32", CUDA, asked(shipped=True)))
    rows = [row for entry in entries() if entry.weight == "int4 group 32" for row in entry.rows]
    assert {it.family for it in found} == {row.family for row in rows} and not none
    assert all(asdict(it.tile) in [row.tile for row in rows if row.family == it.family] for it in found)


SAID = """\
========= COMPUTE-SANITIZER
sanitize_kernels: one
sanitize_kernels: done, right, rms 1.0e-03
sanitize_kernels: other
========= Invalid __global__ read of size 4 bytes
=========     at _kernel+0x120 in a.py:3
=========     by thread (3,0,0) in block (0,0,0)
sanitize_kernels: done, right, rms 2.0e-03
"""
THIRD = """sanitize_kernels: third
sanitize_kernels: done, right, rms 3.0e-03
sanitize_kernels: end"""


@pytest.mark.parametrize(
    ("said", "most", "status", "last"),
    [
        (SAID + THIRD, 1000, 1, "memcheck   3 configurations, 1 reports"),
        (SAID + THIRD, 1, 1, "memcheck   3 configurations, 1 reports, 1 configurations unknown"),
        (SAID, 1000, 2, "memcheck   aborted in other; 1 reports"),
        ("sanitize_kernels: end", 1000, 0, "memcheck   0 configurations, 0 reports"),
    ],
)
def test_what_a_sanitizer_says_is_told_by_configuration(
    script: ModuleType,
    said: str,
    most: int,
    status: int,
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "MOST_REPORTS", most)
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\ncat <<'EOF'\n{said}\nEOF\n")
    sanitizer.chmod(0o755)
    options = asked(formats=["mxfp4", "int8-g32"], seconds=60, shipped=True, most=1)
    assert script.sanitized(str(sanitizer), "memcheck", options) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    if "one" in said:
        assert "memcheck   one: clean, right, rms 1.0e-03" in lines
        place = lines.index("memcheck   other: 1 reports, right, rms 2.0e-03")
        assert lines[place + 1].split(maxsplit=1)[0] == "Invalid" and lines[place + 1].endswith("in a.py:3")
    if "third" in said:
        assert ("memcheck   third: clean, right, rms 3.0e-03" in lines) == (most > 1)
    command = (tmp_path / "asked").read_text()
    assert "--tool memcheck" in command and "--formats mxfp4,int8-g32 --most 1 --shipped" in command


@pytest.mark.parametrize(
    ("line", "report"),
    [
        ("========= Invalid __global__ read of size 4 bytes", "Invalid __global__ read of size 4 bytes"),
        (
            "========= Error: Race reported between Write access at",
            "Error: Race reported between Write access at",
        ),
        ("========= COMPUTE-SANITIZER", None),
        ("=========     at _decode_gemm1_kernel+0x120", None),
        ("========= ERROR SUMMARY: 0 errors", None),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", None),
        ("=========", None),
    ],
)
def test_reports_are_told_from_headings(script: ModuleType, line: str, report: str | None) -> None:
    found = script.REPORTED.match(line)
    assert (found["what"] if found else None) == report


def test_races_between_ordered_accesses_are_told_by_their_source(script: ModuleType) -> None:
    file = script.ROOT / "moectl" / "kernels" / "triton" / "hopper" / "mid_kernels.py"
    lines = file.read_text().splitlines()
    kernel = next(i for i, text in enumerate(lines, 1) if text.startswith("def _grouped_gemm_kernel"))
    other = next(i for i, text in enumerate(lines, 1) if "mbarrier.wait(" in text)
    race = "Error: Race reported between Read access at _k+0x2c0 in mid_kernels.py:{} and Write access at "
    race += "_k+0x80 in mid_kernels.py:{} [8 hazards]"
    assert "compiler" in script.ordered(race.format(kernel, other))
    assert "compiler" in script.ordered(race.format(other, kernel))
    assert not script.ordered(race.format(other, other))
    assert not script.ordered(race.format(kernel, other).replace("mid_kernels", "other_kernels"))
    assert not script.ordered(f"Invalid __shared__ read of size 4 bytes in mid_kernels.py:{kernel}")


BEFORE_ANY = SAID.partition("sanitize_kernels: one")[0] + SAID.partition("sanitize_kernels: other\n")[2]


@pytest.mark.parametrize(("said", "where"), [(SAID, "other"), (BEFORE_ANY, "outside of the kernels")])
def test_reports_of_a_configuration_that_was_aborted_are_told(
    script: ModuleType, said: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\ncat <<'EOF'\n{said.rpartition('sanitize_kernels: done')[0]}EOF\n")
    sanitizer.chmod(0o755)
    assert script.sanitized(str(sanitizer), "synccheck", asked(formats=["mxfp4"], seconds=60)) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"synccheck  aborted in {where}; 1 reports"
    assert lines[-1].split(maxsplit=1)[0] == "Invalid" and lines[-1].endswith("in a.py:3")


def test_the_board_of_the_tile_scheduler_is_told_by_its_source(script: ModuleType) -> None:
    file = script.ROOT / "moectl" / "kernels" / "triton" / "hopper" / "tile_board.py"
    race = "Error: Race reported between Write access at _k in {0}:{1} and Read access at _k in {0}:1"
    known = [
        text.strip()
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if "mbarrier" in script.ordered(race.format(file.name, number))
    ]
    assert [".load(" in text for text in known] == [True, False] and ".store(" in known[1]


def test_words_that_workers_give_back_are_told_by_their_source(script: ModuleType) -> None:
    file = script.ROOT / "moectl" / "kernels" / "triton" / "hopper" / "mid_kernels.py"
    race = "Error: Race reported between Write access at _k in mid_ring.py:1 and Read access at _k in {}:{}"
    known = [
        text.split()[:3]
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if "mbarrier" in script.ordered(race.format(file.name, number))
    ]
    assert [words[0] for words in known] == ["s", "z"]
    assert all(words[2].startswith("of.slice(") for words in known)


@pytest.mark.parametrize("format", ["mxfp4", "int4-g32", "int8-channel"])
def test_every_ring_is_filled_more_than_once(script: ModuleType, format: str) -> None:
    """What is handed back and overwritten is seen only then."""
    columns = min(script.LAYERS[format].dims.hidden, script.LAYERS[format].dims.intermediate) // 64
    with compiling_for(OFFLINE_GPUS[90]):
        found = list(script.configurations(format, CUDA, asked(families=["mid"])))
    assert found and all(it.tile.stages * it.tile.depth < columns for it in found)


def test_what_a_loader_hands_over_is_told_by_its_source(script: ModuleType) -> None:
    folder = script.ROOT / "moectl" / "kernels" / "triton" / "hopper"
    places = [
        (file.name, number, text)
        for file in folder.glob("prefill_*.py")
        for number, text in enumerate(file.read_text().splitlines(), 1)
    ]
    race = "Error: Race reported between Write access at _k+0x2c0 in {}:{} and Read access at _k in x.py:1"
    known = [text for name, number, text in places if "mbarrier" in script.ordered(race.format(name, number))]
    ring = [text for text in known if "stage * 4 + own" in text]
    assert len(ring) == 3 and all(".load(" in text for text in ring)
    known = [text for text in known if text not in ring]
    assert len(known) >= 4 and all("job % 2" in text for text in known)
    assert any(".load(" in text for text in known) and any(".store(" in text for text in known)
