"""moectl's experts in SGLang, as a plug-in of the entry-point group ``sglang.srt.plugins``.

SGLang calls `register` in every process before it reads its command line. What a release of SGLang asks of a
quantization method is in one adapter for a range of releases (`ADAPTERS`).
"""

import re
import sys
from importlib import import_module

from ...errors import UsageError
from ..engine_names import kernels_asked
from ..limits import no_adapter

METHOD = "moectl"

ADAPTERS = {"0.5.23": "v0_5_23"}
"""Modules of adapters, by the first three numbers of SGLang's version."""


def register() -> None:
    """Make ``--quantization moectl`` known to SGLang, with the adapter for its release.

    With a release that has no adapter, SGLang starts as ever, and refuses in one sentence to serve with it.

    Exits with a sentence if MOECTL_EXPERTS has a value that moectl does not know, or asks for moectl's
    experts and there is no adapter: SGLang logs a plug-in's exceptions, goes on, and would serve without.
    """
    try:
        asked = kernels_asked()
    except UsageError as error:
        sys.exit(str(error))
    from sglang.srt.arg_groups.choices import add_quantization_method_choices
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.version import __version__ as release

    found = re.match(r"\d+\.\d+\.\d+", release)
    name = ADAPTERS.get(found[0]) if found else None
    if asked and name is None:
        sys.exit(str(no_adapter("SGLang", release, ADAPTERS)))
    method = import_module(f".{name}.registration", __name__).registered() if name else _refusing(release)
    # SGLang asks methods in this order who claims a checkpoint.
    others = dict(QUANTIZATION_METHODS)
    QUANTIZATION_METHODS.clear()
    QUANTIZATION_METHODS.update({METHOD: method, **others})
    add_quantization_method_choices([METHOD])


def _refusing(release: str) -> type:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

    def refuse(*args: object, **kwargs: object) -> None:
        raise no_adapter("SGLang", release, ADAPTERS)

    return type("RefusingQuantization", (QuantizationConfig,), {"__init__": refuse, "from_config": refuse})
