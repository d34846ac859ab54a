"""Exceptions of the user's own functions: told as their mistake, with their line, and status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.blame import called
from hyper_parallel.verify.model import verify_model
from hyper_parallel.verify.model_case import InputError, ModelCase

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
def path(tmp_path):
    """A file of functions that raise."""
    found = tmp_path / "raising.py"
    found.write_text(CODE)
    return found


def at(path, name, text):
    """How the line of ``path`` that is ``text`` is told."""
    return f"\n  {path}:{CODE.splitlines().index('    ' + text) + 1}, in {name}: {text}"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_that_raises_is_status_2(platform_name, as_json, path, capsys):
    """A TypeError inside the plan is one error with the innermost line of the user's code, and no traceback."""
    case = f"{USER / platform_name}_case.py:case"
    arguments = ["verify", "model", case, "--plan", f"{path}:wrong_type", "--mesh", "2", "--platform", platform_name]
    assert main(arguments + ["--json"] * as_json) == 2
    said = "PLAN raised TypeError: object of type 'int' has no len()" + at(path, "helper", "return len(size)")
    assert capsys.readouterr().err == f"hyper-parallel: error: {said}\n"


def test_every_function_of_the_users_is_told_alike(platform_name, path):
    """SPEC, PLAN, the model's builder, and the model and the loss on a single device: which one, what and where."""
    known = {"SPEC": f"{USER / platform_name}_case.py:case", "PLAN": f"{USER / platform_name}_case.py:plan"}

    def told(**given):
        chosen = {**known, **given}
        with pytest.raises(InputError) as caught:
            verify_model(chosen["SPEC"], chosen["PLAN"], (2,), ("tp",), platform=platform_name)
        return str(caught.value)

    def parts():
        from hyper_parallel.verify.spec import resolve

        return resolve(known["SPEC"], "SPEC")()

    def own(name):
        from hyper_parallel.verify.spec import resolve

        return resolve(f"{path}:{name}", "SPEC")

    def failing():
        model = parts().build()
        for method in ("forward", "construct"):
            object.__setattr__(model, method, own("no_forward"))
        return model

    plan = {name: f"{path}:{name}" for name in ("no_argument", "no_key", "two_lines", "leaves")}
    assert (
        told(PLAN=plan["no_argument"]) == "PLAN: no_argument() is called with DeviceMesh: too many positional arguments"
    )
    assert told(PLAN=plan["no_key"]) == "PLAN raised KeyError: 'missing'" + at(path, "no_key", 'return {}["missing"]')
    assert told(PLAN=plan["two_lines"]) == "PLAN raised ValueError: first" + at(
        path, "two_lines", 'raise ValueError("first\\nsecond")'
    )
    assert told(PLAN=plan["leaves"]) == "PLAN raised SystemExit: 3" + at(path, "leaves", "raise SystemExit(3)")
    assert told(SPEC=f"{path}:no_case") == "SPEC raised AssertionError" + at(path, "no_case", "assert not helper")
    given = parts()
    assert told(SPEC=lambda: ModelCase(own("no_model"), given.batches, given.loss)) == (
        "SPEC: the function that builds the model raised OSError: no weights"
        + at(path, "no_model", 'raise OSError("no weights")')
    )
    assert told(SPEC=lambda: ModelCase(failing, given.batches, given.loss)) == (
        "SPEC: the model on a single device raised ArithmeticError: no more numbers"
        + at(path, "no_forward", 'raise ArithmeticError("no more numbers")')
    )
    assert at(path, "no_loss", "return output.nothing") in told(
        SPEC=lambda: ModelCase(given.build, given.batches, own("no_loss"))
    )


def test_the_end_of_memory_is_nobodys_mistake():
    """It passes as it is; so does what says by itself what is wrong. A function in C says what it takes."""

    def full():
        raise MemoryError

    with pytest.raises(MemoryError):
        called("SPEC", full)
    with pytest.raises(InputError) as caught:
        called("SPEC", next, 3)
    assert str(caught.value) == "SPEC raised TypeError: 'int' object is not an iterator"
