"""What is read from the source of a release: names by kind, deprecations, required versions, spans."""

from devtools.recording.names import DEPRECATED, release_names, required_versions, spans, tuned_files

ENVS = """
environment_variables: dict[str, Callable[[], Any]] = {
    "VLLM_A": lambda: os.getenv("VLLM_A", "0"),
    "VLLM_OLD": deprecated_env("VLLM_OLD", "v9", "Use VLLM_A.", lambda: None),
}
"""
KERNEL = 'MoEBackend = Literal["auto", "triton"]\n'


def test_names_are_keys_and_literals() -> None:
    found = release_names({"vllm/envs.py": ENVS, "vllm/config/kernel.py": KERNEL})
    assert found["variables"] == {"VLLM_A", "VLLM_OLD"}
    assert found["moe_backend"] == {"auto", "triton"} and found["all2all_backend"] == frozenset()
    assert "VLLM_OLD" in found[DEPRECATED] and "VLLM_A" not in found[DEPRECATED]


def test_spans_end_where_a_name_is_missing_and_begin_again() -> None:
    by_release = {"1": frozenset("ab"), "2": frozenset("b"), "3": frozenset("abc")}
    assert spans(by_release) == {"a": [["1", "2"], ["3", ""]], "b": [["1", ""]], "c": [["3", ""]]}


def test_required_versions_are_those_of_known_packages() -> None:
    metadata = """Name: vllm
Requires-Dist: flashinfer-python==0.7.2.post1
Requires-Dist: humming-kernels[cu13]==0.1.19
Requires-Dist: torch==2.14.0
"""
    assert required_versions(metadata) == {"flashinfer-python": "0.7.2", "humming-kernels": "0.1.19"}


def test_tuned_files_are_those_of_their_folder() -> None:
    folder = "vllm/model_executor/layers/fused_moe/configs"
    members = [f"{folder}/E=8,N=1,device_name=X.json", f"{folder}/README", "vllm/E=8,N=2,device_name=X.json"]
    assert tuned_files(members) == {"E=8,N=1,device_name=X.json"}
