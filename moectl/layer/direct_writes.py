"""Batches of whole experts that lie on the layer's GPU as its checkpoint has them: a pass for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..convert.canonical import byte_scales
from ..convert.codecs import magnitude_bits
from ..convert.onepass.compose import compose
from ..convert.onepass.cuda_pass import Start, starter
from ..convert.onepass.executors import load
from ..convert.onepass.guard import Guard, NumberCheck
from ..convert.recipe.recipe import StoredOutput
from ..kernels.prepared_layer import PreparedMoE
from ..kernels.runner import Runner
from ..torch_dtypes import TORCH_DTYPES
from .live_roles import LiveRoles
from .slice_writes import SliceWrite

DEVICES = ("cuda",)
"""Kinds of torch devices on which passes are started one after the other without waiting."""

LEAST_CHECKS = 16
"""Tensors that a guard has room for, or more where a batch has more."""


@dataclass(frozen=True)
class _Job:
    """What writing some experts of a role takes.

    Attributes:
        role: the canonical role.
        first, last: experts of the write's data that are this rank's, the last exclusive.
        target: the live tensor of these experts.
        start: launches the pass; None for a plain copy.
        checked: whether new numbers are examined.
    """

    role: str
    first: int
    last: int
    target: Tensor
    start: Start | None
    checked: bool


class DirectWrites:
    """Writes batches to a layer that need nothing of what it was.

    Scales are examined by kernels that run before the passes, which write nothing if one is refused: the host
    waits once, after it has queued all work.
    """

    def __init__(
        self, roles: LiveRoles, runner: Runner, holders: Callable[[], Sequence[PreparedMoE]]
    ) -> None:
        self._roles, self._runner, self._holders = roles, runner, holders
        self._live = roles.live
        self._jobs: dict[tuple[str, int, int, int], _Job | None] = {}
        self._guard: Guard | None = None

    @cached_property
    def _never(self) -> Tensor:
        """What passes ask for that nothing can refuse."""
        return torch.zeros(1, dtype=torch.int32, device=self._live.device)

    @cached_property
    def _outputs(self) -> Mapping[str, tuple[str, StoredOutput]]:
        """The name and recipe of the one tensor that follows from a role alone, byte by byte."""
        recipe, problem = self._roles.recipe, self._live.problem
        if self._live.device.type not in DEVICES or self._roles.shares.sliced or self._runner.keeps:
            return {}
        if load("cuda")[0] is None:
            return {}
        apart = {s.role for s in recipe.statistics} | {*recipe.kept, *recipe.lossy}
        readers: dict[str, list[str]] = {}
        for name, output in recipe.outputs.items():
            for role in output.reads:
                readers.setdefault(role, []).append(name)
        found = {}
        for role, names in readers.items():
            output = recipe.outputs[names[0]]
            plain = len(names) == 1 and not output.values and not output.per_layer and role not in apart
            known = not self._runner.judges(problem, role) or role in self._bits
            if plain and known:
                found[role] = names[0], output
        return found

    @cached_property
    def _bits(self) -> Mapping[str, tuple[int, int, int]]:
        """`magnitude_bits` of roles that are scales of a kind that is examined here."""
        kind, types = byte_scales(self._live.problem), self._roles.source.whole_types
        every = {
            r: magnitude_bits(TORCH_DTYPES[t.dtype], kind) for r, t in types.items() if r.endswith("_scale")
        }
        return {role: bits for role, bits in every.items() if bits is not None}

    @torch.inference_mode()
    def write(self, writes: Sequence[SliceWrite]) -> bool:
        """Whether all of `writes` was written; False, with nothing changed, if that takes another way.

        So it does if a scale is refused: the reason is found there.
        """
        jobs = []
        for write in writes:
            data = write.data
            if not write.direct or data.device != self._live.device or not data.is_contiguous():
                return False
            key = write.role, write.first, write.last, data.data_ptr() % 16
            if key not in self._jobs:
                self._jobs[key] = self._job(write)
            job = self._jobs[key]
            if job is None:
                return False
            jobs.append((job, data[job.first : job.last] if len(data) > job.last - job.first else data))
        if self._overlap([job for job, _ in jobs]):
            return False
        if self._live.device.type == "cuda":
            with torch.cuda.device(self._live.device):
                return self._written(jobs)
        return self._written(jobs)

    def _written(self, jobs: Sequence[tuple[_Job, Tensor]]) -> bool:
        examined = [(job.role, source) for job, source in jobs if job.checked]
        holders = self._holders() if examined else ()
        guard = self._examine(examined, holders) if examined else None
        copies = []
        for job, source in jobs:
            if job.start is None:
                copies.append((job.target, source))
            else:
                job.start(source, job.target, self._never if guard is None else guard.refused)
        if guard is not None:
            guard.read()
            bounds = guard.wait()
            if bounds is None:
                return False
            self._runner.refit_found(holders, self._exponents([role for role, _ in examined], bounds))
        for target, source in copies:
            target.copy_(source.view(target.dtype).view(target.shape))
        return True

    def _examine(self, scales: Sequence[tuple[str, Tensor]], holders: Sequence[PreparedMoE]) -> Guard:
        if self._guard is not None and self._guard.most < len(scales):
            self._guard.close()
            self._guard = None
        if self._guard is None:
            self._guard = Guard(self._live.device, max(LEAST_CHECKS, len(scales)))
        checks = {}
        for role in dict.fromkeys(role for role, _ in scales):
            mask, stop, shift = self._bits[role]
            needed = self._runner.refit_exponents(holders, role)
            checks[role] = NumberCheck(mask, needed.start << shift, min(stop, needed.stop << shift))
        self._guard.examine([(t, checks[role]) for role, t in scales])
        return self._guard

    def _exponents(
        self, roles: Sequence[str], bounds: Sequence[tuple[int, int]]
    ) -> dict[str, tuple[int, int]]:
        """The least and the largest exponent of each of `roles`, from bounds of their bits."""
        found: dict[str, tuple[int, int]] = {}
        for role, some in zip(roles, bounds, strict=True):
            if some[0] <= some[1]:
                low, high = (number >> self._bits[role][2] for number in some)
                before = found.get(role, (low, high))
                found[role] = min(low, before[0]), max(high, before[1])
        return found

    def _job(self, write: SliceWrite) -> _Job | None:
        """How the experts of `write`, and of others like it, are written; None if not by a pass."""
        if write.role not in self._outputs:
            return None
        source, live = self._roles.source, self._live
        name, output = self._outputs[write.role]
        begin = source.first_expert
        low, high = max(write.first, begin), min(write.last, begin + live.problem.local_experts)
        dtype, shape = source.whole_types[write.role]
        span = low - write.first, high - write.first
        target = live.weights[name][low - begin : high - begin]
        if write.plain(shape, TORCH_DTYPES[dtype]) is None or not target.is_contiguous():
            return None
        start = None
        if output.chain.steps:
            program = compose(output.chain.steps, self._roles.recipe.shapes[write.role].with_first_axis(1))
            start = None if program is None else starter(program, write.data[slice(*span)], target)
            if start is None:
                return None
            # Compiled now, by a pass that writes nothing: later one may fail only before any has begun.
            with torch.cuda.device(target.device) if target.is_cuda else nullcontext():
                start(write.data[slice(*span)], target, torch.ones_like(self._never))
        checked = self._runner.judges(live.problem, write.role)
        return _Job(write.role, *span, target, start, checked)

    @staticmethod
    def _overlap(jobs: Sequence[_Job]) -> bool:
        """Whether one tensor is written twice."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for job in jobs:
            begin = job.target.data_ptr()
            spans.setdefault(job.role, []).append((begin, begin + job.target.nbytes))
        return any(
            b[0] < a[1] for every in spans.values() if len(every) > 1 for a, b in pairwise(sorted(every))
        )
