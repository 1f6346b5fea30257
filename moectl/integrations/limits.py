"""What an engine offers and moectl's experts in it do not support, as data: imports no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import NoBackend

ONE_RANK = "moectl's experts in transformers run on one rank"


@dataclass(frozen=True, slots=True)
class Limit:
    """An option or call of an engine that moectl's experts do not support.

    Attributes:
        option: as on the engine's command line, or a method of its library with its arguments.
        why: what is not supported, as it continues "moectl's experts do not support".
        hint: what to do instead.
        values: the values that are refused; empty for any that turns the option on.
        only: the values that are allowed, where all others are refused.
    """

    option: str
    why: str
    hint: str
    values: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """The option as a name in Python.

        Example:
            >>> Limit("--enable-eplb", "EPLB", "leave it out").field
            'enable_eplb'
        """
        return self.option.lstrip("-").replace("-", "_")

    def refuses(self, value: object) -> bool:
        """Whether `value` of the option is refused: None and False never are, nor an empty collection.

        Example:
            >>> format = Limit("--load-format", "it", "use auto", only=("auto",))
            >>> [format.refuses(name) for name in ("auto", "tensorizer", None)]
            [False, True, False]
        """
        if value is None or value is False or (isinstance(value, list | tuple | dict | set) and not value):
            return False
        if self.only:
            return str(value) not in self.only
        return not self.values or str(value) in self.values


def limits_met(limits: Iterable[Limit], options: Mapping[str, object]) -> tuple[Limit, ...]:
    """Those of `limits` that a deployment with `options` meets; options without a limit are ignored.

    Example:
        >>> eplb = Limit("--enable-eplb", "EPLB", "leave it out")
        >>> limits_met([eplb], {"--enable-eplb": True, "--seed": 7}) == (eplb,)
        True
    """
    return tuple(limit for limit in limits if limit.refuses(options.get(limit.option)))


def reasons_and_hints(engine: str, limits: Iterable[Limit]) -> tuple[str, str]:
    """One sentence with the reason of each of `limits`, and what to do about each.

    Example:
        >>> reasons_and_hints("X", [Limit("--lora", "LoRA", "leave out --lora")])
        ("moectl's experts in X do not support LoRA", 'leave out --lora')
    """
    met = tuple(limits)
    reasons = ", ".join(dict.fromkeys(limit.why for limit in met))
    hints = "; ".join(dict.fromkeys(limit.hint for limit in met))
    return f"moectl's experts in {engine} do not support {reasons}", hints


def unsupported(engine: str, limits: Iterable[Limit]) -> NoBackend:
    """The error of `reasons_and_hints`."""
    what, hint = reasons_and_hints(engine, limits)
    return NoBackend(what, hint=hint)


def no_adapter(engine: str, release: str, known: Iterable[str]) -> NoBackend:
    """The error of an engine's release that moectl has no adapter for; `known` are those that have one.

    Example:
        >>> no_adapter("X", "2.0", ["1.0", "1.1"]).what
        'moectl has no adapter for X 2.0, only for 1.0 and 1.1'
    """
    return NoBackend(
        f"moectl has no adapter for {engine} {release}, only for {' and '.join(known)}",
        hint=f"use one of these releases of {engine}, or serve without moectl",
    )
