"""Several GPUs and deployments in one call."""

from collections import Counter

import pytest

from support.invoking import moectl

GPT, KIMI = "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Thinking"


def explain(*options, code=0):
    return moectl("explain", *options, "--offline", code=code)


def test_a_row_for_each_gpu_and_a_column_for_each_deployment():
    lines = explain(KIMI, "--gpu", "h100,b200", "--tp", "1,8").stdout.splitlines()
    table = [line.split() for line in lines if line.strip().startswith(("GPU", "h100", "b200"))]
    assert table[0] == ["GPU", "arch", "TP", "1", "TP", "8"]
    assert table[1] == ["h100", "sm90", "humming", "!", "humming"]
    assert table[2][:3] == ["b200", "sm100", "marlin"]


def test_rows_agree_with_single_answers():
    rows = explain(KIMI, "--gpu", "h100,a100", "--tp", "1,4", "--dp", "1,2", "--ep", "--json").document[
        "rows"
    ]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        options = ["--gpu", row["gpu"], "--tp", str(row["tp"]), "--dp", str(row["dp"]), "--ep"]
        group = explain(KIMI, *options, "--json").document["groups"][0]
        assert group["decision"]["chosen"]["experts"] == row["experts"]
        assert group["decision"]["inputs"] == row["decision"]["inputs"] | {
            "problem": group["decision"]["inputs"]["problem"]
        }
        assert group["memory"]["padded_bytes"] == row["bytes"]


def test_shards_that_break_alignment_are_explained_once():
    w4a16 = "RedHatAI/Qwen3-30B-A3B-quantized.w4a16"
    done = explain(w4a16, "--gpu", "a100,l40s,rtx5090", "--tp", "2,4,5")
    words = done.words
    assert words.count("768 cannot be sliced over 5 tensor-parallel ranks") == 1
    assert words.count("TP shard is not a multiple of the quantization group") == 1
    assert words.count("[1]") == words.count("[2]") == 4


def test_another_method_for_some_shards_has_a_footnote():
    done = explain("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--gpu", "l40s", "--tp", "2,4")
    assert "marlin triton [1]" in done.words
    assert "[1] MoeWNA16Method replaces AutoGPTQMoEMethod, whose marlin" in done.words
    document = explain("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "--gpu", "l40s", "--tp", "2,4", "--json").document
    assert [row["fallback"] for row in document["rows"]] == [None, "method"]


def test_all_gpus_stand_in_one_answer():
    from moectl.environment import device_names

    rows = explain(GPT, "--gpu", "all", "--tp", "1,2", "--json").document["rows"]
    assert Counter(row["gpu"] for row in rows) == dict.fromkeys(device_names(), 2)
    by_gpu = {row["gpu"]: row for row in rows if row["tp"] == 1}
    assert by_gpu["h200"]["backend"] == "triton" and by_gpu["h200"]["monolithic"]
    assert by_gpu["v100"]["usable"] is False and by_gpu["v100"]["gates"]
    assert by_gpu["l40s"]["fits"] is False
    text = explain(GPT, "--gpu", "all", "--tp", "1,2").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "h100, h100-pcie, h100-nvl, h200" in text


def test_markdown_is_one_table():
    text = explain(KIMI, "--gpu", "all", "--tp", "1,8", "--md").stdout
    assert "| GPU | arch | TP 1 | TP 8 |" in text
    assert "cannot" in text or "needs" in text


def test_quiet_is_one_line_a_cell():
    text = explain(KIMI, "--gpu", "h100,b200", "--tp", "1,8", "-q").stdout
    assert text.splitlines()[0] == "h100\tTP 1\t1-60\thumming"
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--gpu", "h200,v100"], 0),
        (["--gpu", "v100,t4"], 1),
        (["--gpu", "h200,v100", "--strict"], 1),
        (["--gpu", "h200,a100", "--strict"], 0),
    ],
)
def test_exit_codes(options, code):
    explain(GPT, *options, code=code)


def test_too_many_cells_are_refused():
    ranks = ",".join(str(n) for n in range(1, 100))
    assert "at most" in explain(GPT, "--gpu", "all", "--tp", ranks, code=2).stderr


MIXED = "QuantTrio/Qwen3.6-35B-A3B-AWQ"


def test_layer_groups_of_other_formats_have_tables_of_their_own():
    text = explain(MIXED, "--gpu", "h200,a100", "--tp", "1,8").stdout
    assert "\nlayer 0\n" in text
    assert "\nlayers 1-39 (39)\n" in text
    rows = explain(MIXED, "--gpu", "h200,a100", "--tp", "1", "--json").document["rows"]
    assert [(row["layers"][0], row["gpu"], row["backend"]) for row in rows] == [
        (0, "h200", "triton"),
        (0, "a100", "triton"),
        (1, "h200", "humming"),
        (1, "a100", "marlin"),
    ]


def test_why_answers_each_layer_group():
    done = moectl("explain", MIXED, "--gpu", "h200", "--offline", "--why", "humming", code=1)
    assert "why not humming: layer 0" in done.words
    assert "why not humming: layers 1-39 (39) humming is chosen." in done.words


def test_no_answer_imports_torch():
    import subprocess
    import sys

    code = (
        "import sys; from typer.testing import CliRunner; from moectl.cli.main import app\n"
        "for more in (['--gpu', 'h200,b200'], ['--gpu', 'h200', '--why', 'marlin']):\n"
        f"    done = CliRunner().invoke(app, ['explain', {GPT!r}, '--offline', *more])\n"
        "    assert done.exit_code == 0, done.output\n"
        "print(sorted({'torch', 'triton', 'flashinfer'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_slices_that_cut_across_blocks_are_told():
    done = moectl("explain", "Qwen/Qwen3-30B-A3B-FP8", "--offline", "--gpu", "b200", "--tp", "2,4")
    assert "flashinfer_trtllm triton [1]" in done.words
    assert (
        "[1] vLLM 0.33.0 re-expands block scales to fp8 block 64x64, because shards are not block-aligned"
        in done.words
    )


def test_one_machine_has_the_rows_of_a_matrix_too():
    """Scripts read `.rows` whatever the number of GPUs."""
    several = explain(KIMI, "--gpu", "h100,a100", "--tp", "8", "--json").document["rows"]
    for row in several:
        alone = explain(KIMI, "--gpu", row["gpu"], "--tp", "8", "--json").document
        assert alone["rows"] == [row]
        assert [row["backend"] for row in alone["rows"]] == [
            group["decision"]["chosen"]["backend"] for group in alone["groups"]
        ]
