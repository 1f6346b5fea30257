"""Options of a portable conversion as plain values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...problem.portable_formats import PORTABLE, PortableFormat

if TYPE_CHECKING:
    from ..quantize import Quantizer


@dataclass(frozen=True)
class PortableOptions:
    """Options of one portable output.

    Attributes:
        target: name in `PORTABLE`.
        container: name in `CONTAINERS`; None for the first that an engine loads the model from.
        method: as in `Quantizer`; None for its default, or for ``gptq`` with `calibration`.
        rule: as in `Quantizer`; None for its default.
        calibration: a file with activations, as `Calibration` reads it: for the search or, with ``gptq``,
            for error feedback.
        requantize: whether quantized weights may be requantized with additional error.
        include_unquantized: whether layers that a quantized checkpoint leaves in 16 bits are converted, too.
    """

    target: str
    container: str | None = None
    method: str | None = None
    rule: str | None = None
    calibration: Path | None = None
    requantize: bool = False
    include_unquantized: bool = False

    @property
    def format(self) -> PortableFormat:
        return PORTABLE[self.target]

    @property
    def quantizer(self) -> Quantizer:
        """How weights are quantized, if they are. Raises what `check` raises."""
        from ..quantize import METHODS, Quantizer

        self.check()
        method = self.method or (METHODS[0] if self.calibration is None else "gptq")
        if self.rule is None:
            return Quantizer(self.format.weight, method)
        return Quantizer(self.format.weight, method, self.rule)

    def check(self) -> None:
        """Raises UsageError for options that contradict each other."""
        if self.method == "gptq" and self.calibration is None:
            raise UsageError(
                "--method gptq needs activations, got none.",
                hint="Give --calibration FILE, or --method search.",
            )
        if self.rule is not None and not self.format.has_scale_rules:
            raise unsuitable("--mx-scale", self.target, "is for power-of-two scales, as in mxfp4")

    @property
    def given(self) -> dict[str, object]:
        """The options that were given, by name on the command line."""
        options = {
            "--container": self.container,
            "--method": self.method,
            "--mx-scale": self.rule,
            "--calibration": self.calibration,
            "--include-unquantized": self.include_unquantized,
        }
        return {name: value for name, value in options.items() if value}

    @property
    def quantizer_options(self) -> tuple[str, ...]:
        """Names of the given options that affect how weights are quantized."""
        return tuple(name for name in self.given if name not in ("--container", "--include-unquantized"))


def unsuitable(option: str, target: str, why: str) -> UsageError:
    """The error for an `option` that does not apply to `target`."""
    return UsageError(f"{option} {why}, got --to {target}.", hint=f"Leave {option} out.")
