"""Every experts class of vLLM 0.33.0 has a name that the field uses for its kernels."""

from importlib import import_module
from pkgutil import iter_modules

from moectl.oracle.backend import Backend
from moectl.oracle.engines.vllm_0_33_0 import VLLM_0_33_0, backends
from moectl.oracle.engines.vllm_0_33_0.kernel_names import KERNEL_NAMES

CLASSES = {
    variant.experts
    for module in iter_modules(backends.__path__)
    for value in vars(import_module(f"{backends.__name__}.{module.name}")).values()
    for backend in (value if isinstance(value, tuple) else (value,))
    if isinstance(backend, Backend)
    for variant in backend.variants
}


def test_every_class_has_a_name() -> None:
    assert len(CLASSES) > 60
    assert sorted(name for name in CLASSES if not VLLM_0_33_0.kernel_name(name)) == []


def test_every_name_is_of_some_class() -> None:
    used = [next(prefix for prefix, _ in KERNEL_NAMES if name.startswith(prefix)) for name in CLASSES]
    assert [prefix for prefix, _ in KERNEL_NAMES if prefix not in used] == []


def test_classes_are_named_by_their_library() -> None:
    assert VLLM_0_33_0.kernel_name("OAITritonExperts") == "OpenAI triton_kernels"
    assert VLLM_0_33_0.kernel_name("TritonExperts") == "vLLM Triton"
    assert VLLM_0_33_0.kernel_name("SomethingElse") == ""
