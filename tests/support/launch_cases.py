"""Layers, GPUs and recorded launches that tests of the model of launch times and of plans share."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from hypothesis import strategies as st

from moectl.environment.named_devices import published_matrix_rate
from moectl.kernels.choice.launch import Launch
from moectl.kernels.choice.launch_model import GpuRates, fitted
from moectl.kernels.choice.launch_plan import PORTABLE
from moectl.kernels.choice.launch_shape import LaunchShape
from moectl.kernels.choice.tile_family import SHARED_KIB
from moectl.kernels.triton.triton_runner import FAMILIES, launch_of
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.published_layers import SCHEMES

DOCS = Path(__file__).parents[2] / "docs"
IN_4_BITS, CHOSEN, FEW_EXPERTS = "launches_h*.jsonl", "launches_chosen_*.jsonl", "launches_other_*.jsonl"
SETTLED = "launches_settled_*.jsonl"
IN_ROWS, PORTABLE_ONES = "launches_tma_*.jsonl", "launches_portable_*.jsonl"
"""Recorded launches on SM90 of weights that kernels decode (`FEW_EXPERTS` of ranks with few, `SETTLED` on
settled clocks) and of weights in rows, and of portable kernels."""

H200, H100 = GpuRates(132, 4.8e12), GpuRates(132, 3.35e12)
H20 = GpuRates.of(78, 4e12, published_matrix_rate("NVIDIA H20"))
RATES = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
ON_SM90 = (9, 0)
FORMATS = tuple(SCHEMES)
"""Formats of which SM90 has kernels of its own."""

LAYER = MoEProblem(Dims(2560, 1536), 64, 6, SCHEMES["int4-g128"])
"""A layer without rows in the shipped table."""


def known_launches(problem: MoEProblem) -> list[tuple[Launch, LaunchShape]]:
    """Every launch of a layer on SM90 that the model of time knows, but for the portable ones."""
    return [
        (Launch(name, tile), family.shape(problem, tile))
        for name, family in FAMILIES.items()
        if name not in PORTABLE
        for tile in family.candidates(problem)
        if not family.fits(problem, tile) and fitted(name, family.shape(problem, tile), problem.scheme.weight)
    ]


@st.composite
def extreme_layers(draw: st.DrawFn) -> MoEProblem:
    """A share of a layer, from one group of columns and one expert to 25,000 columns and 1024 experts."""
    scheme = SCHEMES[draw(st.sampled_from(FORMATS))]
    group = max(scheme.weight.group, 128 if scheme == SCHEMES["fp8-block"] else 32)
    sizes = st.integers(1, 200).map(lambda groups: groups * group)
    experts = draw(st.integers(1, 8) | st.integers(1, 1024))
    ranks = draw(st.sampled_from([n for n in (1, 2, 3, 8, 64, 1024) if experts % n == 0]))
    top_k = draw(st.integers(1, min(experts, 32)))
    dims = Dims(draw(sizes), draw(sizes))
    return MoEProblem(dims, experts, top_k, scheme, local_experts=experts // ranks)


EXTREME_GPUS = st.builds(
    GpuRates,
    st.integers(1, 500),
    st.floats(5e10, 3e13),
    st.floats(0.1, 1.0) | st.just(1.0),
    st.sampled_from([kib << 10 for kib in sorted(set(SHARED_KIB.values()))]),
)
"""From a multiprocessor with a laptop's memory to several times an H200."""


def measured_cells(
    files: str,
) -> dict[tuple[str, str, str, str, int], list[tuple[MoEProblem, Launch, float]]]:
    """The recorded launches of a file for each layer, number of tokens and GPU, where there are several."""
    cells = defaultdict(list)
    for path in sorted(DOCS.glob(files)):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            launch = launch_of(row["family"], row["tile"])
            if launch is None or "us" not in row:
                continue
            problem = MoEProblem(
                Dims(row["hidden"], row["intermediate"]),
                row["experts"],
                row["top_k"],
                SCHEMES[row["format"]],
                local_experts=row["local_experts"],
            )
            cell = row["gpu"], path.name, row["name"], row["format"], row["tokens"]
            cells[cell].append((problem, launch, row["us"]))
    return {cell: rows for cell, rows in cells.items() if len(rows) > 2}


def shape_of(problem: MoEProblem, launch: Launch) -> LaunchShape:
    """What the model of time knows of a launch."""
    return FAMILIES[launch.family].shape(problem, launch.tile)
