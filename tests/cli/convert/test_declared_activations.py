"""`convert --to moectl` of integer weights: the layout follows from the declared activations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moectl.synth import synthesize
from support.invoking import moectl

TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def quantized(folder: Path, to: str) -> Path:
    """Two layers with integer weights and 16-bit activations."""
    small = {"layers": 2, "experts": 4, "hidden": 128, "intermediate": 384}
    source = synthesize("Qwen/Qwen3-30B-A3B", folder / "bf16", **small)
    done = moectl("convert", source, folder / "a16", "--to", to, "--container", "compressed-tensors")
    assert done.code == 0, done.stderr
    return folder / "a16"


@pytest.fixture(scope="module")
def in_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a scale per channel."""
    return quantized(tmp_path_factory.mktemp("int8"), "int8")


def declaring(source: Path, out: Path, *layers: int) -> Path:
    """A copy of a checkpoint whose `layers`, or all, declare INT8 tokens."""
    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    quantization = config["quantization_config"]
    (group,) = quantization["config_groups"].values()
    quantized = {**group, "input_activations": TOKENS}
    groups = {"group_0": quantized}
    if layers:
        targets = [f"re:.*layers\\.{number}\\..*" for number in layers]
        groups = {"group_0": {**quantized, "targets": targets}, "group_1": group}
    quantization["config_groups"] = groups
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("to", "own"),
    [("int8", "moectl-int8"), ("int4-g128", "moectl-int4"), ("int4-g32", "moectl-mtile64")],
)
def test_the_layout_follows_from_what_is_declared(to: str, own: str, tmp_path: Path) -> None:
    plain = quantized(tmp_path, to)
    declared = declaring(plain, tmp_path / "declared")
    for source, layout in ((plain, "moectl-mtile64"), (declared, own)):
        out, back = (tmp_path / f"{source.name} {there}" for there in ("out", "back"))
        done = moectl("convert", source, out, "--to", "moectl")
        assert done.code == 0 and layout in done.stdout, done.stderr
        assert moectl("verify", out, "--source", source).code == 0
        assert moectl("unconvert", out, back).code == 0
        for path in source.glob("*.safetensors"):
            assert (back / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("declares", "act", "layout"), [(True, "a16", "moectl-int8"), (False, "int8", "moectl-mtile64")]
)
def test_activations_that_are_not_declared_are_refused(
    in_int8: Path, tmp_path: Path, declares: bool, act: str, layout: str
) -> None:
    source = declaring(in_int8, tmp_path / "declared") if declares else in_int8
    done = moectl("convert", source, tmp_path / "out", "--to", "moectl", "--act", act, code=2)
    said = " ".join(done.stderr.split())
    assert f"in {layout}, not in" in said and "Leave out --act" in said
    assert not (tmp_path / "out").exists()


def test_layers_that_declare_different_activations_are_refused(in_int8: Path, tmp_path: Path) -> None:
    mixed = declaring(in_int8, tmp_path / "mixed", 0)
    done = moectl("convert", mixed, tmp_path / "out", "--to", "moectl", code=2)
    said = " ".join(done.stderr.split())
    assert done.code == 2 and "read layer 1 (int8 per channel" in said and "use the checkpoint itself" in said
    assert moectl("explain", mixed, "--gpu", "h200", "--policy", "moectl").code == 0
