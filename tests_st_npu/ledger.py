"""Tests of this folder that do not run on devices, with the reason; any other test that is skipped there is red."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

__all__ = ["DEVICES", "GAPS", "ONE_FRAMEWORK", "OPERATORS", "Ledger", "devices_needed"]

GAPS = (("*test_rehearsal*.py::*", "the rehearsal device would replace the accelerator"),)
"""Patterns of names of tests, each with why they do not run on a device."""

OPERATORS: dict[str, dict[str, str]] = {"torch": {}, "mindspore": {}}
"""By framework, the operators that fail in the quick sweep on a device, and why; its first night fills it."""

ONE_FRAMEWORK = {
    "test_rehearsal.py": "the rehearsal device is PyTorch's PrivateUse1, which MindSpore has not",
    "test_rehearsal_of_ascend.py": "the stand-in for Ascend is for MindSpore, in which nobody can register a device",
    "test_transport.py::test_collectives_of_torch_in_every_form": "they are PyTorch's own; MindSpore's have no world "
    "where it computes on CPU, and test_every_collective_equals_numpy calls them on devices, through the transport",
}
"""Files and tests that are for one framework alone, each with why; all others are for both."""

DEVICES = (
    ("*test_contract.py::*mindspore*", 3),
    ("*test_faults.py::*mindspore*", 3),
    ("*test_memory.py::*mindspore*", 2),
    ("*test_precision.py::*mindspore*", 3),
    ("*test_random.py::*mindspore*", 4),
    ("*test_ratios.py::*mindspore*", 2),
    ("*test_redistributions.py::*mindspore*", 3),
    ("*test_scenarios.py::test_a_fault*mindspore*", 4),
    ("*test_scenarios.py::*2x2*mindspore*", 4),
    ("*test_scenarios.py::*mindspore*", 3),
    ("*test_streams.py::*mindspore*", 3),
    ("*test_training.py::*mindspore-simulated*", 1),
    ("*test_training.py::test_many_steps*mindspore*", 2),
    ("*test_training.py::test_a_checkpoint*mindspore*", 4),
    ("*test_training.py::*mindspore*", 3),
    ("*test_transport.py::test_every_collective*mindspore*", 3),
    ("*test_transport.py::test_many_groups*mindspore*", 4),
)
"""Patterns of names of MindSpore tests with the devices that they need, the first that fits: a device takes one rank.

Where there are fewer devices they are skipped, which is not a gap: cells of the night have one, two, four and eight.
"""

_TOO_FEW = "[too-few-devices]"


def devices_needed(name):
    """Return how many devices the test ``name`` needs; those that share devices, or choose their ranks, need one."""
    return next((count for pattern, count in DEVICES if fnmatch(name, pattern)), 1)


class Ledger:
    """A plugin of pytest that holds what was skipped against :data:`GAPS`.

    Args:
        gaps: patterns with reasons.
    """

    def __init__(self, gaps=GAPS):
        self.gaps, self.skipped, self.executed = gaps, [], []

    def pytest_runtest_logreport(self, report):
        """Remember which tests were skipped and which ran."""
        if report.skipped and _TOO_FEW in str(report.longrepr) and devices_needed(report.nodeid) > 1:
            return
        if report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.executed.append(report.nodeid)

    def problems(self):
        """Return one line for each skipped test without a line in the ledger, and for each line that is out of date."""
        lines = [
            f"{name} was skipped on the device, and ledger.py has no line for it"
            for name in self.skipped
            if not any(fnmatch(name, pattern) for pattern, _ in self.gaps)
        ]
        return lines + [
            f"{name} ran on the device, and ledger.py says {reason!r}: remove the line"
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
