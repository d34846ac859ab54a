"""The page of costs names figures over their budgets, and figures that were not measured."""

import json

import pytest

from workshop.bench.page import RATIOS, TIMINGS, bench_page, read_rows

_ROW = {"name": "add", "plain": 1.0, "peer": 41.0, "ours": 21.0, "ratio": 0.5, "budget": 0.7, "ok": True}
_LATE = {"name": "verify <model>", "seconds": 90.0, "budget": 60.0, "problem": "", "ok": False}


def test_a_figure_over_its_budget_is_named():
    """A figure over its budget is counted and named in the verdict, and its cell has the excess."""
    text = bench_page([_ROW], [_LATE])
    assert "1 of 2 figures within their budgets" in text
    assert "over: verify &lt;model&gt;" in text
    assert "150%, not within" in text
    assert "71%" in text


def test_a_figure_that_was_not_measured_has_its_command():
    """Every table without rows names the command that fills it."""
    text = bench_page([], [])
    assert "not measured: python ci/workshop bench --harness" in text
    assert "not measured: python ci/workshop bench<" in text
    assert "not measured: python ci/workshop bench --platform mindspore" in text
    assert "not measured: python ci/workshop bench --training" in text


def test_a_row_without_a_peer_has_a_dash():
    """A compiled module is compared with hand-written code alone."""
    page = bench_page([{**_ROW, "name": "block, compiled", "peer": None}], [], [], [])
    assert ">-<" in page
    assert "1 of 1 figures within their budgets" in page


def test_mindspore_has_a_table_of_its_own():
    """Its operations have no peer; what is timed in seconds stands with the harness."""
    row = {"name": "exp", "plain": 40.0, "peer": None, "ours": 90.0, "ratio": 2.25, "budget": 1.5, "ok": False}
    start = {"name": "warm start", "seconds": 0.25, "budget": 1.0, "problem": "", "ok": True}
    text = bench_page([_ROW], [], [row, start])
    assert "2 of 3 figures within their budgets" in text
    assert "over: exp" in text
    assert "150%, not within" in text
    assert text.index("warm start") < text.rindex("per operation of PyTorch") < text.index("2.25")


def test_training_steps_have_a_table_of_their_own():
    """A step that is slower than its budget allows is named."""
    row = {"name": "small model", "plain": 4e5, "ours": 3e5, "ratio": 0.75, "budget": 0.5, "ok": False}
    text = bench_page([_ROW], [], [], [row])
    assert "over: small model" in text
    assert text.index("400000.0") < text.rindex("per operation of PyTorch")


def test_reports_are_read_from_a_folder(tmp_path):
    """A missing report has no rows; the rows of others are read as they were written."""
    assert read_rows(tmp_path, RATIOS) == []
    (tmp_path / TIMINGS).write_text(json.dumps([_LATE]))
    assert read_rows(tmp_path, TIMINGS) == [_LATE]


@pytest.mark.parametrize(
    "written, message",
    [
        ("{", "is not a report of `python ci/workshop bench`: "),
        ("7", "is not a report of `python ci/workshop bench`: "),
        (
            '[{"name": "add"}]',
            "has no plain, peer, ours, ratio, budget, ok: it is not a report of `python ci/workshop bench`, or another",
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, written, message):
    """A file that does not parse, or has another version, is an error that names it."""
    (tmp_path / RATIOS).write_text(written)
    with pytest.raises(ValueError, match=r"bench\.json") as error:
        read_rows(tmp_path, RATIOS)
    assert message in str(error.value)
