"""Charts of curves, and of errors compared with their bounds."""

import math
import re

import pytest

from hyper_parallel.verify.pages.charts import Dot, bar, curves, dots


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


def test_every_step_shows_its_values():
    """A strip per step has the values of both curves as a hint, whatever the width of the picture."""
    for width in (480, 960):
        picture = str(curves("t", {"one": [1.0, 2.5], "two": [1.0, math.nan]}, x="step", y="loss", width=width))
        assert re.findall(r"<title>(step [^<]*)<", picture) == ["step 1: one 1, two 1", "step 2: one 2.5, two nan"]
        assert f'width="{width}"' in picture
