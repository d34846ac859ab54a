"""Charts of curves, and of errors compared with their bounds."""

import math
import re

import pytest

from hyper_parallel.verify.pages.charts import Dot, bar, curves, dots, sparkline


def polylines(picture):
    """Return the points of every curve, without the lines of the legend, which come after their curves."""
    lines = re.findall(r'<polyline points="([^"]*)"', str(picture))[::2]
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]


def ticks(picture):
    """Return the numbers at the lines of a chart, from below."""
    return [float(tick) for tick in re.findall(r'text-anchor="end"[^>]*>([^<]+)<', str(picture))]


def test_equal_curves_lie_on_each_other():
    """Equal values of two curves are plotted at equal positions, and a higher value higher."""
    single, parallel = polylines(
        curves("t", {"single": [3.0, 2.0, 1.0], "parallel": [3.0, 2.0, 1.5]}, x="step", y="loss")
    )
    assert single[:2] == parallel[:2]
    assert parallel[2][0] == single[2][0]
    assert parallel[2][1] < single[2][1]
    assert [point[1] for point in single] == sorted(point[1] for point in single)


@pytest.mark.parametrize("values", [[0.1], [2.0, 2.0], [0.0, 0.0], [-3.0, 1e-9], [5.0, 5.0 + 1e-12], [1e30, 1.0]])
def test_every_value_is_inside_the_frame(values):
    """For any range of values, ticks are round numbers, and every point is between them."""
    picture = curves("t", {"a": values}, x="step", y="loss")
    assert ticks(picture) == sorted(ticks(picture))
    assert 2 <= len(ticks(picture)) <= 8
    for x, y in polylines(picture)[0]:
        assert 66 <= x <= 628
        assert 29 <= y <= 201


def test_a_loss_that_is_not_finite_is_left_out():
    """A loss that is not finite has no point, and is named in the description."""
    picture = curves("t", {"a": [1.0, math.nan, 2.0], "b": [math.inf] * 3}, x="step", y="loss")
    assert [len(points) for points in polylines(picture)] == [2, 0]
    assert "a: 1, nan, 2; b: inf, inf, inf" in str(picture)


def test_dots_stand_left_or_right_of_what_was_allowed():
    """A dot is left of its tick if it is smaller; 0 is at the left edge, labelled equal, infinity at the right."""
    rows = [Dot("a", 1e-12, 1e-9, ok=True), Dot("b", 1e-6, 1e-9, ok=False), Dot("c", 0.0, 1e-9, ok=True),
            Dot("d", math.inf, 1e-9, ok=False, hint="<why>")]  # fmt: skip
    picture = str(dots("t", rows))
    centers = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', picture)]
    bounds = [float(x) for x in re.findall(r'<line x1="([\d.]+)"[^>]*stroke-width:2"', picture)]
    assert [center < bound for center, bound in zip(centers, bounds, strict=True)] == [True, False, True, False]
    assert centers[2] < centers[0] < centers[1] < centers[3]
    assert [text for text in re.findall(r">([^<]+)</text>", picture) if text in {"equal", "differs"}] == [
        "equal",
        "differs",
    ]
    assert "<title>&lt;why&gt;: differs, allowed 1.0e-09</title>" in picture
    assert ">relative error, logarithmic</text>" in picture


def test_long_paths_keep_their_end():
    """A long module path is shortened at its beginning, because its end identifies the module."""
    path = "model.decoder." * 6 + "layers.3.mlp"
    picture = str(dots("t", [Dot(path, 0.0, 1.0, ok=True)]))
    assert re.search(r">…[^<]{23}<", picture)
    assert "layers.3.mlp<" in picture


def test_a_line_of_the_legend_looks_like_its_curve():
    """Colour, width, opacity and dashes of every legend line are those of its curve, and differ between curves."""
    picture = str(curves("t", {"single": [3.0, 2.0], "parallel": [3.0, 2.5]}, x="step", y="loss"))
    single, of_single, parallel, of_parallel = re.findall(r'<polyline points="[^"]*" style="([^"]*)"', picture)
    assert (of_single, of_parallel) == (single, parallel)
    assert single != parallel
    assert "stroke-dasharray" in of_parallel


@pytest.mark.parametrize(
    "picture, text",
    [
        (dots("t", []), "no errors to draw"),
        (curves("t", {}, x="step", y="loss"), "no finite loss to draw"),
        (curves("t", {"a": [math.nan, math.inf]}, x="step", y="loss"), "no finite loss to draw"),
    ],
)
def test_a_chart_without_data_says_so(picture, text):
    """Without a value there are no axes and no legend, but a sentence."""
    assert re.findall(r">([^<]+)</text>", str(picture)) == [text]
    assert "<line" not in str(picture)
    assert "<polyline" not in str(picture)


def test_a_bar_stays_inside_its_cell():
    """A share above 1 fills the bar, one below 0 leaves it empty."""
    assert 'width="90.0"' in str(bar(7.0, "more"))
    assert 'width="0.0"' in str(bar(-1.0, "less"))


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


def test_every_step_shows_its_values():
    """A strip per step has the values of both curves as a hint, whatever the width of the picture."""
    for width in (480, 960):
        picture = str(curves("t", {"one": [1.0, 2.5], "two": [1.0, math.nan]}, x="step", y="loss", width=width))
        assert re.findall(r"<title>(step [^<]*)<", picture) == ["step 1: one 1, two 1", "step 2: one 2.5, two nan"]
        assert f'width="{width}"' in picture
