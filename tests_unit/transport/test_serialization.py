"""Functions, arguments and results on their way between processes."""

import functools
import importlib
import subprocess
import sys
import threading
import types

import cloudpickle
import pytest

from hyper_parallel.errors import ArgumentTypeError
from hyper_parallel.transport.serialization import _by_value, pack, pack_back, pack_error, unpack


def double(x):
    """A function of a module that no other process can import."""
    return 2 * x


def elsewhere(packed):
    """What a fresh process makes of ``packed``, called with 4."""
    code = "import pickle,sys; print(pickle.loads(sys.stdin.buffer.read())(4))"
    done = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("fn", [double, lambda x: double(x) + 1, functools.partial(double)])
def test_functions_of_this_module_travel_by_value(fn):
    """Functions, lambdas and partials of a test module run in a process that cannot import it."""
    assert elsewhere(pack(fn, fn)) == fn(4)


def test_functions_keep_their_file(monkeypatch):
    """Functions and those inside them name their file on the other side, also where cloudpickle leaves it out."""
    reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]
    without_files = lambda code: reduce(code.replace(co_filename="<dynamic-code>"))  # noqa: E731
    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, types.CodeType, without_files)

    def outer():
        return lambda: None

    for packed in (pack(outer, outer), pack_back(outer)):
        arrived = unpack(packed)
        assert (arrived.__code__.co_filename, arrived().__code__.co_filename) == (__file__, __file__)


def test_installed_modules_travel_by_reference():
    """Modules of the standard library, installed packages and this library are not shipped."""
    import hyper_parallel.errors

    for module in (functools, pytest, hyper_parallel.errors):
        assert not _by_value(module, None)


def test_importable_module_travels_by_reference(tmp_path, monkeypatch):
    """A module that sys.path finds is not shipped, unless the function is its own."""
    (tmp_path / "findable_helper.py").write_text("def f(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import findable_helper

    assert not _by_value(findable_helper, None)
    assert _by_value(findable_helper, findable_helper.f)


def test_submodule_of_an_unknown_package_is_shipped():
    """A module whose package is not loaded cannot be found by name."""
    module = types.ModuleType("no_such_package.part")
    module.__file__ = "/nowhere/part.py"
    sys.modules[module.__name__] = module
    try:
        assert _by_value(module, None)
    finally:
        del sys.modules[module.__name__]


def test_module_of_a_package_that_only_this_process_has_is_shipped(tmp_path, monkeypatch):
    """A package that only this process has, as pytest makes them, does not make its modules findable elsewhere."""
    (tmp_path / "part.py").write_text("def f(x):\n    return x\n")
    package = types.ModuleType("made_by_a_runner")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    module = importlib.import_module("made_by_a_runner.part")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert _by_value(module, None)
    assert elsewhere(pack(module.f)) == 4


def test_class_comes_back_as_itself():
    """An instance of a class that travelled by value comes back as an instance of the very class."""

    class Local:
        pass

    assert type(unpack(pack_back(Local()))) is Local


def test_error_survives_without_its_frames():
    """An exception travels with its type and arguments and without traceback and causes."""
    try:
        raise KeyError("k") from ValueError("v")  # noqa: TRY301 - a real traceback is wanted
    except KeyError as error:
        back = unpack(pack_error(error))
    assert (type(back), back.args, back.__cause__, back.__traceback__) == (KeyError, ("k",), None, None)


def test_what_cannot_be_copied_is_refused_with_advice():
    """A function that refers to a value that cannot be pickled is refused, with where to create the value."""
    lock = threading.Lock()
    with pytest.raises(ArgumentTypeError) as refused:
        pack(lambda: lock)
    assert str(refused.value) == (
        "a function or argument of the ranks cannot be copied to their processes: cannot pickle '_thread.lock' object; "
        "create the object on the ranks, inside the function"
    )
