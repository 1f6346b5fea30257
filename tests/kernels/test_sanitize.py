"""What scripts/sanitize_kernels runs under the sanitizer; the runs themselves need a GPU."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

import pytest
import torch

from .scripts import loaded


@pytest.fixture
def script() -> ModuleType:
    return loaded("sanitize_kernels")


@pytest.mark.parametrize("format", ["mxfp4", "int4-g32", "int4-g128"])
def test_small_layers_and_their_configurations(script: ModuleType, format: str) -> None:
    layer = script.small_layer(format)
    assert layer.device.type == "cpu" and layer.expert(5).w2.shape == (640, 384)
    options = Namespace(families=["decode", "grouped"], most=2, each=None)
    # On this device stand those that the interpreter can run.
    from moectl.kernels.triton.runner import REGIMES

    found = list(script.configurations(layer.problem, format, torch.device("cpu"), options))
    wanted = {name for name in options.families if REGIMES[name].interpreted}
    assert {it.family for it in found} == wanted and len(found) == 2 * len(wanted)
    assert all(2 <= it.tokens <= 600 for it in found)
    options.each = 100
    asked = script.configurations(layer.problem, format, torch.device("cpu"), options)
    assert {it.tokens for it in asked} == {300}


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
    other = next(i for i, text in enumerate(lines, 1) if ".store(" in text)
    race = "Error: Race reported between Read access at _k+0x2c0 in mid_kernels.py:{} and Write access at "
    race += "_k+0x80 in mid_kernels.py:{} [8 hazards]"
    assert "compiler" in script.ordered(race.format(kernel, other))
    assert "compiler" in script.ordered(race.format(other, kernel))
    assert not script.ordered(race.format(other, other))
    assert not script.ordered(race.format(kernel, other).replace("mid_kernels", "other_kernels"))
    assert not script.ordered(f"Invalid __shared__ read of size 4 bytes in mid_kernels.py:{kernel}")


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
