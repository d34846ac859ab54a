"""`hyper_parallel.pytest_plugin.selection`: tests are selected by framework, and deselected ones are counted."""

import importlib.util
import textwrap

import pytest

CASES = """
import pytest

@pytest.mark.platforms("torch")
def test_torch(): pass

@pytest.mark.platforms("mindspore")
def test_mindspore(): pass

@pytest.mark.platforms("torch", "mindspore")
def test_any(): pass

@pytest.mark.platforms("torch", "mindspore", together=True)
def test_together(): pass

def test_plain(): pass

def test_each(platform_name): pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the cases above under a selection, as if these frameworks were installed."""

    def start(asked, installed=("torch", "mindspore"), cases=CASES):
        find_spec = importlib.util.find_spec

        def fake(name, *rest):
            return name in installed or None if name in {"torch", "mindspore"} else find_spec(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", fake)
        monkeypatch.setenv("HP_TEST_PLATFORMS", asked)
        pytester.makepyfile(cases)
        return pytester.runpytest_inprocess("-v", "-p", "hyper_parallel.pytest_plugin")

    return start


def names(result):
    """Return the names of the tests that passed."""
    return {line.split("::")[1].split()[0] for line in result.outlines if " PASSED" in line}


def test_one_framework_runs_its_own_tests_and_counts_the_others(run):
    """With torch selected, tests that need MindSpore are deselected, and the summary has their number."""
    result = run("torch")
    assert names(result) == {"test_torch", "test_any", "test_plain", "test_each[torch]"}
    result.stdout.fnmatch_lines(
        ["platforms: torch", "deselected: 1 tests of mindspore", "deselected: 1 tests of torch,*"]
    )


def test_both_frameworks_run_everything(run):
    """With both selected no test is deselected, and a test with `platform_name` runs once for each."""
    result = run("torch,mindspore")
    assert result.parseoutcomes() == {"passed": 7}


def test_the_default_is_what_is_installed(run):
    """Without the variable, the installed frameworks are selected."""
    assert "test_each[mindspore]" in names(run("", installed=("mindspore",)))


@pytest.mark.parametrize("asked, message", [("pytorch", "known are torch"), ("torch,mindspore", "not installed")])
def test_a_selection_that_cannot_be_served_is_an_error(run, asked, message):
    """An unknown or missing framework is an error, so that the run does not look green."""
    result = run(asked, installed=("torch",))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{message}*"])


@pytest.mark.parametrize("mark", ['"pytorch"', ""])
def test_a_mark_that_names_no_framework_is_an_error(run, mark):
    """An unknown name in a mark is an error: it would always deselect its test."""
    result = run("torch", cases=f"import pytest\n@pytest.mark.platforms({mark})\ndef test_x(): pass")
    assert result.ret != 0


def test_ids_begin_with_the_tests_own_parameters(run):
    """An id is `[1-torch]`; a test for one framework does not name it, so `test[1]` selects what its author wrote."""
    cases = """
    import pytest

    @pytest.mark.parametrize("number", [1, 2])
    def test_each(number, platform_name): pass

    @pytest.mark.platforms("torch")
    @pytest.mark.parametrize("number", [1, 2])
    def test_own(number, platform_name): assert platform_name == "torch"

    @pytest.mark.platforms("torch")
    def test_alone(platform_name): pass
    """
    assert names(run("torch", cases=textwrap.dedent(cases))) == {
        "test_each[1-torch]", "test_each[2-torch]", "test_own[1]", "test_own[2]", "test_alone",
    }  # fmt: skip
