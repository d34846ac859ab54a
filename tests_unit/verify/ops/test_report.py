"""The summary of a sweep of operators."""

from __future__ import annotations

from collections import Counter

from hyper_parallel.verify.ops.report import OperatorReport, SweepReport


def operator(op, offers, **features):
    """Return the report of an operator that was checked once, with what its placements offer."""
    return OperatorReport(op, "torch", 1, 1, rows=2, features=Counter(features), offers=set(offers))


def test_the_summary_counts_operators_that_lack_a_check():
    """A green sweep says which operators were not checked in a case that they can have, and where to find all."""
    complete = operator("exp", ["uneven", "partial"], uneven=3, partial=1)
    several = operator("cat", ["uneven", "several axes"], uneven=1)
    both = operator("chunk", ["partial", "several axes"])
    report = SweepReport([complete, several, both], planned=3, mode="quick")
    assert report.ok
    assert report.text().splitlines()[-3:] == [
        "2 operators lack a check (--json and --html name all; the full sweep checks more):",
        "  several axes 2: cat, chunk",
        "  partial 1: chunk",
    ]
    report.mode = "full"
    assert report.text().splitlines()[-3] == "2 operators lack a check (--json and --html name all):"
    report.operators += [operator(f"op{number}", ["partial"]) for number in range(5)]
    assert report.text().splitlines()[-1] == "  partial 6: chunk, op0, op1, op2, op3 and 1 more"
    several.platform = "mindspore"
    assert report.text().splitlines()[-2] == "  several axes 2: cat on mindspore, chunk on torch"
    assert "lack a check" not in SweepReport([complete], planned=1).text()
