"""Capabilities derived from what kernels support, and rules for external kernels."""

from ....capabilities.kernel_support import KernelSupport
from ...backend import ANY, BackendRule, FormatSupport, NameSet, SupportQuery, only
from ...format_keys import exact_key
from ...gpu_archs import Archs, sm


def archs_of(support: KernelSupport) -> Archs:
    """The devices that the kernels run on."""
    low, high = (10 * major + minor for major, minor in (support.lowest, support.highest or (0, 0)))
    return (sm(low, high),)


def formats_of(support: KernelSupport) -> tuple[FormatSupport, ...]:
    """The weight formats: those with 16-bit activations only, then those with any activations."""
    wide, any_act = (
        frozenset(exact_key(form) for row in support.weights if row.any_act == flag for form in row.formats)
        for flag in (False, True)
    )
    return (
        *((FormatSupport(wide),) if wide else ()),
        *((FormatSupport(any_act, NameSet()),) if any_act else ()),
    )


def scales_of(support: KernelSupport) -> NameSet:
    """The supported dtypes of scales."""
    return ANY if support.scales is None else only(*support.scales)


def model_dtype(support: KernelSupport) -> BackendRule:
    """A rule for the model's dtype, of kernels that support fp16 only with integers."""

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
    """True when scales of integers have the model's dtype; those of other formats are converted."""
    weight = ask.problem.scheme.weight
    model_dtype = {"bf16": "BF16", "fp16": "F16"}.get(ask.problem.dtype)
    return not weight.name.startswith("int") or weight.scale_dtype in ("", model_dtype)


SCALE_DTYPE = BackendRule(
    question="scale dtype by weights",
    group="scheme",
    code="other",
    holds=_scale_dtype,
    wanted=lambda ask: f"{ask.problem.scheme.weight.scale_dtype}, {ask.problem.dtype} model",
    offered="the model's dtype for integers",
)
_WEIGHT_ON_OUTPUT = BackendRule(
    question="router's weight",
    group="scheme",
    code="other",
    holds=lambda ask: not ask.problem.routing.weight_on_input,
    wanted=lambda ask: "on the input" if ask.problem.routing.weight_on_input else "at the end",
    offered="at the end",
)


def weighting(support: KernelSupport) -> tuple[BackendRule, ...]:
    """A rule for where router weights are applied, of kernels that apply them only to the output."""
    return () if support.weight_on_input else (_WEIGHT_ON_OUTPUT,)
