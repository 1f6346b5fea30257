"""`moectl list`: names of models and GPUs."""

from moectl.checkpoint.source.catalogue import model_names
from moectl.environment.named_devices import find_device, gpu_names
from support.invoking import moectl


def test_models():
    document = moectl("list", "models", "--json").document
    assert [row["name"] for row in document["models"]] == list(model_names())
    assert {row["experts"] for row in document["models"]} >= {8, 384, 896}
    assert "60 models" in moectl("list", "models").words


def test_words_narrow_the_list():
    assert moectl("list", "models", "deepseek", "NVFP4", "-q").stdout.split() == [
        name for name in model_names() if "DeepSeek" in name and "NVFP4" in name
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


def test_formats_and_layouts_name_only_who_loads_them():
    rows = moectl("list", "formats", "--json").document["formats"]
    gpt_oss = {(row["name"], row["container"]) for row in rows if not row["not_for"]}
    assert gpt_oss == {("mxfp4", "native"), ("bf16", "native")}
    for row in moectl("list", "layouts", "--json").document["layouts"]:
        assert row["loaded_by"] == "moectl run, bench, load_prepared" and row["kernels"]
    assert "loaded by" in moectl("list", "layouts", "marlin-int4").words


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
