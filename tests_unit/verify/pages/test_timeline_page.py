"""The timeline shows the flight records of every rank."""

import re

from hyper_parallel.transport.checks.flight_trace import Flight
from hyper_parallel.verify.pages.timeline_page import timeline_page


def cells(page, caption):
    """Return the texts of the cells of a table, by its caption."""
    body = re.search(rf"<caption><span>{caption}.*?<tbody>(.*?)</tbody>", page, re.DOTALL)[1]
    return [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    ]


def test_compute_and_collectives_of_every_rank_add_up(samples):
    """Overlapping calls count once, an unfinished one lasts until the record was written, the rest is compute."""
    assert cells(timeline_page(samples.flight()), "Time of every rank") == [
        ["0", "1250.00", "750.00", "all_gather"],
        ["1", "1000.00", "0.00", "all_gather"],
        ["2", "0.00", "0.00", "no calls"],
    ]


def test_every_call_is_a_bar_and_a_row(samples):
    """A call is a bar with its text, and a row with begin and length; text of the user is escaped."""
    page = timeline_page(samples.flight())
    assert page.count("<rect") == 2 * (4 + 2)  # in both widths, and the ground of each rank with calls
    assert "all_gather of f32[3] (waiting), 1000.00 ms, at &lt;a&gt;.py:3" in page
    rows = cells(page, "Every recorded call")
    assert rows[1] == [
        "0",
        "1",
        "all_gather",
        "all_gather of f32[3]",
        "waiting",
        "1000.00",
        "1000.00",
        "&lt;a&gt;.py:3",
    ]
    assert '<div class="verdict bad"><strong>0 of 3 ranks raised, 1 calls had not ended' in page


def test_errors_and_differences_lead(samples):
    """A rank that raised makes the verdict; the first call on which ranks differ stands beside it."""
    broken = samples.flight(error="ValueError: <no>")
    broken.records[1]["calls"][1]["operation"] = "broadcast"
    page = timeline_page(broken)
    assert '<div class="verdict bad"><strong>3 of 3 ranks raised' in page
    assert "first difference: collective 1 of ranks (0, 1)" in page


def test_a_world_without_calls_is_a_page():
    """Records without calls are said to have none."""
    records = {0: {"rank": 0, "world_size": 1, "written": 1.0, "error": None, "doing": "", "calls": []}}
    page = timeline_page(Flight(1, records))
    assert "no calls" in page
    assert '<div class="verdict good"><strong>0 of 1 ranks raised, 0 calls had not ended' in page
