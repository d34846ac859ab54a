"""Figures of the harness: a command that failed is never within its budget."""

import json
import subprocess

import pytest

from workshop.bench import harness_timings as timings
from workshop.bench.harness_timings import Figure, Timing, figures, recorded

_SUITE = '<testsuites><testsuite time="{time}" failures="{failures}" errors="{errors}"/></testsuites>'


def test_every_promised_figure_is_timed():
    """Every promise of the harness has a figure and a budget, per framework where it can differ."""
    assert [(figure.name, figure.budget) for figure in figures(("torch", "mindspore"))] == [
        ("import hyper_parallel", 0.1),
        ("a user's operator on all meshes, torch", 10.0),
        ("slowest report of a failing rank, torch", 5.0),
        ("quick sweep of operators, torch", 60.0),
        ("a user's operator on all meshes, mindspore", 10.0),
        ("slowest report of a failing rank, mindspore", 5.0),
        ("quick sweep of operators, mindspore", 60.0),
        ("200 tests on four ranks over gloo, torch", 60.0),
        ("verify model, torch and mindspore", 60.0),
    ]


@pytest.mark.parametrize("seconds, problem, ok", [(4.0, "", True), (6.0, "", False), (1.0, "exit status 1: no", False)])
def test_a_failure_is_never_within_the_budget(seconds, problem, ok):
    """Only a command that succeeded in time is within its budget."""
    timing = Figure("some", 5.0, lambda: (seconds, problem)).timed()
    assert timing == Timing("some", seconds, 5.0, problem)
    assert timing.ok is ok


def test_a_command_that_fails_has_its_last_line_as_problem():
    """The problem is the exit status and the last line of the output."""
    _, problem = timings._command(timings._hyper("verify", "ops", "no_such_file.py"))
    assert problem.startswith("exit status 2: hyper-parallel: error: ")
    assert "no_such_file.py" in problem


def test_the_import_is_timed_in_new_processes():
    """The import of the package is timed, and succeeds."""
    timing = figures(())[0].timed()
    assert timing.problem == ""
    assert timing.seconds > 0


@pytest.mark.platforms("mindspore")
def test_the_start_of_warm_ranks_is_timed(monkeypatch):
    """The ranks of the worlds that are timed gather what each of them holds; other values are a problem."""
    monkeypatch.setattr(timings, "_WARM_RANKS", 2)
    figure = timings.warm_start()
    assert (figure.name, figure.budget) == ("warm start of 2 simulated ranks", 1.0)
    timing = figure.timed()
    assert timing.problem == ""
    assert timing.seconds > 0
    monkeypatch.setattr(timings, "simulate", lambda *_: [[0.0], [1.0]])
    assert figure.timed().problem == "the ranks gathered [[0.0], [1.0]]"


@pytest.mark.platforms("torch", "mindspore")
def test_the_operator_of_a_users_file_is_right(platform_name):
    """The operator that is timed has a correct rule: the sweep of its file succeeds."""
    seconds, problem = timings._operator(platform_name)
    assert problem == ""
    assert seconds > 0


@pytest.mark.platforms("torch")
def test_tests_on_four_ranks_are_counted(monkeypatch):
    """The figure is valid only if as many tests passed as it claims."""
    monkeypatch.setattr(timings, "_RANKED_TESTS", timings._RANKED_TESTS.replace("range(200)", "range(3)"))
    seconds, problem = timings._ranked_tests()
    assert problem == "200 tests did not pass"
    assert seconds > 0


def test_the_slowest_report_is_timed_from_the_end_of_a_hang(monkeypatch):
    """The two seconds of the hang and the run that must pass do not count; a self-test that fails is a problem."""
    rows = [("nothing (must pass)", 9.0), ("rank hangs", 4.5), ("rank raises", 1.0), ("lost coverage", 8.0)]
    document = {"results": [{"name": name, "seconds": seconds} for name, seconds in rows]}
    done = subprocess.CompletedProcess([], 0, json.dumps(document), "")
    monkeypatch.setattr(timings, "_run", lambda _: (3.0, "", done))
    assert timings._slowest_report("torch") == (2.5, "")
    monkeypatch.setattr(timings, "_run", lambda _: (3.0, "exit status 1: no", done))
    assert timings._slowest_report("torch") == (0.0, "exit status 1: no")


def test_the_last_unit_tests_are_taken_from_their_files(tmp_path):
    """The seconds of both frameworks are added up; failures are a problem; a missing file means no figure."""
    (tmp_path / "torch.xml").write_text(_SUITE.format(time=400.5, failures=0, errors=0))
    assert list(recorded(tmp_path)) == []
    (tmp_path / "mindspore.xml").write_text(_SUITE.format(time=300, failures=0, errors=0))
    assert list(recorded(tmp_path)) == [Timing("unit tests of both frameworks, last run", 700.5, 900.0)]
    (tmp_path / "mindspore.xml").write_text(_SUITE.format(time=300, failures=1, errors=2))
    assert [timing.problem for timing in recorded(tmp_path)] == ["3 tests failed"]
