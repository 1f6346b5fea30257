"""Recording of SGLang: what is asked, what its worker needs, what samples and comparisons keep."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from devtools.conformance import read_rows, sampled
from devtools.recording.worker_process import STAND_INS, ask_worker
from devtools.sglang_recording import DEVICES, record
from devtools.sglang_recording.compare import compare_recording
from devtools.sglang_recording.recording import WORKER, cells, checkpoints
from devtools.sglang_recording.sample import shortened, traits

from moectl.errors import MoectlError, UsageError

RECORDED = Path(__file__).parents[1] / "data" / "oracle" / "sglang-0.5.23.jsonl.gz"
OTHER_WORKERS = [WORKER.parents[1] / "transformers_recording" / "machine.py"]


def write(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def test_no_cell_is_asked_twice():
    known = checkpoints()
    asked = [json.dumps(cell) for cell in cells(list(known))]
    assert len(set(asked)) == len(asked) > 1000


@pytest.mark.parametrize(
    ("devices", "names", "says"),
    [(["sm90"], ["acme/none"], "acme/none is not asked about"), (["sm20"], [], "sm20 is no device")],
)
def test_unknown_names_are_refused(devices, names, says):
    with pytest.raises(UsageError, match=says):
        list(record(Path("nowhere"), devices, names, 1))


def test_a_worker_gets_its_question_and_the_stand_ins(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys, pathlib, stand_ins\n"
        "asked = json.load(sys.stdin)\n"
        "pathlib.Path(asked['out']).write_text(json.dumps({'name': asked['name']}) + '\\n')\n"
    )
    assert ask_worker(worker, None, {"name": "acme"}, "Acme") == [{"name": "acme"}]
    worker.write_text("raise SystemExit('no such engine')")
    with pytest.raises(MoectlError, match="Acme could not be asked: no such engine"):
        ask_worker(worker, tmp_path, {}, "Acme")


@pytest.mark.parametrize("worker", [WORKER, *OTHER_WORKERS], ids=lambda path: path.stem)
def test_workers_find_their_stand_ins_where_they_are(worker):
    code = f"import runpy; runpy.run_path({str(worker)!r}, run_name='imported')"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(STAND_INS)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_triton_is_told_the_target():
    assert {row["kind"] for row in DEVICES.values()} == {"cuda", "rocm", "cpu"}
    code = (
        f"import sys; sys.path.insert(0, {str(WORKER.parent)!r})\n"
        "import json, sglang_worker, triton\n"
        "sglang_worker._set_triton_target(json.loads(sys.argv[1]))\n"
        "target = triton.runtime.driver.active.get_current_target()\n"
        "print(target.backend, target.arch, target.warp_size)\n"
    )
    for device, said in (("gfx942", "hip gfx942 64"), ("sm90", "cuda 90 32")):
        ran = subprocess.run(
            [sys.executable, "-c", code, json.dumps(DEVICES[device])],
            env={"PYTHONPATH": str(STAND_INS)},
            capture_output=True,
            text=True,
        )
        assert ran.stdout.strip() == said, ran.stderr


def test_a_sample_has_everything_once_and_no_texts():
    rows = list(read_rows(RECORDED))[:300]
    assert list(sampled([*rows, *rows], traits)) == list(sampled(rows, traits))
    assert [shortened(row) for row in rows] == rows
    error = {"kind": "ValueError", "says": "long", "where": "file"}
    layer = {"config": "Fp8Config", "error": error}
    assert shortened({**rows[0], "layer": layer})["layer"] == {"error": "ValueError"}


def test_a_comparison_finds_what_differs(tmp_path):
    few = list(read_rows(RECORDED))[:3]
    right = compare_recording(write(tmp_path / "right.jsonl.gz", few), "sglang==0.5.23")
    assert right.total.asked == right.total.agreed == 3 and set(right.fields) == {"arguments", "layer"}
    wrong = [{**few[0], "layer": {"runner": "none", "method": "None", "scheme": None}}, *few[1:]]
    found = compare_recording(write(tmp_path / "wrong.jsonl.gz", wrong), "sglang==0.5.23")
    assert [(it.line, it.field) for it in found.disagreements] == [(1, "layer")]
    with pytest.raises(UsageError, match="no decision of this engine"):
        compare_recording(write(tmp_path / "other.jsonl.gz", [{"scheme": "mxfp4"}]), "sglang")
