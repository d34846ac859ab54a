"""Wrong use of marks and fixtures: one usage error that names test, mistake and fix, and nothing runs."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import hyper_parallel

PLUGIN = ("-p", "no:cacheprovider", "-p", "hyper_parallel.pytest_plugin")

MARKS = {
    "world_size(0)": "mark world_size(0): sizes are positive integers, for example world_size(2, 3)",
    "world_size()": "mark world_size(): sizes are positive integers, for example world_size(2, 3)",
    "world_size(2, count=3)": (
        "mark world_size(2, count=3): got an unexpected keyword argument 'count'; it is written world_size(*sizes)"
    ),
    "mesh()": "mark mesh(): sizes of the axes are positive integers, for example mesh(2, 2)",
    "mesh(2, 2, name=('dp', 'tp'))": (
        "mark mesh(2, 2, name=('dp', 'tp')): got an unexpected keyword argument 'name'; "
        "it is written mesh(*sizes, names=None)"
    ),
    "mesh(2, 3, names=('dp',))": ("mark mesh(2, 3, names=('dp',)): names are the 2 different names of its axes"),
    "mesh(2, 3, names=('tp', 'tp'))": (
        "mark mesh(2, 3, names=('tp', 'tp')): names are the 2 different names of its axes"
    ),
    "mesh(2, names=(3,))": "mark mesh(2, names=(3,)): names are the 1 different names of its axes",
    "launch('cloud')": "mark launch('cloud'): known are simulated, processes",
    "launch()": "mark launch(): known are simulated, processes",
    "launch('simulated', ranks=2)": (
        "mark launch('simulated', ranks=2): got an unexpected keyword argument 'ranks'; it is written launch(*names)"
    ),
    "platforms('pytorch')": "mark platforms('pytorch'): known are torch, mindspore",
    "rank_timeout()": (
        "mark rank_timeout(): missing a required argument: 'seconds'; it is written rank_timeout(seconds)"
    ),
    "rank_timeout(-1)": "mark rank_timeout -1: expected a positive number of seconds",
    "device('tpu')": "mark device('tpu'): known are cpu, npu, cuda",
    "device('npu', device=8)": (
        "mark device('npu', device=8): got an unexpected keyword argument 'device'; "
        "it is written device(name, devices=1)"
    ),
    "device('npu', devices=0)": (
        "mark device('npu', devices=0): devices is the number of devices that the test needs, at least 1"
    ),
}


def refused(pytester, code, *options):
    """Run this test module, and return the lines of its usage error."""
    pytester.makepyfile(test_it="import pytest\n" + code)
    result = pytester.runpytest_inprocess(*PLUGIN, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str()
    assert " passed" not in result.stdout.str()
    return [line.removeprefix("ERROR: ") for line in result.errlines if line]


def test_every_mistake_in_a_mark_is_listed(pytester):
    """Unknown and impossible arguments of all marks are refused together, with the tests that have them."""
    code = "".join(f"@pytest.mark.{mark}\ndef test_{number}(): pass\n" for number, mark in enumerate(MARKS))
    lines = refused(pytester, code)
    assert sorted(lines) == sorted(f"test_it.py::test_{number}: {text}" for number, text in enumerate(MARKS.values()))


def test_marks_that_contradict_each_other(pytester):
    """A mesh of another size than the world, and ranks for a unittest method, are refused."""
    lines = refused(
        pytester,
        """
import unittest
@pytest.mark.world_size(3)
@pytest.mark.mesh(2, 2)
def test_x(): pass

@pytest.mark.world_size(2)
class TestX(unittest.TestCase):
    def test_x(self): pass
""",
    )
    assert lines == [
        "test_it.py::test_x: mark world_size(3) and mesh(2, 2) disagree: that mesh has 4 ranks; leave world_size out",
        "test_it.py::TestX::test_x: mark world_size has no effect on methods of unittest.TestCase; use a plain class",
    ]


FIXTURES = """
@pytest.fixture
def own(rank, monkeypatch): pass

@pytest.fixture
def caplog(): return 3

@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("HERE", "1")

@pytest.mark.world_size(2)
def test_output(rank, capsys): pass

@pytest.mark.world_size(1, 2)
def test_request(request): pass

@pytest.mark.world_size(2)
def test_own(own): pass

@pytest.mark.world_size(2)
def test_good(caplog, environment, tmp_path): pass

def test_ordinary(capsys, monkeypatch, request): pass
"""


def test_fixtures_of_pytests_process_are_refused(pytester):
    """A fixture that is bound to pytest's process is refused in a ranked test and in a fixture that runs on ranks."""
    output, asked, own = refused(pytester, FIXTURES)
    assert output == (
        "test_it.py::test_output: fixture 'capsys' works in pytest's process only, and this test runs on ranks; "
        "leave it out: what a rank prints is in the report, and contextlib.redirect_stdout catches it inside the test"
    )
    assert asked == (
        "test_it.py::test_request: fixture 'request' works in pytest's process only, and this test runs on ranks; "
        "ask for what it would give: world_size, launch_name, platform_name, or a fixture of yours"
    )
    assert own == (
        "test_it.py::test_own: fixture 'own' runs on ranks, where there is no `monkeypatch`, which works in pytest's "
        "process only; write `with pytest.MonkeyPatch.context() as monkeypatch:` inside the fixture"
    )


@pytest.mark.platforms("torch")
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="[no-tool] pytest-xdist is not installed")
def test_workers_of_xdist_refuse_as_well(pytester, monkeypatch):
    """With pytest-xdist the message arrives, and no test runs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), *sys.path]))
    pytester.makepyfile("import pytest\n@pytest.mark.world_size(0)\ndef test_x(): pass\ndef test_y(): pass\n")
    result = pytester.runpytest_subprocess(*PLUGIN, "-n", "1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert " passed" not in result.stdout.str()
    result.stdout.fnmatch_lines(["FAILED RUN: test_*.py::test_x: mark world_size(0): sizes are positive integers,*"])
