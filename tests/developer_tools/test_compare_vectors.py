"""Recorded conversions of vLLM 0.33.0 and FlashInfer 0.7.2: reproduced, and nothing else passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from devtools.vectors.compare_vectors import VectorStatus, check_file, check_folder, total
from safetensors import safe_open
from safetensors.torch import save_file

from moectl.convert.layouts.registry import layout_named
from moectl.errors import UsageError
from moectl.problem.moe_problem import Dims, MoEProblem
from moectl.problem.schemes import Scheme, int_format
from support import python_forks

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "data" / "vectors"
SCRIPT = ROOT / "scripts" / "check_vectors"
QUIRK = "marlin_int4_g32_i32_VLLM_QUIRK"


def load(name):
    with safe_open(VECTORS / f"{name}.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata())  # noqa: SIM118


def save(path, tensors, metadata, **params):
    """A recording with some params changed; None takes one away."""
    merged = json.loads(metadata["params"]) | params
    kept = {key: value for key, value in merged.items() if value is not None}
    save_file(tensors, path, metadata | {"params": json.dumps(kept)})
    return path


def outcome(path):
    found = check_file(path)
    return found.status, found.reason


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.safetensors")), ids=lambda path: path.stem)
def test_recordings_are_reproduced(path):
    status, reason = outcome(path)
    assert status is (VectorStatus.DEVIATION if path.stem == QUIRK else VectorStatus.PASS), reason


def test_a_file_name_means_nothing(tmp_path):
    quirk, plain = load(QUIRK), load("trtllm_mxint4_small")
    assert outcome(save(tmp_path / "marlin_int8_channel.safetensors", *plain))[0] is VectorStatus.PASS
    assert outcome(save(tmp_path / "renamed.safetensors", *quirk))[0] is VectorStatus.DEVIATION


@pytest.mark.parametrize(
    "name", ["marlin_int4_g32_E2", "marlin_mxfp4_small", "cutlass_sm90_mxfp4_concat", QUIRK]
)
def test_one_changed_byte_fails(tmp_path, name):
    tensors, metadata = load(name)
    for key in tensors:
        changed = dict(tensors)
        t = tensors[key].clone()
        t.view(torch.uint8).view(-1)[-1] ^= 1
        changed[key] = t
        status, reason = outcome(save(tmp_path / "a.safetensors", changed, metadata))
        assert status is VectorStatus.FAIL, key
        assert "bytes differ" in reason


@pytest.mark.parametrize("name", ["marlin_int4_g32_E2", "triton_hopper_small"])
def test_tensors_missing_or_too_many_fail(tmp_path, name):
    tensors, metadata = load(name)
    for key in tensors:
        rest = {other: t for other, t in tensors.items() if other != key}
        assert outcome(save(tmp_path / "a.safetensors", rest, metadata))[0] is VectorStatus.FAIL, key
    extra = tensors | {"in.g_idx": torch.zeros(3)}
    assert outcome(save(tmp_path / "a.safetensors", extra, metadata)) == (
        VectorStatus.FAIL,
        "tensors that are not compared: g_idx",
    )


@pytest.mark.parametrize(
    ("name", "params", "status", "reason"),
    [
        ("marlin_int4_g32_E2", {"zp": True}, VectorStatus.FAIL, "differ about zero points"),
        ("marlin_int4_g32_E2", {"zp": 1}, VectorStatus.FAIL, "expected true or false"),
        ("marlin_int4_g32_E2", {"act": "torch.int8"}, VectorStatus.FAIL, "bytes differ"),
        (
            "marlin_int4_g32_E2",
            {"act": "torch.float16"},
            VectorStatus.UNSUPPORTED,
            "torch.float16 activations",
        ),
        ("marlin_int8_channel", {"act": "torch.float8_e4m3fn"}, VectorStatus.UNSUPPORTED, "float8"),
        ("marlin_int4_g32_E2", {"dtype": "torch.float32"}, VectorStatus.UNSUPPORTED, "dtype torch.float32"),
        ("marlin_int4_g32_E2", {"bits": 2}, VectorStatus.UNSUPPORTED, "2-bit"),
        ("marlin_int4_g32_E2", {"bits": "4"}, VectorStatus.FAIL, "no whole number bits"),
        ("marlin_int4_g32_E2", {"hidden": None}, VectorStatus.FAIL, "params say None"),
        ("marlin_int4_g32_E2", {"padded_intermediate": 128}, VectorStatus.FAIL, "pads to 64"),
        ("marlin_int4_g32_E2", {"E": 3}, VectorStatus.FAIL, "expected"),
        ("marlin_int4_g32_E2", {"group_size": 64}, VectorStatus.FAIL, "expected"),
        ("marlin_mxfp4_small", {"act": "torch.float8_e4m3fn"}, VectorStatus.FAIL, "bytes differ"),
        ("marlin_mxfp4_small", {"act": "torch.int8"}, VectorStatus.UNSUPPORTED, "int8 activations"),
        ("triton_hopper_small", {"arch": 80}, VectorStatus.UNSUPPORTED, "arch 80"),
        ("triton_hopper_small", {"arch": 100}, VectorStatus.FAIL, "is recorded, moectl has"),
        ("triton_hopper_small", {"num_warps": 4}, VectorStatus.FAIL, "bytes differ"),
        ("triton_hopper_small", {"N": 1 << 40}, VectorStatus.FAIL, "is missing"),
        ("trtllm_mxfp4_concat_small", {"w13_rows": "interleaved"}, VectorStatus.FAIL, "bytes differ"),
        ("trtllm_mxfp4_concat_small", {"w13_rows": "sorted"}, VectorStatus.UNSUPPORTED, "rows 'sorted'"),
        ("trtllm_mxint4_small", {"gated": False}, VectorStatus.FAIL, "w13 has 512 rows"),
        ("trtllm_mxint4_small", {"group": 64}, VectorStatus.FAIL, "expected"),
    ],
)
def test_params_decide(tmp_path, name, params, status, reason):
    found = outcome(save(tmp_path / "a.safetensors", *load(name), **params))
    assert found[0] is status
    assert reason in found[1]


def test_an_unknown_function_is_not_passed_over(tmp_path):
    tensors, metadata = load("marlin_int4_g32_E2")
    for function in ("vllm other.py::repack", "no function at all", "mxfp4.py::convert_weight_to_mxfp4_moe"):
        status, reason = outcome(save(tmp_path / "a.safetensors", tensors, metadata | {"function": function}))
        assert status is VectorStatus.UNSUPPORTED
        assert function in reason


def test_damaged_files_fail(tmp_path):
    path = tmp_path / "a.safetensors"
    whole = (VECTORS / f"{QUIRK}.safetensors").read_bytes()
    for data in (b"", whole[:100], whole[:-1], b"\xff" * 64):
        path.write_bytes(data)
        assert outcome(path)[0] is VectorStatus.FAIL
    tensors, metadata = load(QUIRK)
    for broken in ({}, {"function": metadata["function"]}, metadata | {"params": "[1]"}, {"params": "{}"}):
        save_file(tensors, path, broken)
        assert outcome(path)[0] is VectorStatus.FAIL
    save_file({"weight": torch.zeros(2)}, path, metadata)
    assert outcome(path) == (VectorStatus.FAIL, "tensor weight is neither in.* nor out.*")


def quirk_problem():
    problem = MoEProblem(Dims(128, 32), 1, 1, Scheme(int_format(4, 32)))
    align = layout_named("marlin-int4").align(problem.scheme.weight)
    return MoEProblem(align.apply(problem.dims), 1, 1, problem.scheme)


def test_where_the_engine_differs_we_follow_its_kernel():
    """Several groups: the 64-column order, which is what the GEMM reads; the recording has the other."""
    tensors, _ = load(QUIRK)
    given, recorded = tensors["in.w13_scale"], tensors["out.w13_scale"]
    ours = layout_named("marlin-int4").chains(quirk_problem())["w13_scale"].apply(given)
    padded = torch.zeros(1, 128, 4, dtype=given.dtype)
    padded[:, :32], padded[:, 64:96] = given[:, :32], given[:, 32:]
    j = torch.arange(64)
    order = torch.cat([64 * block + 8 * (j % 8) + j // 8 for block in range(2)])
    assert torch.equal(ours, padded.transpose(1, 2)[:, :, order])
    assert not torch.equal(ours, recorded)
    assert torch.equal(ours.sort().values, recorded.sort().values)


def test_a_recording_that_follows_the_kernel_passes(tmp_path):
    tensors, metadata = load(QUIRK)
    right = layout_named("marlin-int4").chains(quirk_problem())["w13_scale"].apply(tensors["in.w13_scale"])
    path = save(tmp_path / "a.safetensors", tensors | {"out.w13_scale": right}, metadata)
    assert outcome(path)[0] is VectorStatus.PASS


def test_the_deviation_needs_its_params(tmp_path):
    """The other order of scales is only excused where the engine's rule gives it."""
    tensors, metadata = load("marlin_int4_g32_E2")
    single = 32 * (torch.arange(128) // 32)
    within = torch.arange(128) % 32
    single = single + 2 * (within // 8) + within % 2 + 8 * ((within % 8) // 2)
    wrong = tensors["in.w13_scale"].transpose(1, 2)[:, :, single].contiguous()
    path = save(tmp_path / "a.safetensors", tensors | {"out.w13_scale": wrong}, metadata)
    assert outcome(path)[0] is VectorStatus.FAIL


def test_a_folder_without_recordings_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="holds no recorded conversions"):
        check_folder(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        check_folder(tmp_path / "absent")


def run(*arguments):
    return python_forks.run([SCRIPT, *arguments])


def test_the_script_lists_every_recording_and_the_total(tmp_path):
    save(tmp_path / "good.safetensors", *load("marlin_int4_g32_E2"))
    save(tmp_path / "known.safetensors", *load(QUIRK))
    done = run(tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "PASS        good.safetensors: 4 tensors equal, round trip exact"
    assert lines[1].startswith("DEVIATION   known.safetensors: marlin-scale-rule: vLLM 0.33.0 chooses")
    assert lines[2:] == ["2 recordings: 1 PASS, 1 DEVIATION, 0 FAIL, 0 UNSUPPORTED"]

    tensors, metadata = load("marlin_int4_g32_E2")
    save(tmp_path / "odd.safetensors", tensors, metadata | {"function": "vllm new.py::swizzle"})
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == total(check_folder(tmp_path))
    assert total(check_folder(tmp_path)) == "4 recordings: 1 PASS, 1 DEVIATION, 1 FAIL, 1 UNSUPPORTED"


def test_the_script_refuses_an_empty_folder(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no recorded conversions" in done.stderr
