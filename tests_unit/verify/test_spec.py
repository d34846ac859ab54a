"""Finding the user's function."""

import sys
from pathlib import Path

import pytest

from hyper_parallel.verify.model_case import InputError
from hyper_parallel.verify.spec import resolve


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a user's files, made current."""
    (tmp_path / "own_case.py").write_text("import own_helper\ndef case(): return own_helper.VALUE\nSIZE = 3\n")
    (tmp_path / "own_helper.py").write_text("VALUE = 7\n")
    (tmp_path / "own_broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_module_and_file(here):
    """Both spellings find the function; a file may import its neighbours."""
    assert resolve("own_case:case", "SPEC")() == 7
    assert resolve(str(here / "own_case.py") + ":case", "SPEC")() == 7
    assert resolve("./own_case.py:case", "SPEC") is resolve("own_case.py:case", "SPEC")


@pytest.mark.parametrize(
    "spec, text",
    [
        ("own_case", "SPEC 'own_case' must look like package.module:function or path/file.py:function"),
        ("own_case:", "SPEC 'own_case:' must look like package.module:function or path/file.py:function"),
        ("own_case:cas", "SPEC 'own_case:cas': own_case has no function 'cas'; it has case"),
        ("own_case:SIZE", "SPEC 'own_case:SIZE': own_case has no function 'SIZE'; it has case"),
        (
            "no_such:f",
            "SPEC: cannot import no_such: ModuleNotFoundError: No module named 'no_such'",
        ),
        (
            "own_broken:f",
            (
                "SPEC: cannot import own_broken: ModuleNotFoundError: No module named 'no_such_module_anywhere'\n"
                "  HERE/own_broken.py:1, in <module>: import no_such_module_anywhere"
            ),
        ),
    ],
)
def test_mistakes(here, spec, text):
    """Every mistake is told with what is there, and where a line of the user's raises, with that line."""
    with pytest.raises(InputError) as caught:
        resolve(spec, "SPEC")
    assert str(caught.value) == text.replace("HERE", str(here))


def test_missing_file(here):
    """A file that is not there is named with its full path."""
    with pytest.raises(InputError) as caught:
        resolve("other.py:case", "PLAN")
    assert str(caught.value) == f"PLAN: there is no file {Path(here) / 'other.py'}"


def test_a_file_that_cannot_be_run(here):
    """A file that raises, or leaves, is named with its path and the line; mended, it may be tried again."""
    broken = here / "own_mended.py"
    for line, said in (("raise OSError('not yet')", "OSError: not yet"), ("raise SystemExit(0)", "SystemExit: 0")):
        broken.write_text(line + "\n")
        with pytest.raises(InputError) as caught:
            resolve(f"{broken}:case", "SPEC")
        assert str(caught.value) == f"SPEC: cannot import {broken}: {said}\n  {broken}:1, in <module>: {line}"
    broken.write_text("def case(): return 'mended by now'\n")
    assert resolve(f"{broken}:case", "SPEC")() == "mended by now"


def test_modules_are_found_where_the_command_runs(tmp_path, monkeypatch):
    """The current folder counts, also where Python itself does not look for modules."""
    (tmp_path / "own_here.py").write_text("def case(): return 5\n")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert resolve("own_here:case", "SPEC")() == 5
