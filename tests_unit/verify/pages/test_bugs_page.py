"""The corpus's page shows its report."""

import re
from dataclasses import replace

from hyper_parallel.verify.bugs.results import CorpusReport, FormResult
from hyper_parallel.verify.pages.report_pages import bugs_page


def test_every_program_has_a_row_with_verdicts(samples):
    """A row tells the report, both forms' verdicts, and whether tensor and cause are the documented ones."""
    page = bugs_page(samples.corpus())
    assert '<div class="verdict good"><strong>1 of 1 bugs caught, 1 of 1 fixed forms pass;' in page
    (row,) = re.findall(r"<tr[^>]*><th[^>]*>.*?router_weight.*?</tr>", page)
    assert row.count('class="good"') == 4
    assert "<td>the sum is &lt;equal&gt;</td>" in row


def test_what_is_not_right_is_shown_with_what_is_documented(samples):
    """A missed bug and a false alarm are bad; another tensor and another cause name the documented ones."""
    (result,) = samples.corpus().results
    wrong = replace(result.broken, name="up.weight", cause="stale")
    rows = [replace(result, broken=wrong), replace(result, broken=FormResult(True, 3), fixed=wrong)]
    page = bugs_page(CorpusReport(rows))
    assert '<div class="verdict bad"><strong>1 of 2 bugs caught, 1 of 2 fixed forms pass;' in page
    assert "documented: gradient router.*</td>" in page
    assert "documented: missing-reduction</td>" in page
    assert '<td class="bad">missed</td>' in page
    assert "false alarm: the gradient of up.weight, stale over tp</td>" in page
