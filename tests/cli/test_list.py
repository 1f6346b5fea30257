"""`moectl list`: names of models and GPUs."""

import importlib
import io

import pytest
from rich.console import Console

from moectl.checkpoint.source.catalogue import SHORT_NAMES, built_in, model_names
from moectl.checkpoint.source.named_layers import declared_layer, named_layer
from moectl.cli.output import Output
from moectl.cli.text_blocks import Table
from moectl.environment.named_devices import find_device, gpu_names
from support.invoking import moectl
from support.sampling import every_nth

list_command = importlib.import_module("moectl.cli.list")


def test_models():
    document = moectl("list", "models", "--json").document
    assert [row["name"] for row in document["models"]] == list(model_names())
    assert {row["experts"] for row in document["models"]} >= {8, 384, 896}
    assert "60 models" in moectl("list", "models").words


def test_words_narrow_the_list():
    named = [name for name in model_names() if "DeepSeek" in name and "NVFP4" in name]
    assert moectl("list", "models", "deepseek", "NVFP4", "-q").stdout.split() == [
        "nvidia/DeepSeek-R1-0528-FP4",
        *named,
    ]
    assert moectl("list", "models", "no such model").words == "0 models"
    assert moectl("list", "gpus", "sm103", "-q").stdout.split() == ["b300", "gb300"]


def test_every_listed_gpu_is_found_by_every_name():
    rows = moectl("list", "gpus", "--json").document["gpus"]
    assert [row["name"] for row in rows] == list(gpu_names())
    for row in rows:
        assert find_device(row["name"]).arch == row["arch"]
        assert all(find_device(spelling).platform == row["platform"] for spelling in row["spellings"])
    assert "TB/s" in moectl("list", "gpus", "h200").words


def test_what_cannot_be_listed():
    assert "models" in moectl("list", "layers", code=2).stderr


def test_variables_are_listed_with_what_replaced_them():
    document = moectl("list", "variables", "--json").document
    rows = {row["name"]: row for row in document["variables"]}
    assert rows["VLLM_USE_DEEP_GEMM"]["default"] == "1"
    assert rows["VLLM_MXFP4_USE_MARLIN"]["instead"] == "--moe-backend marlin"
    removed = moectl("list", "variables", "removed", "-q").stdout.split()
    assert removed == [name for name, row in rows.items() if row["status"] == "removed"]


VLLM = {
    *("moectl-mtile64", "moectl-bf16", "moectl-fp8", "moectl-int8", "moectl-int4"),
    *("marlin-mxfp4", "marlin-int4", "marlin-int8"),
    *("triton-hopper", "triton-blackwell", "cutlass-sm90", "trtllm-mxfp4"),
    *("humming-int4", "humming-int4-e0m3", "humming-int8", "humming-int8-e0m7"),
    *(f"humming-{name}{of}" for name in ("mxfp4", "nvfp4", "fp8", "mxfp8") for of in ("", "-sm100")),
    "humming-nvfp4-rows",
}
"""Layouts whose directories vLLM loads."""


def test_formats_and_layouts_name_only_who_loads_them():
    rows = moectl("list", "formats", "--json").document["formats"]
    gpt_oss = {(row["name"], row["container"]) for row in rows if not row["not_for"]}
    assert gpt_oss == {("mxfp4", "native"), ("bf16", "native")}
    for row in moectl("list", "layouts", "--json").document["layouts"]:
        own = "; SGLang 0.5.23 with moectl[sglang]" if row["name"].startswith("moectl-") else ""
        served = f"; vLLM 0.33 with moectl[vllm]{own}" if row["name"] in VLLM else ""
        library = "; transformers moectl.integrations.transformers"
        assert row["loaded_by"] == f"moectl run, bench, load_prepared{library}{served}" and row["kernels"]
    assert "--json says who loads a directory" in moectl("list", "layouts", "marlin-int4").words


def test_backends_have_the_names_that_request_them():
    from moectl.oracle.registry import newest_engines

    rows = moectl("list", "backends", "--json").document["backends"]
    for engine in newest_engines():
        names = {row["name"] for row in rows if row["engine"] == engine.name}
        assert names == {backend.name for backend in engine.policy.backends()}
        assert names & set(engine.policy.request_names())
    marlin = next(row for row in rows if (row["name"], row["engine"]) == ("marlin", "vllm-0.33.0"))
    assert (marlin["kernels"], "MarlinExperts" in marlin["experts"]) == ("Marlin", True)
    assert {row["name"] for row in moectl("list", "backends", "deepgemm", "--json").document["backends"]} >= {
        "deep_gemm",
        "batched_deep_gemm",
    }


def on_terminal(topic, width, monkeypatch):
    """The lines that a terminal of this width shows."""
    stream = io.StringIO()
    console = Console(file=stream, width=width)

    def table(*columns, **others):
        return Table(columns, **others)

    with monkeypatch.context() as patch:
        patch.setattr(list_command, "table", table)
        patch.setattr(Output, "draw", lambda self, draw: draw(console))
        moectl("list", topic)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("topic", [topic.value for topic in list_command.ListTopic])
@pytest.mark.parametrize("width", [80, 120])
def test_no_word_is_broken_at_usual_widths(topic, width, monkeypatch):
    lines = on_terminal(topic, width, monkeypatch)
    assert max(map(len, lines)) <= width
    shown = set(" ".join(lines).split())
    assert {row["name"] for row in moectl("list", topic, "--json").document[topic]} <= shown
    assert lines[0].startswith("name  ")


def test_models_have_short_names_formats_and_parameters(monkeypatch):
    rows = {row["name"]: row for row in moectl("list", "models", "--json").document["models"]}
    kimi = rows["moonshotai/Kimi-K2-Thinking"]
    assert (kimi["short_name"], kimi["format"], kimi["top_k"]) == ("kimi-k2", "int4 group 32", 8)
    assert kimi["params"] == 3 * 7168 * 2048 * 384 * 60
    assert rows["nvidia/DeepSeek-R1-0528-FP4"]["format"] == "nvfp4 group 16"
    assert {row["short_name"] for row in rows.values()} - {None} == set(SHORT_NAMES)
    words = moectl("list", "models", "kimi-k2").words
    assert "moonshotai/Kimi-K2-Thinking (kimi-k2) | int4 group 32 | 1.01T" in words
    assert moectl("list", "models", "nvfp4", "-q").stdout.count("\n") > 10


@pytest.mark.parametrize("name", every_nth(model_names(), 8))
def test_the_listed_format_is_that_of_the_layers(name):
    problem, listed = named_layer(name)[1], declared_layer(built_in(name))
    assert (listed.scheme.weight, listed.dims) == (problem.scheme.weight, problem.dims)
    assert (listed.experts, listed.top_k) == (problem.experts, problem.top_k)


def test_removed_variables_say_what_replaced_them():
    words = moectl("list", "variables", "MXFP4_USE_MARLIN").words
    assert "removed (Marlin for MXFP4 experts): use --moe-backend marlin" in words
    assert "0 or 1" not in words


def test_a_platform_covers_its_architectures():
    rows = moectl("list", "backends", "--json").document["backends"]
    triton = next(row for row in rows if (row["name"], row["engine"]) == ("triton", "vllm-0.33.0"))
    assert triton["archs"] == "cuda, rocm, xpu"
    own = {row["name"]: row["kernels"] for row in rows if row["engine"] == "moectl"}
    assert own["humming"] == "Humming" and own["moectl"] == "own Triton kernels"
