"""The page of nights shows every value over the nights, what got worse first."""

from workshop.nights.trend_page import trend_page


def test_a_page_of_one_night(samples):
    """The first night has no verdict of getting worse, and its values are shown."""
    page = trend_page(samples.history("torch", 1))
    assert '<div class="verdict good"><strong>2 values, and no night before to compare them with' in page
    assert "torch reason" in page


def test_a_value_that_is_missing_on_some_nights(samples):
    """A value that was not reported is a gap in its series."""
    assert samples.history("a", 3).series("a new") == [None, 1, 1]
    page = trend_page(samples.history("a", 3))
    assert "a new: from 1 to 1 in 2 of 3 nights" in page
    assert page.index("a checks: from 5 to 7") < page.index("a new: from")
