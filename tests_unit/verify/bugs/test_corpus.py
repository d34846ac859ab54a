"""The corpus through the harness: bugs are caught, fixed forms pass, tensors and causes are the documented ones."""

import pytest

from hyper_parallel.verify.bugs.corpus import form_result, run_bug
from hyper_parallel.verify.bugs.registry import CALLS, bugs_named, find_bugs
from hyper_parallel.verify.bugs.results import CAUSE_SHARE, TENSOR_SHARE
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.program.report import ProgramReport

BUGS = {framework: {bug.name: bug for bug in find_bugs(framework)} for framework in ("torch",)}
OTHER_TENSOR: dict[str, set[str]] = {"torch": set()}
"""Bugs of which another value than the documented one is named first."""

OTHER_CAUSE = {"torch": {"all_reduce_without_backward"}}
"""Bugs of which the numbers show that a value is wrong and no more: what is missing was never on any rank."""


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("name", BUGS["torch"])
def test_a_bug_of_torch_is_caught_and_its_fixed_form_passes(name):
    """The broken form differs, first in the documented tensor and for the documented cause; the fixed form is equal."""
    result = run_bug(BUGS["torch"][name])
    assert result.caught, result.text()
    assert result.passed, result.text()
    assert result.tensor_right == (name not in OTHER_TENSOR["torch"]), result.text()
    assert result.cause_right == (name not in OTHER_CAUSE["torch"]), result.text()
    assert result.cause_right <= bool(result.broken.evidence)


@pytest.mark.parametrize("framework", BUGS)
def test_enough_is_right(framework):
    """Nine of ten tensors and eight of ten causes are right; each list of exceptions names bugs that exist."""
    total = len(BUGS[framework])
    for others, share in ((OTHER_TENSOR, TENSOR_SHARE), (OTHER_CAUSE, CAUSE_SHARE)):
        assert others[framework] <= set(BUGS[framework])
        assert len(others[framework]) <= (1 - share) * total


def report(verdict=None, cause=""):
    """A report of a program on three ranks."""
    return ProgramReport("case", "torch", "simulated", 3, 0, verdict=verdict, cause=cause, failure=cause)


def test_an_end_is_told_from_unequal_calls():
    """A disagreement about collectives is a verdict of its own; any other end of the ranks is none."""
    calls = form_result(report(cause="CollectiveMismatchError: ranks 0 and 1 disagree"))
    assert (calls.kind, calls.cause, calls.error) == (CALLS, "unequal-calls", "")
    ended = form_result(report(cause="ZeroDivisionError: no"))
    assert (ended.kind, ended.equal, ended.error) == ("", False, "ZeroDivisionError: no")


def test_what_was_left_out_is_no_pass():
    """Values without placement, steps that were not made and unequal replicas are reported next to the verdict."""
    verdict = Verdict(3, checked=4, unplaced=["a"])
    assert form_result(report(verdict)).unplaced == ("a",)
    unfinished = form_result(report(Verdict(3, checked=4, incomplete=["rank 1 stops"])))
    assert (unfinished.equal, unfinished.error) == (False, "NOT VERIFIED: rank 1 stops")


def test_a_difference_without_cause_has_none():
    """A difference of which no cause is known is a difference."""
    difference = Difference("gradient", "up.weight", "up", (1,), 0, 0, 1.0, 1e-9, "wrong")
    result = form_result(report(Verdict(3, [difference], checked=4)))
    assert (result.kind, result.name, result.cause, result.evidence) == ("gradient", "up.weight", "", "")


@pytest.mark.platforms("torch")
def test_a_program_that_the_harness_refuses_is_no_verdict(monkeypatch):
    """A program that records nothing is not caught: the reason is reported."""
    (bug,) = bugs_named(["torch"], ["average_for_sum"])
    monkeypatch.setattr(bug.load(), bug.name, lambda _: None)
    result = run_bug(bug)
    assert not result.caught
    assert "nothing was recorded" in result.broken.error
