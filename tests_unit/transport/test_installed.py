"""Installed packages are recognised wherever they are installed; everything else is the user's."""

import importlib
import sys
import sysconfig
import types
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.transport.installed import installed_package, is_installed, package_place
from hyper_parallel.transport.serialization import _by_value
from hyper_parallel.transport.simulated.own_modules import _is_users
from hyper_parallel.verify import simulate, spec


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A folder on ``sys.path`` with a package that ``pip install --target`` put there, and a user's own package."""
    folder = tmp_path / "elsewhere"
    for name in ("fake_package", "my_project"):
        (folder / name / "inner").mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
        (folder / name / "inner" / "state.py").write_text("SEEN = []\n\n\ndef fail():\n    raise ValueError('no')\n")
    (folder / "fake_module.py").write_text("")
    record = folder / "fake_package-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    files = ["fake_package/__init__.py", "fake_package/inner/state.py", "fake_module.py", "../../bin/fake"]
    record.write_text("".join(f"{file},sha256=abc,12\n" for file in files) + f"{record.parent.name}/RECORD,,\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.startswith(("fake_", "my_project"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "path, name",
    [
        ("/home/me/.local/lib/python3.12/site-packages/torch/nn/module.py", "torch"),
        ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy"),
        ("/opt/conda/lib/python3.11/site-packages/six.py", "six"),
        ("/home/me/site-packages/torch", "torch"),
        ("/home/me/site-packages", None),
        ("/home/me/torch/train.py", None),
        ("<string>", None),
    ],
)
def test_a_site_of_any_interpreter_holds_installed_packages(path, name):
    """``--user``, ``--system-site-packages``, conda and ``.pth`` files lead to folders of one of two names."""
    assert installed_package(path) == name
    assert is_installed(path) is (name is not None)


def test_the_standard_library_and_this_interpreters_packages_are_installed():
    """Files of the standard library are nobody's project, and neither are those beside this interpreter."""
    assert installed_package(importlib.util.__file__) == "importlib"
    assert package_place(types.__file__) == f"{sysconfig.get_path('stdlib')}/types.py"
    assert installed_package(np_file()) == "numpy"


def np_file():
    """Return a file of an installed package."""
    import numpy as np

    return np.__file__


def test_the_record_of_an_installer_tells_packages_from_a_project(target):
    """In a folder on PYTHONPATH the files that an installer wrote down are installed, and all others the user's."""
    assert installed_package(f"{target}/fake_package/inner/state.py") == "fake_package"
    assert installed_package(f"{target}/fake_package/inner") == "fake_package"
    assert package_place(f"{target}/fake_module.py") == f"{target}/fake_module.py"
    assert not is_installed(f"{target}/fake_package/added_by_hand.py")
    assert not is_installed(f"{target}/my_project/inner/state.py")
    assert not is_installed(str(target))


def test_a_framework_that_is_imported_from_a_checkout_is_installed(tmp_path, monkeypatch):
    """A framework that was built in its source folder has neither a site nor a record."""
    (tmp_path / "mindspore").mkdir()
    module = types.ModuleType("mindspore")
    module.__path__ = [str(tmp_path / "mindspore")]
    file = tmp_path / "mindspore" / "nn.py"
    file.write_text("")
    assert not is_installed(str(file))
    monkeypatch.setitem(sys.modules, "mindspore", module)
    assert installed_package(str(file)) == "mindspore"
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch.py")  # before it is in sys.modules
    assert not _is_users(spec)


def test_every_user_of_the_rule_agrees(target):
    """Copies for ranks, pickles by value and messages follow the one rule."""
    theirs = importlib.import_module("fake_package.inner.state")
    own = importlib.import_module("my_project.inner.state")
    assert (_is_users(theirs.__spec__), _is_users(own.__spec__)) == (False, True)
    assert (_by_value(theirs, theirs.fail), _by_value(own, own.fail)) == (False, True)
    lines = []
    for module in (theirs, own):
        with pytest.raises(ValueError, match="no") as caught:
            exec(compile("fail()", str(target / "my_project" / "run.py"), "exec"), {"fail": module.fail})  # noqa: S102 - a frame of a file
        lines.append(spec.user_line(caught.value))
    assert lines[0].endswith("my_project/run.py:1, in <module>: ")
    assert lines[1].endswith("my_project/inner/state.py:5, in fail: raise ValueError('no')")


@pytest.mark.platforms("torch")
def test_ranks_share_an_installed_package_in_another_folder(target):
    """Each rank imports the user's module anew; one module of an installed package serves them all."""

    def body():
        from fake_package.inner import state as theirs
        from my_project.inner import state as own

        return id(theirs), id(own)

    results = simulate(body, 3, "torch", own_modules=True)
    assert len({theirs for theirs, _ in results}) == 1
    assert len({own for _, own in results}) == 3


def test_this_library_is_not_the_users():
    """A checkout of this library on the search path is not the user's project."""
    assert not _is_users(hyper_parallel.__spec__)
    assert Path(hyper_parallel.__file__).exists()
