"""The values that a run of a program leaves behind; the data model is part of the platforms' contract."""

from __future__ import annotations

from hyper_parallel.verify.frameworks.contract.records import KINDS, Group, Pending, RankRecords, Record, Region, Run

__all__ = ["KINDS", "Group", "Pending", "RankRecords", "Record", "Region", "Run"]
