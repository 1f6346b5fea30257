"""What ranks do together, against one rank that has everything: cases that every rank runs.

A rank judges its own tokens and gives a sentence for what is wrong, empty when all is well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moectl.checkpoint import open_checkpoint
from moectl.convert.rank_slice import RankShard, RankSlice
from moectl.environment import Device, Packages
from moectl.environment.named_devices import find_device
from moectl.errors import NoBackend, UsageError
from moectl.kernels.layer_inputs import LayerInputs, make_inputs
from moectl.kernels.modular.exchange import GatheringExchange, ReplicatedExchange
from moectl.kernels.modular.fused_moe_kernel import FusedMoEKernel, map_of
from moectl.kernels.prepared_layer import DenseExpert, PreparedMoE
from moectl.kernels.quantize_tokens import dequantize, quantize
from moectl.kernels.reference import moe_reference
from moectl.kernels.registry import RUNNERS
from moectl.kernels.runner import ActivationFormat, Runner
from moectl.kernels.tolerance import Tolerance, check, tolerance_for
from moectl.layer.build_kernel import build_kernel
from moectl.layer.experts import ExpertLayer
from moectl.layer.prepare import checkpoint_layer, load_prepared
from moectl.oracle.decision import Decision
from moectl.oracle.registry import policy_named
from moectl.oracle.select import select
from moectl.problem.moe_problem import Dims, MoEProblem, Parallel
from support.fake_runners import FP8, MONOLITHIC, MXFP8, NVFP4, TORCH, UNWEIGHED
from support.random_layers import GPT_OSS, KIMI, QWEN, canonical_roles, layer_of, skipping
from support.runners import entry_of

FP8_BOUND = Tolerance(0.4, 0.06, "E4M3 rounds tokens by 2.6e-2 RMS, gate and up both: 3.7e-2, and weights")

UNEVEN, EMPTY, NOBODY = (5, 1, 0, 3), (0, 4, 0, 0), (0, 0, 0, 0)
"""Tokens of each rank."""


def decision_for(problem: MoEProblem, parallel: Parallel, device: Device | None = None) -> Decision:
    """What the tool's own policy decides for a deployment, on a CPU unless told otherwise."""
    where = device or find_device("cpu")
    return select(problem.on(parallel), where, Packages({}), policy_named("moectl"))


@dataclass(frozen=True)
class World:
    """One rank's view of a layer that all ranks share."""

    rank: int
    size: int
    folder: Path

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def share(self, problem: MoEProblem, tp: bool = False) -> tuple[ExpertLayer, PreparedMoE]:
        """The whole layer, and this rank's part: its experts, or with `tp` its slice of each."""
        whole = canonical_roles(problem)
        shard = RankShard(self.size, self.rank) if tp else RankShard(1, 0, self.size, self.rank)
        share = RankSlice(problem, shard)
        first, last = share.experts
        roles = share.slice({role: t[first:last] for role, t in whole.items()})
        part = replace(layer_of(share.problem, roles), rank_slice=share)
        return layer_of(problem, whole), part.prepared("torch", "cpu")

    def inputs(
        self, problem: MoEProblem, tokens: Sequence[int], distribution: str = "uniform"
    ) -> LayerInputs:
        """This rank's inputs, other ones on every rank."""
        return make_inputs(problem, tokens[self.rank], seed=self.rank + 1, distribution=distribution)


def wrong(
    layer: ExpertLayer,
    y: Tensor,
    inputs: LayerInputs,
    bound: Tolerance | None = None,
    added: Tensor | None = None,
) -> str:
    """What is wrong with `y`; empty when it is the layer's output, and `added`."""
    expected = moe_reference(inputs.x, inputs.ids, inputs.weights, layer.reference, layer.problem)
    if y.shape != inputs.x.shape:
        return f"shape {list(y.shape)}"
    result = check(y, expected if added is None else expected + added, bound or tolerance_for(layer.problem))
    return "" if result.ok else f"max {result.max:.2e} rms {result.rms:.2e}"


@dataclass(frozen=True)
class Spread:
    """A case of ranks with tokens of their own, each with some experts.

    Attributes:
        tokens: of each rank.
        most: bound on tokens that the kernel is built with.
        skewed: all tokens go to experts of the first rank.
        skipped: some assignments are of no expert.
    """

    runner: Runner = TORCH
    form: ActivationFormat = ActivationFormat.STANDARD
    problem: MoEProblem = KIMI
    tokens: Sequence[int] = UNEVEN
    most: int | None = None
    skewed: bool = False
    skipped: bool = False

    def __call__(self, world: World) -> str:
        problem = replace(self.problem, top_k=1 if self.skewed else self.problem.top_k)
        layer, prepared = world.share(problem)
        inputs = world.inputs(problem, self.tokens)
        if self.skewed:
            logits = inputs.logits.clone()
            logits[:, :1] += 1000
            inputs = replace(inputs, logits=logits, ids=torch.zeros_like(inputs.ids))
        if self.skipped:
            inputs = skipping(inputs, 3)
        exchange = GatheringExchange(world.group, self.most)
        kernel = FusedMoEKernel(prepared, self.runner, self.form, exchange, expert_map=map_of(prepared))
        bias = torch.zeros(problem.experts) if problem.routing.correction_bias else None
        y = kernel.run(inputs, bias if kernel.monolithic else None)
        return wrong(layer, y, inputs)


@dataclass(frozen=True)
class QuantizedSpread:
    """Tokens quantized before they travel: exact against rounded tokens, and near those that were not."""

    runner: Runner
    bound: Tolerance
    form: ActivationFormat = ActivationFormat.STANDARD
    most: int | None = None

    def __call__(self, world: World) -> str:
        layer, prepared = world.share(QWEN)
        inputs = world.inputs(QWEN, UNEVEN)
        exchange = GatheringExchange(world.group, self.most)
        kernel = FusedMoEKernel(prepared, self.runner, self.form, exchange, expert_map=map_of(prepared))
        y = kernel.run(inputs)
        if not len(inputs.x):
            return wrong(layer, y, inputs)
        seen = dequantize(quantize(inputs.x, self.runner.wants_of(QWEN))).to(inputs.x.dtype)
        exact = wrong(layer, y, replace(inputs, x=seen))
        near = wrong(layer, y, inputs, self.bound)
        return f"{exact and f'rounded tokens: {exact}'} {near and f'tokens: {near}'}".strip()


def built(world: World) -> str:
    """`build_kernel` of a decision for all ranks, shared experts on top, summed in fp32."""
    problem = replace(GPT_OSS, shared_experts=1)
    layer, prepared = world.share(problem)
    inputs = world.inputs(problem, UNEVEN)
    decision = decision_for(problem, Parallel(dp=world.size, ep=True))
    kernel = build_kernel(
        decision,
        prepared,
        group=world.group,
        shared=lambda x: 2 * x,
        most_tokens=6,
        dtype=torch.float32,
    )
    y = kernel.apply(inputs.x, inputs.ids, inputs.weights)
    if y.dtype != torch.float32 or not isinstance(kernel.exchange, GatheringExchange):
        return f"{y.dtype} through {kernel.exchange.name}"
    return wrong(layer, y, inputs, added=2 * inputs.x.float())


def sliced(world: World) -> str:
    """Data-parallel ranks that slice every expert; a dense shared expert that each has whole."""
    problem = replace(KIMI, dims=Dims(192, 128), shared_experts=1)
    layer, prepared = world.share(problem, tp=True)
    inputs = world.inputs(problem, UNEVEN)
    decision = decision_for(problem, Parallel(dp=world.size))
    dense = layer.reference(3)
    kernel = build_kernel(decision, prepared, group=world.group, shared=dense)
    y = kernel.apply(inputs.x, inputs.ids, inputs.weights)
    ids = torch.zeros(len(inputs.x), 1, dtype=torch.int32)
    alone: Callable[[int], DenseExpert] = lambda expert: dense  # noqa: E731
    added = moe_reference(inputs.x, ids, torch.ones(len(inputs.x), 1), alone, problem)
    return wrong(layer, y, inputs, added=added)


def replicated(world: World) -> str:
    """Tensor-parallel ranks with the same tokens, whole experts or slices: outputs are summed."""
    problem, found = replace(KIMI, dims=Dims(192, 128)), []
    for parallel in (Parallel(tp=world.size), Parallel(tp=world.size, ep=True)):
        layer, prepared = world.share(problem, tp=not parallel.ep)
        inputs = make_inputs(problem, 5, seed=1)
        kernel = build_kernel(decision_for(problem, parallel), prepared, group=world.group)
        if not isinstance(kernel.exchange, ReplicatedExchange):
            return f"exchanged through {kernel.exchange.name}"
        found.append(wrong(layer, kernel.apply(inputs.x, inputs.ids, inputs.weights), inputs))
    return "; ".join(filter(None, found))


def converted(world: World) -> str:
    """Folders that `moectl convert` has written for all ranks, against the checkpoint."""
    layer = checkpoint_layer(open_checkpoint(world.folder / "checkpoint"))
    prepared = load_prepared(world.folder / "converted", backend="torch", rank=world.rank)
    inputs = world.inputs(layer.problem, UNEVEN)
    decision = decision_for(prepared.problem, Parallel(dp=world.size, ep=True))
    kernel = build_kernel(decision, prepared, group=world.group)
    return wrong(layer, kernel.apply(inputs.x, inputs.ids, inputs.weights), inputs)


def converted_nvfp4(world: World) -> str:
    """NVFP4 experts with input scales of their own: ranks quantize tokens by the largest of the layer."""
    layer = checkpoint_layer(open_checkpoint(world.folder / "nvfp4"))
    largest = layer.canonical(range(layer.problem.experts))["w13_input"].max()
    plain = RUNNERS["torch"]
    RUNNERS["torch"] = entry_of(NVFP4)
    try:
        prepared = load_prepared(world.folder / "nvfp4-converted", backend="torch", rank=world.rank)
        scale = prepared.weights["w13_input"].flatten()
        prepared = replace(prepared, weights={**prepared.weights, "w13_input": scale[:1]})
        inputs = world.inputs(layer.problem, UNEVEN)
        decision = decision_for(prepared.problem, Parallel(dp=world.size, ep=True))
        try:
            kernel = build_kernel(decision, prepared, group=world.group)
        except NoBackend as error:
            return str(error)
        if not torch.equal(scale, largest.expand_as(scale)):
            return f"scales of inputs are {scale.tolist()}, the layer's largest is {largest:g}"
        seen = dequantize(quantize(inputs.x, NVFP4.wants_of(QWEN), scale[:1]), scale[:1]).to(inputs.x.dtype)
        return wrong(layer, kernel.run(inputs), replace(inputs, x=seen))
    finally:
        RUNNERS["torch"] = plain


def refused(world: World) -> str:
    """Every rank is told before anything travels; the group goes on to work."""
    _, prepared = world.share(KIMI)
    decision = decision_for(KIMI, Parallel(dp=world.size, ep=True))
    other = replace(prepared, first_expert=prepared.first_expert + 1)
    ranks = f"rank {world.rank} of {world.size} computes experts"
    wanted = {
        ranks: lambda: build_kernel(decision, other, group=world.group),
        "process group has 1": lambda: build_kernel(decision, prepared),
        "a rank may have 4 tokens, this one got 5": lambda: build_kernel(
            decision, prepared, group=world.group, most_tokens=4
        ).run(make_inputs(KIMI, 5)),
    }
    for says, call in wanted.items():
        try:
            call()
        except UsageError as error:
            if says not in str(error):
                return f"{says!r} is not in {error}"
        else:
            return f"nothing was raised for {says!r}"
    return ""


def scales_of_inputs(world: World) -> str:
    """Tokens that were quantized by a rank's own scale are read by the others': all must have one."""
    decision, plain = decision_for(QWEN, Parallel(dp=world.size, ep=True)), RUNNERS["torch"]
    layer, prepared = world.share(QWEN)
    RUNNERS["torch"] = entry_of(NVFP4)
    try:
        for scale, says in ((0.01, ""), (0.01 * (1 + world.rank), "theirs are 0.01 to 0.0")):
            weights = {**prepared.weights, "w13_input": torch.tensor([scale])}
            try:
                kernel = build_kernel(decision, replace(prepared, weights=weights), group=world.group)
            except NoBackend as error:
                if not says or says not in str(error):
                    return str(error)
                continue
            if says:
                return "ranks with scales of their own were not refused"
            inputs = world.inputs(QWEN, UNEVEN)
            seen = quantize(inputs.x, NVFP4.wants_of(QWEN), weights["w13_input"])
            rounded = dequantize(seen, weights["w13_input"]).to(inputs.x.dtype)
            if told := wrong(layer, kernel.run(inputs), replace(inputs, x=rounded)):
                return told
    finally:
        RUNNERS["torch"] = plain
    return ""


CASES: dict[str, Callable[[World], str]] = {
    "uneven tokens": Spread(),
    "uneven tokens, bounded": Spread(most=7),
    "interleaved rows, biases": Spread(problem=GPT_OSS),
    "equally many tokens": Spread(tokens=(4, 4, 4, 4), most=4),
    "empty ranks": Spread(tokens=EMPTY),
    "empty ranks, bounded": Spread(tokens=EMPTY, most=4),
    "no tokens at all": Spread(tokens=NOBODY),
    "no tokens at all, bounded": Spread(tokens=NOBODY, most=3),
    "all tokens to one rank": Spread(tokens=(9, 7, 8, 3), skewed=True),
    "skipped assignments": Spread(skipped=True, tokens=(6, 2, 1, 3)),
    "batched": Spread(form=ActivationFormat.BATCHED),
    "batched, bounded, skipped": Spread(form=ActivationFormat.BATCHED, most=6, skipped=True),
    "batched, all tokens to one rank": Spread(form=ActivationFormat.BATCHED, skewed=True),
    "batched, no tokens": Spread(form=ActivationFormat.BATCHED, tokens=NOBODY, most=2),
    "weights left to finalize": Spread(UNWEIGHED, skipped=True),
    "monolithic": Spread(MONOLITHIC, ActivationFormat.MONOLITHIC),
    "monolithic, bounded, empty ranks": Spread(MONOLITHIC, ActivationFormat.MONOLITHIC, tokens=EMPTY, most=5),
    "monolithic, all tokens to one rank": Spread(MONOLITHIC, ActivationFormat.MONOLITHIC, skewed=True),
    "fp8 tokens": QuantizedSpread(FP8, FP8_BOUND),
    "fp8 tokens, batched, bounded": QuantizedSpread(FP8, FP8_BOUND, ActivationFormat.BATCHED, most=8),
    "mxfp8 tokens": QuantizedSpread(MXFP8, FP8_BOUND),
    "nvfp4 tokens in tiles": QuantizedSpread(
        NVFP4, Tolerance(1.2, 0.25, "E2M1 rounds tokens by 9.5e-2 RMS, gate and up both: 0.14, and weights")
    ),
    "nvfp4 tokens in tiles, batched": QuantizedSpread(
        NVFP4, Tolerance(1.2, 0.25, "as above"), ActivationFormat.BATCHED, most=6
    ),
    "one scale of inputs": scales_of_inputs,
    "built for all ranks": built,
    "sliced experts": sliced,
    "the same tokens": replicated,
    "converted folders": converted,
    "converted folders, nvfp4": converted_nvfp4,
    "refusals": refused,
}
"""What every rank runs, by name."""


def run_rank(rank: int, size: int, folder: str) -> None:
    """All cases on one rank; what is wrong goes into a file of its own.

    `folder` has a checkpoint, and its experts converted for `size` ranks.
    """
    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=size)
    found = {name: case(World(rank, size, place)) for name, case in CASES.items()}
    (place / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
