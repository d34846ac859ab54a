"""JUnit files say where their run comes from, and which rank printed what."""

import re
from xml.etree import ElementTree as ET

import pytest

from hyper_parallel.pytest_plugin.report import titled

pytestmark = pytest.mark.platforms("torch")

CASES = """
import pytest

@pytest.fixture
def printed(request):
    request.node.add_report_section("call", "stdout of rank 1", "I am 1\\n")
    request.node.add_report_section("call", "collectives of rank 1", "all_reduce(f32[3])")

def test_fails(printed):
    print("mine")
    assert 1 == 2

def test_passes(printed):
    pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the cases above in this process, and return what the terminal showed."""
    monkeypatch.setenv("HP_TEST_PLATFORMS", "torch")
    pytester.makeini("[pytest]\njunit_logging = all\njunit_log_passing_tests = false\n")
    pytester.makepyfile(CASES)
    return lambda *words: pytester.runpytest_inprocess("-p", "hyper_parallel.pytest_plugin", *words)


def test_a_file_has_the_facts_of_its_run_and_the_sections_of_ranks(run, pytester):
    """Date, revision, versions, command, frameworks, device are properties; a failed test has its ranks' sections."""
    shown = run("--junitxml=made.xml")
    root = ET.parse(pytester.path / "made.xml").getroot()  # noqa: S314 - written by the run above
    facts = {entry.get("name"): entry.get("value") for entry in root.iterfind(".//testsuite/properties/property")}
    assert {name.removeprefix("hyper_parallel.") for name in facts} == {
        "date", "revision", "versions", "platform", "command", "frameworks", "device",
    }  # fmt: skip
    assert (facts["hyper_parallel.frameworks"], facts["hyper_parallel.device"]) == ("torch", "cpu")
    assert facts["hyper_parallel.revision"].startswith("version ")
    assert "numpy" in facts["hyper_parallel.versions"]
    assert re.fullmatch("pytest .*--junitxml=made.xml", facts["hyper_parallel.command"])
    failed, passed = root.iter("testcase")
    assert {"failure", "system-out"} <= {part.tag for part in failed}
    text = failed.findtext("system-out")
    for line in ("mine", "--- stdout of rank 1 ---\nI am 1\n", "--- collectives of rank 1 ---\nall_reduce(f32[3])\n"):
        assert line in text
    assert list(passed) == []
    shown.stdout.fnmatch_lines(["*Captured stdout of rank 1*", "I am 1", "*Captured collectives of rank 1*"])


def test_a_run_without_a_file_is_not_described(run):
    """Without --junitxml nothing is written, and the run is as before."""
    run().assert_outcomes(passed=1, failed=1)


def test_only_sections_of_ranks_get_titles():
    """Other sections keep title and text."""
    assert titled([("Captured log setup", "a"), ("Captured stdout of rank 12 call", "b\n\n")]) == [
        ("Captured log setup", "a"),
        ("Captured stdout call", "--- stdout of rank 12 ---\nb\n"),
    ]


def test_a_run_on_devices_says_how_many(run, pytester):
    """With --device, the file has the number of devices that the run could use."""
    run("--junitxml=made.xml", "--device", "npu", "-k", "passes").assert_outcomes(passed=1, deselected=1)
    text = (pytester.path / "made.xml").read_text()
    assert 'name="hyper_parallel.device" value="npu"' in text
    assert re.search(r'name="hyper_parallel.devices" value="\d+"', text)
