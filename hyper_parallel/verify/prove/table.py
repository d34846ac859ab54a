"""The stored table with the level of each row: written from a run of ``prove ops``, read by other commands."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.verify.ops.claims import axis_rows, row_text
from hyper_parallel.verify.prove.operators import LEVELS, answered

if TYPE_CHECKING:
    from hyper_parallel.core.shard.op_plan import OpPlan

__all__ = ["FILE", "ProofTable", "ProvenCalls", "RowsOfCall", "operator_digest", "proven_calls", "rows_of_call",
           "stored_table", "table_of"]  # fmt: skip

FILE = Path(__file__).with_name("table.json")
UNLISTED = "unlisted"
"""Level of a row that occurs in no sample of its operator."""

_SHORT = ((r"Replicate\(\)", "R"), (r"Shard\((-?\d+)\)", r"S\1"), (r"Partial\((\w+)\)", r"P\1"), (r", ", ","))
_ALL = "all"


@dataclass(frozen=True)
class RowsOfCall:
    """A planned call on DTensors, as plain data that can be sent between processes.

    Attributes:
        op: the operator.
        rows: rows as text, one per axis; axes on which everything is replicated are left out.
        shapes: global shapes of the operands.
    """

    op: str
    rows: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ProofTable:
    """Levels of the rows of every operator.

    Attributes:
        date: date of the run of ``prove ops``.
        levels: worst level of a row over the operator's samples, by operator and row in short form (``S0,R>S0``). An
            operator that is composed of others has no rows.
        digests: digests of the operators' rules at the time of the proof.
    """

    date: str
    levels: Mapping[str, Mapping[str, str]]
    digests: Mapping[str, str]

    def level(self, op: str, row: str) -> str:
        """Return the level of a row given as text; ``unlisted`` if the row occurs in no sample."""
        rows = self.levels.get(op, {})
        return rows.get(_ALL) or rows.get(_short(row), UNLISTED)

    def rows_of(self, op: str, inputs: str) -> dict[str, str]:
        """Return an operator's rows for placements of its operands, in short form, with their levels."""
        start = f"{_short(inputs)}>"
        return {row: level for row, level in self.levels.get(op, {}).items() if row.startswith(start)}

    def counts(self, op: str) -> Counter[str]:
        """Return the number of rows of an operator by level."""
        return Counter(self.levels.get(op, {}).values())

    def is_stale(self, platform: str, op: str) -> bool:
        """Whether the rows of an operator's rule have changed since the proof."""
        return op in self.digests and self.digests[op] != operator_digest(platform, op)

    def json(self) -> dict[str, Any]:
        """Return the table as a JSON object for storage."""
        operators: dict[str, dict[str, Any]] = {}
        for op, rows in self.levels.items():
            by_level = {level: sorted(row for row in rows if rows[row] == level) for level in LEVELS}
            operators[op] = {"rules": self.digests[op]} | {level: rows for level, rows in by_level.items() if rows}
        return {"date": self.date, "operators": operators}

    def text(self) -> str:
        """Return the text of the file, with one line per operator."""
        content = self.json()
        lines = [f"{json.dumps(op)}: {json.dumps(rows)}" for op, rows in content["operators"].items()]
        body = ",\n".join(lines)
        return f'{{"date": {json.dumps(self.date)}, "operators": {{\n{body}\n}}}}\n'


@dataclass(frozen=True)
class ProvenCalls:
    """Counts of a program's calls by the level of their rows.

    Attributes:
        date: date of the table.
        counts: number of calls by the worst level of their rows.
        rows: level, operator and row of each row that is not proven.
        other_rules: operators whose rules differ from the table's; their rows count as unlisted.
    """

    date: str
    counts: Mapping[str, int]
    rows: tuple[tuple[str, str, str], ...]
    other_rules: tuple[str, ...]

    def line(self) -> str:
        """Return the numbers in one line."""
        words = {
            "proven": "proven for every size", "tested": "tested on small sizes", "assumed": "assumed",
            "refuted": "refuted", UNLISTED: "without a sample",
        }  # fmt: skip
        parts = [f"{count} {words[level]}" for level, count in self.counts.items() if count]
        stale = f"; the table is of other rules: {', '.join(self.other_rules)}" if self.other_rules else ""
        return f"rows of {sum(self.counts.values())} operator calls: {', '.join(parts) or 'none'}{stale}"

    def row_lines(self) -> list[str]:
        """Return the rows that are not proven, one per line."""
        return [f"{level}: {op}: {row}" for level, op, row in self.rows]

    def json(self) -> dict[str, Any]:
        """Return the numbers and the rows that are not proven."""
        return {
            "schema": "proofs-1",
            "table": self.date,
            "calls": dict(self.counts),
            "rows": [{"level": level, "op": op, "row": row} for level, op, row in self.rows],
            "other_rules": list(self.other_rules),
        }


def rows_of_call(plan: OpPlan) -> RowsOfCall:
    """Return the rows that the plan of a call uses."""
    rows = tuple(row_text(row) for _, row in axis_rows(plan))
    return RowsOfCall(plan.call.op, rows, tuple(operand.shape for operand in plan.call.operands))


def proven_calls(platform: str, calls: Iterable[RowsOfCall], table: ProofTable | None = None) -> ProvenCalls:
    """Look up the rows of calls; equal calls count once, and fully replicated calls do not count.

    Args:
        platform: framework whose rules are compared with the table's: ``torch`` or ``mindspore``.
        calls: calls of any number of ranks.
        table: table to use; the stored one by default.
    """
    table = table or stored_table()
    distinct = [call for call in dict.fromkeys(calls) if call.rows]
    stale = {op for op in {call.op for call in distinct} if table.is_stale(platform, op)}
    order = (*LEVELS, UNLISTED)
    counts, rows = dict.fromkeys(("proven", "tested", "assumed", UNLISTED), 0), dict[tuple[str, str, str], None]()
    for call in distinct:
        levels = [UNLISTED if call.op in stale else table.level(call.op, row) for row in call.rows]
        worst = max(levels, key=order.index)
        counts[worst] = counts.get(worst, 0) + 1
        rows |= {(level, call.op, row): None for level, row in zip(levels, call.rows, strict=True) if level != "proven"}
    return ProvenCalls(table.date, counts, tuple(sorted(rows)), tuple(sorted(stale)))


@functools.lru_cache(maxsize=1)
def stored_table() -> ProofTable:
    """Return the table that the package contains."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    operators: dict[str, dict[str, Any]] = content["operators"]
    levels = {
        op: {row: level for level in LEVELS for row in found.get(level, ())} for op, found in operators.items()
    }  # fmt: skip
    return ProofTable(content["date"], levels, {op: found["rules"] for op, found in operators.items()})


def table_of(report: Mapping[str, Any]) -> ProofTable:
    """Return the table of a report of ``prove ops --json`` over all operators.

    Raises:
        ValueError: its rows differ from the current rules.
    """
    levels: dict[str, dict[str, str]] = {op: {} for op in sorted({*report["composed"], *_names(report["rows"])})}
    for row in report["rows"]:
        known, short = levels[row["op"]], _short(row["row"])
        known[short] = max(known.get(short, "proven"), row["level"], key=LEVELS.index)
    for op, known in levels.items():
        rows = {_short(text) for _, text, *_ in _claims("torch", op)}
        if known.keys() - {_ALL} != rows:
            different = ", ".join(sorted(rows ^ (known.keys() - {_ALL})))
            msg = f"{op}: the run of prove ops has other rows than the rule has now: {different}; run it again"
            raise ValueError(msg)
    return ProofTable(report["header"]["date"], levels, {op: operator_digest("torch", op) for op in levels})


def _names(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    return {row["op"] for row in rows}


@functools.lru_cache(maxsize=1024)
def operator_digest(platform: str, op: str) -> str:
    """Return a digest of the rows, with conditions, of an operator's rule on each of its samples."""
    return hashlib.sha256(json.dumps(_claims(platform, op)).encode()).hexdigest()[:12]


def _claims(platform: str, op: str) -> list[tuple[Any, ...]]:
    """Return the number of the sample, the row and the conditions, for every row of an operator."""
    found = list[tuple[Any, ...]]()
    with use_platform(platform):
        rule = find_rule(op)
        for number, sample in enumerate(samples_of(op) if isinstance(rule, Rule) else ()):
            assert isinstance(rule, Rule)
            known = answered(current_platform(), rule, number, sample)
            rows = dict.fromkeys(known[1].rows) if known is not None else ()
            found += [(number, row_text(row), row.even, row.full, row.sizes, row.cut) for row in rows]
    return found


def _short(row: str) -> str:
    """Return the short form of a row given as text, such as ``S0,R>S0``."""
    for long, short in _SHORT:
        row = re.sub(long, short, row)
    return row.replace(" -> ", ">").strip()
