"""Reports for CI: each result at the line of the script, as JUnit's XML, SARIF and JSON."""

import json
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.suite.formats import junit, sarif
from hyper_parallel.verify.suite.report import CheckResult, SuiteReport
from hyper_parallel.verify.suite.settings import SuiteCheck

problems_of = runpy.run_path(str(Path(__file__).with_name("schema.py")))["problems_of"]


@pytest.fixture
def report(tmp_path):
    """A check that passed, one that differs, one that failed in a rank, one inconclusive, one without its file."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("\n" * 9)
    script = tmp_path / "sub" / "train.py"
    check = [
        SuiteCheck(name, "program", {"run": "torchrun sub/train.py"}, {}, None, ("pyproject.toml", 4))
        for name in ("good", "wrong", "raises", "little", "resumed", "late")
    ]
    gone = SuiteCheck("gone", "diff", {"a": "nosuch.py"}, {}, None, ("pyproject.toml", 7))
    first = {"site": f"{script}:5", "cause": {"kind": "missing-reduction"}}
    raised = f'File "/usr/lib/torch.py", line 3\n  File "{script}", line 8, in f\n    x\nValueError: <x> \x1b'
    resumed = {"headline": "resume: DIFFERS", "verdict": {"first": None}, "hardened": [
        {"verdict": None}, {"verdict": {"first": {"site": "/elsewhere/a.py:3", "cause": None}}}]}  # fmt: skip
    results = [
        CheckResult(check[0], "c", 0, 1.5, {"headline": "equal", "verdict": {"first": None}}),
        CheckResult(check[1], "c", 1, 1, {"headline": "DIFFERS", "verdict": {"first": first}}, "DIFFERS\nlong"),
        CheckResult(check[2], "c", 1, 1, {"headline": "FAILED: <x>", "failure": raised, "verdict": None}, "\x1b<x>"),
        CheckResult(check[3], "c", 3, 1, {"headline": "this case cannot expose", "verdict": {"first": None}}),
        CheckResult(check[4], "c", 1, 1, resumed),
        CheckResult(check[5], "c", 1, 1, error="stopped after 1 s, its budget"),
        CheckResult(gone, "c", 2, 1, error="there is no file"),
    ]
    return SuiteReport(tmp_path / "pyproject.toml", results, [])


def test_junit_has_a_case_for_each_check(report):
    """Failures and errors have their cause, file, line and text; characters that XML forbids are escaped."""
    report.left = ["later"]
    suite = ET.fromstring(junit(report)).find("testsuite")  # noqa: S314 - written here
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "8", "failures": "5", "errors": "1", "skipped": "1",
    }  # fmt: skip
    cases = {case.get("name"): case for case in suite}
    assert list(cases["good"]) == []
    assert cases["good"].get("time") == "1.500"
    failure = cases["wrong"].find("failure")
    assert failure.attrib == {"type": "missing-reduction", "message": "sub/train.py:5: DIFFERS"}
    assert failure.text == "DIFFERS\nlong\nc"
    assert cases["raises"].find("failure").text == "\\x1b<x>\nc"
    assert cases["gone"].find("error").attrib == {
        "type": "invalid-input", "message": "pyproject.toml:7: there is no file"
    }  # fmt: skip
    assert cases["later"].find("skipped") is not None


def test_sarif_has_a_result_at_each_line(report):
    """The line is that of the first difference, of the last call in the traceback, the script's, or the settings'."""
    run = json.loads(sarif(report))["runs"][0]
    found = []
    for result in run["results"]:
        place = result["locations"][0]["physicalLocation"]
        found.append(
            (result["ruleId"], result["level"], place["artifactLocation"]["uri"], place["region"]["startLine"])
        )
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    assert found == [
        ("missing-reduction", "error", "sub/train.py", 5),
        ("failed", "error", "sub/train.py", 8),
        ("inconclusive", "warning", "sub/train.py", 1),
        ("differs", "error", "sub/train.py", 1),
        ("failed", "error", "sub/train.py", 1),
        ("invalid-input", "error", "pyproject.toml", 7),
    ]
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]


def test_json_is_as_the_schema_says_and_says_what_to_do(report):
    """Each check has its verdict in a word, and a next step."""
    document = json.loads(report_json(report.json()))
    assert problems_of(document, "verify") == []
    assert [check["verdict"] for check in document["checks"]] == [
        *("passed", "FAILED", "FAILED", "INCONCLUSIVE", "FAILED", "FAILED", "NOT RUN")
    ]
    assert len({check["next"] for check in document["checks"]}) == 5


@pytest.mark.parametrize(
    "statuses, left, status",
    [([0, 0], [], 0), ([], [], 1), ([0, 3], [], 3), ([3, 2], [], 2), ([3, 2, 1], [], 1), ([0], ["b"], 1)],
)
def test_the_status_is_that_of_the_worst_check(report, statuses, left, status):
    """No check at all is no success, and neither is one that did not run."""
    check = report.results[0].check
    made = SuiteReport(report.settings, [CheckResult(check, "c", each, 1, error="x") for each in statuses], left)
    assert (made.status, made.ok) == (status, status == 0)
    assert made.text().endswith(f"{statuses.count(0)} of {len(statuses) + len(left)} checks passed")
