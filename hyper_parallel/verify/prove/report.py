"""Report of the proofs of every operator's rows, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hyper_parallel.verify.prove.operators import LEVELS, ProvenRow, family_of
from hyper_parallel.verify.prove.tested import EXTENT
from hyper_parallel.verify.report import Report

__all__ = ["ProofReport"]


@dataclass
class ProofReport(Report):
    """The levels of proof of all rows of the checked operators.

    Attributes:
        rows: rows of all operators.
        composed: operators without rows of their own, which are composed of other operators.
        detailed: whether the text lists every row.
    """

    rows: list[ProvenRow] = field(default_factory=list)
    composed: list[str] = field(default_factory=list)
    detailed: bool = False

    @property
    def ok(self) -> bool:
        """Whether no row is refuted."""
        return bool(self.rows or self.composed) and not any(row.level == "refuted" for row in self.rows)

    def counts(self) -> dict[str, Counter[str]]:
        """Return the number of rows by family and level."""
        found: dict[str, Counter[str]] = {}
        for row in self.rows:
            found.setdefault(family_of(row.op), Counter())[row.level] += 1
        return dict(sorted(found.items()))

    def text(self) -> str:
        """Return the table; with ``detailed`` also every row, otherwise the unproven rows by reason."""
        lines = [_line("", LEVELS)]
        counts = self.counts()
        lines += [_line(family, [str(count[level]) for level in LEVELS]) for family, count in counts.items()]
        total = sum(counts.values(), Counter[str]())
        rows = max(total.total(), 1)
        lines.append(_line("all", [f"{total[level]}" for level in LEVELS]))
        lines.append(_line("", [f"{100 * total[level] / rows:.1f} %" for level in LEVELS]))
        if self.composed:
            lines.append(f"{len(self.composed)} operators have no rows of their own: they are composed of others")
        lines.append(f"tested: {EXTENT}")
        listed = self.rows if self.detailed else [row for row in self.rows if row.level == "refuted"]
        lines += [_row_line(row) for row in listed]
        if not self.detailed:
            lines += _reasons(row for row in self.rows if row.level not in {"proven", "refuted"})
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return a JSON object with every row and the counts."""
        return {
            "ok": self.ok,
            "counts": {family: {level: count[level] for level in LEVELS} for family, count in self.counts().items()},
            "tested": EXTENT,
            "composed": self.composed,
            "rows": [{**asdict(row), "family": family_of(row.op)} for row in self.rows],
        }


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:12}" + "".join(f"{cell:>10}" for cell in cells)


def _row_line(row: ProvenRow) -> str:
    more = [row.why, *row.conditions, *(f"not covered: local sizes with {each}" for each in row.sizes)]
    return f"{row.level:8} {row.op} sample {row.sample}: {row.row}" + "".join(f"\n    {each}" for each in more if each)


def _reasons(rows: Iterable[ProvenRow]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.why, []).append(row.op)
    lines = ["not proven:"] * bool(reasons)
    for why, ops in sorted(reasons.items(), key=lambda item: -len(item[1])):
        names = list(dict.fromkeys(ops))
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        lines.append(f"{len(ops):5} {why} ({shown})")
    return lines
