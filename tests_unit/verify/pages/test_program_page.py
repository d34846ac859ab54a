"""The page of a program's verification shows its report."""

import re
from dataclasses import replace

from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.verdict import Verdict
from hyper_parallel.verify.pages.program_page import program_page


def row_of(page, words):
    """Return the cells of the row that has the words."""
    (row,) = [row for row in re.findall(r"<tr[^>]*><th[^>]*>.*?</tr>", page, re.DOTALL) if words in row]
    return [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", row, re.DOTALL)]


def test_differences_stand_in_order_with_cause_and_line(samples):
    """The first difference has its facts; every difference has a row; kinds are counted, ranks each by itself."""
    page = program_page(samples.program("head.weight"))
    state = "DIFFERS first in step 1: the gradient of head.weight on ranks 0, 1"
    assert f'<div class="verdict bad"><strong>{state}</strong>' in page
    assert (
        "<p>head.weight on torch: 2 simulated ranks (dp=2) against a single device, 3 optimizer steps, seed 7" in page
    )
    assert "<dt>cause</dt><dd>missing-reduction over dp: " in page
    assert "<dt>evidence</dt><dd>the sum over dp is that of head.weight</dd>" in page
    assert row_of(page, ">the gradient of head.weight") == [
        "the gradient of head.weight", "gradient", "in step 1", "ranks 0, 1", "0.25", "1e-09", "missing-reduction",
        "head.weight",
    ]  # fmt: skip
    assert row_of(page, ">the loss<")[4] == "not a number"
    assert row_of(page, ">gradients<") == ["gradients", "4", "2", "different"]
    assert row_of(page, ">parameters<") == ["parameters", "2", "0", "equal"]
    for title in ("Incomplete", "Placement unknown", "Not compared, and why", "Blind spots of this case", "Notes"):
        assert f">{title}</h3>" in page
    assert "<li>parameter head.weight, after step 1, on ranks 0, 1</li>" in page
    assert "rounds differently in each run, first in head.weight at step 1" in page


def test_harder_cases_have_a_section_each(samples):
    """What was changed, and the verdict or the failure with its traceback."""
    page = program_page(samples.program("head.weight"))
    assert page.count(">In a harder case</h2>") == 2
    assert "<p>noise on head.weight</p>" in page
    assert '<div class="verdict bad"><strong>FAILED: KeyError: head.weight</strong>' in page


def test_equal_refused_and_unfinished_programs(samples):
    """An equal program is good; a refused case says why; without a verdict nothing is verified."""
    equal = replace(samples.program(), verdict=Verdict(2, counts={"loss": 2}, checked=2), hardened=[], rounding="")
    assert '<div class="verdict good"><strong>equal on 2 ranks: 2 losses (2 elements)' in program_page(equal)
    spot = BlindSpot("equal-data", "dp", "both have one batch", "give each its own", refused=True)
    equal.verdict.spots.append(spot)
    page = program_page(equal)
    assert "<strong>INCONCLUSIVE: all values match, but this case cannot expose some bugs</strong>" in page
    assert f"<p>this case cannot expose {spot}</p>" in page
    assert "<strong>NOT VERIFIED</strong>" in program_page(replace(equal, verdict=None))
    unplaced = replace(equal, verdict=replace(equal.verdict, unplaced=["x"]))
    assert "<strong>NOT VERIFIED: declare the values whose placement" in program_page(unplaced)
    harder = replace(equal, hardened=samples.program().hardened)
    assert '<div class="verdict bad"><strong>NOT EQUAL in a harder case</strong>' in program_page(harder)


def test_a_failure_shows_calls_cause_and_traceback(samples):
    """What the ranks called, the class of the failure, and every rank's traceback."""
    page = program_page(samples.failed_program("head"))
    assert '<div class="verdict bad"><strong>FAILED on 2 ranks: ValueError: head</strong>' in page
    assert "<p>rank 0 calls all_reduce at head</p>" in page
    assert "<p>cause: unequal-calls: " in page
    assert "<details><summary>traceback of every rank</summary><pre>rank 0: head</pre></details>" in page


def test_the_lines_around_a_call_are_shown(samples, tmp_path):
    """A call site links the lines of the script around it; one whose file is gone, or no Python file, is text."""
    script = tmp_path / "train.py"
    script.write_text("".join(f"line_{number} = '<{number}>'\n" for number in range(1, 10)))
    (tmp_path / "secret").write_text("concealed\n" * 9)
    report = samples.failed_program()
    report.calls = [f"rank 0 calls all_reduce at {script}:5", f"rank 1 at {tmp_path}/gone.py:1", f"{tmp_path}/secret:1",
                    f"{script}:99"]  # fmt: skip
    page = program_page(report)
    assert f'rank 0 calls all_reduce at <a href="#site-train.py-5">{script}:5</a>' in page
    (lines,) = re.findall(r'<pre class="source">(.*?)</pre>', page, re.DOTALL)
    assert lines.split("\n")[0] == "    2  line_2 = &#39;&lt;2&gt;&#39;"
    assert "<mark>    5  line_5 = &#39;&lt;5&gt;&#39;  ← here</mark>" in lines
    assert lines.count("\n") == 6
    assert "concealed" not in page
    assert f"<p>rank 1 at {tmp_path}/gone.py:1</p>" in page
