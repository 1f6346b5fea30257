"""Recording of transformers: what is asked, what is read of its source, what samples and comparisons keep."""

import gzip
import json
from pathlib import Path

import pytest
from devtools.conformance import read_rows, sampled
from devtools.transformers_recording import experts_classes, record
from devtools.transformers_recording.compare import compare_recording
from devtools.transformers_recording.recording import COMPLETE, DEVICES, cells, checkpoints
from devtools.transformers_recording.sample import shortened, traits

from moectl.errors import UsageError

RECORDED = Path(__file__).parents[1] / "data" / "oracle" / "transformers-5.23.0.jsonl.gz"


def write(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


@pytest.fixture(scope="module")
def known():
    return checkpoints()


def test_every_kind_is_asked_about_on_every_device_and_no_cell_twice(known):
    asked = list(cells(known, "0.18.2"))
    assert len({json.dumps(cell) for cell in asked}) == len(asked)
    gpt = [cell for cell in asked if cell["checkpoint"] == "openai/gpt-oss-120b"]
    assert {cell["device"] for cell in gpt} == set(DEVICES)
    assert any("kernels" not in cell["packages"] for cell in gpt)
    assert {len(cell["packages"]) for cell in gpt} == {len(COMPLETE), len(COMPLETE) + 1}
    assert any(cell["arguments"]["dequantize"] for cell in gpt)
    assert all("auto_map" not in row["config"] for row in known.values())


def test_an_unknown_checkpoint_is_refused():
    with pytest.raises(UsageError, match="acme/none is not asked about"):
        list(record(None, "0.18.2", ["acme/none"], 1))


def test_classes_of_experts_are_read_from_source(tmp_path):
    sources = {
        "acme": "@use_experts_implementation(has_post_expert_norm=True)\nclass AcmeExperts: ...",
        "own": "class OwnSharedExperts: ...\nclass OwnExperts: ...",
        "dense": "class DenseMLP: ...",
    }
    for name, source in sources.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / f"modeling_{name}.py").write_text(source)
        (folder / f"configuration_{name}.py").write_text(f'class C:\n    model_type: str = "{name}_text"\n')
    assert experts_classes(tmp_path) == {
        "experts": {
            "acme_text": {"experts": "AcmeExperts", "normed": True},
            "own_text": {"experts": "OwnExperts", "interface": False},
        },
        "others": ["dense_text"],
    }


def test_a_sample_has_everything_once_and_no_texts():
    rows = list(read_rows(RECORDED))
    assert list(sampled([*rows, *rows], traits)) == list(sampled(rows, traits))
    said = {"kind": "ImportError", "says": "long", "where": "file"}
    row = next(row for row in rows if "prefill" in row and "error" in row["prefill"])
    short = shortened({**row, "warnings": ["x"], "prefill": {"error": said}})
    assert short["prefill"] == {"error": {"kind": "ImportError"}} and "warnings" not in short


def test_a_comparison_finds_what_differs(tmp_path):
    rows = [
        row for row in read_rows(RECORDED) if "loading" in row or row["checkpoint"] == "openai/gpt-oss-120b"
    ]
    few = rows[:3] + [row for row in rows if "loading" in row]
    right = compare_recording(write(tmp_path / "right.jsonl.gz", few), "transformers==5.23.0")
    assert right.total.asked == right.total.agreed == len(few) > 10
    wrong = [{**few[0], "prefill": {"kernel": "none"}}, *few[1:]]
    found = compare_recording(write(tmp_path / "wrong.jsonl.gz", wrong), "transformers==5.23.0")
    assert [disagreement.line for disagreement in found.disagreements] == [1]
    with pytest.raises(UsageError, match="no decision of this engine"):
        compare_recording(write(tmp_path / "other.jsonl.gz", [{"scheme": "mxfp4"}]), "transformers")
    with pytest.raises(UsageError, match="cannot be read"):
        compare_recording(tmp_path / "absent.jsonl.gz", "transformers")
