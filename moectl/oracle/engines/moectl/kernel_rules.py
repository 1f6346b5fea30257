"""Parts of records that are made of what kernels compute, and questions to other projects' kernels."""

from ....capabilities.kernel_support import KernelSupport
from ...backend import ANY, BackendRule, FormatSupport, NameSet, SupportQuery, only
from ...format_keys import exact_key
from ...gpu_archs import Archs, sm


def archs_of(support: KernelSupport) -> Archs:
    """The devices that the kernels run on."""
    low, high = (10 * major + minor for major, minor in (support.lowest, support.highest or (0, 0)))
    return (sm(low, high),)


def offers_of(support: KernelSupport) -> tuple[FormatSupport, ...]:
    """The weight formats, with 16-bit activations alone before those with any."""
    rows = {any_act: [row for row in support.weights if row.any_act == any_act] for any_act in (False, True)}
    keys = {act: frozenset(exact_key(it) for row in some for it in row.formats) for act, some in rows.items()}
    exact, any_act = (FormatSupport(keys[False]),), (FormatSupport(keys[True], NameSet()),)
    return (*(exact if keys[False] else ()), *(any_act if keys[True] else ()))


def scales_of(support: KernelSupport) -> NameSet:
    """The dtypes of scales that are read."""
    return ANY if support.scales is None else only(*support.scales)


def model_dtype(support: KernelSupport) -> BackendRule:
    """The model's dtype, of kernels that take fp16 with integers alone."""

    def holds(ask: SupportQuery) -> bool:
        row = support.row(ask.problem.scheme.weight.name)
        return ask.dtype in (row.dtypes if row else ("bf16",))

    return BackendRule(
        question="model dtype by weights",
        group="scheme",
        code="other",
        holds=holds,
        wanted=lambda ask: f"{ask.dtype}, {ask.problem.scheme.weight}",
        offered="bf16, and fp16 for integers",
    )


def _scale_dtype(ask: SupportQuery) -> bool:
    """True when scales of integers are of the model's dtype; those of other formats are made anew."""
    weight = ask.problem.scheme.weight
    model = {"bf16": "BF16", "fp16": "F16"}.get(ask.problem.dtype)
    return not weight.name.startswith("int") or weight.scale_dtype in ("", model)


SCALE_DTYPE = BackendRule(
    question="scale dtype by weights",
    group="scheme",
    code="other",
    holds=_scale_dtype,
    wanted=lambda ask: f"{ask.problem.scheme.weight.scale_dtype}, {ask.problem.dtype} model",
    offered="the model's dtype for integers",
)
_WEIGHT_AT_THE_END = BackendRule(
    question="router's weight",
    group="scheme",
    code="other",
    holds=lambda ask: not ask.problem.routing.weight_on_input,
    wanted=lambda ask: "on the input" if ask.problem.routing.weight_on_input else "at the end",
    offered="at the end",
)


def weighting(support: KernelSupport) -> tuple[BackendRule, ...]:
    """Where the router's weight multiplies, of kernels that do so at the end alone."""
    return () if support.weight_on_input else (_WEIGHT_AT_THE_END,)
