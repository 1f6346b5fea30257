"""moectl's experts in SGLang, as a plug-in of the entry-point group ``sglang.srt.plugins``.

SGLang calls `register` in every process before it reads its command line. What a release of SGLang asks of a
quantization method is in one adapter for a range of releases (`ADAPTERS`).
"""

import re
from importlib import import_module

from ...errors import NoBackend

METHOD = "moectl"

ADAPTERS = {"0.5.23": "v0_5_23"}
"""Modules of adapters, by the first three numbers of SGLang's version."""


def register() -> None:
    """Make ``--quantization moectl`` known to SGLang, with the adapter for its release.

    With a release that has no adapter, SGLang starts as ever, and refuses in one sentence to serve with it.
    """
    from sglang.srt.arg_groups.choices import add_quantization_method_choices
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.version import __version__ as release

    found = re.match(r"\d+\.\d+\.\d+", release)
    name = ADAPTERS.get(found[0]) if found else None
    method = import_module(f".{name}.registration", __name__).registered() if name else _refusing(release)
    # SGLang asks methods in this order who claims a checkpoint.
    others = dict(QUANTIZATION_METHODS)
    QUANTIZATION_METHODS.clear()
    QUANTIZATION_METHODS.update({METHOD: method, **others})
    add_quantization_method_choices([METHOD])


def _refusing(release: str) -> type:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

    def refuse(*args: object, **kwargs: object) -> None:
        known = " and ".join(ADAPTERS)
        raise NoBackend(
            f"moectl has no adapter for SGLang {release}, only for {known}",
            hint="use one of these releases of SGLang, or serve without moectl",
        )

    return type("RefusingQuantization", (QuantizationConfig,), {"__init__": refuse, "from_config": refuse})
