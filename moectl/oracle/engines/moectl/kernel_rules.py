"""Capabilities derived from what kernels support, and rules for external kernels."""

from collections.abc import Iterable

from ....capabilities.kernel_support import KernelSupport, WeightSupport
from ...backend import ANY, BackendRule, FormatSupport, NameSet, SupportQuery, only
from ...format_keys import act_key, exact_key
from ...gpu_archs import Archs, sm


def archs_of(support: KernelSupport) -> Archs:
    """The devices that the kernels run on."""
    low, high = (10 * major + minor for major, minor in (support.lowest, support.highest or (0, 0)))
    return (sm(low, high),)


def formats_of(support: KernelSupport) -> tuple[FormatSupport, ...]:
    """The weight formats by the activations that they are computed with: 16-bit ones first, any last."""
    rows = [row for row in support.weights if not row.any_act]
    any_act = _keys(row for row in support.weights if row.any_act)
    groups = dict.fromkeys((row.acts, row.lowest) for row in rows)
    return (
        *(
            FormatSupport(
                _keys(row for row in rows if (row.acts, row.lowest) == (acts, lowest)),
                only(*map(act_key, acts)),
                None if lowest is None else (sm(10 * lowest[0] + lowest[1]),),
            )
            for acts, lowest in groups
        ),
        *((FormatSupport(any_act, NameSet()),) if any_act else ()),
    )


def _keys(rows: Iterable[WeightSupport]) -> frozenset[str]:
    """Keys of the formats of `rows`."""
    return frozenset(exact_key(form) for row in rows for form in row.formats)


def scales_of(support: KernelSupport) -> NameSet:
    """The supported dtypes of scales; formats that are defined with scales of one dtype bring it."""
    if support.scales is None:
        return ANY
    defined = {form.number.byte_scale for form in support.formats} - {""}
    own = ("F32",) if any(row.own_scales for row in support.weights) else ()
    return only(*support.scales, *defined, *own)


def scales_by_weights(support: KernelSupport) -> BackendRule:
    """A rule for the dtype of scales, of kernels whose layouts convert those of some formats."""

    def holds(ask: SupportQuery) -> bool:
        scheme = ask.problem.scheme
        weight, stored = scheme.weight, scheme.weight.scale_dtype
        row = support.row_for(scheme) or support.row(weight.name)
        own = row is not None and (row.own_scales or stored == weight.number.byte_scale)
        return own or support.scales is None or not stored or stored in support.scales

    return BackendRule(
        question="scale dtype by weights",
        group="scheme",
        code="other",
        holds=holds,
        wanted=lambda ask: f"{ask.problem.scheme.weight.scale_dtype}, {ask.problem.scheme.weight}",
        offered=f"{', '.join(sorted(support.scales or ()))} for formats that are not FP8",
    )


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
