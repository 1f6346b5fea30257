"""moectl's experts in vLLM, as a plug-in of the entry-point group ``vllm.general_plugins``.

vLLM calls `register` in every process, so it imports nothing but what registering needs. What a release
of vLLM asks of a quantization method is in one adapter for a range of releases (`ADAPTERS`).
"""

from importlib import import_module

from ..engine_names import kernels_asked
from ..limits import no_adapter

METHOD = "moectl"

OWN_KERNELS = "vllm"
"""The value of MOECTL_BACKEND that leaves all experts to vLLM's own kernels."""

ADAPTERS = {"0.33": "v0_33"}
"""Modules of adapters, by the first two numbers of vLLM's version."""


def register() -> None:
    """Make ``quantization="moectl"`` known to vLLM, with the adapter for its release.

    With a release that has no adapter, vLLM starts as ever, and refuses in one sentence to serve with moectl.
    What is raised here ends vLLM: UsageError if MOECTL_EXPERTS has a value that moectl does not know,
    NoBackend if it asks for moectl's experts and there is no adapter, for vLLM would serve without them.
    """
    asked = kernels_asked()
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.version import __version__ as release

    name = ADAPTERS.get(".".join(release.split(".")[:2]))
    if name is None:
        if asked:
            raise no_adapter("vLLM", release, ADAPTERS)
        register_quantization_config(METHOD)(_refusing(release))
        return
    adapter = import_module(f".{name}.quantization", __name__)
    register_quantization_config(METHOD)(adapter.MoectlQuantization)
    if asked:
        import_module(f".{name}.engine_calls", __name__).claim_unquantized()


def _refusing(release: str) -> type:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def refuse(*args: object, **kwargs: object) -> None:
        raise no_adapter("vLLM", release, ADAPTERS)

    return type("RefusingQuantization", (QuantizationConfig,), {"__init__": refuse, "from_config": refuse})
