"""Requirements of a run: missing devices, too few executed tests or an unknown skip reason fail it."""

import sys
import types

import pytest

from hyper_parallel.pytest_plugin.capability import count_devices

PLUGIN = ("-p", "hyper_parallel.pytest_plugin", "-p", "no:cacheprovider")


@pytest.mark.parametrize("visible, expected", [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("0,1,2,3,4", 3)], ids=str)
def test_devices_are_counted_without_a_framework(tmp_path, monkeypatch, visible, expected):
    """Devices are device nodes, minus those hidden by the environment; other nodes do not count."""
    for name in ("davinci0", "davinci1", "davinci2", "davinci_manager", "nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert count_devices("npu", tmp_path) == expected


def test_devices_without_device_nodes_are_counted_by_the_framework(tmp_path, monkeypatch):
    """A device that only PyTorch knows of has as many devices as it says; a type that it does not know has none."""
    seen = types.SimpleNamespace(npu=types.SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setitem(sys.modules, "torch", seen)
    assert (count_devices("npu", tmp_path), count_devices("cuda", tmp_path)) == (2, 0)


def test_the_processor_is_never_short_of_devices():
    """On CPU any number of ranks fits."""
    assert count_devices("cpu") > 1000


CASES = """
import pytest
@pytest.mark.device("npu", devices=8)
def test_devices(): pass
def test_plain(): pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run test code under a requirement."""

    def start(*options, cases=CASES, ini="", **variables):
        for name in ("HP_REQUIRE", "HP_MIN_EXECUTED"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        pytester.makeini(f"[pytest]\n{ini}")
        pytester.makepyfile(cases)
        return pytester.runpytest_inprocess(*PLUGIN, *options)

    return start


def test_without_devices_a_test_is_skipped_with_its_reason(run):
    """A test that needs devices is skipped where there are none, with a reason of the closed list."""
    result = run("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*[[]no-device] needs 8 npu, has 0"])


@pytest.mark.parametrize("how", [{"HP_REQUIRE": "npu:8"}, ["--hp-require", "npu:8"]])
def test_required_devices_that_are_not_here_end_the_run(run, how):
    """`HP_REQUIRE=npu:8` turns the skip into an error before anything runs."""
    result = run(**how) if isinstance(how, dict) else run(*how)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*8 npu devices are required, but 0 are available"])


@pytest.mark.parametrize("text", ["tpu:8", "npu:none", "npu:0", "8"])
def test_a_requirement_that_cannot_be_read_ends_the_run(run, text):
    """A mistyped requirement must not pass as no requirement."""
    result = run(HP_REQUIRE=text)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*HP_REQUIRE={text}: expected npu or cuda*"])


def test_a_run_that_skipped_every_npu_test_fails_on_request(run):
    """With `--require-npu`, a run passes only if a test ran on an NPU."""
    result = run("--require-npu")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED RUN: --require-npu: no test ran on an NPU"])


@pytest.mark.parametrize("how", [{"HP_MIN_EXECUTED": "2"}, ["--hp-min-executed", "2"]])
def test_too_few_executed_tests_fail_the_run(run, how):
    """Skipped and deselected tests do not count towards the floor of executed ones."""
    result = run(**how) if isinstance(how, dict) else run(*how)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED RUN: 1 tests ran, fewer than the required 2"])


def test_the_floor_of_a_run_on_a_device_counts_what_ran_there(run):
    """With `--device npu`, only tests that ran on the NPU count towards the floor."""
    result = run("--device", "npu", "--hp-min-executed", "1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED RUN: 0 tests ran on npu, fewer than the required 1"])


def test_enough_executed_tests_pass(run):
    """Exactly as many tests as the floor requires are enough."""
    assert run("--hp-min-executed", "1").ret == 0


@pytest.mark.parametrize("floor, status", [(3, 0), (4, 1)])
def test_the_floor_counts_without_a_terminal_reporter(run, floor, status):
    """With `-p no:terminalreporter`, tests are counted alike, subtests are not, and problems go to stderr."""
    more = """
@pytest.mark.xfail(reason="expected")
def test_expected(): assert False
@pytest.mark.xfail(reason="not run", run=False)
def test_not_run(): assert False
@pytest.fixture
def checks(request):
    return request.getfixturevalue("subtests") if hasattr(pytest, "Subtests") else None
def test_parts(checks):
    for part in range(5 if checks else 0):
        with checks.test(part=part):
            pass
"""
    result = run("-p", "no:terminalreporter", "--hp-min-executed", str(floor), cases=CASES + more)
    assert result.ret == status
    result.stdout.no_fnmatch_line("*")
    lines = ["FAILED RUN: 3 tests ran, fewer than the required 4"]
    assert result.errlines == (lines if status else [])


def test_a_floor_that_is_no_number_ends_the_run(run):
    """A mistyped floor must not pass as no floor."""
    assert run(HP_MIN_EXECUTED="many").ret == pytest.ExitCode.USAGE_ERROR


def test_an_open_reason_fails_a_run_with_closed_reasons(run):
    """With `hp_closed_skips` every skip names a reason of the list, and the summary counts by reason."""
    cases = CASES + "def test_open(): pytest.skip('later')\n"
    result = run(cases=cases, ini="hp_closed_skips = true")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["skipped: 1 tests, (not on the list)", "skipped: 1 tests, no-device", "FAILED RUN: *test_open: later"]
    )
    assert run(cases=CASES, ini="hp_closed_skips = true").ret == 0


def test_a_mistyped_device_is_an_error(run):
    """An unknown device is a usage error instead of a test that is always skipped."""
    result = run(cases='import pytest\n@pytest.mark.device("npx")\ndef test_x(): pass')
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *::test_x: mark device('npx'): known are cpu, npu, cuda"])
