"""How fast slices are written into a live layer, beside plain copies, and the memory that takes."""

from __future__ import annotations

import gc
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
        batches: into how many batches they were divided.
        seconds: the shortest time of several, with all work done.
        host: until the calls returned, the shortest likewise.
        kernels: the sum of the GPU's kernels, copies and fills, without gaps between them; 0 on a CPU.
        copy: the shortest time of copying as many bytes from tensors to tensors of the same sizes.
        scratch: most bytes that were allocated meanwhile.
        expert: bytes of one expert; `role`: of its gate's and up's codes.
    """

    layout: str
    what: str
    written: int
    batches: int
    seconds: float
    host: float
    kernels: float
    copy: float
    scratch: int
    expert: int
    role: int

    def __str__(self) -> str:
        mine, plain = (self.written / seconds / 1e9 for seconds in (self.seconds, self.copy))
        kernels = ""
        if self.kernels:
            kernels = f", kernels {self.kernels * 1e6:.0f} us ({self.copy / self.kernels:.2f} of copies)"
        return (
            f"{self.layout}, {self.what}: {mine:.3g} GB/s, plain copies {plain:.3g} ({mine / plain:.2f}); "
            f"{self.seconds * 1e6:.0f} us{kernels}, host {self.host / self.batches * 1e6:.0f} us a batch; "
            f"scratch memory of {self.scratch / self.expert:.2f} experts"
        )


def rates(
    device: torch.device, layouts: list[str], experts: int, hidden: int, inter: int, times: int = 5
) -> Iterator[RefitRate]:
    """The rates of layers with `experts` experts of these sizes on `device`, each measured `times` times."""
    for name in layouts:
        layout = layout_named(name)
        problem = problem_for(layout, layout.weights[0], "concatenated", hidden, inter, experts)
        dims = Dims(hidden, inter)
        problem = MoEProblem(dims, experts, 2, problem.scheme, problem.activation, bias=problem.bias)
        whole = numbers(problem, 0)
        # The torch backend keeps numbers of its own, which it makes anew.
        backend = "moectl" if device.type == "cuda" and layout.name in OWN_LAYOUTS else "torch"
        live = live_layer(layout, problem, RankShard(), whole, device, backend)
        new = {role: t.to(device) for role, t in whole.items()}
        expert = sum(t.nbytes for t in whole.values()) // experts
        update = refit(live)
        for what, batches, parts, call in calls(update, new, inter, experts):
            other = [t.clone() for t in parts]
            copy, _ = seconds_of(lambda o=other, p=parts: copied(o, p), device, times)
            (took, host), written = seconds_of(call, device, times), sum(t.nbytes for t in other)
            kernels, role = kernel_seconds_of(call, device), new["w13"].nbytes // experts
            scratch = scratch_of(call, device)
            yield RefitRate(name, what, written, batches, took, host, kernels, copy, scratch, expert, role)


def calls(
    update: LayerRefit, new: dict[str, Tensor], inter: int, experts: int
) -> Iterator[tuple[str, int, list[Tensor], Callable[[], object]]]:
    """What is measured: its name, number of batches, numbers, and the call that writes them."""
    every = list(new.values())
    yield "whole layer", 1, every, lambda: whole_layer(update, new)
    yield "expert by expert", experts, every, lambda: by_expert(update, new, experts)
    gates = new["w13"][:, :inter].contiguous()
    yield "gate alone", 1, [gates], lambda: update.update("w13", gates, rows=(0, inter))
    row = new["w2"][1, 3].contiguous()
    yield "a row", 1, [row], lambda: update.update("w2", row[None], experts=1, rows=3)
    if "w2_scale" in new and new["w2_scale"][0].numel() > 1:
        scale = new["w2_scale"][1, :1, :1].contiguous()
        yield "a scale", 1, [scale], lambda: update.update("w2_scale", scale, experts=1, rows=0, columns=0)
    if "w2_bias" in new:
        bias = new["w2_bias"][1, :1].contiguous()
        yield "a bias", 1, [bias], lambda: update.update("w2_bias", bias, experts=1, rows=0)


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


def seconds_of(call: Callable[[], object], device: torch.device, times: int) -> tuple[float, float]:
    """The shortest time of `times` calls after a first one, and the shortest until they return."""
    done = returned = float("inf")
    for number in range(times + 1):
        begin = time.perf_counter()
        call()
        after = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            done, returned = min(done, time.perf_counter() - begin), min(returned, after - begin)
    return done, returned


def kernel_seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """How long the GPU's kernels, copies and fills of a call take together; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize(device)
    return sum(float(row.self_device_time_total) for row in recorded.key_averages()) / 1e6


def scratch_of(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes that torch has allocated on `device` during a call, beyond those before it.

    Python's garbage is collected before and not meanwhile: tensors of others that are freed during the call
    would be taken off.
    """
    gc.collect()
    gc.disable()
    try:
        return bytes_allocated(call, device)
    finally:
        gc.enable()


def bytes_allocated(call: Callable[[], object], device: torch.device) -> int:
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
