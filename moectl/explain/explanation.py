"""The decision for every layer group of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, Origin
from ..environment import Device, Packages
from ..errors import NoBackend, UsageError
from ..files.records import to_json
from ..oracle.decision import Decision
from ..oracle.policy import Policy
from ..oracle.registry import engine_named, policy_named
from ..oracle.select import decide
from ..oracle.selection_inputs import SelectionInputs
from ..problem.layer_ranges import layers_of
from ..problem.model_shape import ModelShape
from ..problem.moe_problem import Dims, MoEProblem, Parallel
from ..problem.other_weights import OtherWeights
from .answer_rows import answer_row
from .assumptions import assume
from .deployment import StepTimes, WeightMemory, memory_of, roofline_of
from .fallback import Fallback, fallback_of
from .measured_evidence import EvidenceLookup, MeasuredEvidence, nothing
from .predicted_time import predicted_of
from .problem_facts import facts, source_of
from .rank_memory import RankMemory, rank_memory

ASSUMED = "assumed"
"""The source of a property that the user stated."""


@dataclass(frozen=True)
class OtherAnswer:
    """Another policy's answer for the same layers: its decision, or why it has no route for them."""

    policy: str
    decision: Decision | None
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "policy": self.policy,
            "decision": self.decision.to_json() if self.decision else None,
            "refusal": self.refusal or None,
        }


@dataclass(frozen=True)
class GroupExplanation:
    """Layers with one decision; `problem` is one rank's share, as the policy slices experts.

    `sources`, `notes` and `details` are those of the checkpoint's layer group; `others`: the answers of
    further policies; `evidence`: measurements of the layer on the device.
    """

    layers: tuple[int, ...]
    problem: MoEProblem
    decision: Decision
    memory: WeightMemory
    roofline: StepTimes
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    others: tuple[OtherAnswer, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)
    evidence: MeasuredEvidence = field(default_factory=MeasuredEvidence)

    def __repr__(self) -> str:
        return f"{layers_of(self.layers)}: {self.decision}"

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts about the layers, in words."""
        return facts(self.problem, self.details)

    @property
    def fallback(self) -> Fallback | None:
        """Why the choice is a fallback, or None."""
        return fallback_of(self.decision, policy_named(self.decision.inputs.policy))

    def to_json(self) -> dict[str, Any]:
        """Plain data: the facts with their sources, the memory, the decision."""
        return {
            "layers": list(self.layers),
            "facts": [
                {"fact": fact, "value": value, "source": source_of(fact, self.sources)}
                for fact, value in self.facts.items()
            ],
            "sources": dict(self.sources),
            "details": dict(self.details),
            "notes": list(self.notes),
            "memory": self.memory.to_json(len(self.layers)),
            "roofline": self.roofline.to_json(),
            "fallback": self.fallback.kind if self.fallback else None,
            "decision": self.decision.to_json(),
            "others": [other.to_json() for other in self.others],
            "measured": self.evidence.to_json(),
            "predicted": to_json(predicted_of(self.decision)),
        }


def stages_of(groups: Iterable[GroupExplanation]) -> tuple[range, ...]:
    """The layers of each pipeline stage, as the engine divides them; a single one without parallelism.

    If the config does not tell the number of layers, the last MoE layer is taken for the last.
    Raises UsageError for more stages than layers.
    """
    groups = tuple(groups)
    if not groups:
        return ()
    inputs = groups[0].decision.inputs
    layers = max(inputs.model.layers, 1 + max(layer for group in groups for layer in group.layers))
    engine = engine_named(inputs.policy)
    sizes = engine.stages(layers, inputs.problem.parallel.pp, inputs.packages.env)
    return tuple(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))


def largest_stage(groups: Iterable[GroupExplanation]) -> tuple[tuple[int, GroupExplanation], ...]:
    """The pipeline stage with the most bytes of expert weights: its number of layers of each group."""

    def size(stage: tuple[tuple[int, GroupExplanation], ...]) -> int:
        return sum(count * group.memory.padded for count, group in stage)

    groups = tuple(groups)
    stages = [
        tuple((sum(layer in stage for layer in group.layers), group) for group in groups)
        for stage in stages_of(groups)
    ]
    return max(stages, key=size, default=())


def stage_bytes(groups: Iterable[GroupExplanation]) -> int:
    """Bytes of the padded expert weights on one rank of the pipeline stage that has the most."""
    return sum(count * group.memory.padded for count, group in largest_stage(groups))


def memory_with(
    groups: Sequence[GroupExplanation], others: OtherWeights | None, policy: str, device: Device
) -> RankMemory:
    """Memory of one GPU with all layer groups of a model and its other weights."""
    layers = tuple((count, group.decision) for count, group in largest_stage(groups))
    stage = max(map(len, stages_of(groups)), default=0)
    return rank_memory(layers, others, stage, device, engine_named(policy).memory_share)


@dataclass(frozen=True)
class Explanation:
    """Every layer group of a checkpoint under one policy on one device.

    `other_weights`: the model's weights that are no routed experts, None if they are not known.
    """

    origin: Origin
    device: Device
    packages: Packages
    parallel: Parallel
    policy: str
    groups: tuple[GroupExplanation, ...]
    other_weights: OtherWeights | None = None

    @property
    def memory(self) -> RankMemory:
        """Memory of one GPU: experts, other weights, and what remains at the engine's default."""
        return memory_with(self.groups, self.other_weights, self.policy, self.device)

    def __repr__(self) -> str:
        dp = f" DP {self.parallel.dp}" if self.parallel.dp > 1 else ""
        ranks = f"TP {self.parallel.tp}{dp}{' EP' if self.parallel.ep else ''}"
        head = f"Explanation({self.origin.name} on {self.device.name}, {ranks}, {self.policy})"
        return "\n".join([head, *(f"  {group}" for group in self.groups)])

    @property
    def usable(self) -> bool:
        """True when every layer group has a working backend."""
        return all(group.decision.usable for group in self.groups)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all layers' expert weights on one rank, as padded.

        With pipeline parallelism, of the layers of the stage that has the most.
        """
        return stage_bytes(self.groups)

    @property
    def loading_bytes(self) -> int:
        """Peak bytes during load-time repacking: all layers as padded, and the largest temporary copies."""
        return self.expert_bytes + max((group.memory.repacking for group in self.groups), default=0)

    @property
    def fits(self) -> bool | None:
        """False when the known weights exceed the memory that the engine uses; None if that is unknown."""
        return self.memory.fits

    def to_json(self, gpu: str = "") -> dict[str, Any]:
        """The document of ``moectl explain --json``, enough to repeat every decision.

        `gpu` is the device's name as requested.
        """
        memory, requested = self.memory, [group.decision.inputs.requested for group in self.groups]
        return {
            "checkpoints": [checkpoint_json(self.origin, self.other_weights)],
            "policy": self.policy,
            "requested": requested[0] if requested else None,
            "usable": self.usable,
            "errors": [],
            "rows": [
                answer_row(self.origin.name, gpu, group.decision.inputs, group.layers, group, "", memory)
                for group in self.groups
            ],
            "device": to_json(self.device),
            "packages": {"versions": dict(self.packages.versions), "env": dict(self.packages.env)},
            "parallel": to_json(self.parallel),
            "stages": [[stage[0], stage[-1]] if stage else [] for stage in stages_of(self.groups)],
            "expert_bytes": self.expert_bytes,
            "loading_bytes": self.loading_bytes,
            "fits": self.fits,
            "memory": memory.to_json(),
            "groups": [group.to_json() for group in self.groups],
        }


def checkpoint_json(origin: Origin, others: OtherWeights | None) -> dict[str, Any]:
    """Where a checkpoint was found, and its weights that are no routed experts."""
    return {
        "name": origin.name,
        "source": origin.kind,
        "revision": origin.revision,
        "path": str(origin.path) if origin.path else None,
        "note": origin.note,
        "other_weights": to_json(others),
    }


def explained(
    layers: tuple[int, ...],
    inputs: SelectionInputs,
    sources: Mapping[str, str],
    notes: tuple[str, ...] = (),
    others: Sequence[Policy] = (),
    details: Mapping[str, str] = MappingProxyType({}),
    evidence: MeasuredEvidence | None = None,
) -> GroupExplanation:
    """The decision for `inputs` with memory and roofline times, and the automatic choices of `others`."""
    decision = decide(inputs)
    dims = decision.problem.dims
    share = replace(inputs.problem, dims=Dims(dims.hidden, dims.intermediate))
    return GroupExplanation(
        layers,
        share,
        decision,
        memory_of(decision),
        roofline_of(replace(share, scheme=decision.held.scheme), inputs.device),
        sources,
        notes,
        tuple(_other(inputs, policy) for policy in others),
        details,
        evidence or MeasuredEvidence(inputs.measured),
    )


def _other(inputs: SelectionInputs, policy: Policy) -> OtherAnswer:
    automatic = replace(inputs, policy=policy.name, requested=None, allow_fallback=False)
    try:
        return OtherAnswer(policy.name, decide(automatic))
    except NoBackend as error:
        return OtherAnswer(policy.name, None, error.what)


@dataclass(frozen=True)
class Question:
    """What to explain for every layer group: a policy, a deployment, and the engine's options.

    `known` returns measurements of a rank's share on a device, for policies that use them.
    """

    policy: Policy
    parallel: Parallel = field(default_factory=Parallel)
    backend: str | None = None
    allow_fallback: bool = False
    assumptions: Mapping[str, str] = field(default_factory=dict)
    others: tuple[Policy, ...] = ()
    known: EvidenceLookup = nothing

    def inputs(
        self, problem: MoEProblem, device: Device, packages: Packages, model: ModelShape
    ) -> SelectionInputs:
        """The selection inputs for one rank's share of a layer group's `problem`, assumptions applied.

        `model` has the sizes outside the experts.

        Raises UsageError when the experts or the layers cannot be distributed as `parallel` requires.
        """
        if model.layers:
            engine_named(self.policy.name).stages(model.layers, self.parallel.pp, packages.env)
        share = assume(problem, self.assumptions).on(self.parallel)
        measured = self.known(device, share, packages).measured
        return SelectionInputs(
            share, device, packages, self.policy.name, self.backend, self.allow_fallback, measured, model
        )


def with_expert_parallel(explanation: Explanation, ep: bool) -> Explanation | None:
    """`explanation` of the same ranks with or without expert parallelism; None if they cannot be used so.

    The evidence and the answers of other policies are left out.
    """
    parallel = replace(explanation.parallel, ep=ep, eplb=explanation.parallel.eplb and ep)
    groups = []
    for group in explanation.groups:
        inputs = group.decision.inputs
        try:
            moved = replace(inputs, problem=inputs.problem.on(parallel))
            groups.append(explained(group.layers, moved, group.sources, group.notes, details=group.details))
        except (UsageError, NoBackend):
            return None
    return replace(explanation, parallel=parallel, groups=tuple(groups))


def explain(checkpoint: Checkpoint, device: Device, packages: Packages, question: Question) -> Explanation:
    """The decision for every layer group of `checkpoint`.

    Raises UsageError when the experts cannot be sharded as requested, OutOfScope when the policy has no
    route for a group's format or for the platform.

    Example:
        >>> from moectl.checkpoint import open_checkpoint
        >>> from moectl.environment import find_device
        >>> from moectl.oracle import packages_from, policy_named
        >>> checkpoint = open_checkpoint("openai/gpt-oss-20b", offline=True)
        >>> question = Question(policy_named("moectl"))
        >>> answer = explain(checkpoint, find_device("h200"), packages_from("full"), question)
        >>> [group.decision.chosen.backend.name for group in answer.groups]
        ['moectl']
    """
    groups = []
    for group in checkpoint.groups:
        inputs = question.inputs(group.problem, device, packages, checkpoint.model)
        sources = {**group.sources, **dict.fromkeys(question.assumptions, ASSUMED)}
        evidence = question.known(device, inputs.problem, packages)
        groups.append(
            explained(group.layers, inputs, sources, group.notes, question.others, group.details, evidence)
        )
    return Explanation(
        checkpoint.origin,
        device,
        packages,
        question.parallel,
        question.policy.name,
        tuple(groups),
        checkpoint.other_weights,
    )
