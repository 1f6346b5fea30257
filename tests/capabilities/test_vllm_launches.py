"""Names and contents of vLLM's tuned files, and launches without one, as its own functions have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moectl.capabilities.vllm_launches import (
    FIELDS,
    TunedName,
    VllmLaunch,
    default_launch,
    find_tuned_file,
    gpu_in_names,
    nearest_launch,
    parse_name,
    read_launches,
)
from moectl.errors import CheckpointError, UsageError
from support import vllm_launch_choice as vllm

LAUNCH = dict(zip(FIELDS, (16, 64, 128, 1, 4, 3), strict=True))


def test_defaults_are_those_that_vllm_chose() -> None:
    """Recorded from vLLM 0.33.0's ``get_default_config``."""
    recorded = json.loads(vllm.RECORDED.read_text(encoding="utf-8"))
    assert recorded["vllm"] == "0.33.0" and len(recorded["launches"]) > 50
    mine = [list(default_launch(*case)) for case in vllm.cases()]
    assert vllm.packed(mine) == recorded["launches"]


def test_the_recording_is_what_vllms_file_says() -> None:
    recorded = json.loads(vllm.RECORDED.read_text(encoding="utf-8"))
    assert vllm.packed(vllm.vllm_defaults(vllm.vllm_folder())) == recorded["launches"]


def test_vllms_own_files_are_found_and_read_as_vllm_does(tmp_path: Path) -> None:
    folder = vllm.vllm_folder()
    names = [name for file in (folder / "configs").iterdir() if (name := parse_name(file.name))]
    nvidia = [name for name in names if name.gpu.startswith("NVIDIA") and name.dtype in ("", "fp8_w8a8")]
    assert len(nvidia) > 100 and any(all(name.block) for name in nvidia)
    for name in nvidia:
        theirs = vllm.vllm_functions(folder, name.gpu)
        block = list(name.block) if all(name.block) else None
        assert str(name) == theirs.get_config_file_name(name.experts, name.size, name.dtype or None, block)
        configs = theirs.get_moe_configs(name.experts, name.size, name.dtype or None, *(block or ()))
        file = find_tuned_file(name, [tmp_path, folder / "configs"])
        assert file is not None and file.parent == folder / "configs"
        mine = read_launches(file)
        assert list(mine) == list(configs)
        assert all(list(mine[key]) == [entry[field] for field in FIELDS] for key, entry in configs.items())
        for tokens in (1, 3, 5, 12, 20, 97, 700, 5000, 10**6):
            key = min(configs.keys(), key=lambda x, tokens=tokens: abs(x - tokens))
            assert nearest_launch(mine, tokens) == mine[key]


def test_a_named_folder_comes_first_as_with_vllm(tmp_path: Path) -> None:
    folder = vllm.vllm_folder()
    name = TunedName(128, 768, "NVIDIA_H200")
    (tmp_path / str(name)).write_text(json.dumps({"triton_version": "3.6.0", "7": LAUNCH}))
    theirs = vllm.vllm_functions(folder, "NVIDIA_H200", str(tmp_path)).get_moe_configs(128, 768, None)
    file = find_tuned_file(name, [tmp_path, folder / "configs"])
    assert file == tmp_path / str(name) and read_launches(file) == {7: VllmLaunch(*theirs[7].values())}
    assert find_tuned_file(TunedName(127, 768, "NVIDIA_H200"), [tmp_path, folder / "configs"]) is None


def test_names_hold_what_a_layer_differs_in() -> None:
    name = TunedName(256, 256, "NVIDIA_H200", "fp8_w8a8", (128, 128))
    assert str(name) == "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert parse_name(str(name)) == name and parse_name("E=8.json") is None
    assert gpu_in_names("NVIDIA H200 NVL") == "NVIDIA_H200" != gpu_in_names("NVIDIA H100 80GB HBM3")
    assert gpu_in_names("Some GPU/2  GB") == "Some_GPU_2_GB"


def test_the_first_of_two_equally_near_numbers_is_taken() -> None:
    launches = {8: VllmLaunch(16, 64, 128, 1, 4, 3), 4: VllmLaunch(32, 64, 128, 1, 4, 3)}
    assert nearest_launch(launches, 6) == launches[8] and nearest_launch(launches, 5) == launches[4]


BROKEN = [
    ("[]", CheckpointError, "object"),
    ("{", CheckpointError, "JSON"),
    ('{"1": {}, "1": {}}', CheckpointError, "twice"),
    (json.dumps({"one": LAUNCH}), UsageError, "launches by number of tokens, got 'one'"),
    (json.dumps({"-1": LAUNCH}), UsageError, "got '-1'"),
    (json.dumps({"1": 3}), UsageError, "is missing or unknown"),
    (json.dumps({"1": LAUNCH | {"tile": 1}}), UsageError, "'tile' is missing or unknown"),
    (json.dumps({"1": LAUNCH | {"BLOCK_SIZE_M": 24}}), UsageError, "power of two from 1 to 256, got 24"),
    (json.dumps({"1": LAUNCH | {"BLOCK_SIZE_N": 1 << 20}}), UsageError, "from 1 to 512"),
    (json.dumps({"1": LAUNCH | {"num_stages": 0}}), UsageError, "a number from 1 to 16, got 0"),
    (json.dumps({"1": LAUNCH | {"num_warps": "4"}}), UsageError, "num_warps for 1 tokens"),
    (json.dumps({"1": LAUNCH | {"num_warps": True}}), UsageError, "num_warps for 1 tokens"),
    (json.dumps({"1": LAUNCH | {"SPLIT_K": 2}}), UsageError, "SPLIT_K for 1 tokens"),
    (" " * ((1 << 20) + 1), UsageError, "at most 1048576 bytes"),
]


@pytest.mark.parametrize(("text", "error", "says"), BROKEN)
def test_other_contents_are_refused(text: str, error: type[Exception], says: str, tmp_path: Path) -> None:
    file = tmp_path / "E=1,N=2,device_name=X.json"
    file.write_text(text)
    with pytest.raises(error, match=says.replace("[", "\\[")) as caught:
        read_launches(file)
    assert str(file) in str(caught.value)


def test_what_is_one_may_be_said(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"16": LAUNCH | {"SPLIT_K": 1, "num_ctas": 1}}))
    assert read_launches(file) == {16: VllmLaunch(*LAUNCH.values())}
    with pytest.raises(CheckpointError, match="not a file"):
        read_launches(tmp_path)
