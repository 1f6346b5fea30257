"""What the scripts about kernels refuse, in a sentence and with the exit status of its kind."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from support.scripts import SCRIPTS, loaded

Ended = Callable[..., tuple[int, str]]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Runs a script; gives its exit status and the last line of its errors."""

    def run(script: str, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *options])
        with pytest.raises(SystemExit) as end:
            sys.exit(loaded(script).main())
        assert isinstance(end.value.code, int)
        return end.value.code, capsys.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("tune_kernels", ("--models", "gpt-5"), "no model is called 'gpt-5'; choose from gpt-oss-120b"),
        ("tune_kernels", ("--families", "mid,large"), "no family is called 'large'; choose from decode"),
        ("tune_kernels", ("--best", "0"), "argument --best: expected a positive integer"),
        ("bench_peers", ("--models", "gpt-5"), "no model is called 'gpt-5'"),
        ("bench_first_call", ("--columns", "moectl,sonic"), "no column is called 'sonic'"),
        (
            "bench_first_call",
            ("--layers", "gpt-oss-20b pp2"),
            "a layer is NAME, NAME:FORMAT, either with tpN",
        ),
        (
            "bench_first_call",
            ("--peers", "nowhere"),
            "there is no directory nowhere",
        ),
        ("bench_router", ("--models", "gpt-5"), "no model is called 'gpt-5'; choose from gpt-oss-20b"),
        ("fp8_sums", ("--backends", "marlin"), "no backend is called 'marlin'; choose from moectl"),
        ("fp8_sums", ("--columns", "2000"), "argument --columns: expected multiples of 256"),
        ("bench_router", ("--tokens", "0"), "argument --tokens: expected positive integers"),
        ("bench_peers", ("--columns", "moectl,sonic"), "no column is called 'sonic'"),
        ("bench_peers", ("--routing", "zipf"), "argument --routing: routing distribution 'zipf' has 0 arg"),
        (
            "bench_peers",
            ("--routing", "often"),
            "routing distribution 'often' is not known. Use uniform",
        ),
        ("bench_peers", ("--tokens", "1,x"), "argument --tokens: expected positive integers"),
        ("bench_peers", ("--rates", "fast"), "argument --rates: expected measured"),
        ("bench_peers", ("--warm", "-1"), "argument --warm: expected a positive integer"),
        ("tune_kernels", ("--experts", "0"), "argument --experts: expected a positive integer"),
        ("sanitize_kernels", ("--most", "0"), "argument --most: expected a positive integer"),
        ("bench_peers", ("--peers", "nowhere"), "there is no directory nowhere"),
        ("sanitize_kernels", ("--formats", "int3"), "no format is called 'int3'; choose from mxfp4"),
        ("sanitize_kernels", ("--families", "large"), "no family is called 'large'; choose from decode"),
        (
            "profile_kernels",
            ("--routing", "skewed"),
            "routing distribution 'skewed' is not known",
        ),
        ("inspect_kernels", ("--family", "large"), "no kernel family is called 'large'; choose from decode"),
        ("inspect_kernels", ("--arch", "70"), "no GPU is defined for sm_70; choose from 80"),
        ("survey_launches", (), "give a plan to run, or --draw N to print one"),
        ("survey_launches", ("plan.jsonl",), "a run needs --out FILE"),
        ("survey_launches", ("--draw", "2", "--formats", "int3"), "no format is called 'int3'"),
    ],
)
def test_wrong_usage(script: str, options: tuple[str, ...], said: str, ended: Ended) -> None:
    status, line = ended(script, *options)
    assert status == 2 and said in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("bench_first_call", ()),
        ("bench_peers", ()),
        ("bench_peers", ("--warm", "1", "--models", "qwen3-30b", "--tokens", "1")),
        ("bench_router", ()),
        ("fp8_sums", ()),
        ("profile_kernels", ()),
        ("sanitize_kernels", ()),
        ("survey_launches", ("plan.jsonl", "--out", "rows.jsonl")),
        ("tune_kernels", ()),
    ],
)
def test_without_a_gpu(script: str, options: tuple[str, ...], ended: Ended) -> None:
    assert ended(script, *options) == (3, f"{script}: it needs a CUDA GPU, and torch sees none")
