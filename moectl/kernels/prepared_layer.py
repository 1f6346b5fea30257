"""One layer's weights in one backend's layout, the dense experts behind them, and the router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import UsageError
from ..problem.moe_problem import MoEProblem

Derived = TypeVar("Derived")

CANONICAL = "canonical"
"""Name of the layout of a checkpoint's own tensors, before any conversion."""

KERNEL = "kernel"
"""Key in `PreparedMoE.derived` of the kernel behind calls of the layer."""


@dataclass(frozen=True)
class DenseExpert:
    """One expert as plain matrices, with the rows of `w13` in the problem's order.

    Attributes:
        w13: ``[2 * intermediate, hidden]`` float.
        w2: ``[hidden, intermediate]`` float.
        w13_bias, w2_bias: ``[2 * intermediate]`` and ``[hidden]``, or None.
        w13_input, w2_input: the static scale of the activations that enter each, one number; None without.
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_input: Tensor | None = None
    w2_input: Tensor | None = None


@dataclass(frozen=True)
class DenseExperts:
    """A batch of `DenseExpert`, stacked along a leading axis in the order of the requested ids."""

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_input: Tensor | None = None
    w2_input: Tensor | None = None

    def __len__(self) -> int:
        return len(self.w13)

    def __getitem__(self, i: int) -> DenseExpert:
        others = (self.w13_bias, self.w2_bias, self.w13_input, self.w2_input)
        return DenseExpert(self.w13[i], self.w2[i], *(None if t is None else t[i] for t in others))


NORM_EPSILON = 1e-6
"""Added to the mean square of a token that a router normalizes (``rms_norm_eps`` of Gemma 4's configs)."""


@dataclass(frozen=True)
class Router:
    """The linear layer that scores experts.

    Attributes:
        weight: ``[experts, hidden]``.
        bias: ``[experts]`` of the linear layer, or None.
        correction_bias: ``[experts]`` added to the scores to choose experts, not to weigh them; or None.
        expert_scale: ``[experts]`` factors on the final weights, or None.
        table: ``[vocabulary, top_k]`` integer expert ids by token id (hash routing), or None.
        input_scale: ``[hidden]`` factors on tokens, which are first normalized to length 1, or None.

    Example:
        >>> router = Router(torch.eye(4, 8))
        >>> router.logits(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    weight: Tensor
    bias: Tensor | None = None
    correction_bias: Tensor | None = None
    expert_scale: Tensor | None = None
    table: Tensor | None = None
    input_scale: Tensor | None = None

    def logits(self, x: Tensor) -> Tensor:
        """``[tokens, experts]`` fp32 logits of `x` ``[tokens, hidden]``, computed in fp32."""
        if x.shape[-1] != self.weight.shape[-1]:
            raise UsageError(
                f"the router expects tokens of width {self.weight.shape[-1]}, got {x.shape[-1]}",
                hint="give an input with the model's hidden size",
            )
        x = x.float()
        if self.input_scale is not None:
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=NORM_EPSILON) * x.shape[-1] ** -0.5
            x = x * self.input_scale.float()
        logits = x @ self.weight.float().T
        return logits if self.bias is None else logits + self.bias.float()

    def to(self, device: torch.device | str) -> Router:
        """The same router with its tensors on `device`."""
        return Router(*(None if t is None else t.to(device) for t in self._tensors()))  # type: ignore[arg-type]

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class PreparedMoE:
    """One MoE layer ready to run on one backend. Made per layer, never shared between layers.

    Attributes:
        problem: what the layer computes; runners read sizes, activation and routing from here.
        backend: name of the runner that reads `weights`.
        layout: name of the layout of `weights`.
        weights: storage tensors by role (``w13``, ``w13_scale``, ``w13_bias``, ``w2``, ...), experts first.
        dense: fp32 experts for a batch of expert ids, decoded from `weights`.
        relaid: how the stored weights were repacked for this backend; empty when they were loaded unchanged.
        first_expert: the layer's id of local expert 0, on a rank that has some of the experts.
        derived: what the runner derives from `weights` once and keeps with the layer (`derive`).
        origin: how `weights` follow from a checkpoint's tensors, which `moectl.refit` needs; None if unknown.
    """

    problem: MoEProblem
    backend: str
    layout: str
    weights: Mapping[str, Tensor]
    dense: Callable[[Sequence[int] | Tensor], DenseExperts]
    relaid: str = field(default="")
    first_expert: int = 0
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    origin: Any = field(default=None, compare=False, repr=False)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts' output ``[tokens, hidden]`` in the dtype of `x`; a rank's share gives its part of it.

        Args:
            x: ``[tokens, hidden]`` in the model's 16-bit dtype, on the layer's device.
            ids: ``[tokens, top_k]`` int32, of the whole layer's experts, no expert twice in a row; negative
                ids are skipped.
            weights: ``[tokens, top_k]`` fp32.

        Raises:
            UsageError: arguments that do not fit the layer or each other.
            NoBackend: the backend does not run here, or routes by itself and takes no ids.
        """
        from .modular.fused_moe_kernel import layer_kernel

        return self.derive(KERNEL, layer_kernel).apply(x, ids, weights)

    def __repr__(self) -> str:
        dims = self.problem.dims
        share = "" if self.problem.local_experts == self.problem.experts else f" of {self.problem.experts}"
        return (
            f"PreparedMoE({self.problem.local_experts}{share} experts, top-{self.problem.top_k}, "
            f"{dims.hidden} x {dims.intermediate}, {self.problem.scheme.words};\n"
            f"  backend {self.backend}, layout {self.layout}, {self.nbytes / 1e6:.3g} MB on {self.device}: "
            f"{', '.join(self.weights)})"
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.weights["w13"].device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, scales and biases as stored."""
        return sum(t.numel() * t.element_size() for t in self.weights.values())

    def local_ids(self, ids: Tensor) -> Tensor:
        """`ids` of the layer's experts as local ids, which runners take: -1 for experts of other ranks."""
        return local_ids(ids, self.first_expert, self.problem.local_experts)

    def derive(self, key: str, make: Callable[[PreparedMoE], Derived]) -> Derived:
        """The result of `make` for this layer, created once and kept in `derived` under `key`."""
        if key not in self.derived:
            self.derived[key] = make(self)
        result: Derived = self.derived[key]
        return result

    def expert(self, expert: int) -> DenseExpert:
        """Expert `expert`, decoded: the `dense` argument of `moe_reference`."""
        return self.dense([expert])[0]


def local_ids(ids: Tensor, first: int, experts: int) -> Tensor:
    """`ids` minus `first`, and -1 where that is not one of the `experts` local experts.

    Example:
        >>> local_ids(torch.tensor([0, 5, 9]), first=4, experts=4).tolist()
        [-1, 1, -1]
    """
    local = ids - first
    return torch.where((local >= 0) & (local < experts), local, -1)
