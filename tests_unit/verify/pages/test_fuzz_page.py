"""The page of random programs shows its report."""

from collections import Counter

from hyper_parallel.verify.fuzz.report import Finding, FuzzReport
from hyper_parallel.verify.pages.report_pages import fuzz_page


def report(*findings):
    """Return a report with findings."""
    counts = {"torch": Counter(equal=8, refused=2, wrong=len(findings))}
    calls = Counter({"torch.add": 9, "Tensor.<b>": 1})
    refusals = Counter({"LayoutError: no": 2})
    return FuzzReport(
        5,
        ("torch",),
        counts,
        exact=3,
        compared=20,
        gradients=4,
        steps=calls,
        refusals=refusals,
        findings=list(findings),
    )


def test_counts_are_shown():
    """Outcomes, refusals and calls have tables; a run without findings is good."""
    page = fuzz_page(report())
    assert '<div class="verdict good"><strong>torch: 10 programs: 8 equal, 2 refused,' in page
    assert "LayoutError: no" in page
    assert "Tensor.&lt;b&gt;" in page


def test_every_finding_is_shown_with_its_program():
    """A finding has its program, escaped; one without a program says why."""
    shown = Finding("torch", "wrong", "value of x1", 5, 7, (2,), "if a < b: pass", "f.py", shown=True)
    page = fuzz_page(report(shown, Finding("torch", "hang", "rank 1", 5, 9)))
    assert '<div class="verdict bad">' in page
    assert "<pre>if a &lt; b: pass</pre>" in page
    assert "needs the programs before it" in page


def test_nothing_checked_is_bad():
    """A run that compared nothing has no good page."""
    assert '<div class="verdict bad"><strong>nothing was checked' in fuzz_page(FuzzReport(0, ("torch",)))
