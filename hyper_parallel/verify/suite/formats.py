"""Report files of CI systems: JUnit's XML and SARIF 2.1.0."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import Any

from hyper_parallel._release import __version__
from hyper_parallel._text import printable
from hyper_parallel.verify.engine.causes import CAUSES
from hyper_parallel.verify.program.report import REFUSED
from hyper_parallel.verify.suite.report import INVALID, CheckResult, SuiteReport

__all__ = ["junit", "sarif"]

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = {
    **CAUSES,
    "differs": "a value differs",
    "failed": "a run failed, took too long, or could not be compared",
    "invalid-input": "the check could not run",
    "inconclusive": "nothing differs, but the case cannot expose some errors",
}


def junit(report: SuiteReport) -> str:
    """Return the report as JUnit XML: a case for each check, with file and line of the error.

    Args:
        report: the report of the checks.
    """
    failed = sum(not result.ok and result.status != INVALID for result in report.results)
    errors = sum(result.status == INVALID for result in report.results)
    suite = ET.Element("testsuite", {
        "name": "hyper-parallel verify", "tests": str(len(report.results) + len(report.left)),
        "failures": str(failed), "errors": str(errors), "skipped": str(len(report.left)),
        "time": f"{sum(result.seconds for result in report.results):.3f}",
    })  # fmt: skip
    for result in report.results:
        _case(suite, result, report)
    for name in report.left:
        ET.SubElement(ET.SubElement(suite, "testcase", {"classname": "hyper-parallel", "name": name}), "skipped")
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, result: CheckResult, report: SuiteReport) -> None:
    file, line = result.place(report.settings.parent)
    named = {"classname": f"hyper-parallel.{result.check.kind}", "name": result.check.name}
    case = ET.SubElement(suite, "testcase", {**named, "file": file, "line": str(line), "time": f"{result.seconds:.3f}"})
    if result.ok:
        return
    what = "error" if result.status == INVALID else "failure"
    where = f"{file}:{line}: " if file else ""
    wrong = ET.SubElement(case, what, {"type": result.rule, "message": printable(where + result.headline)})
    wrong.text = printable(f"{result.text or result.error}\n{result.command}", keep="\n\t")


def sarif(report: SuiteReport) -> str:
    """Return the errors as SARIF, which code hosts display at the line of the script.

    Args:
        report: the report of the checks.
    """
    wrong = [result for result in report.results if not result.ok]
    rules = sorted({result.rule for result in wrong})
    run = {
        "tool": {"driver": {
            "name": "hyper-parallel verify", "version": __version__,
            "rules": [{"id": rule, "shortDescription": {"text": _RULES[rule]}} for rule in rules],
        }},
        "results": [_result(result, rules, report) for result in wrong],
        "invocations": [{"executionSuccessful": not report.left, "exitCode": report.status}],
    }  # fmt: skip
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _result(result: CheckResult, rules: list[str], report: SuiteReport) -> dict[str, Any]:
    file, line = result.place(report.settings.parent)
    place = {"artifactLocation": {"uri": file or report.settings.name}, "region": {"startLine": line}}
    return {
        "ruleId": result.rule,
        "ruleIndex": rules.index(result.rule),
        "level": "warning" if result.status == REFUSED else "error",
        "message": {"text": f"{result.check.name}: {result.headline}\n{result.command}"},
        "locations": [{"physicalLocation": place}],
    }
