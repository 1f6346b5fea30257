"""Traces of expert ids: what is read from them, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from moectl.bench.routings import read_trace, routing_of
from moectl.bench.settings import check_routing
from moectl.errors import UsageError
from moectl.kernels.reference import route
from support.bench_rows import settings_of
from support.random_layers import GPT_OSS, KIMI, random_layer

IDS = [[0, 1, 2, 3], [5, 4, 3, 2], [1, 0, 5, 4]]


def traced(path, problem=GPT_OSS):
    return routing_of(f"trace:{path}", random_layer(problem), settings_of())


def test_both_kinds_of_file_say_the_same(tmp_path):
    lines, tensors = tmp_path / "a.jsonl", tmp_path / "a.safetensors"
    lines.write_text("".join(json.dumps({"ids": row}) + "\n" for row in IDS))
    save_file({"ids": torch.tensor(IDS)}, tensors)
    for path in (lines, tensors):
        ids, weights = read_trace(path, GPT_OSS)
        assert ids.tolist() == IDS and ids.dtype == torch.int32 and weights is None


@pytest.mark.parametrize("problem", [GPT_OSS, KIMI])
def test_calls_take_runs_of_tokens_and_logits_agree(tmp_path, problem):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in IDS))
    first, second = traced(path, problem)(2, 2)
    assert first.ids.tolist() == IDS[:2] and second.ids.tolist() == [IDS[2], IDS[0]]
    assert first.agrees
    bias = torch.zeros(problem.experts) if problem.routing.correction_bias else None
    ids, weights = route(first.logits, problem, bias)
    assert torch.equal(ids, first.ids) and torch.equal(weights, first.weights)
    with pytest.raises(UsageError, match="has 3 tokens, and 4 were requested"):
        traced(path)(4, 1)


def test_weights_of_a_trace_are_taken_as_they_are(tmp_path):
    path = tmp_path / "a.jsonl"
    given = [0.5, 0.25, 0.25, 0.0]
    path.write_text("".join(json.dumps({"ids": row, "weights": given}) + "\n" for row in IDS))
    (routed,) = traced(path)(3, 1)
    assert routed.weights.tolist() == [given] * 3 and not routed.agrees


def test_a_bench_on_a_trace(tmp_path, bench_of):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in IDS))
    rows = list(bench_of(routings=(f"trace:{path}", "balanced"), tokens=(1, 3)).measured())
    assert [(row.routing, row.tokens, row.experts) for row in rows] == [
        (f"trace:{path}", 1, 4),
        (f"trace:{path}", 3, 6),
        ("balanced", 1, 4),
        ("balanced", 3, 6),
    ]
    with pytest.raises(UsageError, match="3 tokens, and 9"):
        bench_of(routings=(f"trace:{path}",), tokens=(9,))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "of at least one token"),
        ("[0, 1, 2]\n", r"must be \[tokens, 4\]"),
        ("[0, 1, 2, 3]\n[0, 1]\n", "different numbers of experts"),
        ("[0, 1, 2, 6]\n", "token 0 of ids in trace .* not an expert, 0 to 5"),
        ("[0, 1, 2, -1]\n", "not an expert, 0 to 5"),
        ("[0, 1, 2, 2]\n", "an expert twice"),
        ("[0, 1, 2, 3]\n[0, 1, 2, true]\n", "line 2 of trace .* list of expert ids"),
        ("[0, 1, 2, 3.0]\n", "list of expert ids"),
        ("[0, 1, 2, 99999999999999999999]\n", "must be a finite number of at most 64 bits"),
        ("nonsense\n", "line 1 of trace .* is not valid JSON"),
        ("[" * 100000, "nested too deeply"),
        ('{"ids": [0,1,2,3], "weights": [1, 1]}\n', "different numbers|must be finite"),
        ('{"ids": [0,1,2,3], "weights": [1, 1, 1, NaN]}\n', "must be a finite number"),
        ('{"ids": [0,1,2,3], "weights": "x"}\n', "weights must be a list"),
        ('{"ids": [0,1,2,3], "weights": [1,1,1,1]}\n[0, 1, 2, 3]\n', "for 1 of 2 tokens"),
    ],
)
def test_bad_lines_are_refused(tmp_path, text, words):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_trace(path, GPT_OSS)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"x": torch.zeros(2, 4)}, "must hold a tensor ids, got x"),
        ({"ids": torch.zeros(2, 4)}, "whole numbers"),
        ({"ids": torch.zeros(4, dtype=torch.int32)}, r"must be \[tokens, 4\]"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int64)}, "an expert twice"),
        ({"ids": torch.arange(4)[None], "weights": torch.zeros(2, 4)}, "must be finite numbers"),
    ],
)
def test_bad_tensors_are_refused(tmp_path, tensors, words):
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    with pytest.raises(UsageError, match=words):
        read_trace(path, GPT_OSS)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 30)
    with pytest.raises(UsageError, match="cannot read trace"):
        read_trace(tmp_path / "a.safetensors", GPT_OSS)
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UsageError, match="cannot read trace"):
        read_trace(tmp_path / "a.jsonl", GPT_OSS)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UsageError, match="is not that of a trace"):
        read_trace(tmp_path / "a.txt", GPT_OSS)


def test_a_routing_that_is_not_known_names_all_there_are():
    with pytest.raises(UsageError, match="routing 'foo:1' is not known") as raised:
        check_routing("foo:1")
    assert raised.value.hint == "Use uniform, balanced, zipf:A, hot:N:F, experts:N, trace:FILE, router."
    with pytest.raises(UsageError, match="A must be a number"):
        check_routing("zipf:x")
