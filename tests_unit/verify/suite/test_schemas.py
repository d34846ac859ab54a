"""The published schema describes every key of every report, and its checker notices what it does not describe."""

import json
import runpy
from pathlib import Path

import pytest

from hyper_parallel.verify.diff.report import DiffReport
from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.verdict import Difference, UnequalReplicas, Verdict
from hyper_parallel.verify.program.report import HardenedCase, ProgramReport
from hyper_parallel.verify.report import report_json

problems_of = runpy.run_path(str(Path(__file__).with_name("schema.py")))["problems_of"]


def verdict():
    """A verdict with everything that one can have."""
    first = Difference(
        "gradient", "head.weight", "head", (0, 1), 0, 0, float("inf"), 1e-6, "rank 0 has 1", "replica",
        Cause("missing-reduction", "dp", "sum over dp"), "/a/train.py:7",
    )  # fmt: skip
    made = Verdict(2, [first], checked=3, replicas=[UnequalReplicas("gradient", "head.weight", 0, (0, 1), "replica")])
    made.counts["gradient"] = 4
    made.spots = [BlindSpot("equal-data", "dp", "all ranks see the same", "take others", refused=True)]
    made.settings = {"launch": "simulated"}
    made.power.unjudged["head.weight"] = 0.2
    return made


@pytest.mark.parametrize("found", [verdict(), None], ids=["differs", "fails"])
def test_reports_are_as_the_schema_says(found):
    """Of a program and of two runs, with a first difference and without a verdict."""
    cases = [HardenedCase(["k"], found, title="resume"), HardenedCase(["k"], title="upcast", skipped="why", asked=True)]
    program = ProgramReport("a.py", "torch", "simulated", 2, 0, {"dp": 2}, 1, found, failure="" if found else "E",
                            hardened=cases)  # fmt: skip
    assert problems_of(json.loads(report_json(program.json())), "program") == []
    diff = DiffReport(("a", "b"), ("torch", "torch"), 0, found, failure="" if found else "E", failed_run="B")
    assert problems_of(json.loads(report_json(diff.json())), "diff") == []


def test_the_checker_notices_what_the_schema_does_not_allow():
    """A key that is new, one that is missing, and one of another type."""
    document = ProgramReport("a.py", "torch", "simulated", 2, 0).json()
    del document["launch"]
    wrong = {**document, "new": 1, "steps": "1", "ok": 0, "schema": "program-2", "hardened": [{"ok": True}]}
    assert problems_of(wrong, "program") == [
        "report has no launch",
        "report.schema is 'program-2'",
        "report.ok is a int, not boolean",
        "report.steps is a str, not integer",
        *(f"report.hardened[0] has no {key}" for key in ("title", "changes", "skipped", "verdict", "failure")),
        "report.new is not in the schema",
    ]
