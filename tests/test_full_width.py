"""One layer of each model at its published sizes through every command. Run with --slow."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moectl.checkpoint import read_header

pytestmark = pytest.mark.slow

MODELS = {
    "gpt-oss-20b": ("openai/gpt-oss-20b", ["--layers", "1"], "marlin"),
    "kimi-k2-thinking": ("moonshotai/Kimi-K2-Thinking", ["--layers", "1", "--experts", "32"], "trtllm"),
}


def moectl(*arguments):
    """Run the program as a user does; its JSON document."""
    done = subprocess.run(
        [sys.executable, "-m", "moectl", *map(str, arguments), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tensor_hashes(folder):
    """Dtype, shape and SHA-256 of every tensor's bytes, by name."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as data:
            infos = read_header(data, file.stat().st_size, file.name)
            for info in infos.values():
                data.seek(info.start)
                found[info.name] = (
                    info.dtype,
                    info.shape,
                    hashlib.sha256(data.read(info.nbytes)).hexdigest(),
                )
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_command_at_published_sizes(model, tmp_path):
    name, options, target = MODELS[model]
    checkpoint, out, back = tmp_path / "checkpoint", tmp_path / "out", tmp_path / "back"
    moectl("synth", name, checkpoint, *options)
    problem = moectl("explain", checkpoint, "--gpu", "h200")["groups"][0]["decision"]["inputs"]["problem"]
    published = moectl("explain", name, "--gpu", "h200", "--offline")["groups"][0]
    assert problem["dims"] == published["decision"]["inputs"]["problem"]["dims"]
    moectl("convert", checkpoint, out, "--to", target)
    assert moectl("verify", out, "--source", checkpoint)["ok"]
    assert moectl("run", checkpoint, "--device", "cpu")["check"]["ok"]
    assert moectl("run", out, "--device", "cpu")["check"]["ok"]
    rows = moectl("bench", out, "-m", "1,16", "--repeats", "3", "--device", "cpu")["rows"]
    assert all(row["check"]["ok"] and row["timing"]["median_us"] > 0 for row in rows)
    moectl("unconvert", out, back)
    assert tensor_hashes(back) == tensor_hashes(checkpoint)


CONVERTING = """
import resource, sys
from pathlib import Path
from moectl.checkpoint import open_checkpoint
from moectl.convert.plan.kernel_layout_plan import plan_conversion
from moectl.convert.execute.convert import convert
from moectl.convert.layouts.registry import layout_for
checkpoint = open_checkpoint(sys.argv[1])
layout = layout_for("marlin", checkpoint.groups[0].problem.scheme.weight, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan = plan_conversion(checkpoint, layout, max_memory=int(sys.argv[3]))
summary = convert(plan, Path(sys.argv[2]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"in {summary.bytes_in} grown {(after - before) * 1024}")
"""


def test_a_layer_far_larger_than_the_bound_converts_within_it(tmp_path):
    checkpoint, bound = tmp_path / "checkpoint", 400 << 20
    moectl("synth", "openai/gpt-oss-120b", checkpoint, "--layers", "1")
    done = subprocess.run(
        [sys.executable, "-c", CONVERTING, checkpoint, tmp_path / "out", str(bound)],
        capture_output=True,
        text=True,
        check=True,
    )
    size, grown = map(int, re.findall(r"\d+", done.stdout))
    assert size > 4 * bound
    assert grown < bound, f"converting {size} bytes took {grown} bytes more than before, bound {bound}"
    assert (Path(tmp_path) / "out" / "READY").is_file()
