"""`ci/coverage_gate.py`: a floor that does not hold fails, and says where."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "coverage_gate.py"


@pytest.fixture(scope="module")
def gate():
    """The script as a module."""
    pytest.importorskip("coverage")
    spec = importlib.util.spec_from_file_location("coverage_gate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(lines, covered, branches=0, taken=0):
    """Numbers as in coverage's JSON report."""
    return {"num_statements": lines, "covered_lines": covered, "num_branches": branches, "covered_branches": taken}


REPORT = {
    "totals": summary(10, 8, branches=10, taken=8),
    "files": {
        "a.py": {"summary": summary(5, 5, branches=5, taken=5), "missing_lines": []},
        "b.py": {"summary": summary(5, 3, branches=5, taken=3), "missing_lines": [7, 9]},
    },
}


def test_floors_that_hold_pass(gate):
    """Floors equal to the actual values hold."""
    assert gate.failures(REPORT, {"total": 80, "files": {"a.py": 100, "b.py": 60}}) == []


@pytest.mark.parametrize(
    "floors, message",
    [
        ({"total": 80.5}, "total: 80.00 % is below the floor of 80.5 %"),
        ({"files": {"b.py": 61}}, "b.py: 60.00 % is below the floor of 61 %; missing lines: 7, 9"),
        ({"files": {"gone.py": 10}}, "gone.py: has a floor of 10 % but was not measured"),
    ],
)
def test_a_floor_that_does_not_hold_fires(gate, floors, message):
    """A failure names file, floor, actual value and the missing lines."""
    assert gate.failures(REPORT, floors) == [message]


def test_a_report_about_nothing_fires(gate):
    """A run that measured no file is a failure, not 100 %."""
    assert gate.failures({"totals": summary(0, 0), "files": {}}, {}) == ["no file was measured"]


def test_a_branch_that_was_not_taken_lowers_the_number(gate):
    """Lines and branches count together: all lines and half the branches is 75 %."""
    assert gate.percent(summary(10, 10, branches=10, taken=5)) == 75


@pytest.mark.parametrize("env, other", [("torch", "mindspore"), ("mindspore", "torch")])
def test_an_environment_omits_the_other_framework_only(gate, env, other):
    """Each framework's environment has a floor, and leaves out nothing but the other framework's own files."""
    entry = gate.settings(env)
    assert entry["total"] > 0
    transport = {"torch": "c10d", "mindspore": "mindspore"}[other]
    assert entry["omit"] == [f"hyper_parallel/platform/{other}/*", f"hyper_parallel/transport/{transport}.py"]


def test_a_run_without_data_fails_without_a_traceback(gate, monkeypatch, tmp_path, capsys):
    """When nothing at all was measured, the gate fails in one line."""
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "settings", lambda _env: {})
    gate.erase("torch")
    assert gate.main(["torch"]) == 1
    assert "`coverage combine` failed" in capsys.readouterr().err
