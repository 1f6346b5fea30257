"""What the router's kernel must do, wherever it runs: in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moectl.kernels import reference
from moectl.kernels.triton import router
from moectl.problem.moe_problem import Dims, MoEProblem, Routing
from moectl.problem.schemes import BF16, Scheme

VOCABULARY = 50


def problem_of(experts: int, top_k: int, routing: Routing) -> MoEProblem:
    return MoEProblem(Dims(8, 8), experts, top_k, Scheme(BF16), routing=routing)


SIGMOID = Routing("sigmoid", correction_bias=True)

METHODS: dict[str, MoEProblem] = {
    name: problem_of(experts, top_k, routing)
    for name, experts, top_k, routing in (
        ("softmax, renormalized", 128, 8, Routing()),
        ("softmax", 60, 4, Routing(renormalize=False)),
        ("softmax after", 32, 4, Routing(after_topk=True)),
        ("softmax with a bias", 64, 6, Routing(correction_bias=True)),
        ("sigmoid", 77, 5, Routing("sigmoid")),
        ("sigmoid with a bias", 384, 8, Routing("sigmoid", correction_bias=True, scale=2.827)),
        ("grouped", 256, 8, Routing("sigmoid", correction_bias=True, groups=8, topk_groups=4, scale=2.5)),
        ("grouped, odd sizes", 45, 6, Routing("sigmoid", correction_bias=True, groups=5, topk_groups=2)),
        ("groups of one", 7, 3, Routing("sigmoid", correction_bias=True, groups=7, topk_groups=3)),
        ("grouped softmax", 160, 6, Routing(renormalize=False, groups=8, topk_groups=3, scale=16.0)),
        ("all groups", 96, 8, Routing("sigmoid", correction_bias=True, groups=4, topk_groups=4)),
        ("llama", 16, 1, Routing("sigmoid", False, after_topk=True, weight_on_input=True)),
        ("llama, biased", 16, 2, Routing("sigmoid", False, after_topk=True, correction_bias=True)),
        ("sqrtsoftplus", 256, 6, Routing("sqrtsoftplus", correction_bias=True, scale=1.5)),
        ("hashed", 256, 6, Routing("sqrtsoftplus", hashed=True, scale=1.5)),
        ("hashed softmax", 33, 3, Routing(hashed=True, renormalize=False)),
        ("hashed softmax after", 33, 3, Routing(hashed=True, after_topk=True)),
        ("factors", 128, 8, Routing(expert_scale=True)),
        ("sparsemixer", 16, 2, Routing("sparsemixer", False)),
        ("sparsemixer of more", 40, 7, Routing("sparsemixer", scale=3.0)),
        ("many experts", 1023, 22, SIGMOID),
        ("most experts", 1024, 10, Routing()),
        ("more than a warp holds", 1500, 3, SIGMOID),
        ("one expert", 1, 1, Routing()),
        ("every expert", 22, 22, Routing("sigmoid", correction_bias=True)),
    )
}

KINDS = ("random", "coarse", "equal", "large bias", "odd bias", "nan", "infinite", "wide")
"""Logits and biases: without ties, with many, all the same, and what is odd in either."""


@dataclass(frozen=True)
class Case:
    """What `route` is called with beside the problem."""

    logits: Tensor
    bias: Tensor | None
    factors: Tensor | None
    table: Tensor | None
    token_ids: Tensor | None

    def to(self, device: str) -> Case:
        tensors = (self.logits, self.bias, self.factors, self.table, self.token_ids)
        return Case(*(None if t is None else t.to(device) for t in tensors))  # type: ignore[arg-type]


def case_of(problem: MoEProblem, kind: str, tokens: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(tokens + problem.experts)
    routing, shape = problem.routing, (tokens, problem.experts)
    logits = torch.randn(shape, generator=generator) * 3
    bias = torch.randn(problem.experts, generator=generator)
    if kind == "coarse":
        logits, bias = logits.round(), bias.round() / 4
    elif kind == "equal":
        logits.zero_()
        logits[1::2] = -0.0
        bias.zero_()
    elif kind == "large bias":
        bias = 1e4 + bias / 64
    elif kind == "odd bias":
        for at, value in enumerate((float("nan"), float("inf"), -float("inf"))):
            bias[at :: 7 if problem.experts > 7 else 2] = value
    elif kind == "nan":
        logits[torch.rand(shape, generator=generator) < 0.3] = float("nan")
        logits[1::5] = float("nan")
        logits[2::5, : problem.experts // 2 + 2] = float("nan")
    elif kind == "infinite":
        drawn = torch.rand(shape, generator=generator)
        logits[drawn < 0.2], logits[drawn > 0.8] = -float("inf"), float("inf")
        logits[1::5], logits[2::5], logits[3::5, 1:] = float("inf"), -float("inf"), -float("inf")
    elif kind == "wide":
        logits *= 40
    table = torch.stack(
        [torch.randperm(problem.experts, generator=generator)[: problem.top_k] for _ in range(VOCABULARY)]
    )
    return Case(
        logits.to(dtype),
        bias if routing.correction_bias else None,
        torch.rand(problem.experts, generator=generator).bfloat16() + 0.5 if routing.expert_scale else None,
        table if routing.hashed else None,
        torch.randint(VOCABULARY, (tokens,), generator=generator) if routing.hashed else None,
    )


def expected(problem: MoEProblem, case: Case) -> tuple[Tensor, Tensor]:
    """The reference's answer, from the CPU."""
    c = case.to("cpu")
    return reference.route(
        c.logits, problem, c.bias, expert_scale=c.factors, table=c.table, token_ids=c.token_ids
    )


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """The same ids, and weights within 1e-6 of them."""
    ids, weights = (t.cpu() for t in found)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, wanted[0])
    torch.testing.assert_close(weights, wanted[1], rtol=1e-6, atol=1e-30, equal_nan=True)


def agrees(
    name: str, kind: str, tokens: int, dtype: torch.dtype, device: str, warps: int = router.WARPS
) -> None:
    """The kernel's ids are the reference's, weights too to 1e-6."""
    problem = METHODS[name]
    case = case_of(problem, kind, tokens, dtype)
    c = case.to(device)
    found = router.route(c.logits, problem, c.bias, c.factors, c.table, c.token_ids, warps=warps)
    same(found, expected(problem, case))


def leaves_out_what_is_out_of_range(device: str) -> None:
    """Of a table on a GPU, that nobody reads back: id -1 with weight 0, and no share in the sum."""
    problem = METHODS["hashed"]
    case = case_of(problem, "random", 5, torch.float32)
    assert case.table is not None and case.token_ids is not None
    table, token_ids = case.table.clone(), torch.tensor([0, -1, VOCABULARY, 1, 2])
    table[0, 1], table[1, 0], table[2] = problem.experts, -5, 1 << 40
    tensors = (case.logits, None, None, table, token_ids)
    logits, _, _, on_device, tokens = (None if t is None else t.to(device) for t in tensors)
    ids, weights = (t.cpu() for t in router.route(logits, problem, None, None, on_device, tokens))  # type: ignore[arg-type]
    assert (ids == -1).sum(1).tolist() == [1, 6, 6, 1, 6]
    assert bool((weights[ids == -1] == 0).all())
    sums = [1.5, 0, 0, 1.5, 0]
    torch.testing.assert_close(weights.sum(1), torch.tensor(sums))


def takes_rows_with_gaps(device: str) -> None:
    """Logits that are columns of a wider tensor, or turned around."""
    problem = METHODS["sigmoid with a bias"]
    case = case_of(problem, "random", 9, torch.float32)
    wanted, c = expected(problem, case), case.to(device)
    wide = torch.full((9, 500), float("nan"), device=device)
    wide[:, 16:400] = c.logits
    same(router.route(wide[:, 16:400], problem, c.bias), wanted)
    same(router.route(c.logits.T.contiguous().T, problem, c.bias), wanted)
