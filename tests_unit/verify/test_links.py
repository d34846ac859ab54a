"""Prices of communication: links of axes, and the time of collectives over them."""

from __future__ import annotations

import re

import pytest

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.links import Link, axis_traffic, links_of, seconds_of
from hyper_parallel.verify.model_report import Traffic

INSIDE, BETWEEN = Link(200e9, 5e-6), Link(25e9, 15e-6)


def row(axes, count, size):
    """Return collectives over ``axes``."""
    return Traffic("m", "forward", "all_reduce", axes, count, size, 0)


def test_defaults_follow_the_ranks():
    """An axis whose ranks lie within eight that follow each other is inside of a node, another between nodes."""
    assert links_of((64, 8), ("dp", "tp")) == {"dp": BETWEEN, "tp": INSIDE}
    assert links_of((4, 2), ("dp", "tp")) == {"dp": INSIDE, "tp": INSIDE}
    assert links_of((2, 2, 4), ("pp", "dp", "tp")) == {"pp": BETWEEN, "dp": INSIDE, "tp": INSIDE}
    assert str(INSIDE) == "200 GB/s and 5 us"


def test_options_replace_defaults():
    """An option gives GB/s and microseconds of one axis, and leaves the others alone."""
    links = links_of((64, 8), ("dp", "tp"), ("tp=300,4",))
    assert links == {"dp": BETWEEN, "tp": Link(300e9, 4e-6)}


def test_times_add_up():
    """A collective takes its latency and its bytes; over several axes the least bandwidth and the largest latency."""
    links = {"dp": Link(1e6, 2.0), "tp": Link(4e6, 1.0)}
    rows = [row(("tp",), 3, 8_000_000), row(("dp", "tp"), 1, 1_000_000), row(("tp",), 1, 0)]
    assert seconds_of(rows, links) == 3 * 1 + 2 + 2 + 1 + 1
    over = axis_traffic(rows, {"dp": 5, "tp": 2}, links)
    assert [(each.axes, each.ranks, each.count, each.bytes, each.seconds) for each in over] == [
        (("tp",), 2, 4, 8_000_000, 6.0), (("dp", "tp"), 10, 1, 1_000_000, 3.0)
    ]  # fmt: skip


def test_ranks_that_are_no_axes_have_no_price():
    """A collective over ranks that are no axes is listed first, and the sum has no price either."""
    rows = [row(("tp",), 1, 1), row((), 1, 1)]
    assert seconds_of(rows, {"tp": INSIDE}) is None
    assert [each.seconds is None for each in axis_traffic(rows, {"tp": 2}, {"tp": INSIDE})] == [True, False]


@pytest.mark.parametrize(
    "option, message",
    [
        ("ep=1,1", "--link ep=1,1: the mesh has no axis 'ep'; its axes are dp, tp"),
        ("tp=1", "--link tp=1: give GB/s and microseconds, both above 0, as in tp=300,4"),
        ("tp=a,b", "--link tp=a,b: give GB/s and microseconds, both above 0, as in tp=300,4"),
        ("tp=0,1", "--link tp=0,1: give GB/s and microseconds, both above 0, as in tp=300,4"),
        ("tp=1,inf", "--link tp=1,inf: give GB/s and microseconds, both above 0, as in tp=300,4"),
    ],
)
def test_wrong_options_are_refused(option, message):
    """An option that names no axis, or is not two numbers above zero, is refused with what to write."""
    with pytest.raises(InputError, match=re.escape(message)):
        links_of((2, 2), ("dp", "tp"), (option,))


def test_an_axis_is_given_once():
    """Two options of one axis contradict each other."""
    with pytest.raises(InputError, match="--link tp=3,4: axis tp is given twice"):
        links_of((2, 2), ("dp", "tp"), ("tp=3,4", "dp=1,1", "tp=5,6"))
