"""Results of the corpus: what counts as caught, passed and right, and when a run is good."""

import json
from dataclasses import replace

import pytest

from hyper_parallel.verify.bugs.registry import Bug
from hyper_parallel.verify.bugs.results import BugResult, CorpusReport, FormResult

BUG = Bug("torch", "router_weight", "Wrong.", "repository 1", {"tp": 3}, "gradient", "router.*", "missing-reduction")
BROKEN = FormResult(False, 40, "gradient", "router.weight", "missing-reduction", "tp", "the sum is equal")
FIXED = FormResult(True, 50)
GOOD = BugResult(BUG, BROKEN, FIXED, 0.25)


def states(result):
    """The four states of a result, in order."""
    return result.caught, result.passed, result.tensor_right, result.cause_right


def test_a_right_result():
    """A result is right where the first value, by its pattern, and the cause are the documented ones."""
    assert states(GOOD) == (True, True, True, True)
    assert GOOD.text() == "torch router_weight: caught: the gradient of router.weight, missing-reduction over tp"


@pytest.mark.parametrize(
    "broken, expected, text",
    [
        (replace(BROKEN, name="up.weight"), (True, False, True), "; documented is gradient router.*"),
        (replace(BROKEN, kind="weight"), (True, False, True), "; documented is gradient router.*"),
        (
            replace(BROKEN, cause="stale", axis=""),
            (True, True, False),
            "stale; the documented cause is missing-reduction",
        ),
        (FormResult(True, 9, unplaced=("a",)), (False, False, False), "MISSED: equal, 9 values, 1 not placed"),
        (FormResult(False, error="X: no\nmore"), (False, False, False), "MISSED: ended: X: no"),
    ],
)
def test_a_broken_form_that_is_judged_otherwise(broken, expected, text):
    """Another tensor, another cause, an equal run and an end without verdict are distinguished."""
    result = replace(GOOD, broken=broken)
    assert (result.caught, result.tensor_right, result.cause_right) == expected
    assert result.text().endswith(text)


@pytest.mark.parametrize(
    "fixed, text",
    [
        (BROKEN, "the gradient of router.weight, missing-reduction over tp"),
        (FormResult(True, 0), "equal, 0 values"),
        (FormResult(True, 5, unplaced=("a",)), "equal, 5 values, 1 not placed"),
        (FormResult(False, error="X: no"), "ended: X: no"),
    ],
)
def test_a_fixed_form_passes_only_if_all_was_compared(fixed, text):
    """A difference, nothing compared, a value without placement and an end each are a false alarm."""
    result = replace(GOOD, fixed=fixed)
    assert not result.passed
    assert result.text().endswith(f"\n  FALSE ALARM in the fixed form: {text}")
    assert not CorpusReport([result], whole=False).ok


def test_a_whole_run_needs_its_shares():
    """Of a whole corpus nine of ten tensors and eight of ten causes must be right; of chosen bugs all be caught."""
    other = replace(GOOD, broken=replace(BROKEN, cause="stale"))
    assert CorpusReport([GOOD] * 8 + [other] * 2).ok
    assert not CorpusReport([GOOD] * 7 + [other] * 3).ok
    assert CorpusReport([other], whole=False).ok
    renamed = replace(GOOD, broken=replace(BROKEN, name="up"))
    assert CorpusReport([GOOD] * 9 + [renamed]).ok
    assert not CorpusReport([GOOD] * 8 + [renamed] * 2).ok


def test_nothing_and_a_part_are_no_success():
    """A run of no program is not good, nor an interrupted one."""
    assert not CorpusReport([]).ok
    partial = CorpusReport([GOOD], note="partial report: 1 of 2 bugs finished")
    assert not partial.ok
    assert partial.text() == (
        "1 of 1 bugs caught, 1 of 1 fixed forms pass; the tensor is right in 1, the cause in 1 (0.2 s); partial "
        "report: 1 of 2 bugs finished"
    )


def test_a_report_is_plain_data():
    """The report as data has the counts, and each bug with its facts, verdicts and states."""
    data = json.loads(json.dumps(CorpusReport([GOOD]).json()))
    assert (data["ok"], data["caught"], data["tensor_right"]) == (True, 1, 1)
    (bug,) = data["bugs"]
    assert bug["bug"]["mesh"] == {"tp": 3}
    assert (bug["broken"]["evidence"], bug["cause_right"]) == ("the sum is equal", True)


def test_unequal_calls_are_no_value():
    """Where ranks call different collectives, the result names no tensor."""
    form = FormResult(False, kind="calls", cause="unequal-calls", evidence="rank 0 disagrees")
    assert form.text() == "different collectives on the ranks, unequal-calls"
