"""The report of two runs says in text and JSON what tells them apart, whatever came of them."""

import json
import math
from collections import Counter

import pytest

from hyper_parallel.verify.diff.report import DiffReport
from hyper_parallel.verify.diff.side import side_of
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.power import Power
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.input_error import InputError


def report(verdict=None, **options):
    """Return a report of two runs of one program."""
    return DiffReport(("train.py, 1 rank", "train.py, 2 ranks"), ("torch", "torch"), 3, verdict, seconds=1.5, **options)


def verdict(*differences, **options):
    """Return the verdict on six elements of one gradient."""
    return Verdict(2, list(differences), Counter(gradient=1), 6, **options)


def difference(error, bound, cause=None):
    """Return a gradient that differs from the single device's."""
    return Difference("gradient", "up.weight", "up", (1,), 0, 0, error, bound, "the single device has 1.0", cause=cause)


@pytest.mark.parametrize(
    "of_runs, first_bits, kind, said",
    [
        ([], "", "none", "all bits are equal"),
        (
            [],
            "the loss of step 1",
            "order of sums",
            "order of sums: the loss of step 1, and all compared values are within the rounding error measured in A",
        ),
        (
            [difference(0.5, 0.1, Cause("other-weights", "", "seeds"))],
            "",
            "another start",
            "another start: the runs begin with different weights or samples, so later differences mean nothing",
        ),
        (
            [difference(math.inf, 0.1)],
            "",
            "another computation",
            "another computation: no rounding explains the first difference",
        ),
        (
            [difference(0.5, 0.0)],
            "",
            "another computation",
            "another computation: no rounding explains the first difference",
        ),
        (
            [difference(0.5, 0.1, Cause("unexplained", "", "")), difference(9.0, 0.1)],
            "",
            "another computation",
            (
                "another computation: the first value that differs is 5 times as far off as rounding in A may make it; "
                "all values before it are equal but for rounding"
            ),
        ),
    ],
)
def test_the_conclusion_says_what_tells_the_runs_apart(of_runs, first_bits, kind, said):
    """One sentence of the first difference is in the text, and its kind in JSON; the reference is called A."""
    made = report(verdict(*of_runs), first_bits=first_bits, steps=2, own=["A's own ranks differ"])
    assert (made.kind_of_difference, made.conclusion()) == (kind, said)
    lines = made.text().splitlines()
    assert lines[:3] == ["A: train.py, 1 rank", "B: train.py, 2 ranks", "2 optimizer steps, seed 3, 1.5 s"]
    assert lines[-2:] == [f"  {said}", "  A's own ranks differ"]
    found = json.loads(json.dumps(made.json()))
    assert (found["difference"], found["ok"], made.status) == (kind, not of_runs, 1 if of_runs else 0)
    assert "single device" not in made.text() + str(found)
    assert [each["why"] for each in found["verdict"]["differences"]] == ["A has 1.0"] * len(of_runs)


def test_runs_that_round_too_much_are_inconclusive():
    """Equal runs most of whose gradients could not be judged are status 3, with the reason in text and JSON."""
    weak = Power(0.3, "up.weight", 0.5, {"up.weight": 0.5, "down.weight": 0.06, "enter.weight": 0.2}, 3)
    made = report(verdict(power=weak), steps=1, rounding="the output of up")
    said = (
        "2 of 3 gradients might each be off by more than 10 % without being noticed: rounding alone moves them that "
        "much in A; compare fewer steps (--steps), or runs in a wider dtype"
    )
    assert (made.equal, made.ok, made.status, made.inconclusive) == (True, False, 3, said)
    assert made.json()["inconclusive"] == said
    lines = made.text().splitlines()
    assert lines[2:4] == [
        "1 optimizer step, seed 3, 1.5 s",
        "A rounds differently in each run, first in the output of up",
    ]
    assert lines[-1] == f"INCONCLUSIVE: {said}"


def test_compiled_functions_that_ran_uncompiled_are_inconclusive():
    """Where both runs asked for the compiler, both are named: equal runs prove nothing about it."""
    made = report(verdict(), uncompiled=["A", "B"])
    said = "A and B asked for compiled functions, and recorded modules run uncompiled: nothing was found out about the "
    assert (made.status, made.inconclusive) == (3, f"{said}compiler")


@pytest.mark.parametrize("cause", ["", "not-restored"])
def test_a_run_that_failed_has_no_verdict(cause):
    """The failed run, its cause and the ranks' errors follow the runs; JSON has no verdict."""
    made = report(failure="rank 1: ...", failed_run="B", cause="ValueError: bad", kind=cause)
    lines = made.text().splitlines()
    assert lines[2:4] == ["seed 3, 1.5 s", "FAILED in B: ValueError: bad"]
    assert lines[-1] == "rank 1: ..."
    said = "  cause: not-restored: after a restart, a value is not the one that the program had saved"
    assert lines[4:-1] == ([said] if cause else [])
    found = made.json()
    assert (found["difference"], found["failed_run"], found["failure_cause"]) == ("failed", "B", cause)
    assert (found["verdict"], found["ok"], made.status, made.inconclusive) == (None, False, 1, "")


def test_an_empty_side_is_refused():
    """A side without words is named; a function or a script has no number of ranks of its own."""
    with pytest.raises(InputError) as refused:
        side_of([], "B")
    assert str(refused.value) == "B is empty; it must be a script with its arguments, such as 'train.py --tp 2'"
    assert side_of(["train.py:main", "3"], "A") == ("train.py:main", ("3",), None)
    assert side_of(["train.py", "--tp", "2"], "A") == ("train.py", ("--tp", "2"), None)
    assert side_of(["torchrun", "--nproc-per-node", "2", "train.py"], "A") == ("train.py", (), 2)
