"""Weight layouts: the arrangement of expert weights in memory that a family of backends reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...errors import NoBackend
from ...problem.layouts import LAYOUTS, LayoutReader
from ...problem.moe_problem import Align, MoEProblem
from ...problem.padding import pad, padding, size_rule
from ...problem.schemes import WeightFormat
from ..canonical import CONCATENATED, INTERLEAVED, canonical_shapes, scale_dtype
from ..recipe.chain import Chain
from ..recipe.recipe import Recipe, StoredOutput
from ..steps.transforms import Step
from ..steps.value_steps import Shapes

Build = Callable[[MoEProblem, Shapes, bool], Mapping[str, StoredOutput]]
"""From a padded problem, its canonical roles, and whether requantization is allowed, to the stored tensors,
including their padding."""


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def by_role(steps: Callable[[MoEProblem, str], tuple[Step, ...]]) -> Build:
    """A layout that stores every canonical role as one tensor of the same name, rearranged by `steps`.

    It has no global scales and no activation scales.
    """

    def build(problem: MoEProblem, shapes: Shapes, requantize: bool) -> Mapping[str, StoredOutput]:
        rows = [role for role in shapes if not role.endswith(("_global", "_input"))]
        return {role: StoredOutput(role, chain=Chain(steps(problem, role))) for role in rows}

    return build


@dataclass(frozen=True)
class WeightLayout:
    """One layout, which determines the stored tensors of a problem. `moectl.problem.layouts` has its readers.

    Attributes:
        name: unique, as in manifests, `moectl.problem.layouts` and `moectl.problem.padding`.
        version: incremented when stored bytes change.
        weights: the supported weight formats.
        build: the stored tensors of a padded problem.
        logical_dtypes: the format of stored bytes, for roles whose storage dtype does not imply it, in
            safetensors spellings: ``F4`` (two E2M1 codes per byte), ``F8_E8M0``, ``F8_E4M3``.
        scale_dtypes: storage dtypes of scales that its kernels read.
        bias: True when biases are supported.
        ungated: True when experts with a single matrix before the activation are supported.
        requantize: True when weights whose scales the layout cannot hold may be quantized again (lossy).
    """

    name: str
    version: int
    weights: tuple[WeightFormat, ...]
    build: Build = field(repr=False)
    logical_dtypes: Mapping[str, str] = field(default_factory=dict)
    scale_dtypes: tuple[str, ...] = ("U8", "BF16", "F16")
    bias: bool = True
    ungated: bool = True
    requantize: bool = False

    @property
    def target(self) -> str:
        """The target that users name; the scheme, and if needed the architecture, select the layout."""
        return LAYOUTS[self.name].target

    @property
    def verified(self) -> bool:
        """True when recorded conversions of its engine confirm it."""
        return LAYOUTS[self.name].verified

    @property
    def acts(self) -> tuple[str, ...]:
        """Names of the activation formats that its kernels support with it."""
        return LAYOUTS[self.name].acts

    @property
    def archs(self) -> tuple[str, ...]:
        """Device architectures whose kernels read it."""
        return LAYOUTS[self.name].archs

    @property
    def readers(self) -> tuple[LayoutReader, ...]:
        """Engines and their backends that read it."""
        return LAYOUTS[self.name].readers

    def align(self, weight: WeightFormat) -> Align:
        """The units that sizes are rounded up to for gated experts of `weight`."""
        return padding(self.name, weight)

    def pad(self, problem: MoEProblem) -> MoEProblem:
        """`problem` with the padded sizes of this layout."""
        return pad(self.name, problem)

    def requantizing(self) -> WeightLayout:
        """This layout with permission to quantize weights again if it cannot hold their scales."""
        return replace(self, requantize=True)

    def recipe(self, problem: MoEProblem, shapes: Shapes | None = None) -> Recipe:
        """The recipe for a layer of `problem`, whose padded sizes are those of `pad`.

        `shapes` has the layer's canonical roles, for all experts; by default those of the problem.
        Raises NoBackend with the first reason why this layout does not support the problem.

        Example:
            >>> from moectl.convert.layouts.registry import layout_named
            >>> from moectl.problem.moe_problem import Dims, MoEProblem
            >>> from moectl.problem.schemes import MXFP4, Scheme
            >>> layout = layout_named("marlin-mxfp4")
            >>> problem = layout.pad(MoEProblem(Dims(256, 128), 4, 2, Scheme(MXFP4)))
            >>> for role, (dtype, shape) in layout.recipe(problem).stored.items():
            ...     print(role, dtype, shape)
            w13 I32 (4, 16, 512)
            w13_scale U8 (4, 8, 256)
            w2 I32 (4, 8, 512)
            w2_scale U8 (4, 4, 256)
        """
        for reason in self.refusals(problem):
            raise NoBackend(
                f"layout {self.name} cannot hold this layer: {reason}.",
                hint="Choose another --to; `moectl list layouts` has them all.",
            )
        roles = canonical_shapes(problem, problem.local_experts) if shapes is None else shapes
        recipe = Recipe(roles, self.build(problem, roles, self.requantize))
        recipe.check()
        return recipe

    def chains(self, problem: MoEProblem) -> dict[str, Chain]:
        """The chain of every stored tensor of `problem`, for layouts that only rearrange tensors.

        Raises NoBackend as `recipe` does, and if the layout changes numbers.
        """
        recipe = self.recipe(problem)
        changed = [name for name, output in recipe.outputs.items() if output.values or output.role != name]
        if changed or recipe.kept:
            raise NoBackend(
                f"layout {self.name} stores {', '.join([*changed, *recipe.kept])} in other numbers."
            )
        return {name: output.chain for name, output in recipe.outputs.items()}

    def refusals(self, problem: MoEProblem) -> Iterator[str]:
        """Every reason why this layout does not support `problem`."""
        weight, dims = problem.scheme.weight, problem.dims
        if weight not in self.weights:
            yield f"it holds {'; '.join(map(str, self.weights))}, got {weight}"
            return
        if not problem.activation.gated and not self.ungated:
            yield "it holds gate and up rows, and these experts are not gated"
        if problem.rows not in (INTERLEAVED, CONCATENATED):
            yield f"rows must be {INTERLEAVED} or {CONCATENATED}, got {problem.rows!r}"
        if problem.act_order == "group":
            yield "weights permuted by group (act order) are not supported"
        if problem.bias and not self.bias:
            yield "expert biases are not supported"
        if weight.block != (0, 0) and scale_dtype(problem) not in self.scale_dtypes:
            yield f"its kernels read {' or '.join(self.scale_dtypes)} scales, got {scale_dtype(problem)}"
        rule = size_rule(self.name, weight, problem.activation.gated, dims.hidden)
        for name in ("hidden", "intermediate"):
            size, need = getattr(dims, name), getattr(rule.needs, name)
            full, unit = getattr(dims, f"padded_{name}"), getattr(rule.align, name)
            if size % need:
                yield f"its {name} size must be a multiple of {need}, got {size}"
            if full < size or full % unit:
                yield f"its {name} size {size} is to be padded to a multiple of {unit}, got {full}"
