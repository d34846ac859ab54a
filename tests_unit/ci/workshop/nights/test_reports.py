"""The reports of a night are read from a folder: suites with each test's outcome, and reports of commands."""

import json
import re

import pytest

from workshop.nights.reports import CaseResult, read_reports, read_suite

SUITE = """<testsuites><testsuite name="pytest" timestamp="2026-01-02T03:04:05+00:00">
<properties><property name="hyper_parallel.device" value="npu"/><property name="hyper_parallel.devices" value="4"/>
<property name="other" value="not ours"/></properties>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="fails"><failure message="rank 1: no\nmore">Traceback</failure>
<system-out>--- stdout of rank 1 ---</system-out></testcase>
<testcase classname="a" name="ends badly"><error/></testcase>
<testcase name="left out"><skipped message="[no-device] none"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def folder(tmp_path):
    """A night with a suite in a folder, a report with a header, and files that are none."""
    (tmp_path / "npu-torch-4").mkdir()
    (tmp_path / "npu-torch-4" / "st.xml").write_text(SUITE)
    gate = {"name": "torch", "total": 97.5, "failures": [], "ranks": 3, "ok": True}
    header = {"date": "2026", "versions": {"torch": "2.13", "numpy": "1"}, "command": "it"}
    (tmp_path / "gate.json").write_text(json.dumps({"header": header, **gate}))
    (tmp_path / "old.json").write_text(json.dumps(gate))
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "other.xml").write_text("<coverage/>")
    return tmp_path


def test_a_suite_has_its_tests_and_the_facts_of_its_run(folder):
    """Each test has name, outcome, reason, and if it failed its log; the facts are those that the plugin wrote."""
    (suite,) = read_reports([folder]).suites
    assert suite.name == "npu-torch-4/st"
    assert suite.cases == (
        CaseResult("a.passes", "passed"),
        CaseResult("a.fails", "failed", "rank 1: no more", "rank 1: no more\nTraceback\n\n--- stdout of rank 1 ---"),
        CaseResult("a.ends badly", "failed"),
        CaseResult("left out", "skipped", "[no-device] none"),
    )
    assert suite.facts == {"date": "2026-01-02T03:04:05+00:00", "device": "npu", "devices": "4"}
    assert (suite.executed, suite.number("passed"), len(suite.failed), dict(suite.skipped)) == (
        3, 1, 2, {"[no-device] none": 1},
    )  # fmt: skip


def test_a_report_of_a_command_has_its_values_and_its_header(folder):
    """Values are those that are followed, words included; a report without a header has no facts."""
    gate, old = read_reports([folder]).commands
    assert {name: measured.value for name, measured in gate.values.items()} == {
        "torch: covered": 97.5, "torch: ranks": 3, "torch: gates": "held",
    }  # fmt: skip
    assert gate.facts == {"date": "2026", "versions": "torch 2.13, numpy 1", "command": "it"}
    assert old.facts == {"versions": ""}
    assert [report.name for report in read_reports([folder / "gate.json", folder / "old.json"]).commands] == [
        "gate", "old",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", "{", "a.json is not a report: Expecting property name enclosed in double quotes"),
        ("a.json", "[1]", "a.json cannot be followed: it is neither a JUnit file nor one of the reports of verify ops"),
        ("a.xml", "<testsuites>", "a.xml is not a JUnit file: no element found"),
        ("a.xml", "<coverage/>", "a.xml is not a JUnit file: its root is coverage, not testsuites"),
        ("a.xml", None, "a.xml is not a JUnit file: No such file or directory"),
    ],
)
def test_a_named_file_must_be_a_report(name, text, message, tmp_path):
    """A file that is named and is not a report of either kind is an error that names it."""
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_reports([tmp_path / name])


def test_a_folder_without_reports_is_an_error(tmp_path):
    """A night of nothing is not a night."""
    (tmp_path / "other.xml").write_text("<coverage/>")
    with pytest.raises(ValueError, match=r"no report of verify ops, .*, and no JUnit file"):
        read_reports([tmp_path])


def test_a_suite_without_times_or_properties_is_read(tmp_path):
    """A JUnit file of another tool has its tests, and no facts but an empty date."""
    path = tmp_path / "a.xml"
    path.write_text('<testsuite><testcase name="a"/></testsuite>')
    suite = read_suite(path, "a")
    assert (suite.facts, suite.executed) == ({"date": ""}, 1)
    path.write_text("<testsuites/>")
    assert read_suite(path, "a").facts == {"date": ""}
