"""The canonical roles of a live layer's experts, as they are and as writes change them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..convert.rank_slice import RankSlice
from ..convert.recipe.recipe import Recipe
from ..convert.stream.source_reader import spans
from ..kernels.prepared_layer import PreparedMoE
from ..torch_dtypes import TORCH_DTYPES
from .experts import ExpertLayer, LoadExperts
from .slice_writes import SliceWrite

Roles = dict[str, Tensor]
"""Canonical tensors of consecutive experts."""


@dataclass(frozen=True)
class LiveRoles:
    """Canonical roles behind a live layer's tensors.

    Attributes:
        live: the layer.
        source: the layer that it was prepared from.
        recipe: how its tensors follow from canonical roles.
        kept: roles of all local experts that its tensors do not restore, on the CPU.
    """

    live: PreparedMoE
    source: ExpertLayer
    recipe: Recipe
    kept: Roles

    @cached_property
    def shares(self) -> RankSlice:
        """What this rank has of the layer."""
        return self.source.rank_slice or RankSlice(self.source.problem)

    def reaches(self, write: SliceWrite) -> bool:
        """Whether this rank has any of what `write` changes."""
        first, last = self.source.first_expert, self.source.first_expert + self.live.problem.local_experts
        height = self.source.whole_types[write.role].shape[1]
        columns = write.index[1] if write.mapping is None and len(write.index) > 1 else None
        return (
            max(first, write.first) < min(last, write.last)
            and self.shares.holds(write.role, 1, *write.rows(height))
            and (columns is None or self.shares.holds(write.role, 2, columns.start, columns.stop))
        )

    def covered(self, role: str, writes: Sequence[SliceWrite]) -> bool:
        """Whether `writes` give all of whole `role`, so that nothing of what it was is needed."""
        (_, height, *widths), done = self.source.whole_types[role].shape, 0
        mine = [write for write in writes if write.role == role]
        if any(not write.full and write.mapping is not None for write in mine):
            return False
        for first, last in sorted(write.rows(height) for write in mine if write.fills_rows(widths)):
            if first <= done:
                done = max(done, last)
        return done == height

    def applied(self, role: str, first: int, writes: Sequence[SliceWrite], old: Tensor) -> Tensor:
        """This rank's `role` of experts from local `first`, of which `old` was, after `writes`."""
        whole = self.shares.placed(role, old) if self.shares.sliced else old
        for write in writes:
            write.write(self.source.first_expert + first, whole)
        return self.shares.slice({role: whole})[role]

    def plain(self, role: str, first: int, last: int, writes: Sequence[SliceWrite]) -> Tensor | None:
        """The new `role` of local experts if one write has it on the device as it is."""
        mine = [write for write in writes if write.role == role]
        if len(mine) != 1 or self.shares.sliced or role in self.kept:
            return None
        dtype, shape = self.source.whole_types[role]
        t = mine[0].plain(shape, TORCH_DTYPES[dtype])
        if t is None or t.device != self.live.device:
            return None
        begin = self.source.first_expert - mine[0].first
        return t[begin + first : begin + last]

    def after(
        self, roles: set[str], first: int, last: int, writes: Sequence[SliceWrite], kept: Roles
    ) -> tuple[Roles, set[str]]:
        """The canonical `roles` of local experts after `writes`, on the device.

        Also those that are nobody else's: neither kept, nor given in `writes`, nor read by several outputs.
        """
        device, new = self.live.device, Roles()
        for role in roles:
            plain = self.plain(role, first, last, writes)
            if role in kept:
                new[role] = kept[role][first:last].to(device)
            elif plain is not None:
                new[role] = plain
        others = roles - new.keys()
        old = self._restored({r for r in others if not self.covered(r, writes)}, first, last)
        for role in others:
            mine = [write for write in writes if write.role == role]
            dtype, (_, *shape) = self.recipe.shapes[role]
            t = old.get(role)
            if t is None:
                t = torch.zeros(last - first, *shape, dtype=TORCH_DTYPES[dtype], device=device)
            new[role] = self.applied(role, first, mine, t) if mine else t
        readers = [role for output in self.recipe.outputs.values() for role in output.reads]
        return new, {role for role in others if readers.count(role) == 1}

    def _restored(self, roles: set[str], first: int, last: int) -> Roles:
        """The canonical `roles` of local experts as they are, from the live tensors."""
        recipe, device, stored = self.recipe, self.live.device, Roles()
        for role in recipe.restored_with(roles):
            name = recipe.source_of(role)
            source = self.kept[role].to(device) if role in self.kept else self.live.weights[name]
            stored[name] = source[first:last]
        live = {t.untyped_storage().data_ptr() for t in self.live.weights.values()}
        return {
            role: t.clone() if t.untyped_storage().data_ptr() in live else t
            for role, t in recipe.restore(stored, last - first, roles, lean=True).items()
            if role in roles
        }


def read_roles(canonical: LoadExperts, roles: Iterable[str], experts: int, step: int) -> Roles:
    """The canonical `roles` of all `experts` on the CPU, read `step` experts at a time."""
    parts: dict[str, list[Tensor]] = {role: [] for role in roles}
    for first, last in spans(experts, step):
        batch = canonical(range(first, last))
        for role, some in parts.items():
            some.append(batch[role].cpu())
    return {role: torch.cat(some) for role, some in parts.items()}
