"""The summary of a sweep of operators."""

from __future__ import annotations

from collections import Counter

from hyper_parallel.verify.ops.report import OperatorReport, SweepReport


def operator(op, offers, **features):
    """Return the report of an operator that was checked once, with what its placements offer."""
    return OperatorReport(op, "torch", 1, 1, rows=2, features=Counter(features), offers=set(offers))


def test_the_summary_counts_operators_that_lack_a_check():
    """A green sweep says how many operators were not checked in a case that they can have, and where to find them."""
    complete = operator("exp", ["uneven", "partial"], uneven=3, partial=1)
    several = operator("cat", ["uneven", "several axes"], uneven=1)
    both = operator("chunk", ["partial", "several axes"])
    report = SweepReport([complete, several, both], planned=3, mode="quick")
    assert report.ok
    assert report.text().splitlines()[-1] == (
        "2 operators lack a check: several axes 2, partial 1 (--json and --html name them; the full sweep checks more)"
    )
    report.mode = "full"
    assert report.text().endswith("2 operators lack a check: several axes 2, partial 1 (--json and --html name them)")
    assert "lack a check" not in SweepReport([complete], planned=1).text()
