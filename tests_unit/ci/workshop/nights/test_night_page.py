"""The page of a night shows suites with devices and frameworks, failures with their logs, skips, and sources."""

from dataclasses import replace

from workshop.nights.changes import NightChanges
from workshop.nights.history import History, night_of
from workshop.nights.night_page import night_page
from workshop.nights.reports import NightReports


def test_a_page_has_a_row_for_every_suite_failure_and_skip(samples):
    """What is new stands in its row; a suite without a report has a row; a failure without a file says where it is."""
    text = night_page(samples.night(), {("torch/st", "torch new"): "logs/001.txt"})
    assert "4 tests ran in 2 suites: 2 failed (1 new), 1 skipped; 1 suites have no report" in text
    for part in (
        "4 x npu", "1 new failures, 1 more skipped", "nothing new", "no report; 5 tests ran the night before", "97.5",
        '<a href="logs/001.txt">log</a>', "in torch/st.xml", "torch reason", "99.5", "worse",
    ):  # fmt: skip
        assert part in text, part
    assert text.index("<code>torch new</code>") < text.index("<code>torch old</code>")
    assert "2026-11-20" in text  # since when the old failure fails
    assert "no environment of a version has a report" in text
    assert "unknown" in text  # where the suite on CPU comes from


def test_versions_have_a_row_each_and_suites_a_column(samples):
    """A cell says how many tests of a suite failed on a version and since when, or passed, or that none is there."""
    before = samples.night().history.nights[0]
    failing, passing = samples.night().reports.suites
    name = "py312-torch214/versions/py312-torch214"
    suites = (
        replace(failing, name=f"{name}/unit"),
        replace(passing, name=f"{name}/st-cpu"),
        replace(passing, name="py310-torch210/unit", cases=()),
    )
    reports = NightReports(suites, ())
    known = replace(before, failed={f"{name}/unit": {"torch old": "2026-11-20"}})
    text = night_page(NightChanges(reports, History((known, night_of(reports, known)))), {})
    rows = text.partition("Versions of Python and the frameworks")[2].partition("</table>")[0]
    assert [part for part in ("unit", "st-cpu", "py310-torch210", "py312-torch214") if f">{part}<" not in rows] == []
    assert "2 of 3 failed, since 2026-11-20" in rows
    assert "1 passed" in rows
    assert "0 passed" in rows
    assert "no report" in rows
