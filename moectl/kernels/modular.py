"""A layer's kernel: what brings tokens to the experts, the experts, and what brings results back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import NoBackend
from .inputs import Inputs
from .prepared import PreparedMoE
from .runners import Runner, runner_for


@dataclass(frozen=True)
class FusedMoEKernel:
    """One layer's experts on one backend. Made per layer by `kernel_of`, never shared between layers.

    Attributes:
        prepared: the layer's weights.
        runner: what computes with them.
        monolithic: the runner takes router logits; else expert ids and weights.
    """

    prepared: PreparedMoE
    runner: Runner
    monolithic: bool = False

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``[tokens, hidden]`` output; arguments as of `Runner.run`. NoBackend for a monolithic kernel."""
        return self.runner.run(self.prepared, x, ids, weights)

    def apply_monolithic(self, x: Tensor, logits: Tensor, correction_bias: Tensor | None = None) -> Tensor:
        """``[tokens, hidden]`` output of tokens that the kernel routes by ``[tokens, experts]`` logits."""
        self.runner.accept(self.prepared)
        if self.runner.monolithic is None:
            raise NoBackend(
                f"the {self.runner.name} backend takes expert ids and weights, got router logits",
                hint="route first, or choose a monolithic backend",
            )
        return self.runner.monolithic(self.prepared, x, logits, correction_bias)

    def run(self, inputs: Inputs, correction_bias: Tensor | None = None) -> Tensor:
        """The output for `inputs`, of which a monolithic kernel takes the logits."""
        if self.monolithic:
            return self.apply_monolithic(inputs.x, inputs.logits, correction_bias)
        return self.apply(inputs.x, inputs.ids, inputs.weights)


def kernel_of(prepared: PreparedMoE) -> FusedMoEKernel:
    """The kernel of a layer that was prepared for one backend, on one rank."""
    runner = runner_for(prepared.backend)
    return FusedMoEKernel(prepared, runner, monolithic=runner.compute is None)
