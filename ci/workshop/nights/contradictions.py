"""Rows that fail in a sweep of operators, or in random programs, although the table says that they are proven."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hyper_parallel.verify.prove.table import ProofTable, stored_table

__all__ = ["contradictions"]


def contradictions(document: Mapping[str, Any], table: ProofTable | None = None) -> tuple[str, ...]:
    """Return the proven rows that a report of ``verify ops`` or ``fuzz`` shows to be wrong, in words with what failed.

    A check on several axes contradicts the table if the rows on all of its axes are proven, and a random program if
    those of all its calls are. Other reports have none.

    Args:
        document: a report as JSON.
        table: the stored one by default.
    """
    known = table or stored_table()
    found: dict[str, None] = {}
    for operator in document.get("operators", ()):
        for failed in operator.get("wrong", ()):
            rows = list(_rows(known, operator["op"], str(failed["places"])))
            if rows and all(rows):
                row = " and ".join(rows)
                mesh = "x".join(map(str, failed.get("mesh", ())))
                found[
                    f"{operator['op']} on {operator['platform']}: row {row} is proven, and fails on mesh {mesh} with "
                    f"{failed['places']}: {failed['problem']}"
                ] = None
    for finding in document.get("findings", ()):
        calls = [(call["op"], row) for call in finding.get("rows", ()) for row in call["rows"]]
        if finding["kind"] == "wrong" and calls and all(known.level(*call) == "proven" for call in calls):
            used = "; ".join(dict.fromkeys(f"{op}: {row}" for op, row in calls))
            found[
                f"program {finding['number']} of seed {finding['seed']} on {finding['framework']}: all rows of its "
                f"calls are proven ({used}), and it fails: {finding['text']}"
            ] = None
    return tuple(found)


def _rows(table: ProofTable, op: str, places: str) -> Iterator[str]:
    """Yield, for each axis of a failed check, the row of its operands; empty if there is none that is proven.

    Args:
        table: of proofs.
        op: the operator.
        places: of the operands, each with a placement per axis: ``[Shard(0), Replicate()], [Replicate(), Shard(1)]``.
    """
    operands = [re.split(r", (?=[A-Z])", text) for text in re.findall(r"\[([^\]]*)\]", places)]
    if len({len(each) for each in operands}) != 1:
        yield ""
        return
    for inputs in zip(*operands, strict=True):
        levels = table.rows_of(op, ", ".join(inputs))
        yield " or ".join(levels) if set(levels.values()) == {"proven"} else ""
