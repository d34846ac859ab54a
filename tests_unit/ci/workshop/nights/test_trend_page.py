"""The page of nights shows every value over the nights, what got worse first."""

import math
import re

from workshop.nights.trend_page import sparkline, trend_page


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


def test_a_small_curve_has_gaps_and_stays_inside_its_cell():
    """A value that is absent or not finite is a gap; a lone value and the last are points; equal ones a level line.

    Its range stands below it, and every value shows its number when it is pointed at.
    """
    picture = str(sparkline("a <b>", [1.0, 3.0, None, 2.0, math.nan, 2.0, 5.0]))
    lines = re.findall(r'points="([^"]+)"', picture)
    assert [len(line.split()) for line in lines] == [2, 2]
    assert picture.count("<circle") == 2
    assert ">1 to 5</text>" in picture
    assert re.findall(r"<title>(night [^<]*)<", picture) == [
        f"night {night} of 7: {value}" for night, value in ((1, 1), (2, 3), (4, 2), (6, 2), (7, 5))
    ]
    heights = [float(point.split(",")[1]) for line in lines for point in line.split()]
    assert (min(heights), max(heights)) == (4.0, 20.0)
    assert "<title>a &lt;b&gt;: from 1 to 5 in 5 of 7 nights</title>" in picture
    assert 'points="4.0,12.0 116.0,12.0"' in str(sparkline("level", [2, 2]))
    assert "<title>none: no value</title>" in str(sparkline("none", [None]))
