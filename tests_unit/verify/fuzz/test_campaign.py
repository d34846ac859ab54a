"""Runs of many programs: equal for equal seeds, in worker processes too; findings are written once per kind."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hyper_parallel.verify.frameworks.torch import programs as language
from hyper_parallel.verify.fuzz import campaign
from hyper_parallel.verify.fuzz.campaign import Settings, run_batch, run_campaign
from hyper_parallel.verify.fuzz.report import Finding, FuzzReport

pytestmark = pytest.mark.platforms("torch")

SHORT = Settings(("torch",), 7, 24, jobs=0)


def counts(batch):
    """Return a batch without its time."""
    return {**asdict(batch), "processor_seconds": 0.0}


def test_the_same_seed_gives_the_same_outcomes():
    """A batch that runs again, in another process state, has the same programs and outcomes."""
    assert counts(run_batch("torch", 7, range(12))) == counts(run_batch("torch", 7, range(12)))


def test_a_run_counts_what_it_compared(monkeypatch):
    """Programs, results, calls and modes of all batches are counted; nothing that fails is a good run."""
    monkeypatch.setattr(campaign, "BATCH", 16)
    seen = []
    report = run_campaign(replace(SHORT, count=campaign.BATCH + 6), lambda report: seen.append(report.programs))
    assert seen == [campaign.BATCH, campaign.BATCH + 6]
    assert report.programs == campaign.BATCH + 6
    assert report.outcomes["torch"]["equal"] > report.programs / 2
    assert report.compared > report.programs
    assert report.gradients > 0
    assert report.exact > 0
    assert sum(report.modes.values()) == sum(report.worlds.values()) == report.programs
    assert report.text().startswith(f"torch: {report.programs} programs: {report.outcomes['torch']['equal']} equal, ")
    assert report.json()["outcomes"]["torch"]["equal"] == report.outcomes["torch"]["equal"]


def test_a_run_may_start_later(monkeypatch):
    """Programs run from the given one on, so many as asked; those of a batch together."""
    numbers = []

    def note(framework, _, batch, *__):
        numbers.append(batch)
        return campaign.Batch(framework, 2)

    monkeypatch.setattr(campaign, "run_batch", note)
    size = campaign.BATCH
    run_campaign(replace(SHORT, first=2 * size + 5, count=size + 3))
    run_campaign(replace(SHORT, first=7, count=1))
    assert numbers == [range(2 * size + 5, 3 * size), range(3 * size, 3 * size + 8), range(7, 8)]


def test_programs_mix_the_dtypes_that_are_asked_for():
    """A run with dtypes compares programs of these, and the report names them."""
    report = run_campaign(replace(SHORT, count=8, dtypes=("bool", "int8", "float16")))
    assert report.ok
    assert "\nseed 7, dtypes bool,int8,float16; " in report.text()
    assert report.outcomes["torch"]["equal"]
    assert counts(run_batch("torch", 7, range(8)))["steps"] != dict(report.steps)


def test_no_time_and_no_program_is_no_good_run():
    """A run in which nothing was checked is not ok, and says so."""
    report = run_campaign(replace(SHORT, seconds=-1.0))
    assert (report.programs, report.checked, report.ok) == (0, False, False)
    assert report.text().endswith("nothing was checked: no program was compared with a single device")
    refused = FuzzReport(0, ("torch",), {"torch": campaign.Counter(refused=5)})
    assert not refused.checked


def test_what_fails_is_made_small_and_written(small, monkeypatch, tmp_path):
    """A broken operator is found, made small and written; findings alike are counted as one."""
    usual = language.call_named

    def broken(tensor):
        return tensor * 2 if hasattr(tensor, "to_local") else tensor * 1

    monkeypatch.setattr(language, "call_named", lambda name: broken if name == "torch.broken" else usual(name))

    class Broken:
        language = language

        @staticmethod
        def program(seed, number, world_size):
            program = small.unary("torch.broken" if number % 2 else "torch.square", mesh=(world_size,))
            return replace(program, seed=(seed, number))

    monkeypatch.setattr(campaign, "_generator", lambda *_: Broken)
    report = run_campaign(replace(SHORT, count=12, folder=str(tmp_path)))
    assert report.outcomes["torch"] == {"equal": 6, "wrong": 6}
    (shrunk,) = report.findings
    assert (shrunk.kind, shrunk.calls, shrunk.mode, shrunk.alike) == ("wrong", "torch.broken", "forward", 6)
    assert [call.op for call in shrunk.rows] == ["mul"]
    assert not report.ok
    assert "wrong: value of x1 is " in report.text()
    assert (tmp_path / "torch-7-1.py").read_text() == shrunk.source
    assert len(shrunk.source.splitlines()) <= 20
    assert shrunk.shown  # torch.broken is not a function of PyTorch: the file fails


def test_a_failure_that_needs_earlier_programs_is_told(monkeypatch, tmp_path):
    """What does not fail by itself is a finding all the same, without a file."""
    from hyper_parallel.verify.fuzz.program import Outcome

    kinds = iter(["equal", "wrong", "equal"])
    monkeypatch.setattr(
        campaign, "run_programs", lambda _, programs, **__: [Outcome(next(kinds), "text", 1) for _ in programs]
    )
    report = run_campaign(replace(SHORT, count=2, folder=str(tmp_path)))
    (finding,) = report.findings
    assert finding.source == ""
    assert finding.lines()[1] == "  torch, seed 7, program 1: fails only after the programs before it in its batch"


def test_an_interruption_leaves_a_partial_report(monkeypatch):
    """After Ctrl-C the report says that it is partial, and is not ok."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "run_batch", stop)
    report = run_campaign(SHORT)
    assert (report.note, report.ok) == ("interrupted: a partial report", False)


def _die(*_, **__):
    os._exit(9)


def _die_in_a_smaller_program(*arguments, shrinks):
    if shrinks:
        os._exit(9)
    return campaign.run_batch(*arguments, shrinks=False)


def test_a_smaller_program_that_ends_the_process_costs_no_batch(monkeypatch):
    """The batch runs again without making its findings smaller: its programs are counted as in any run."""
    expected = run_campaign(replace(SHORT, count=3)).outcomes
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # the process of the campaign imports this file
    monkeypatch.setattr(campaign, "run_batch", _die_in_a_smaller_program)
    report = run_campaign(replace(SHORT, count=3, jobs=1))
    assert report.outcomes == expected
    assert "internal error" not in report.outcomes["torch"]


def test_what_is_not_made_smaller_is_named_by_its_number(monkeypatch):
    """A batch that runs again reports each program with its number, and why there is no file."""
    from hyper_parallel.verify.fuzz.program import Outcome

    kinds = iter(["equal", "wrong", "equal"])
    monkeypatch.setattr(
        campaign, "run_programs", lambda _, programs, **__: [Outcome(next(kinds), "text", 1) for _ in programs]
    )
    (finding,) = campaign.run_batch("torch", 7, range(3), shrinks=False).findings
    line = "  torch, seed 7, program 1: not made smaller: a process of the campaign ended meanwhile"
    assert finding.lines()[1] == line


def test_a_batch_whose_process_dies_is_a_finding(monkeypatch):
    """A native crash, twice, costs one batch, and is an internal error of it; the run goes on."""
    monkeypatch.setattr(campaign, "run_batch", _die)
    report = run_campaign(replace(SHORT, count=campaign.BATCH + 1, jobs=1))
    assert report.outcomes["torch"] == {"internal error": campaign.BATCH + 1}
    assert [finding.text for finding in report.findings] == ["the process of batch 0 died: programs 0 to 63"]
    assert report.findings[0].alike == 2


def test_findings_are_told_apart():
    """Findings with other calls are other findings."""
    report = FuzzReport(0)
    for calls in ("torch.a", "torch.a", "torch.b"):
        report.add(Finding("torch", "wrong", "text", 0, 1, calls=calls, look=calls, source="x", file="f.py"))
    assert [finding.alike for finding in report.findings] == [2, 1]
    assert report.findings[0].lines() == [
        "wrong: text (2 programs alike)", "  torch, seed 0, program 1, mesh : f.py; by itself it does not fail",
    ]  # fmt: skip
