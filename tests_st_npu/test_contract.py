"""The whole platform contract over real processes: every member, its documented errors included."""

from __future__ import annotations

from workshop.conformance.inventory import MEMBERS
from workshop.conformance.results import examine


def test_every_member_over_real_processes(platform_name, reports, suite_device):
    """Every member behaves over real processes as over simulated ranks; the outcome is written for the reports."""
    outcome = examine(platform_name, 3, "processes", device=suite_device)
    outcome.write(reports)
    assert outcome.ok, outcome.failures()
    assert set(outcome.members) == {member for members in MEMBERS.values() for member in members}
