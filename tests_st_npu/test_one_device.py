"""What one device verifies by itself: simulated ranks share it. On CPU a part of each is rehearsed."""

from __future__ import annotations

import json

from hyper_parallel.cli import main
from hyper_parallel.verify.model.run import verify_scenario
from hyper_parallel.verify.scenarios import SCENARIOS
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.results import examine

_HOLDS = ("ok", "absent", "exempt")  # with a kernel; without one in the framework; excused in the rule
_REHEARSED = ("cumsum", "softmax")
_FACETS = {"rehearsal": ("collectives",), "night": tuple(MEMBERS)}
_CASES = {"rehearsal": SCENARIOS[:1], "night": SCENARIOS}
_STEPS = {"rehearsal": 1, "night": 3}


def test_every_operator_holds(platform_name, suite_device, effort, lacking, reports):
    """Operators give what one device gives, with gradients, on DTensors too; none fails but those of the ledger."""
    path = reports / f"operators-{platform_name}-{suite_device}.json"
    words = ["verify", "ops", "--quick", "--platform", platform_name, "--device", suite_device, "--report", str(path)]
    status = main([*words, *(("--op", *_REHEARSED) if effort == "rehearsal" else ())])
    report = json.loads(path.read_text(encoding="utf-8"))
    failed = {each["op"]: each["outcome"] for each in report["operators"] if each["outcome"] not in _HOLDS}
    assert set(failed) == set(lacking), failed
    assert "interrupted" not in report
    assert report["finished"] == report["planned"] >= len(_REHEARSED)
    assert report["backward"] > 0
    assert status == (1 if failed else 0)


def test_every_member_of_the_contract(platform_name, suite_device, effort, reports):
    """Members of the platform contract behave on simulated ranks as over real processes."""
    outcome = examine(platform_name, 3, "simulated", _FACETS[effort], device=suite_device)
    outcome.write(reports)
    assert outcome.ok, outcome.failures()


def test_every_scenario_trains_like_one_device(platform_name, suite_device, effort):
    """On simulated ranks every output, gradient and updated weight equals the single device's."""
    for scenario in _CASES[effort]:
        report = verify_scenario(scenario, platform=platform_name, steps=_STEPS[effort], device=suite_device)
        assert report.ok, str(report)
