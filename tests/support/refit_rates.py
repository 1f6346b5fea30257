"""How fast slices are written into a live layer, beside plain copies, and the memory that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moectl.convert.layouts.registry import layout_named
from moectl.convert.rank_slice import RankShard
from moectl.layer.refit import LayerRefit, refit
from moectl.problem.layouts import OWN_LAYOUTS
from moectl.problem.moe_problem import Dims, MoEProblem
from support.layout_cases import problem_for
from support.refit_cases import live_layer, numbers


@dataclass(frozen=True)
class RefitRate:
    """What writing part of a layer took.

    Attributes:
        written: bytes of canonical numbers that were given.
        seconds: the shortest time of several.
        copy: the shortest time of copying as many bytes from tensors to tensors of the same sizes.
        scratch: most bytes that were allocated meanwhile.
        expert: bytes of one expert; `role`: of its gate's and up's codes.
    """

    layout: str
    what: str
    written: int
    seconds: float
    copy: float
    scratch: int
    expert: int
    role: int

    def __str__(self) -> str:
        rates = (self.written / seconds / 1e9 for seconds in (self.seconds, self.copy))
        mine, plain = rates
        return (
            f"{self.layout}, {self.what}: {mine:.3g} GB/s, plain copies {plain:.3g} ({mine / plain:.2f}); "
            f"scratch memory of {self.scratch / self.expert:.2f} experts"
        )


def rates(
    device: torch.device, layouts: list[str], experts: int, hidden: int, inter: int, times: int = 5
) -> Iterator[RefitRate]:
    """The rates of layers with `experts` experts of these sizes on `device`, each measured `times` times."""
    for name in layouts:
        layout = layout_named(name)
        problem = problem_for(layout, layout.weights[0], "concatenated", hidden, inter, experts)
        problem = MoEProblem(Dims(hidden, inter), experts, 2, problem.scheme, problem.activation)
        whole = numbers(problem, 0)
        # The torch backend keeps numbers of its own, which it makes anew.
        backend = "moectl" if device.type == "cuda" and layout.name in OWN_LAYOUTS else "torch"
        live = live_layer(layout, problem, RankShard(), whole, device, backend)
        new = {role: t.to(device) for role, t in whole.items()}
        halves = {"w13": new["w13"][:, :inter].contiguous()}
        expert = sum(t.nbytes for t in whole.values()) // experts
        update = refit(live)
        for what, parts, call in (
            ("whole layer", new, lambda u=update, n=new: whole_layer(u, n)),
            ("expert by expert", new, lambda u=update, n=new: by_expert(u, n, experts)),
            ("gate alone", halves, lambda u=update, h=halves["w13"]: u.update("w13", h, rows=(0, inter))),
        ):
            other = [t.clone() for t in parts.values()]
            copy = seconds_of(lambda o=other, p=parts: copied(o, list(p.values())), device, times)
            took, written = seconds_of(call, device, times), sum(t.nbytes for t in other)
            role = new["w13"].nbytes // experts
            yield RefitRate(name, what, written, took, copy, scratch_of(call, device), expert, role)


def whole_layer(update: LayerRefit, new: dict[str, Tensor]) -> None:
    with update.batch():
        for role, t in new.items():
            update.update(role, t)


def by_expert(update: LayerRefit, new: dict[str, Tensor], experts: int) -> None:
    for expert in range(experts):
        with update.batch():
            for role, t in new.items():
                update.update(role, t[expert], experts=expert)


def copied(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def seconds_of(call: Callable[[], object], device: torch.device, times: int) -> float:
    """The shortest time of `times` calls, after one that is not counted."""
    best = float("inf")
    for number in range(times + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            best = min(best, time.perf_counter() - begin)
    return best


def scratch_of(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes that torch has allocated on `device` during a call, beyond those before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    results = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = most = 0
    for event in sorted((e for e in results if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
