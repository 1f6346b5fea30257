"""Tuned files: which name a layer is looked up by, found or missing, and what comes near."""

from dataclasses import replace
from pathlib import Path

import pytest

from moectl.environment import find_device
from moectl.oracle import Decision, policy_named, select
from moectl.oracle.engines.vllm_0_33_0.tuned_files import (
    SHIPPED,
    TUNED_FILES,
    file_remark,
    gpu_in_names,
    parse_name,
    shipped,
)
from moectl.oracle.machine_packages import packages_from
from moectl.oracle.tuned_files import TunedStatus, tuned_status
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from moectl.problem.schemes import (
    A16,
    BF16,
    FULL,
    MXFP4,
    ActFormat,
    Scheme,
    WeightFormat,
    int_format,
)

FP8_BLOCK = Scheme(WeightFormat("fp8", 8, (128, 128)), ActFormat("fp8", 8, (1, 128)))
FP8_TENSOR = Scheme(WeightFormat("fp8", 8, (FULL, FULL)), ActFormat("fp8", 8, (FULL, FULL)))
FP8_CHANNEL = Scheme(WeightFormat("fp8", 8, (1, FULL)), ActFormat("fp8", 8, (1, FULL)))
FP8_SMALL = Scheme(WeightFormat("fp8", 8, (32, 32)), ActFormat("fp8", 8, (1, 32)))
W8A8 = Scheme(WeightFormat("int8", 8, (1, FULL)), ActFormat("int8", 8, (1, FULL)))


def status_of(decision: Decision, folders: dict[str, tuple[str, ...]] | None = None) -> TunedStatus:
    return tuned_status(decision, TUNED_FILES, folders)


def decided(experts: str, scheme: Scheme, gpu: str, size: int = 768, n: int = 128, **changes) -> Decision:
    """A decision for `experts` of `size` on `gpu`, whatever the rest of the checkpoint."""
    problem = MoEProblem(
        Dims(4096, size), experts=n, top_k=8, scheme=Scheme(int_format(4, 128)), storage="gptq", **changes
    )
    packages = packages_from("rocm_default")
    decision = select(problem, find_device("mi300x"), packages, policy_named("vllm-0.33.0"))
    chosen = decision.require()
    return replace(
        decision,
        inputs=replace(decision.inputs, device=find_device(gpu)),
        problem=replace(problem, scheme=scheme),
        chosen=replace(chosen, variant=replace(chosen.variant, experts=experts)),
    )


@pytest.mark.parametrize(
    ("experts", "scheme", "gpu", "name"),
    [
        ("TritonExperts", Scheme(BF16), "h100", "E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"),
        (
            "TritonExperts",
            FP8_BLOCK,
            "h200",
            "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        ("BatchedTritonExperts", FP8_TENSOR, "l4", "E=128,N=768,device_name=NVIDIA_L4,dtype=fp8_w8a8.json"),
        ("TritonExperts", FP8_CHANNEL, "l40s", "E=128,N=768,device_name=NVIDIA_L40S,dtype=fp8_w8a8.json"),
        (
            "TritonExperts",
            FP8_SMALL,
            "h20",
            "E=128,N=768,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[32,32].json",
        ),
        ("TritonExperts", W8A8, "a100", "E=128,N=768,device_name=NVIDIA_A100-SXM4-80GB.json"),
        (
            "TritonWNA16Experts",
            Scheme(int_format(4, 128)),
            "mi300x",
            "E=128,N=768,device_name=AMD_Instinct_MI300X,dtype=int4_w4a16.json",
        ),
        (
            "TritonWNA16Experts",
            Scheme(int_format(8, FULL)),
            "gb10",
            "E=128,N=768,device_name=NVIDIA_GB10,dtype=int8_w8a16.json",
        ),
        ("Int4EmulationTritonExperts", Scheme(MXFP4), "h20", "E=128,N=768,device_name=NVIDIA_H20.json"),
        (
            "Nvfp4QuantizationEmulationTritonExperts",
            Scheme(WeightFormat("nvfp4", 4, (1, 16)), A16),
            "mi300x",
            "E=128,N=384,device_name=AMD_Instinct_MI300X.json",
        ),
        ("TritonExperts", Scheme(BF16), "gh200", "E=128,N=768,device_name=NVIDIA_GH200_480GB.json"),
        ("TritonExperts", Scheme(BF16), "h200-nvl", "E=128,N=768,device_name=NVIDIA_H200.json"),
    ],
)
def test_the_name_is_the_engines(experts: str, scheme: Scheme, gpu: str, name: str) -> None:
    status = status_of(decided(experts, scheme, gpu))
    assert status.reads
    assert str(status.wanted) == name
    assert parse_name(name) == status.wanted
    assert bool(status.found) == (status.wanted in shipped())


def test_padded_sizes_and_one_ranks_experts_stand_in_the_name() -> None:
    spread = {"parallel": Parallel(dp=4, ep=True), "local_experts": 32}
    decision = decided("TritonExperts", Scheme(BF16), "h100", **spread)
    decision = replace(decision, problem=replace(decision.problem, dims=Dims(4096, 700, 4096, 704)))
    wanted = status_of(decision).wanted
    assert wanted is not None
    assert (wanted.experts, wanted.size) == (32, 704)


def test_what_reads_none_is_told_so() -> None:
    marlin = status_of(decided("MarlinExperts", Scheme(MXFP4), "h100"))
    assert not marlin.reads
    assert "reads no tuned files" in marlin.why
    nothing = status_of(replace(decided("TritonExperts", Scheme(BF16), "h100"), chosen=None))
    assert not nothing.reads
    decision = decided("TritonExperts", Scheme(BF16), "h100")
    packages = replace(decision.inputs.packages, env={"VLLM_BATCH_INVARIANT": "1"})
    invariant = replace(decision, inputs=replace(decision.inputs, packages=packages))
    assert "BATCH_INVARIANT" in status_of(invariant).why
    fallback = status_of(decided("TritonOrDeepGemmExperts", FP8_BLOCK, "h200"))
    assert fallback.reads
    assert "DeepGEMM does not take" in fallback.why


def test_a_file_that_ships_is_found() -> None:
    status = status_of(decided("TritonExperts", FP8_BLOCK, "h200", size=512, n=128))
    assert status.found == SHIPPED
    assert status.folders == (SHIPPED,)
    assert (status.other_gpus, status.other_shapes) == ((), ())
    assert status.to_json()["wanted"].startswith("E=128,N=512,device_name=NVIDIA_H200")


def test_near_misses_are_like_gpus_and_near_shapes() -> None:
    status = status_of(decided("TritonExperts", Scheme(BF16), "h100-pcie", size=384, n=128))
    assert not status.found
    assert status.wanted is not None
    assert status.wanted.gpu == "NVIDIA_H100_PCIe"
    assert "NVIDIA_H100_80GB_HBM3" in [name.gpu for name in status.other_gpus]
    assert all((name.experts, name.size) == (128, 384) for name in status.other_gpus)
    nearby = status_of(decided("TritonExperts", Scheme(BF16), "h200", size=640, n=128))
    assert nearby.other_shapes
    assert all(name.gpu == "NVIDIA_H200" and not name.dtype for name in nearby.other_shapes)
    assert nearby.other_shapes[0].experts == 128


def test_the_users_folder_comes_first(tmp_path: Path) -> None:
    decision = decided("TritonExperts", FP8_BLOCK, "h200", size=512)
    wanted = str(status_of(decision).wanted)
    env = {"VLLM_TUNED_CONFIG_FOLDER": str(tmp_path)}
    assert status_of(decision, TUNED_FILES.listed(env)).found == SHIPPED
    (tmp_path / wanted).write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    folders = TUNED_FILES.listed(env)
    status = status_of(decision, folders)
    assert status.found == str(tmp_path)
    assert status.folders == (str(tmp_path), SHIPPED)
    missing = TUNED_FILES.listed({"VLLM_TUNED_CONFIG_FOLDER": str(tmp_path / "nowhere")})
    assert missing == {str(tmp_path / "nowhere"): ()}
    assert TUNED_FILES.listed({}) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"1": {}, "64": {}}', ""),
        ('{"triton_version": "3.6.0", "1": {}}', ""),
        ('{"triton_version": "3.4.0", "1": {}}', "was measured with Triton 3.4.0; Triton 3.6.0 is installed"),
        ('{"many": {}}', "'many' where vLLM expects a number of tokens"),
        ("[1]", "holds no table"),
        ('{"1": ', "cannot be read, and vLLM fails on it"),
    ],
)
def test_odd_files_are_told(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    remark = file_remark(file, "3.6.0")
    assert says in remark
    assert bool(remark) == bool(says)
    assert "cannot be read" in file_remark(tmp_path / "missing.json", "")


def test_shipped_names_are_those_that_can_be_looked_up() -> None:
    names = shipped()
    assert len(names) == 330
    for name in names:
        assert parse_name(str(name)) == name
    assert not any("backend" in str(name) for name in names)


def test_a_file_counts_from_the_release_on_that_ships_it() -> None:
    newer = decided("TritonExperts", Scheme(BF16), "h20", size=256, n=256)
    assert status_of(newer).found == SHIPPED
    older = replace(newer, inputs=replace(newer.inputs, policy="vllm-0.24.0"))
    status = status_of(older)
    assert status.wanted == status_of(newer).wanted and not status.found
    assert shipped("0.24.0") < shipped("0.33.0") and len(shipped("0.24.0")) == 317


@pytest.mark.parametrize("name", ["README", "E=1,N=2.json", "E=1,N=2,device_name=X,dtype=a,backend=b.json"])
def test_other_files_have_no_parts(name: str) -> None:
    assert parse_name(name) is None


def test_gpu_names_are_spelled_as_in_file_names() -> None:
    assert gpu_in_names(find_device("arc-pro-b60").name) == "Intel(R)_Arc(TM)_Pro_B60"
    assert gpu_in_names(find_device("mi325x").name) == "AMD_Instinct_MI325X"
