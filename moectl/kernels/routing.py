"""From router logits to expert ids and weights: the fused kernel on a GPU, the reference elsewhere."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ..problem.moe_problem import Dims, MoEProblem, Routing
from ..problem.schemes import BF16, Scheme
from . import reference
from .prepared_layer import Router

CAPABILITY = (8, 0)
"""The lowest compute capability that the kernel runs on."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits that it takes."""


def route(
    logits: Tensor,
    problem: MoEProblem,
    correction_bias: Tensor | None = None,
    *,
    expert_scale: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expert ids ``[tokens, top_k]`` int32 and their weights ``[tokens, top_k]`` fp32.

    What `reference.route` defines, with its arguments and errors: ids agree with it exactly, weights to
    1e-6 of them. On a GPU it is one launch of a fused kernel that never waits for the GPU and can be
    captured in a CUDA graph; logits of fp64, a GPU below compute capability 8.0 and a machine without
    triton take the reference. Under torch.compile it is one operator.
    """
    tensors = (logits, correction_bias, expert_scale, table, token_ids)
    if torch.compiler.is_compiling():
        r = problem.routing
        has = (r.correction_bias, r.expert_scale, r.hashed)
        how = (r.scoring, r.renormalize, r.after_topk, r.groups, r.topk_groups, r.scale)
        ids, weights = _route_op(*tensors, problem.top_k, *has, *how)
        return ids, weights
    return _route(problem, *tensors)


def _route(
    problem: MoEProblem,
    logits: Tensor,
    correction_bias: Tensor | None,
    expert_scale: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if not _has_kernel(logits):
        return reference.route(
            logits,
            problem,
            correction_bias,
            expert_scale=expert_scale,
            table=table,
            token_ids=token_ids,
        )
    from .triton import router

    reference.check_routing(logits, problem, correction_bias, expert_scale, table, token_ids)
    return router.route(logits, problem, correction_bias, expert_scale, table, token_ids)


@torch.library.custom_op(
    "moectl::route",
    mutates_args=(),
    schema="(Tensor logits, Tensor? correction_bias, Tensor? expert_scale, Tensor? table, Tensor? token_ids, "
    "SymInt top_k, bool biased, bool scaled, bool hashed, str scoring, bool renormalize, bool after_topk, "
    "SymInt? groups, SymInt? topk_groups, float scale) -> (Tensor, Tensor)",
)
def _route_op(
    logits: Tensor,
    correction_bias: Tensor | None,
    expert_scale: Tensor | None,
    table: Tensor | None,
    token_ids: Tensor | None,
    top_k: int,
    biased: bool,
    scaled: bool,
    hashed: bool,
    scoring: str,
    renormalize: bool,
    after_topk: bool,
    groups: int | None,
    topk_groups: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`route` as an operator, opaque to torch.compile: of a problem it takes what routing asks of it."""
    routing = Routing(
        scoring,
        renormalize,
        after_topk,
        biased,
        groups=groups,
        topk_groups=topk_groups,
        scale=scale,
        hashed=hashed,
        expert_scale=scaled,
    )
    problem = MoEProblem(Dims(1, 1), logits.shape[1], top_k, Scheme(BF16), routing=routing)
    return _route(problem, logits, correction_bias, expert_scale, table, token_ids)


@_route_op.register_fake
def _routed(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    top_k = others[4]
    ids = torch.empty((len(logits), top_k), dtype=torch.int32, device=logits.device)
    return ids, torch.empty_like(ids, dtype=torch.float32)


def route_by(
    router: Router, x: Tensor, problem: MoEProblem, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, weights and logits of tokens `x` ``[tokens, hidden]`` by a layer's router; see `route`.

    `token_ids` ``[tokens]`` are needed by a router that looks experts up.
    """
    logits = router.logits(x)
    ids, weights = route(
        logits,
        problem,
        router.correction_bias,
        expert_scale=router.expert_scale,
        table=router.table,
        token_ids=None if router.table is None else token_ids,
    )
    return ids, weights, logits


def _has_kernel(logits: Tensor) -> bool:
    return (
        logits.is_cuda
        and logits.dtype in KERNEL_DTYPES
        and torch.cuda.get_device_capability(logits.device) >= CAPABILITY
        and _has_triton()
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
