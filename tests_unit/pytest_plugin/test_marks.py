"""`arg_mark`: the marks of Ascend's suites, with names that cannot be mistyped."""

import pytest

from hyper_parallel.pytest_plugin import arg_mark

GOOD = {"plat_marks": ["platform_ascend910b"], "level_mark": "level0", "card_mark": "onecard"}


def test_every_mark_is_applied_and_registered(pytester):
    """Tests are selected by platform, level, device and essential marks, under --strict-markers."""
    pytester.makepyfile("""
from hyper_parallel.pytest_plugin import arg_mark
@arg_mark(plat_marks=["platform_ascend910b", "cpu_linux"], level_mark="level0", card_mark="allcards",
          essential_mark="essential")
def test_nightly(): pass
@arg_mark(plat_marks=["cpu_linux"], level_mark="level1", card_mark="onecard")
def test_weekly(): pass
""")
    options = ("-p", "hyper_parallel.pytest_plugin", "--strict-markers", "-m")
    for expression, passed in {
        "level0 and allcards and essential and platform_ascend910b": 1,
        "cpu_linux": 2,
        "unessential": 1,
        "platform_gpu": 0,
    }.items():
        pytester.runpytest_inprocess(*options, expression).assert_outcomes(passed=passed, deselected=2 - passed)


def test_a_mistyped_mark_or_option_is_reported(pytester):
    """Under --strict-markers, an unknown mark fails the collection, and so does an unknown option."""
    pytester.makepyfile("import pytest\n@pytest.mark.wrld_size(2)\ndef test_x(): pass\n")
    options = ("-p", "hyper_parallel.pytest_plugin", "--strict-markers")
    result = pytester.runpytest_inprocess(*options)
    result.stdout.fnmatch_lines(["'wrld_size' not found in `markers` configuration option"])
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result = pytester.runpytest_inprocess(*options, "--hp-lunch", "processes")
    result.stderr.fnmatch_lines(["*error: unrecognized arguments: --hp-lunch*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"plat_marks": ["platform_ascend910"]}, r"arg_mark\(plat_marks='platform_ascend910'\): known are "),
        ({"plat_marks": []}, "expected a list with at least one of platform_ascend,"),
        ({"plat_marks": "cpu_linux"}, "expected a list"),
        ({"level_mark": "level9"}, r"arg_mark\(level_mark='level9'\): known are level0,"),
        ({"card_mark": "twocards"}, r"arg_mark\(card_mark='twocards'\): known are onecard,"),
        ({"essential_mark": "very"}, r"arg_mark\(essential_mark='very'\): known are essential,"),
    ],
)
def test_a_mistyped_name_is_an_error(wrong, message):
    """An unknown name in arg_mark is refused where it is written: it would always deselect its test."""
    with pytest.raises(ValueError, match=message):
        arg_mark(**{**GOOD, **wrong})
