"""The public Python API: what `dir(moectl)` shows, and the examples of docs/python.md."""

from __future__ import annotations

import gc
import inspect
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import moectl
from moectl.errors import UsageError
from support.invoking import moectl as command

pytestmark = pytest.mark.usefixtures("quick_machine")

ROOT = Path(__file__).parents[1]


def test_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_page_names_everything_public() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    for name in dir(moectl):
        assert getattr(moectl, name) is not None
        assert name in page or name in {"SCHEMA_VERSION", "Checkpoint", "Explanation", "__version__"}, name


def test_import_is_light_and_explain_needs_no_torch() -> None:
    code = (
        "import sys, moectl; assert not {'torch', 'numpy', 'typer', 'rich'} & set(sys.modules)\n"
        "import moectl.explain.explanation as module\n"
        "answer = moectl.explain('openai/gpt-oss-120b', 'h200', offline=True)\n"
        "assert isinstance(answer, module.Explanation) and 'torch' not in sys.modules\n"
        "from moectl.bench import BenchSettings; assert callable(moectl.bench) and callable(moectl.convert)\n"
        "from moectl import explain; print(explain('openai/gpt-oss-120b', 'h200', offline=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["  layers 0-35: triton"]


def test_explain_is_the_command() -> None:
    answer = moectl.explain("moonshotai/Kimi-K2-Thinking", "b200", tp=8, backend="marlin", offline=True)
    words = ("explain", "moonshotai/Kimi-K2-Thinking", "--gpu", "b200", "--tp", "8", "--backend", "marlin")
    document = command(*words, "--policy", "vllm", "--offline", "--json").document
    assert [group["decision"] for group in document["groups"]] == [
        group.decision.to_json() for group in answer.groups
    ]


def test_signatures_are_those_of_the_functions() -> None:
    for name in ("explain", "convert", "bench"):
        assert inspect.signature(getattr(moectl, name)) == inspect.signature(getattr(moectl.api, name))


def test_reprs_are_a_few_lines(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    (summary,) = moectl.convert(tiny_gpt_oss, tmp_path / "out", "marlin")
    layer = moectl.load_prepared(tmp_path / "out", backend="torch")
    checkpoint = moectl.open_checkpoint(tiny_gpt_oss)
    answer = moectl.explain(checkpoint, "h200")
    rows = moectl.bench(tiny_gpt_oss, tokens=[2], backends=["torch"], device="cpu", rounds=1)
    for value in (summary, layer, checkpoint, answer, answer.groups[0].decision, rows):
        assert len(repr(value)) < 400 and repr(value).count("\n") < 5, repr(value)
    assert "8 experts, top-4, 256 x 192" in repr(layer)


def test_a_called_layer_is_the_reference_and_ranks_add_up(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    moectl.convert(tiny_gpt_oss, tmp_path / "whole", "marlin")
    moectl.convert(tiny_gpt_oss, tmp_path / "ranks", "marlin", tp_size=2, ep_size=2)
    layer = moectl.load_prepared(tmp_path / "whole", 1, "torch")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 256, generator=generator).bfloat16()
    weights, ids = torch.rand(6, 8, generator=generator).softmax(-1).topk(4)
    ids = ids.int()
    y = layer(x, ids, weights).float()
    from moectl.kernels.reference import moe_reference

    expected = moe_reference(x.float(), ids, weights, layer.expert, layer.problem)
    assert (y - expected).norm() < 0.02 * expected.norm()
    shares = [moectl.load_prepared(tmp_path / "ranks", 1, "torch", rank=rank) for rank in range(4)]
    total = sum(share(x, ids, weights).float() for share in shares)
    assert (total - y).norm() < 0.02 * y.norm()
    with pytest.raises(UsageError, match="int32"):
        layer(x, ids.long(), weights)


def test_a_called_layer_is_freed_with_its_last_reference(tiny_gpt_oss: Path, tmp_path: Path) -> None:
    moectl.convert(tiny_gpt_oss, tmp_path / "out", "marlin")
    layer = moectl.load_prepared(tmp_path / "out", backend="torch")
    layer(torch.zeros(1, 256).bfloat16(), torch.tensor([[0, 1, 2, 3]]).int(), torch.ones(1, 4))
    weights = weakref.ref(layer.weights["w13"])
    gc.disable()
    try:
        del layer
        assert weights() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_type_checkers_know_the_functions(tmp_path: Path) -> None:
    file = tmp_path / "uses.py"
    file.write_text(
        "import moectl\n"
        "reveal_type(moectl.explain('a', 'h200'))\n"
        "reveal_type(moectl.bench(models=['gpt-oss-20b']))\n"
        "moectl.convert('a', 'b')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert 'is "moectl.explain.explanation.Explanation"' in done.stdout
    assert 'list[moectl.bench.bench_rows.BenchRow]"' in done.stdout
    assert 'Missing positional argument "to"' in done.stdout
