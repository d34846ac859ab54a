"""The page of a night shows suites with devices and frameworks, failures with their logs, skips, and sources."""

from workshop.nights.night_page import night_page


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
    assert "unknown" in text  # where the suite on CPU comes from
