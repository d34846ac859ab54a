"""``python ci/workshop proofs``: write the table of what is proven of each row, which the package has."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.output import coloured, print_result
from hyper_parallel.platform.select import require_framework
from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import read_json, reading, write_text

if TYPE_CHECKING:
    from hyper_parallel.verify.prove.table import ProofTable

__all__ = ["add_parser", "run"]

_COMMAND = "hyper-parallel prove ops --report RUN.json"
_DESCRIPTION = f"""\
Write the package's table of proofs from a run of `{_COMMAND}` over all operators, and list the rows whose
level has changed. verify model, explain and the pages of verify ops read levels from this table. A run whose rows are
not those of the current rules is rejected.

Exit status: 0 if the table was written, 1 if a row is no longer proven, 2 for invalid input."""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("proofs", help="write the stored table of proofs", description=_DESCRIPTION)
    parser.add_argument("report", metavar="RUN.json", help=f"report of {_COMMAND}")
    parser.add_argument("--json", action="store_true", help="print the counts and changes as JSON on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the table; 1 if a row is no longer proven."""
    from hyper_parallel.verify.prove import table

    require_framework("torch")
    path = Path(arguments.report)
    report = read_json(path, ("header", "composed", "rows"), _COMMAND)
    with reading(path):
        made = table.table_of(report)
    before = table.stored_table() if table.FILE.exists() else None
    write_text(table.FILE, made.text())
    table.stored_table.cache_clear()
    changes = _changes(before, made) if before is not None else []
    lost, lines = any(worse for worse, _ in changes), [line for _, line in changes]
    counts = sum((made.counts(op) for op in made.levels), Counter[str]())
    if arguments.json:
        print_result(report_json({"ok": not lost, "operators": len(made.levels), "rows": counts, "changes": lines}))
    else:
        levels = ", ".join(f"{count:,} {level}" for level, count in counts.most_common())
        print_result(coloured("\n".join([*lines, f"{len(made.levels)} operators, {levels}"])))
    return 1 if lost else 0


def _changes(before: ProofTable, after: ProofTable) -> list[tuple[bool, str]]:
    """Return whether a row is no longer proven, and the change in words, of every row that both tables have."""
    changes = []
    for op, rows in after.levels.items():
        old = before.levels.get(op, {})
        for row, level in rows.items():
            if old.get(row, level) != level:
                changes.append((old[row] == "proven", f"{op}: {row}: {old[row]} -> {level}"))
    return sorted(changes, reverse=True)
