"""What `moectl convert` plans: a layout or a portable format; and what the latter cost, for a person."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...portable import CONTAINERS, PORTABLE
from ..options import pick
from ..output import table

if TYPE_CHECKING:
    from ...checkpoint.model import Checkpoint
    from ...convert.plan import Plan
    from ...convert.shards import Shard


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; None is an option that was not given."""

    to: str
    arch: str | None
    act: str | None
    container: str | None
    method: str | None
    mx_scale: str | None
    calibration: Path | None
    requantize: bool
    max_memory: int | None
    experts_only: bool

    @property
    def quantizing(self) -> tuple[str, ...]:
        """Options given that say how weights are quantized."""
        options = {
            "--method": self.method,
            "--mx-scale": self.mx_scale,
            "--calibration": self.calibration,
        }
        return tuple(name for name, value in options.items() if value)

    def refuse(self, options: dict[str, object], why: str) -> None:
        """UsageError when one of the `options` was given."""
        given = [name for name, value in options.items() if value]
        if given:
            raise UsageError(f"{given[0]} {why}, got --to {self.to}.", hint=f"Leave {given[0]} out.")


def planner(source: "Checkpoint", asked: Asked) -> "Callable[[Shard], Plan]":
    """What plans one rank's conversion of `source`. Raises UsageError for options that do not go together."""
    if asked.to in PORTABLE:
        return _portable(source, asked)
    asked.refuse(
        {
            "--container": asked.container,
            "--method": asked.method,
            "--mx-scale": asked.mx_scale,
            "--calibration": asked.calibration,
        },
        "goes with portable formats only",
    )
    from ...convert.layout import layout_for
    from ...convert.planning import plan_conversion

    layout = layout_for(asked.to, source.groups[0].problem.scheme.weight, asked.arch, asked.act)
    if asked.requantize:
        layout = layout.requantizing()
    return lambda shard: plan_conversion(
        source, layout, max_memory=asked.max_memory, experts_only=asked.experts_only, shard=shard
    )


def _portable(source: "Checkpoint", asked: Asked) -> "Callable[[Shard], Plan]":
    asked.refuse({"--arch": asked.arch, "--act": asked.act}, "goes with kernel layouts only")

    from ...convert.codecs import E8M0_RULES
    from ...convert.portable.plan import Portable, plan_portable
    from ...convert.quantize import METHODS
    from ...convert.quantize.calibration import Calibration
    from ...kernels.activation import activate

    container = None if asked.container is None else pick(asked.container, CONTAINERS, "container")
    default = METHODS[0] if asked.calibration is None else "gptq"
    method = default if asked.method is None else pick(asked.method, METHODS, "method")
    if method == "gptq" and asked.calibration is None:
        raise UsageError(
            "--method gptq needs activations, got none.", hint="Give --calibration FILE, or --method search."
        )
    if not PORTABLE[asked.to].has_scale_rules:
        asked.refuse({"--mx-scale": asked.mx_scale}, "is for scales of powers of two, which mxfp4 has")
    rule = "floor" if asked.mx_scale is None else pick(asked.mx_scale, E8M0_RULES, "rule for scales")
    seen = None if asked.calibration is None else Calibration(asked.calibration)
    wanted = Portable(
        asked.to,
        container,
        method,
        rule,
        asked.requantize,
        seen,
        asked.quantizing,
        lambda h, problem, rows: activate(h, problem.activation, rows),
    )

    def plan(shard: "Shard") -> "Plan":
        if shard.ranks > 1:
            raise UsageError(
                "a portable checkpoint is whole; engines slice it themselves.",
                hint="Leave out --tp-size, --ep-size and --rank.",
            )
        return plan_portable(source, wanted, max_memory=asked.max_memory, experts_only=asked.experts_only)

    return plan


def draw_costs(folder: Path, console: Any) -> None:
    """The summary of the report that a portable output holds."""
    from ...convert.portable.parts import CostTable, read_report

    costs = CostTable(read_report(folder)["layers"])
    made = table(*costs.columns)
    for row in costs.rows():
        made.add_row(*row)
    console.print(made)
