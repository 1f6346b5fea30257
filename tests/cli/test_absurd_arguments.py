"""Numbers and names that no machine has: one sentence, exit code 2."""

import pytest

from support.invoking import moectl

CONVERT = ("convert", "gpt-oss-20b", "out", "--to", "marlin")
EXPLAIN = ("explain", "gpt-oss-20b", "--gpu", "h100", "--offline")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*CONVERT, "--max-memory", "9" * 400 + "T"), "a size must look like"),
        ((*CONVERT, "--max-memory", "٢GB"), "a size must look like"),
        ((*CONVERT, "--max-memory", "9" * 18 + "T"), "a size must be below"),
        ((*CONVERT, "--threads", "9" * 30), "--threads"),
        ((*CONVERT, "--threads", "1025"), "--threads"),
        ((*CONVERT, "--threads", "9" * 5000), "--threads"),
        (("explain", "\ud800"), "lone surrogate"),
        ((*EXPLAIN, "--replay", "\udfff.json"), "surrogate"),
        ((*EXPLAIN, "--assume", "hidden=\ud800"), "lone surrogate"),
        (("verify", "a\0b"), "null"),
        (("compare", "a\ud800", "b"), "surrogate"),
    ],
    ids=lambda value: ascii(value)[-24:],
)
def test_a_sentence(words, said):
    done = moectl(*words, code=2)
    assert said in " ".join(done.stderr.split()) and "internal" not in done.stderr
