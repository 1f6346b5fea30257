"""Tuned files for vLLM's Triton experts: whose they are, what stands in them, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moectl.checkpoint import open_checkpoint
from moectl.environment import find_device
from moectl.errors import NoBackend, Unavailable, UsageError
from moectl.files.lock import folder_lock
from moectl.kernels.choice.launch import Launch
from moectl.oracle.engines.vllm_0_33_0.tuned_files import CHOICES, KERNELS, file_remark, parse_name
from moectl.oracle.machine_packages import packages_from
from moectl.oracle.registry import engine_named
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.tuning import engine_bench
from moectl.tuning.engine_bench import EngineBench, blocks_for, shapes
from moectl.tuning.engine_tuned_files import (
    TunedFileTarget,
    target_of,
    tuned_file_path,
    write_choices,
    wrong_name_note,
)
from moectl.tuning.grouped_gemm import GemmConfig
from moectl.tuning.launch_search import WrongResult
from moectl.tuning.tuning_cases import TuningCase

pytestmark = pytest.mark.usefixtures("quick_machine")

H200 = find_device("h200")
FULL = packages_from("full")
TILE = dict(zip(CHOICES.values(), (16, 64, 128, 1, 4, 4), strict=True))
PLAIN, BLOCK = KERNELS["", (0, 0)], KERNELS["fp8_w8a8", (128, 128)]
VLLM = engine_named("vllm")


def target(model: str, **parallel: int) -> TunedFileTarget:
    problem = open_checkpoint(model, offline=True).groups[0].problem
    return target_of(problem.on(Parallel(**parallel)), H200, FULL, VLLM)


@pytest.mark.parametrize(
    ("model", "ranks", "name", "form"),
    [
        ("Qwen/Qwen3-30B-A3B", 1, "E=128,N=768,device_name=NVIDIA_H200.json", PLAIN),
        ("Qwen/Qwen3-30B-A3B", 2, "E=128,N=384,device_name=NVIDIA_H200.json", PLAIN),
        (
            "Qwen/Qwen3-30B-A3B-FP8",
            1,
            "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
            BLOCK,
        ),
    ],
)
def test_the_file_is_the_one_that_vllm_reads(model: str, ranks: int, name: str, form: object) -> None:
    found = target(model, tp=ranks)
    assert str(found.name) == name and found.form is form


@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B-GPTQ-Int4"])
def test_experts_that_read_no_file_are_refused(model: str) -> None:
    with pytest.raises(NoBackend, match=r"a tuned file would change nothing: .* reads no tuned files"):
        target(model)


def test_a_kernel_of_another_form_is_refused_with_the_reason() -> None:
    with pytest.raises(NoBackend, match="and moectl has no kernel of that form") as told:
        target("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic")
    assert "mean nothing to the engine's" in told.value.reason
    assert "The file is E=16,N=8192,device_name=NVIDIA_H200,dtype=fp8_w8a8.json." in told.value.reason


def test_a_file_is_what_moectl_reads_of_vllms(tmp_path: Path) -> None:
    name = target("Qwen/Qwen3-30B-A3B").name
    place = tuned_file_path(tmp_path / "tuned", name)
    write_choices(place, {64: TILE, 1: TILE}, "3.6.0", VLLM)
    write_choices(place, {8: TILE | {"num_warps": 8}}, "3.6.0", VLLM)
    document = json.loads(place.read_text())
    assert list(document) == ["triton_version", "1", "8", "64"]
    assert document["8"] == {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": 1,
        "num_warps": 8,
        "num_stages": 4,
    }
    assert (
        parse_name(place.name) == name
        and not file_remark(place, "3.6.0")
        and not wrong_name_note(place, name, VLLM)
    )
    assert not list(tmp_path.rglob("*.partial"))


def test_a_file_of_another_name_is_said_to_be_none_that_is_looked_for(tmp_path: Path) -> None:
    name = target("Qwen/Qwen3-30B-A3B").name
    assert tuned_file_path(tmp_path / "mine.json", name) == tmp_path / "mine.json"
    assert (
        wrong_name_note(tmp_path / "mine.json", name, VLLM) == f"mine.json is not what vLLM looks for: {name}"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "no table"),
        ('{"one": {}}', "'one'"),
        ('{"triton_version": "2.0", "1": {}}', "Triton 2.0"),
    ],
)
def test_another_file_is_not_overwritten(tmp_path: Path, text: str, said: str) -> None:
    place = tmp_path / "a.json"
    place.write_text(text)
    with pytest.raises(UsageError, match=said):
        write_choices(place, {1: TILE}, "3.6.0", VLLM)
    assert place.read_text() == text


def test_of_two_writers_neither_loses_the_others_rows(tmp_path: Path) -> None:
    place = tmp_path / "a.json"
    with folder_lock(tmp_path):  # as a writer holds it from the moment it reads the file
        other = threading.Thread(target=write_choices, args=(place, {64: TILE}, "3.6.0", VLLM))
        other.start()
        other.join(0.1)
        assert other.is_alive() and not place.exists()
    other.join(10)
    write_choices(place, {1: TILE}, "3.6.0", VLLM)
    assert list(json.loads(place.read_text())) == ["triton_version", "1", "64"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("")
    with pytest.raises(Unavailable, match="cannot create"):
        write_choices(tmp_path / "in the way" / "a.json", {1: TILE}, "3.6.0", VLLM)


@pytest.mark.parametrize("form", [PLAIN, BLOCK], ids=["16 bit", "fp8"])
@pytest.mark.parametrize("tokens", [1, 16, 200, 1024, 8192])
def test_choices_can_be_launched(form: Any, tokens: int) -> None:
    cell = TuningCase("qwen", target("Qwen/Qwen3-30B-A3B").decision.problem, tokens)
    found = blocks_for(cell, form, 227 << 10)
    assert 20 <= len(found) <= 200 and len(set(found)) == len(found)
    size = 1 if form.scaled else 2
    for it in found:
        assert (it.block_m + it.block_n) * it.block_k * size * it.num_stages <= 227 << 10
        assert not form.scaled or 128 % it.block_k == 0
    fewer = blocks_for(cell, form, 99 << 10)
    assert set(fewer) < set(found)


def test_sizes_are_those_of_the_engine() -> None:
    problem = target("Qwen/Qwen3-30B-A3B", tp=2).decision.problem
    assert shapes(problem) == ((128, 2 * 384, 2048), (128, 2048, 384))


SMALL: MoEProblem = replace(
    target("Qwen/Qwen3-30B-A3B").decision.problem,
    dims=Dims(256, 128),
    experts=6,
    local_experts=6,
    top_k=2,
)


def compiling_for(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`plain_gemm` by torch, changed."""

    def gemm(y: Any, x: Any, weight: Any, rows: Any, blocks: Any, scales: Any, swapped: Any) -> torch.Tensor:
        share = rows.assignments // len(x)
        plain, dense = x.float(), weight.float()
        if scales is not None:
            plain = plain * scales[0].repeat_interleave(128, 1)
            dense = dense * scales[1].repeat_interleave(128, 1).repeat_interleave(128, 2)
        for at, expert in enumerate(rows.experts.tolist()):
            block = rows.order.view(-1, blocks.block_m)[at].long()
            mine = block[block < rows.assignments]
            y[mine] = (plain[mine // share] @ dense[expert].T).to(y.dtype)
        return y.copy_(change(y))

    return gemm


@pytest.mark.parametrize("problem", [SMALL, replace(SMALL, experts=12)], ids=["whole", "one rank of two"])
@pytest.mark.parametrize("form", [PLAIN, BLOCK], ids=["16 bit", "fp8"])
def test_both_products_are_held_to_torch(
    monkeypatch: pytest.MonkeyPatch, form: Any, problem: MoEProblem
) -> None:
    bench = EngineBench(torch.device("cpu"), lambda cell: form)
    cell, launch = TuningCase("small", problem, 5), Launch("fused_moe", GemmConfig(16, 64, 128, 1, 4, 4))
    monkeypatch.setattr(engine_bench, "plain_gemm", compiling_for(lambda y: y))
    assert bench.error(cell, launch) < 3e-3 and bench.time(cell, launch, 1) > 0
    assert launch in bench.candidates(cell) and bench.current(cell).family == "fused_moe"
    for wrong in (lambda y: y * 1.05, torch.zeros_like, lambda y: torch.cat([y[:-1], -y[-1:]])):
        monkeypatch.setattr(engine_bench, "plain_gemm", compiling_for(wrong))
        with pytest.raises(WrongResult, match="differs from torch"):
            bench.error(cell, launch)
