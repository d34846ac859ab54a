"""Reports as a notebook shows them."""

import html
import re

import pytest

from hyper_parallel import verify
from hyper_parallel.verify.diff.report import DiffReport
from hyper_parallel.verify.report import command_line


class Printer:
    """What IPython hands to `_repr_pretty_`."""

    def __init__(self):
        self.lines = []

    def text(self, text):
        """Take a text."""
        self.lines.append(text)


@pytest.mark.parametrize("kind", ["run", "program", "campaign", "corpus"])
def test_a_notebook_shows_the_page_of_a_report(samples, kind):
    """The cell's output is the page in a frame, escaped; where no page can be shown it is the report's text."""
    report = getattr(samples, kind)()
    with command_line(["a notebook"]):  # one header, with one date
        shown, expected = report._repr_html_(), verify.page_of(report)
    (page,) = re.fullmatch(
        r'<iframe srcdoc="([^"]*)" style="width: 100%; height: 40em; border: 0"></iframe>', shown
    ).groups()
    assert html.unescape(page) == expected
    assert "<" not in page
    printer = Printer()
    report._repr_pretty_(printer, False)
    assert printer.lines == [report.text()]


def test_a_report_without_a_page_is_text():
    """A comparison of two runs has no page, so that a notebook prints its text."""
    assert DiffReport.has_page is False
    report = object.__new__(DiffReport)
    assert report._repr_html_() is None
    with pytest.raises(TypeError, match=r"^DiffReport has no page; its text is report\.text\(\)$"):
        verify.page_of(report)
