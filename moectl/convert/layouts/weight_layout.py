"""A weight layout: how one family of backends wants expert weights in memory."""

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


@dataclass(frozen=True)
class LayoutOptions:
    """What a user allows: `requantize` weights whose scales the layout cannot hold; they do not come back."""

    requantize: bool = False


Build = Callable[[MoEProblem, Shapes, LayoutOptions], Mapping[str, StoredOutput]]
"""From a padded problem and its canonical roles to the stored tensors, padding included."""


def by_role(steps: Callable[[MoEProblem, str], tuple[Step, ...]]) -> Build:
    """A layout that stores every canonical role as one tensor of that name, moved by `steps`.

    Numbers that stand for an expert, and scales of activations, have no place in it.
    """

    def build(problem: MoEProblem, shapes: Shapes, options: LayoutOptions) -> Mapping[str, StoredOutput]:
        rows = [role for role in shapes if not role.endswith(("_global", "_input"))]
        return {role: StoredOutput(role, chain=Chain(steps(problem, role))) for role in rows}

    return build


@dataclass(frozen=True)
class WeightLayout:
    """One layout: its stored tensors follow from the problem. `moectl.problem.layouts` says who reads it.

    Attributes:
        name: unique, as in manifests, `moectl.problem.layouts` and `moectl.problem.padding`.
        version: raised when stored bytes change.
        weights: the formats it holds.
        build: from a padded problem and its canonical roles to the stored tensors, padding included.
        logical_dtypes: what stored bytes are, for roles whose storage dtype does not say it, in
            safetensors spellings: ``F4`` (two E2M1 codes to a byte), ``F8_E8M0``, ``F8_E4M3``.
        scale_dtypes: storage dtypes of scales that its kernels read.
        bias: True when it has a place for biases.
        ungated: True when it holds experts of one matrix before the activation.
        options: what the user allows.
    """

    name: str
    version: int
    weights: tuple[WeightFormat, ...]
    build: Build = field(repr=False)
    logical_dtypes: Mapping[str, str] = field(default_factory=dict)
    scale_dtypes: tuple[str, ...] = ("U8", "BF16", "F16")
    bias: bool = True
    ungated: bool = True
    options: LayoutOptions = LayoutOptions()

    @property
    def target(self) -> str:
        """What a user asks for; the scheme, and where needed the architecture, then decide."""
        return LAYOUTS[self.name].target

    @property
    def verified(self) -> bool:
        """False when no recorded conversion of its engine has confirmed it."""
        return LAYOUTS[self.name].verified

    @property
    def acts(self) -> tuple[str, ...]:
        """Names of the activation formats that its kernels take with it."""
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
        """What sizes are rounded up to for gated experts of `weight`."""
        return padding(self.name, weight)

    def pad(self, problem: MoEProblem) -> MoEProblem:
        """`problem` with the padded sizes of this layout."""
        return pad(self.name, problem)

    def requantizing(self) -> WeightLayout:
        """This layout with leave to quantize weights again where it cannot hold their scales."""
        return replace(self, options=LayoutOptions(requantize=True))

    def recipe(self, problem: MoEProblem, shapes: Shapes | None = None) -> Recipe:
        """How a layer of `problem`, whose padded sizes `pad` has already set, is stored.

        `shapes` has the canonical roles that there are, for all experts; by default those that the
        problem asks for. Raises NoBackend with the first reason why this layout cannot hold the problem.
        """
        for reason in self.refusals(problem):
            raise NoBackend(
                f"layout {self.name} cannot hold this layer: {reason}.",
                hint="Choose another --to; `moectl list layouts` has them all.",
            )
        known = canonical_shapes(problem, problem.local_experts) if shapes is None else shapes
        made = Recipe(known, self.build(problem, known, self.options))
        made.check()
        return made

    def chains(self, problem: MoEProblem) -> dict[str, Chain]:
        """The chain of every stored tensor of `problem`, where nothing but chains makes them.

        Errors as of `recipe`; NoBackend, too, where numbers change on the way.
        """
        made = self.recipe(problem)
        changed = [name for name, output in made.outputs.items() if output.values or output.role != name]
        if changed or made.kept:
            raise NoBackend(
                f"layout {self.name} stores {', '.join([*changed, *made.kept])} in other numbers."
            )
        return {name: output.chain for name, output in made.outputs.items()}

    def refusals(self, problem: MoEProblem) -> Iterator[str]:
        """Every reason why this layout cannot hold `problem`."""
        weight, dims = problem.scheme.weight, problem.dims
        if weight not in self.weights:
            yield f"it holds {'; '.join(map(str, self.weights))}, got {weight}"
            return
        if not problem.activation.gated and not self.ungated:
            yield "it holds gate and up rows, and these experts are not gated"
        if problem.rows not in (INTERLEAVED, CONCATENATED):
            yield f"rows must be {INTERLEAVED} or {CONCATENATED}, got {problem.rows!r}"
        if problem.act_order == "group":
            yield "weights permuted by group (act order) have no place in it"
        if problem.bias and not self.bias:
            yield "it has no place for biases"
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
