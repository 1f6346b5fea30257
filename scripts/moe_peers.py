"""The columns of `bench_peers`: moectl's backends, its own and those made of other libraries.

A column is built from a layer, and then called with tokens and a routing; it gives the layer's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from moectl.errors import NoBackend
from moectl.kernels.modular import FusedMoEKernel
from moectl.kernels.runners import Form, runner_for
from moectl.problem import Activation
from moectl.random_layer import RandomLayer, Routed


class Absent(Exception):
    """A library, or what it would need to serve a layer, is not here; the message says which."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a column computes a layer.

    Attributes:
        backend: whose runner it is.
        note: what a reader of its times has to know.
        ours: whether it is held to moectl's own tolerances.
        by_logits: it routes by itself.
        fused: the one activation that its GEMM computes by itself; empty for any.
    """

    backend: str
    note: str = ""
    ours: bool = False
    by_logits: bool = False
    fused: str = ""


WAYS: Mapping[str, Way] = {
    "moectl": Way("triton", ours=True),
    "moectl-marlin": Way("triton_marlin", ours=True),
    "marlin": Way("marlin", "padded as vLLM pads it"),
    "triton_kernels": Way(
        "triton_kernels", "its routing starts from logits", by_logits=True, fused="swigluoai"
    ),
    "humming": Way("humming"),
}
"""By the name of the column."""

PLUS_ONE = "; its SwiGLU adds 1 to the up half, which SiLU does not: checked against that"
"""A layer with SiLU is timed with the activation that the library's users have, which costs the same."""


class Column:
    """One way to compute a layer.

    Attributes:
        numerics: the activation that its result is to be checked with.
        note, ours: as of its `Way`.
    """

    def __init__(self, name: str, layer: RandomLayer) -> None:
        way = WAYS[name]
        self.note, self.ours, self.by_logits = way.note, way.ours, way.by_logits
        problem = layer.problem
        if way.fused and problem.activation.name != way.fused:
            self.note += PLUS_ONE
            problem = replace(problem, activation=Activation(way.fused, alpha=1.0, limit=1e30))
        self.numerics = problem.activation
        runner = runner_for(way.backend)
        reason = runner.refusal(problem, layer.device)
        if reason:
            raise Absent(reason)
        try:
            experts = RandomLayer(problem, layer.device).experts
            prepared = experts.prepared(way.backend, layer.device)
        except NoBackend as error:
            raise Absent(str(error)) from error
        self.kernel = FusedMoEKernel(prepared, runner, Form.MONOLITHIC if way.by_logits else Form.STANDARD)

    def __call__(self, x: Tensor, routed: Routed) -> Tensor:
        """``[tokens, hidden]``."""
        if self.by_logits:
            return self.kernel.apply_monolithic(x, routed.logits)
        return self.kernel.apply(x, routed.ids, routed.weights)
