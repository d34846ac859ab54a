"""A night beside the night before: what is new, what is gone, and a log for every failed test."""

from types import SimpleNamespace

import pytest

from workshop.commands import main
from workshop.nights import history
from workshop.nights.changes import NightChanges, write_logs
from workshop.nights.history import History, night_of
from workshop.nights.reports import CaseResult, NightReports, SuiteReport


def suite(name, failed=(), passed=0, skipped=()):
    """A suite of tests with these failures, so many passed tests, and skips for these reasons."""
    cases = [CaseResult(test, "failed", "why", f"log of {test}") for test in failed]
    cases += [CaseResult(f"passes{number}", "passed") for number in range(passed)]
    cases += [CaseResult(f"left{number}", "skipped", reason) for number, reason in enumerate(skipped)]
    return SuiteReport(name, tuple(cases), {"device": "npu", "devices": "4"})


def changes(*nights):
    """The changes of the last night; a night is a list of suites."""
    reports = [NightReports(tuple(suites), ()) for suites in nights]
    kept = ()
    for report in reports:
        kept = (*kept, night_of(report, kept[-1] if kept else None))
    return NightChanges(reports[-1], History(kept))


def test_what_is_new_since_the_night_before():
    """New failures come first; tests that no longer ran, further skips, and suites without a report are counted."""
    night = changes(
        [suite("a", ["old", "fixed"], 5, ["no device"]), suite("gone", [], 3)],
        [suite("a", ["old", "new"], 3, ["no device", "no device", "no tool"])],
    )
    (a,) = night.reports.suites
    assert [(case.name, is_new) for _, case, is_new in night.failures()] == [("new", True), ("old", False)]
    assert (night.new_failures(a), night.fewer_tests(a)) == (1, 2)
    assert {reason: night.new_skips(a, reason) for reason in a.skipped} == {"no device": 1, "no tool": 1}
    assert night.absent() == {"gone": 3}
    assert not night.ok
    assert night.summary() == "5 tests ran in 1 suites: 2 failed (1 new), 3 skipped; 1 suites have no report"
    assert night.changes()["tests of a: executed"].verdict == "worse"


def test_the_first_night_has_nothing_before_it():
    """Every failure of a first night is new, nothing is gone, and a night without failures is good."""
    night = changes([suite("a", ["x"])])
    assert (night.failures()[0][2], night.absent(), night.ok) == (True, {}, False)
    assert night.fewer_tests(night.reports.suites[0]) == 0
    good = changes([suite("a", [], 2, ["no device"])])
    assert good.ok
    assert good.summary() == "2 tests ran in 1 suites: 0 failed (0 new), 1 skipped"
    assert good.new_skips(good.reports.suites[0], "no device") == 1


def test_a_failure_has_the_day_since_which_it_fails_whenever_it_runs(monkeypatch):
    """The day is that of the first failure; a night without a report keeps it, and a pass in between ends it."""
    header = SimpleNamespace()
    monkeypatch.setattr(history, "run_header", lambda: header)
    before = None
    for day, suites, since in [
        ("2026-11-01", [suite("a", ["x", "y"])], {"a": {"x": "2026-11-01", "y": "2026-11-01"}}),
        ("2026-11-02", [suite("b", [], 1)], {"a": {"x": "2026-11-01", "y": "2026-11-01"}}),
        ("2026-11-03", [suite("a", ["x"], 1)], {"a": {"x": "2026-11-01"}}),
        ("2026-11-04", [suite("a", ["x", "y"])], {"a": {"x": "2026-11-01", "y": "2026-11-04"}}),
        ("2026-11-05", [suite("a", [], 2)], {}),
    ]:
        header.json = lambda day=day: {"date": f"{day}T02:00:00+00:00"}
        before = night_of(NightReports(tuple(suites), ()), before)
        assert before.failed == since


def test_a_lost_suite_alone_makes_a_night_bad():
    """A cell whose agent was lost is not a success of the others."""
    night = changes([suite("a", [], 2), suite("b", [], 2)], [suite("a", [], 2)])
    assert not night.ok


def test_every_failure_has_a_log(tmp_path):
    """A log has suite, test, the facts of the run, and what the ranks printed; of many failures the first 500 have."""
    night = changes([suite("a", ["old"])], [suite("a", ["old", "new"])])
    files = write_logs(night, tmp_path / "logs")
    assert {test: path.name for (_, test), path in files.items()} == {"new": "001.txt", "old": "002.txt"}
    assert files["a", "new"].read_text() == "# suite: a\n# test: new (new)\n# device: npu\n# devices: 4\n\nlog of new\n"
    assert files["a", "old"].read_text().startswith("# suite: a\n# test: old\n# device")
    many = write_logs(changes([suite("a", [f"t{number}" for number in range(501)])]), tmp_path / "many")
    assert len(many) == 500


def test_the_command_writes_page_and_logs(tmp_path, capsys):
    """`trend --night` writes the page of what --add adds, whose links are the logs beside it; alone it is refused."""
    (tmp_path / "night" / "npu-torch-4").mkdir(parents=True)
    path = tmp_path / "night" / "npu-torch-4" / "st.xml"
    path.write_text('<testsuite><testcase name="a"><failure message="no">rank 1</failure></testcase></testsuite>')
    page = tmp_path / "a page" / "the night.html"
    command = ["trend", str(tmp_path / "nights.json"), "--night", str(page)]
    assert main([*command, "--add", str(tmp_path / "night")]) == 0
    capsys.readouterr()
    assert 'href="the%20night-logs/001.txt"' in page.read_text()
    assert "no\nrank 1" in (page.parent / "the night-logs" / "001.txt").read_text()
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "python ci/workshop: error: --night writes a page of new reports; name the reports with --add REPORT\n"
    )


@pytest.mark.parametrize("reason", ["no device", "other"])
def test_as_many_skips_as_before_are_not_new(reason):
    """Only skips beyond those of the night before are new, for each reason by itself."""
    night = changes([suite("a", [], 1, ["no device"])], [suite("a", [], 1, [reason])])
    assert night.new_skips(night.reports.suites[0], reason) == (reason != "no device")
