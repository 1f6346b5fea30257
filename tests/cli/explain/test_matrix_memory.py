"""Weights on one GPU below a matrix, and the smallest TP that fits."""

from support.invoking import moectl

KIMI, GPT = "moonshotai/Kimi-K2-Thinking", "openai/gpt-oss-120b"


def explain(*options: str, code: int = 0):
    return moectl("explain", *options, "--offline", code=code)


def test_weights_by_tp_and_the_smallest_that_fits():
    words = explain(KIMI, "--gpu", "h100,h200,b200", "--tp", "1,4,8").words
    assert "TP 1 532 GiB experts + 21.8 GiB other weights TP 4 133 GiB experts" in words
    assert "note other weights are estimated from config" in words
    assert "fits from TP 4 on b200 (179 GiB); from TP 8 on h100 (79.6 GiB), h200 (140 GiB)" in words
    assert "weights per GPU; vLLM fills 0.92 of its memory (--gpu-memory-utilization)" in words


def test_they_agree_with_the_answer_for_one_gpu_and_with_json():
    alone = explain(KIMI, "--gpu", "h200", "--tp", "8").words
    assert "experts 66.4 GiB" in alone and "needs TP 8 or more" in alone
    rows = explain(KIMI, "--gpu", "h100,h200", "--tp", "8", "--json").document["rows"]
    assert {row["memory"]["smallest_tp"] for row in rows} == {8}


def test_padding_that_differs_is_a_range():
    words = explain(GPT, "--gpu", "4090,mi300x,h100", "--tp", "1,8").words
    assert "TP 1 56.8 GiB to 64.6 GiB experts" in words
    assert "from TP 1 on mi300x (192 GiB), h100 (79.6 GiB); from TP 4 on 4090 (24 GiB)" in words


def test_deployments_of_other_kinds_have_their_own_line():
    words = explain(KIMI, "--gpu", "h100,h200", "--tp", "8", "--pp", "1,2").words
    assert "fits from TP 8 on h100 (79.6 GiB), h200 (140 GiB)" in words
    assert "with PP 2: from TP 4 on h100" in words
    assert "TP 8 PP 2 33.2 GiB experts" in words


def test_what_fits_nowhere_is_said():
    words = explain("moonshotai/Kimi-K3", "--gpu", "t4,4090", "--tp", "1,2").words
    assert "fits at no TP up to 64 on t4 (15 GiB), 4090 (24 GiB)" in words


def test_weights_that_are_not_listed_are_not_counted():
    words = explain("moonshotai/Kimi-K3", "--gpu", "h100,h200").words
    assert "note other weights are not listed here, and not counted" in words


def test_other_weights_count_where_headers_list_them(tmp_path):
    moectl("synth", "openai/gpt-oss-20b", str(tmp_path / "small"), "--layers", "2", "--hidden", "256")
    words = explain(str(tmp_path / "small"), "--gpu", "h100,h200", "--tp", "1,2").words
    assert "other weights" in words and "not listed" not in words


def test_markdown_and_a_gpu_without_known_memory():
    text = explain(KIMI, "--gpu", "h100,h200", "--tp", "8", "--md").stdout
    assert "- TP 8: 66.4 GiB experts" in text and "- fits: **from TP 8" in text
    assert "weights per GPU" in explain(GPT, "--gpu", "h100,cpu").words
