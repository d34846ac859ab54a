"""Finding and calling the user's functions, and the errors that they raise."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify import spec
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase
from hyper_parallel.verify.spec import call_user_function, find_function, type_name

USER = Path(__file__).parent / "user"
CODE = """
def helper(size):
    return len(size)

def wrong_type(mesh):
    return helper(mesh.shape[0])

def no_argument():
    return {}

def no_key(mesh):
    return {}["missing"]

def two_lines(mesh):
    raise ValueError("first\\nsecond")

def leaves(mesh):
    raise SystemExit(3)

def no_case():
    assert helper
    assert not helper

def no_model():
    raise OSError("no weights")

def no_forward(*_):
    raise ArithmeticError("no more numbers")

def no_loss(output, batch):
    return output.nothing
"""


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
    """A module and a file name both find the function, and a file may import its neighbours."""
    assert find_function("own_case:case", "SPEC")() == 7
    assert find_function(str(here / "own_case.py") + ":case", "SPEC")() == 7
    assert find_function("./own_case.py:case", "SPEC") is find_function("own_case.py:case", "SPEC")


@pytest.mark.parametrize(
    "spec, text",
    [
        ("own_case", "SPEC 'own_case' must look like package.module:function or path/file.py:function"),
        ("own_case:", "SPEC 'own_case:' must look like package.module:function or path/file.py:function"),
        ("own_case:cas", "SPEC 'own_case:cas': own_case has no function 'cas'; did you mean case?"),
        (
            "own_case:SIZE",
            (
                "SPEC 'own_case:SIZE': SIZE is an object of type int, not a function; SPEC must name a function "
                "that returns model, batches and loss"
            ),
        ),
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
    """The error lists the existing names and, if the user's code raised, its line."""
    with pytest.raises(InputError) as caught:
        find_function(spec, "SPEC")
    assert str(caught.value) == text.replace("HERE", str(here))


def test_a_value_instead_of_a_function(here):
    """A plan that is a value is answered with the function to write."""
    with pytest.raises(InputError) as caught:
        find_function("own_case:SIZE", "PLAN")
    message = (
        "PLAN 'own_case:SIZE': SIZE is an object of type int, not a function; PLAN must name a function "
        "that takes the mesh and returns the plan"
    )
    assert str(caught.value) == message


def test_imported_functions_are_listed_only_if_there_are_no_own(here):
    """Names that a file imports are no candidates, unless it has only those."""
    (here / "own_imports.py").write_text("from math import prod\n")
    (here / "own_both.py").write_text("from math import prod\ndef case(): pass\n")
    for module, names in (("own_imports", "it has prod"), ("own_both", "did you mean case?")):
        with pytest.raises(InputError) as caught:
            find_function(f"{module}:cas", "SPEC")
        assert str(caught.value) == f"SPEC '{module}:cas': {module} has no function 'cas'; {names}"


def test_a_type_is_named_by_its_file(here):
    """A class in a file that the user named is named with that file, others with their module."""
    (here / "own_net.py").write_text("class Net:\n    class Inner: pass\n")
    net = find_function("own_net.py:Net", "SPEC")
    names = [type_name(kind) for kind in (net, net.Inner, int)]
    assert names == ["own_net.py:Net", "own_net.py:Net.Inner", "builtins.int"]


def test_missing_file(here):
    """A missing file is named by its full path."""
    with pytest.raises(InputError) as caught:
        find_function("other.py:case", "PLAN")
    assert str(caught.value) == f"PLAN: there is no file {Path(here) / 'other.py'}"


def test_a_file_that_cannot_be_run(here):
    """A file that raises or exits is named with its path and the line; once repaired, it loads."""
    broken = here / "own_mended.py"
    for line, error in (("raise OSError('not yet')", "OSError: not yet"), ("raise SystemExit(0)", "SystemExit: 0")):
        broken.write_text(line + "\n")
        with pytest.raises(InputError) as caught:
            find_function(f"{broken}:case", "SPEC")
        assert str(caught.value) == f"SPEC: cannot import {broken}: {error}\n  {broken}:1, in <module>: {line}"
    broken.write_text("def case(): return 'mended by now'\n")
    assert find_function(f"{broken}:case", "SPEC")() == "mended by now"


def test_modules_are_found_where_the_command_runs(tmp_path, monkeypatch):
    """Modules in the current folder are found even if Python's own path does not have it."""
    (tmp_path / "own_here.py").write_text("def case(): return 5\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert find_function("own_here:case", "SPEC")() == 5


@pytest.fixture
def path(tmp_path):
    """A file of functions that raise."""
    file = tmp_path / "raising.py"
    file.write_text(CODE)
    return file


def line_of(path, name, text):
    """Return how an error shows the line of ``path`` that is ``text``."""
    return f"\n  {path}:{CODE.splitlines().index('    ' + text) + 1}, in {name}: {text}"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_that_raises_is_status_2(platform_name, as_json, path, capsys):
    """A TypeError inside the plan is one error with the innermost line of the user's code, and no traceback."""
    case = f"{USER / platform_name}_case.py:case"
    arguments = ["verify", "model", case, "--plan", f"{path}:wrong_type", "--mesh", "2", "--platform", platform_name]
    assert main(arguments + ["--json"] * as_json) == 2
    message = "PLAN raised TypeError: object of type 'int' has no len()" + line_of(path, "helper", "return len(size)")
    assert capsys.readouterr().err == f"hyper-parallel: error: {message}\n"


def test_every_function_of_the_user_is_reported_alike(platform_name, path):
    """An error in SPEC, PLAN, the builder, the model or the loss is reported with its function, type and line."""
    known = {"SPEC": f"{USER / platform_name}_case.py:case", "PLAN": f"{USER / platform_name}_case.py:plan"}

    def error_of(**changed):
        chosen = {**known, **changed}
        with pytest.raises(InputError) as caught:
            verify_model(chosen["SPEC"], chosen["PLAN"], (2,), ("tp",), platform=platform_name)
        return str(caught.value)

    def parts():
        return find_function(known["SPEC"], "SPEC")()

    def own(name):
        return find_function(f"{path}:{name}", "SPEC")

    def failing():
        model = parts().build()
        for method in ("forward", "construct"):
            object.__setattr__(model, method, own("no_forward"))
        return model

    plan = {name: f"{path}:{name}" for name in ("no_argument", "no_key", "two_lines", "leaves")}
    assert (
        error_of(PLAN=plan["no_argument"])
        == "PLAN: no_argument() is called with 1 argument (DeviceMesh): too many positional arguments"
    )
    assert error_of(PLAN=plan["no_key"]) == "PLAN raised KeyError: 'missing'" + line_of(
        path, "no_key", 'return {}["missing"]'
    )
    assert error_of(PLAN=plan["two_lines"]) == "PLAN raised ValueError: first" + line_of(
        path, "two_lines", 'raise ValueError("first\\nsecond")'
    )
    assert error_of(PLAN=plan["leaves"]) == "PLAN raised SystemExit: 3" + line_of(path, "leaves", "raise SystemExit(3)")
    assert error_of(SPEC=f"{path}:no_case") == "SPEC raised AssertionError" + line_of(
        path, "no_case", "assert not helper"
    )
    parts_ = parts()
    assert error_of(SPEC=lambda: ModelCase(own("no_model"), parts_.batches, parts_.loss)) == (
        "SPEC: the function that builds the model raised OSError: no weights"
        + line_of(path, "no_model", 'raise OSError("no weights")')
    )
    assert error_of(SPEC=lambda: ModelCase(failing, parts_.batches, parts_.loss)) == (
        "SPEC: the model or its loss on a single device raised ArithmeticError: no more numbers"
        + line_of(path, "no_forward", 'raise ArithmeticError("no more numbers")')
    )
    called = "called with the output and the complete batch, a tuple) on a single device raised"
    blamed = f"({type(parts_.build()).__name__}, {called}"
    assert f"SPEC: the model or its loss {blamed}" in error_of(
        SPEC=lambda: ModelCase(parts_.build, parts_.batches, parts_.build())
    )
    assert line_of(path, "no_loss", "return output.nothing") in error_of(
        SPEC=lambda: ModelCase(parts_.build, parts_.batches, own("no_loss"))
    )


def test_a_memory_error_passes_unchanged():
    """A MemoryError is not an input error; a function in C without a signature reports its own error."""

    def full():
        raise MemoryError

    with pytest.raises(MemoryError):
        call_user_function("SPEC", full)
    with pytest.raises(InputError) as caught:
        call_user_function("SPEC", next, 3)
    assert str(caught.value) == "SPEC raised TypeError: 'int' object is not an iterator"


def test_a_name_that_no_file_can_have_is_no_file():
    """A name longer than file systems allow is told as a missing file."""
    name = "x" * 300 + ".py"
    with pytest.raises(InputError) as raised:
        find_function(f"{name}:case", "SPEC")
    assert str(raised.value) == f"SPEC: there is no file {Path(name).resolve()}"


@pytest.mark.parametrize(
    "text, line",
    [
        ("no\nat all", "no"),
        ("\n-----\n- Kernel select failed:\n-----\nUnsupported op [A] on CPU\nmore", "Unsupported op [A] on CPU"),
        ("-----", "-----"),
    ],
)
def test_a_summary_is_the_first_line_that_says_something(text, line):
    """Rules and titles, by which MindSpore frames its errors, are passed over."""
    assert spec.error_summary(ValueError(text)) == f"ValueError: {line}"
    assert spec.error_summary(ValueError()) == "ValueError"


def test_tracebacks_begin_in_the_users_files():
    """Calls before the first one in the user's files are counted instead of shown; other lines stay as they are."""
    library = spec.__file__
    text = (
        "rank 0 of 2 failed\n--- rank 0:\nTraceback (most recent call last):\n"
        f'  File "{library}", line 1, in run\n    run()\n    ^^^^^\n'
        f'  File "{torch_like()}", line 2, in call\n    call()\n'
        '  File "/home/me/model.py", line 3, in forward\n    fail()\n    ^^^^^^\n'
        f'  File "{library}", line 4, in fail\n    raise\nValueError: no\n--- rank 1: was running'
    )
    assert spec.from_user_frames(text).splitlines() == [
        "rank 0 of 2 failed",
        "--- rank 0:",
        "Traceback (most recent call last):",
        "  (2 calls before it are not in your files)",
        '  File "/home/me/model.py", line 3, in forward',
        "    fail()",
        "    ^^^^^^",
        f'  File "{library}", line 4, in fail',
        "    raise",
        "ValueError: no",
        "--- rank 1: was running",
    ]


def test_a_traceback_without_the_users_files_stays_whole():
    """An error of the library itself keeps its whole traceback, and one that begins in the user's file, too."""
    own = f'Traceback (most recent call last):\n  File "{spec.__file__}", line 1, in run\n    run()\nValueError: no'
    assert spec.from_user_frames(own) == own
    users = 'Traceback (most recent call last):\n  File "/home/me/a.py", line 1, in run\n    run()'
    assert spec.from_user_frames(users) == users
    assert spec.from_user_frames("no traceback") == "no traceback"


def torch_like():
    """Return the path of a file of an installed package."""
    return Path(sysconfig.get_path("purelib")) / "torch" / "module.py"
