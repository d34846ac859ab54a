"""Tests of this folder that do not run on cards, with the reason; any other test that is skipped there is red."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

__all__ = ["GAPS", "Ledger"]

GAPS = (
    ("*test_rehearsal.py::*", "the rehearsal device would take the place of the card"),
    ("*test_contract.py::*mindspore*", "ranks of MindSpore are started on CPU only"),
    ("*test_scenarios.py::*mindspore*", "ranks of MindSpore are started on CPU only"),
    ("*test_transport.py::test_every_collective*mindspore*", "ranks of MindSpore are started on CPU only"),
    ("*test_faults.py::*mindspore*", "ranks of MindSpore are started on CPU only"),
)
"""Patterns of names of tests, each with why they do not run on a card."""


class Ledger:
    """A plugin of pytest that holds what was skipped against :data:`GAPS`.

    Args:
        gaps: patterns with reasons.
    """

    def __init__(self, gaps=GAPS):
        self.gaps, self.skipped, self.executed = gaps, [], []

    def pytest_runtest_logreport(self, report):
        """Remember which tests were skipped and which ran."""
        if report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.executed.append(report.nodeid)

    def problems(self):
        """Return one line for each skipped test without a line in the ledger, and for each line that is out of date."""
        lines = [
            f"{name} was skipped on the card, and ledger.py has no line for it"
            for name in self.skipped
            if not any(fnmatch(name, pattern) for pattern, _ in self.gaps)
        ]
        return lines + [
            f"{name} ran on the card, and ledger.py says {reason!r}: remove the line"
            for name in self.executed
            for pattern, reason in self.gaps
            if fnmatch(name, pattern)
        ]

    def pytest_sessionfinish(self, session):
        """Make the run red for any problem."""
        if self.problems() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        """Print the problems."""
        for line in self.problems():
            terminalreporter.write_line(f"FAILED RUN: {line}", red=True)
