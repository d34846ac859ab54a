"""The whole platform contract over real processes: every member, its documented errors included."""

from __future__ import annotations

from hyper_parallel.platform.contract.inventory import MEMBERS
from hyper_parallel.verify.contract.suite import run_contract


def test_every_member_over_real_processes(platform_name):
    """Members do over real processes what they do over simulated ranks."""
    found = run_contract(platform_name, 3, "processes")
    assert set(found) == {member for members in MEMBERS.values() for member in members}
