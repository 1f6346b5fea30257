"""Counts of agreement along every axis, and every disagreement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

AXES = ("scheme", "device", "parallel")
"""Names of a case by which recorded decisions are counted."""


@dataclass(frozen=True)
class FieldDisagreement:
    """One field of one recorded answer that differs."""

    line: int
    cell: str
    field: str
    recorded: object
    ours: object

    def __str__(self) -> str:
        return (
            f"line {self.line}: {self.cell}\n    {self.field}: recorded {self.recorded}\n"
            f"    {' ' * len(self.field)}  ours     {self.ours}"
        )


@dataclass
class AgreementTally:
    """Counts of answers compared, of those that agree in every field, and of those left out."""

    asked: int = 0
    agreed: int = 0
    outside: int = 0
    without_meaning: int = 0

    def add(self, other: AgreementTally) -> None:
        """Count what `other` counted."""
        self.asked += other.asked
        self.agreed += other.agreed
        self.outside += other.outside
        self.without_meaning += other.without_meaning

    @property
    def share(self) -> str:
        """Agreement in per cent, rounded down, so that 100% means all."""
        if not self.asked:
            return "-"
        return f"{self.agreed * 10000 // self.asked / 100:.2f}%"

    def to_json(self) -> dict[str, int]:
        """Plain data."""
        return {
            "asked": self.asked,
            "agreed": self.agreed,
            "out_of_scope": self.outside,
            "without_meaning": self.without_meaning,
        }


@dataclass
class ConformanceReport:
    """Tallies by the names of each axis, by field, and in total; `title` names what was compared.

    `out_of_scope` are the reasons with their counts.
    """

    title: str
    axes: dict[str, dict[str, AgreementTally]] = field(default_factory=dict)
    fields: dict[str, AgreementTally] = field(default_factory=dict)
    total: AgreementTally = field(default_factory=AgreementTally)
    out_of_scope: Counter[str] = field(default_factory=Counter)
    disagreements: list[FieldDisagreement] = field(default_factory=list)

    def count(self, names: Sequence[tuple[str, str]], tally: AgreementTally) -> None:
        """Add `tally` to the total and to each (axis, name)."""
        self.total.add(tally)
        for axis, name in names:
            self.axes.setdefault(axis, {}).setdefault(name, AgreementTally()).add(tally)

    def count_field(self, name: str, agrees: bool) -> None:
        """Add one comparison of a field."""
        self.fields.setdefault(name, AgreementTally()).add(AgreementTally(1, int(agrees)))

    def add(self, other: ConformanceReport) -> None:
        """Count what `other`, a report on other answers, counted."""
        self.total.add(other.total)
        self.out_of_scope.update(other.out_of_scope)
        self.disagreements += other.disagreements
        for name, tally in other.fields.items():
            self.fields.setdefault(name, AgreementTally()).add(tally)
        for axis, names in other.axes.items():
            for name, tally in names.items():
                self.axes.setdefault(axis, {}).setdefault(name, AgreementTally()).add(tally)

    def arrange(self, axis: str, names: Iterable[str]) -> None:
        """Put the names of one axis in the order of `names`."""
        known = self.axes.get(axis, {})
        self.axes[axis] = {name: known[name] for name in dict.fromkeys([*names, *known]) if name in known}

    def lines(self, show: int) -> Iterator[str]:
        """The report as text: a table, at most `show` disagreements, reasons, the total last."""
        rows = [(axis, name, tally) for axis, names in self.axes.items() for name, tally in names.items()]
        rows += [("field", name, tally) for name, tally in self.fields.items()]
        width = max((len(name) for _, name, _ in rows), default=0)
        previous = ""
        for axis, name, tally in rows:
            if axis != previous:
                yield f"{'by ' + axis:<{width}}   asked   agree    share  outside  no meaning"
                previous = axis
            yield (
                f"{name:<{width}}  {tally.asked:6}  {tally.agreed:6}  {tally.share:>7}  "
                f"{tally.outside or '':7}  {tally.without_meaning or '':10}".rstrip()
            )
        shown = sorted(self.disagreements, key=lambda found: found.line)[:show]
        yield from (str(found) for found in shown)
        if hidden := len(self.disagreements) - len(shown):
            yield f"{hidden} more disagreements; --show {len(self.disagreements)} prints all"
        for reason, count in self.out_of_scope.most_common():
            yield f"out of scope: {count}: {reason}"
        total = self.total
        yield (
            f"total: {total.agreed} of {total.asked} {self.title} agree ({total.share}), "
            f"{total.outside} out of scope, {total.without_meaning} without meaning"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.title,
            "total": self.total.to_json(),
            "axes": {
                axis: {name: tally.to_json() for name, tally in names.items()}
                for axis, names in self.axes.items()
            },
            "fields": {
                name: {"asked": tally.asked, "agreed": tally.agreed} for name, tally in self.fields.items()
            },
            "out_of_scope": dict(self.out_of_scope),
            "disagreements": [
                {
                    "line": d.line,
                    "cell": d.cell,
                    "field": d.field,
                    "recorded": d.recorded,
                    "ours": d.ours,
                }
                for d in sorted(self.disagreements, key=lambda found: found.line)
            ],
        }
