"""The report counts as verified only if every value had a place and was compared."""

from hyper_parallel.verify.engine.power import Power
from hyper_parallel.verify.engine.verdict import Verdict
from hyper_parallel.verify.program.report import HardenedCase, ProgramReport


def test_values_without_a_place_are_not_verified():
    """Everything that was compared is equal, but something was not compared: not ok, and the text says so."""
    report = ProgramReport("train.py", "torch", "simulated", 2, 0, verdict=Verdict(2, checked=4))
    assert report.ok
    report.verdict.unplaced.append("output of experts")
    assert not report.ok
    assert report.text().endswith("NOT VERIFIED: declare the values whose placement is unknown (--declare)")


def test_the_device_is_told():
    """A run on a device says so in its first line and in its JSON; one on CPU does not mention it."""
    report = ProgramReport("train.py", "torch", "simulated", 2, 0, verdict=Verdict(2, checked=4))
    assert report.text().startswith("train.py on torch: 2 simulated ranks against a single device")
    report.device = "npu"
    assert report.text().startswith("train.py on torch: 2 simulated ranks on npu against a single device")
    assert report.json()["device"] == "npu"


def test_nothing_compared_is_not_verified():
    """Neither a verdict without values nor none at all is a success."""
    assert not ProgramReport("train.py", "torch", "simulated", 2, 0).ok
    assert not ProgramReport("train.py", "torch", "simulated", 2, 0, verdict=Verdict(2)).ok


def test_calls_that_do_not_fit_come_first():
    """What the ranks called stands in the first lines, before the tracebacks."""
    calls = ("  rank 0: all_reduce(f32[3], sum) at train.py:4", "  rank 1: barrier() at train.py:6")
    report = ProgramReport(
        "train.py", "torch", "simulated", 2, 0, failure="ranks 0, 1 of 2 failed", cause="they disagree:",
        kind="unequal-calls", calls=calls,
    )  # fmt: skip
    assert report.text().splitlines()[1:] == [
        "FAILED on 2 ranks: they disagree:",
        *calls,
        "  cause: unequal-calls: ranks call different collectives",
        "ranks 0, 1 of 2 failed",
    ]


def test_little_that_could_be_judged_is_inconclusive():
    """Most gradients that rounding moves by more than a tenth: status 3 with the ways out, unless float32 is right."""
    weak = {"head.weight": 0.4, "body.weight": 0.2}
    power = Power(0.2, "head.weight", 0.4, weak, 3)
    report = ProgramReport("train.py", "torch", "simulated", 2, 0, verdict=Verdict(2, checked=4, power=power))
    assert (report.ok, report.equal, report.status) == (False, True, 3)
    lines = report.text().splitlines()
    assert lines[-1] == (
        "INCONCLUSIVE: 2 of 3 gradients might each be off by more than 10 % without being noticed: rounding alone "
        "moves them that much in this program; verify it in a wider dtype (--upcast), with fewer steps (--steps) or a "
        "smaller learning rate, or accept it with --allow wide-bounds"
    )
    assert "  could not be judged: the gradient of head.weight: off by 40 %, it might have passed" in lines
    assert report.json()["inconclusive"] == report.inconclusive
    report.hardened.append(HardenedCase([], Verdict(2, checked=4), title="upcast", skipped="it fails"))
    assert report.status == 3
    report.hardened.append(HardenedCase([], Verdict(2, checked=4), title="upcast"))
    assert (report.status, report.inconclusive) == (0, "")
    report.hardened.clear()
    report.allowed = ("wide-bounds",)
    assert report.status == 0
    few = Power(0.01, "head.weight", 0.4, {"head.weight": 0.4}, 2)
    assert ProgramReport("train.py", "torch", "simulated", 2, 0, verdict=Verdict(2, checked=4, power=few)).ok
