"""`refit`: writes slices of a checkpoint into a prepared layer, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..convert.canonical import byte_scales, scale_dtype
from ..convert.codecs import check_every_scale
from ..convert.steps.value_steps import ExpertStatistic, Statistics, update_statistics
from ..convert.stream.source_reader import spans
from ..errors import NoBackend, UsageError
from ..files.safetensors_writer import nbytes
from ..kernels.modular.fused_moe_kernel import called_kernel
from ..kernels.prepared_layer import CANONICAL, PreparedMoE
from ..kernels.registry import runner_for
from .direct_writes import DirectWrites
from .experts import LayerOrigin
from .live_roles import LiveRoles, Roles, read_roles
from .renew import renew
from .slice_writes import SliceWrite, Span, slice_write

TEMPORARIES = 4
"""Copies of a role that conversion step by step may hold at once."""

MOST_FORMS = 1 << 14
"""Kinds of updates of which a `LayerRefit` knows what they change."""


def refit(layer: PreparedMoE, *, scratch: int | None = None) -> LayerRefit:
    """An object that writes new numbers into `layer`, whose tensors stay where they are.

    Make it once, before files of the layer's checkpoint change. Canonical roles that the layer's layout does
    not restore (scales that it rounds or rescales) are read from the checkpoint and kept on the CPU.

    Args:
        layer: a layer of `load_prepared` or `prepare`, or the one inside an engine.
        scratch: bytes of device memory that an update may take; if fewer than that, the bytes of one expert.
            Only layouts that quantize MXFP4 again for FP8 tokens, or store sums, take more for an expert.

    Raises:
        UsageError: the layer was not made from a checkpoint or a converted directory.
        NoBackend: its backend keeps a copy of its weights in a layout of its own.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from moectl.checkpoint import open_checkpoint
        >>> from moectl.layer.prepare import prepare
        >>> from moectl.synth import synthesize
        >>> with tempfile.TemporaryDirectory() as temporary:
        ...     small = {"layers": 1, "experts": 4, "hidden": 128, "intermediate": 128}
        ...     folder = synthesize("openai/gpt-oss-20b", Path(temporary) / "source", **small)
        ...     live = prepare(open_checkpoint(str(folder)), 0, "torch")
        >>> address, update = live.weights["w13_scale"].data_ptr(), refit(live).update
        >>> update("w13_scale", torch.full((2, 256, 4), 120, dtype=torch.uint8), experts=(1, 3))
        True
        >>> update("model.layers.0.mlp.experts.down_proj_bias", torch.ones(3, 128).bfloat16(), experts=(0, 3))
        True
        >>> live.weights["w13_scale"].data_ptr() == address, live.expert(2).w2_bias[0].item()
        (True, 1.0)
    """
    if not isinstance(layer.origin, LayerOrigin):
        raise UsageError(
            "the layer does not say how its tensors follow from a checkpoint's",
            hint="use a layer of moectl.load_prepared or moectl.layer.prepare.prepare",
        )
    if runner_for(layer.backend).keeps == "weights" and layer.layout == CANONICAL:
        raise NoBackend(
            f"the {layer.backend} backend keeps its own copy of the weights, which cannot change in place",
            hint="prepare the layer again, or for another backend",
        )
    return LayerRefit(layer, layer.origin, scratch)


class LayerRefit:
    """Writes slices of a checkpoint into one live layer; see `refit`.

    Every update either happens whole or, with an error, not at all. The result is bit for bit what converting
    the changed checkpoint gives. CUDA graphs that were captured before compute with the new numbers; the work
    is queued on the current stream, so replays on other streams have to wait for it.
    """

    def __init__(self, layer: PreparedMoE, origin: LayerOrigin, scratch: int | None) -> None:
        self._live, self._source, self._recipe = layer, origin.layer, origin.recipe
        self._runner = runner_for(layer.backend)
        self._local = layer.problem.local_experts
        self._kept = origin.kept
        self._inputs: Roles = {}
        self._pending: list[SliceWrite] | None = None
        self._roles = LiveRoles(layer, origin.layer, origin.recipe, origin.kept)
        self._shares = self._roles.shares
        each = sum(nbytes(*self._source.whole_types[role].with_first_axis(1)) for role in self._recipe.shapes)
        self._scratch = max(each, scratch or 0)
        self._load_kept()
        self._statistics = self._statistics_of(self._kept, self._inputs)
        self._direct = DirectWrites(self._roles, self._runner, self._holders)
        self._forms: dict[object, tuple[SliceWrite, bool]] = {}

    def update(
        self, name: str, t: Tensor, *, experts: Span = None, rows: Span = None, columns: Span = None
    ) -> bool:
        """Writes `t` over a slice of the tensor `name`; returns whether this rank holds any of it.

        Args:
            name: a tensor of the checkpoint, such as ``model.layers.3.mlp.experts.7.gate_proj.weight``, or
                a canonical role (``w13``, ``w13_scale``, ``w2_bias``, ...; see `moectl.convert.canonical`).
            t: the new numbers in the checkpoint's format and dtype, on any device: whole experts as one
                GPU would hold them, whatever share this rank has. Bytes may be uint8 or an 8-bit float.
            experts: number of an expert in the whole layer, or first and last (exclusive), of a tensor that
                has several; None for all of them.
            rows, columns: numbers along the first and second axis of an expert's tensor, likewise.

        Raises:
            UsageError: name, numbers or tensor do not fit the layer.
            CheckpointError: the layout cannot hold the numbers; nothing is changed.
            NoBackend: kernels that were launched before would be wrong with them; nothing is changed.
        """
        write = self._reaching(name, t, experts, rows, columns)
        if write is None:
            return False
        if self._pending is None:
            self._commit([write])
        else:
            self._pending.append(write)
        return True

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Collects updates, which must not change in the meantime, and writes them together at its end.

        That is faster, as each expert is converted once, and needed where a layout takes several tensors
        together only: the scales of gate and up where it has one for both. After an error nothing is written.
        """
        if self._pending is not None:
            raise UsageError("a batch of updates is open already", hint="leave it before the next one")
        self._pending = []
        try:
            yield
            writes = self._pending
        finally:
            self._pending = None
        self._commit(writes)

    def _reaching(self, name: str, t: Tensor, experts: Span, rows: Span, columns: Span) -> SliceWrite | None:
        """The write, or None if this rank holds none of it; what follows from all but numbers is kept."""
        spans = (tuple(span) if isinstance(span, list) else span for span in (experts, rows, columns))
        key = name, t.shape, t.dtype, *spans
        form, reaches = self._forms.get(key, (None, False))
        if form is not None:
            return form.given(t) if reaches else None
        write = slice_write(self._source, name, t, experts, rows, columns)
        if write is None:
            return None
        reaches = write.role in self._inputs or self._roles.reaches(write)
        if len(self._forms) >= MOST_FORMS:
            self._forms.clear()
        self._forms[key] = write.form, reaches
        return write if reaches else None

    def _load_kept(self) -> None:
        source, recipe = self._source, self._recipe
        of_layer = {s.role for s in recipe.statistics if s.of_layer}
        kept = dict.fromkeys((*recipe.kept, *(s.role for s in recipe.statistics)))
        step = max(1, self._scratch // max(1, source.problem.expert_bytes()))
        if kept and not self._kept:
            self._kept.update(read_roles(source.canonical, kept, self._local, step))
        if of_layer and source.whole is not None:
            self._inputs = read_roles(source.whole.canonical, of_layer, source.whole_experts, step)

    def _statistics_of(self, kept: Roles, inputs: Roles) -> Statistics:
        """The statistics of the layer; `inputs` has those roles of which all ranks' experts count."""
        found: dict[ExpertStatistic, Tensor] = {}
        for statistic in self._recipe.statistics:
            of_all = inputs.get(statistic.role) if statistic.of_layer else None
            t = kept[statistic.role] if of_all is None else of_all
            found |= update_statistics((statistic,), {statistic.role: t}, {})
        return found

    @torch.inference_mode()
    def _commit(self, writes: Sequence[SliceWrite]) -> None:
        if not writes or self._direct.write(writes):
            return
        self._refuse(writes)
        kept, inputs = self._staged(writes)
        statistics = self._statistics
        if {write.role for write in writes} & {statistic.role for statistic in statistics}:
            statistics = self._statistics_of(kept, inputs)
        moved = {s for s, t in statistics.items() if not torch.equal(t, self._statistics[s])}
        jobs = [*self._jobs(writes), *(((name,), 0, self._local) for name in self._made_with(moved))]
        scales: list[tuple[str, Tensor]] = []
        for names, first, last in jobs:
            scales += self._checked(names, first, last, writes, kept, statistics)
        self._check_scales(scales)
        for names, first, last in jobs:
            self._convert(names, first, last, writes, kept, statistics)
        self._kept.update(kept)
        self._inputs, self._statistics = inputs, statistics
        if self._runner.keeps == "numbers":
            for layer in self._holders():
                renew(self._runner.ready(layer), self._runner.ready(replace(layer, derived={})))

    def _holders(self) -> tuple[PreparedMoE, ...]:
        """What holds values derived from the layer: itself, and its copy in the kernel that calls run."""
        kernel = called_kernel(self._live)
        return (self._live,) if kernel is None else (self._live, kernel.prepared)

    def _refuse(self, writes: Sequence[SliceWrite]) -> None:
        """Raises for updates whose result would not be that of a conversion."""
        recipe, shard = self._recipe, self._shares.shard
        for write in writes:
            if write.role.endswith("_input"):
                of_layer = any(s.of_layer and s.role == write.role for s in recipe.statistics)
                if of_layer and shard.ep_size > 1 and not self._inputs:
                    raise UsageError(
                        f"{write.role} is the largest of all ranks' experts, and only this rank's are here",
                        hint="load the layer from its checkpoint, or convert again",
                    )
                scale = self._runner.input_scale(self._live)
                own = {t.untyped_storage().data_ptr() for t in self._live.weights.values()}
                if scale is not None and scale.untyped_storage().data_ptr() not in own:
                    raise NoBackend(
                        f"kernels of the {self._live.backend} backend hold a copy of the scale of inputs",
                        hint="prepare the layer again",
                    )
        for role in recipe.lossy:
            together = {role, *(r for o in recipe.outputs.values() if o.role == role for r in o.reads)}
            touched = [w for w in writes if w.role in together]
            for expert in {e for w in touched for e in range(w.first, w.last)}:
                mine = [w for w in touched if w.first <= expert < w.last]
                for needed in sorted(together):
                    if not self._roles.covered(needed, mine):
                        raise UsageError(
                            f"{role} was quantized again, so {' and '.join(sorted(together))} of an expert "
                            f"change together and whole; {needed} of expert {expert} was not given",
                            hint="give them in one batch",
                        )

    def _staged(self, writes: Sequence[SliceWrite]) -> tuple[Roles, Roles]:
        """The kept roles after `writes`: of this rank, and those of all ranks."""
        kept, inputs = dict(self._kept), dict(self._inputs)
        for role in dict.fromkeys(write.role for write in writes):
            mine = [write for write in writes if write.role == role]
            if role in inputs:
                inputs[role] = inputs[role].clone()
                for write in mine:
                    write.write(0, inputs[role])
            if role in kept:
                kept[role] = kept[role].clone()
                for first, last, some in self._spans({role}, mine):
                    old = kept[role][first:last]
                    old.copy_(self._roles.applied(role, first, some, old))
        return kept, inputs

    @cached_property
    def _together(self) -> tuple[tuple[frozenset[str], tuple[str, ...]], ...]:
        """Roles that outputs read together, and the names of these outputs."""
        groups: list[tuple[frozenset[str], tuple[str, ...]]] = []
        for name, output in self._recipe.outputs.items():
            joined = [group for group in groups if group[0] & set(output.reads)]
            roles = frozenset(output.reads).union(*(group[0] for group in joined))
            names = (*(n for group in joined for n in group[1]), name)
            groups = [group for group in groups if group not in joined] + [(roles, names)]
        return tuple(groups)

    def _jobs(self, writes: Sequence[SliceWrite]) -> Iterator[tuple[tuple[str, ...], int, int]]:
        """Outputs that change together, and the local experts of which they do."""
        for roles, names in self._together:
            for first, last, some in self._spans(roles, writes):
                touched = {write.role for write in some}
                yield (
                    tuple(n for n in names if touched & set(self._recipe.outputs[n].reads)),
                    first,
                    last,
                )

    def _spans(
        self, roles: Iterable[str], writes: Sequence[SliceWrite]
    ) -> Iterator[tuple[int, int, list[SliceWrite]]]:
        """Runs of local experts that the same of `writes` change, and these."""
        begin = self._source.first_expert
        mine = [
            (max(0, w.first - begin), min(self._local, w.last - begin), w) for w in writes if w.role in roles
        ]
        mine = [(first, last, write) for first, last, write in mine if first < last]
        edges = sorted({edge for first, last, _ in mine for edge in (first, last)})
        for first, last in pairwise(edges):
            some = [w for low, high, w in mine if low <= first and last <= high]
            if some:
                yield first, last, some

    def _made_with(self, statistics: set[ExpertStatistic]) -> list[str]:
        """Outputs that depend on one of `statistics`."""
        return [
            name
            for name, output in self._recipe.outputs.items()
            if any(s in statistics for value in output.values for s in value.statistics)
        ]

    def _convert(
        self,
        names: Sequence[str],
        first: int,
        last: int,
        writes: Sequence[SliceWrite],
        kept: Roles,
        statistics: Statistics,
    ) -> None:
        """Writes the outputs `names` of local experts."""
        outputs = {name: self._recipe.outputs[name] for name in names}
        roles = {role for o in outputs.values() for role in o.reads}
        mine = self._of_experts(writes, roles, first, last)
        copied = any(output.values for output in outputs.values())
        for low, high in self._chunks(roles, copied, first, last, mine):
            batch, spare = self._roles.after(roles, low, high, mine, kept)
            for name, output in outputs.items():
                target = self._live.weights[name]
                if not output.per_layer:
                    output.apply(batch, statistics, target[low:high], lean=True, spare=spare)
                elif low == 0:
                    output.apply(batch, statistics, target, lean=True)
            del batch  # before the next one takes memory

    def _checked(
        self,
        names: Sequence[str],
        first: int,
        last: int,
        writes: Sequence[SliceWrite],
        kept: Roles,
        statistics: Statistics,
    ) -> list[tuple[str, Tensor]]:
        """Raises what speaks against writing the outputs `names`; returns new scales that are to be checked.

        These are of updates that are given whole, and take no memory.
        """
        every = (self._recipe.outputs[name] for name in names)
        outputs = [o for o in every if o.values or self._runner.judges(self._live.problem, o.role)]
        roles = {role for o in outputs for role in o.reads}
        mine = self._of_experts(writes, roles, first, last)
        written = {write.role for write in mine}
        # Checks of 8-bit exponents take no memory, those of other scales as much as the scales.
        problem = self._live.problem
        copied = (scale_dtype(problem), byte_scales(problem)) != ("U8", "E8M0")
        copied |= any(output.values for output in outputs)
        found = []
        for low, high in self._chunks(roles, copied, first, last, mine) if roles else ():
            batch, spare = self._roles.after(roles, low, high, mine, kept)
            scales = [(o.role, batch[o.role]) for o in outputs if self._runner.judges(problem, o.role)]
            scales = [(role, t) for role, t in scales if role in written]
            if copied or not self._given(roles, first, last, mine):
                self._check_scales(scales)
            else:
                found += scales
            for output in outputs:
                if output.values:
                    output.changed(batch, statistics, lean=True, spare=spare)
            del batch
        return found

    def _check_scales(self, scales: Sequence[tuple[str, Tensor]]) -> None:
        """Raises for new scales, by role, that are no numbers or that launched kernels cannot use."""
        check_every_scale(
            [t for role, t in scales if role.endswith("_scale")], byte_scales(self._live.problem)
        )
        if reason := self._runner.refit(self._holders(), scales) if scales else "":
            raise NoBackend(
                f"{' and '.join(sorted({role for role, _ in scales}))} cannot change in place: {reason}",
                hint="load the layer again with its new weights",
            )

    def _given(self, roles: set[str], first: int, last: int, writes: Sequence[SliceWrite]) -> bool:
        """Whether `writes` give all of `roles` of these experts as they are, so that nothing is copied."""
        return all(self._roles.plain(role, first, last, writes) is not None for role in roles)

    def _of_experts(
        self, writes: Sequence[SliceWrite], roles: set[str], first: int, last: int
    ) -> list[SliceWrite]:
        """Those of `writes` that change `roles` of all local experts `first` to `last`."""
        begin = self._source.first_expert
        return [w for w in writes if w.role in roles and w.first - begin <= first and last <= w.last - begin]

    def _chunks(
        self, roles: set[str], copied: bool, first: int, last: int, writes: Sequence[SliceWrite]
    ) -> Iterator[tuple[int, int]]:
        """Runs of experts whose conversion takes at most the scratch memory, but for one expert.

        All of them in one run where the updates are read as they are, unless work on them makes copies.
        """
        if not copied and self._given(roles, first, last, writes):
            return iter([(first, last)])
        each = sum(nbytes(*self._source.whole_types[role].with_first_axis(1)) for role in roles)
        step = max(1, self._scratch // (TEMPORARIES * each))
        return ((first + low, first + high) for low, high in spans(last - first, step))
