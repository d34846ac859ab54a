"""Private names of frameworks have one home each; one that is missing refuses its feature, by name."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from hyper_parallel._versions import Missing, Names, Wanted, named
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import INSTALL
from hyper_parallel.platform.tested import OLDEST, TESTED, newer_than_tested, older_than_supported

ROOT = Path(__file__).resolve().parents[2] / "hyper_parallel"
FRAMEWORKS = ("torch", "mindspore")
HOMES = {f"platform/{name}/{file}.py" for name in FRAMEWORKS for file in ("versions/__init__", "patches")}
HOMES.add("platform/mindspore/versions/older.py")
# Attributes that PyTorch reads itself, so that they are set where they are: the number of places only falls.
SET_IN_PLACE = {
    "transport/real/c10d/groups.py": 3,  # _hash_ranks_to_str, by which PyTorch names a new group
    "transport/frontends/c10d/installation.py": 1,  # _thread_id, PyTorch's mark for worlds in threads
    "verify/frameworks/torch/pretended/installation.py": 2,  # _C._get_accelerator, which has no hooks
    "verify/frameworks/torch/pretended/sync_batchnorm.py": 1,  # a function of DistributedDataParallel that rejects CPUs
    "transport/host/torch/process_state.py": 5,  # what parametrize.cached() keeps, of which each rank has its own
}


# -- the test of the tree ----------------------------------------------------------------------------------------------


def _private(path):
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


class _Names(ast.NodeVisitor):
    """The private names of frameworks that a module imports, or reads from what it imports."""

    def __init__(self):
        self.known = {}
        self.found = []

    def visit_If(self, node):
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top in FRAMEWORKS:
                self.known[alias.asname or top] = alias.name if alias.asname else top
                self._note(node, alias.name)

    def visit_ImportFrom(self, node):
        if not node.level and node.module.partition(".")[0] in FRAMEWORKS:
            for alias in node.names:
                self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._note(node, f"{node.module}.{alias.name}")

    def visit_Assign(self, node):
        self._alias(node.targets[0], node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node):
        self._alias(node.target, node.value)
        self.generic_visit(node)

    def visit_Attribute(self, node):
        path = self._path(node)
        if path and _private(node.attr):
            self._note(node, path)
        self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            path, name = self._path(node.args[0]), node.args[1]
            if path and isinstance(name, ast.Constant):
                self._note(node, f"{path}.{name.value}")
        self.generic_visit(node)

    def _alias(self, target, value):
        path = self._path(value)
        if path and isinstance(target, ast.Name):
            self.known.setdefault(target.id, path)

    def _path(self, node):
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            path = self._path(node.value)
            return path and f"{path}.{node.attr}"
        return None

    def _note(self, node, path):
        if _private(path):
            self.found.append(f"{path} in line {node.lineno}")


def private_names(source):
    """Return the private names of frameworks in a module's text."""
    names = _Names()
    names.visit(ast.parse(source))
    return names.found


def test_private_names_stand_in_their_home():
    """Private names are read in `versions.py` and `patches.py` of a framework, but for a list that only shrinks."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        names = private_names(path.read_text(encoding="utf-8"))
        if names and place not in HOMES and "verify/bugs/" not in place:
            found[place] = names
    assert {place: names for place, names in found.items() if len(names) > SET_IN_PLACE.get(place, 0)} == {}
    assert {place: len(found.get(place, [])) for place in SET_IN_PLACE} == SET_IN_PLACE, "lower the number"


@pytest.mark.parametrize(
    "source, name",
    [
        ("import torch\nx = torch._C._f()", "torch._C in line 2"),
        ("from torch.utils import _pytree", "torch.utils._pytree in line 1"),
        ("def f():\n    from mindspore.common._grad_function import _Function", "mindspore.common._grad_function._Fun"),
        ("import torch.nn as nn\nP = nn.utils\nP._cache = 1", "torch.nn.utils._cache in line 3"),
        ("import mindspore as ms\nms.Tensor._make", "mindspore.Tensor._make in line 2"),
        ("import torch.nn as nn\nx = getattr(nn, '_cache', 1)", "torch.nn._cache in line 2"),
        ("import torch\nsetattr(torch.nn, '_cache', 1)", "torch.nn._cache in line 2"),
        ("import torch\ntorch.__version__", None),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch._ops import OpOverload", None),
        ("import numpy as np\nnp._core", None),
    ],
)
def test_a_private_name_is_found(source, name):
    """Imports, attributes and other names of what was imported are found; dunders and types alone are not reported."""
    found = private_names(source)
    assert (name is None and not found) or any(text.startswith(name) for text in found)


# -- the tables --------------------------------------------------------------------------------------------------------


def test_a_tested_version_has_every_name(platform_name):
    """The installed version, if it is one of those tested, lacks only what the table gives to other versions."""
    table = importlib.import_module(f"hyper_parallel.platform.{platform_name}.versions")
    tested = " and ".join(TESTED[platform_name])
    assert [sentence for sentence in table.NAMES.missing() if sentence.endswith(f" {tested}")] == []


def test_an_unknown_name_is_a_mistake_of_ours(platform_name):
    """A name that the table does not have is an AttributeError, so that an import of it fails in every version."""
    table = importlib.import_module(f"hyper_parallel.platform.{platform_name}.versions")
    with pytest.raises(AttributeError, match="private names has no 'no_such_name'"):
        table.no_such_name  # noqa: B018 - read for its error
    assert not hasattr(table, "__wrapped__")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A framework of two modules, of which one is hidden by a function of its name."""
    folder = tmp_path / "fake_framework"
    folder.mkdir()
    (folder / "__init__.py").write_text("from fake_framework.inner import inner\n__version__ = '3.7'\n")
    (folder / "inner.py").write_text("def inner(): pass\nclass _Hidden: value = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("fake_framework")]:
        del sys.modules[name]


@pytest.mark.usefixtures("fake")
def test_the_first_path_that_is_there_counts():
    """A name that moved is found in either place, also in a module that a function of its name hides."""
    table = Names("Fake", "fake_framework", {
        "moved": Wanted(("fake_framework.outer._Hidden", "fake_framework.inner._Hidden"), "views"),
        "optional": Wanted(("fake_framework._switch",), "", otherwise=7),
    })  # fmt: skip
    assert table.find("moved").value == 5
    assert table.find("moved") is named("fake_framework.inner._Hidden")
    assert table.find("optional") == 7
    assert table.missing() == []
    assert named("no_such_framework.at.all") is None


@pytest.mark.usefixtures("fake")
def test_a_missing_name_refuses_what_needs_it_and_nothing_else():
    """A missing name can be imported, and derived from; using it says what is missing and which versions have it."""
    text = "views of DTensors needs fake_framework._View, which Fake 3.7 does not have; it is in Fake 3.8 and newer"
    wanted = {"View": Wanted(("fake_framework._View",), "views of DTensors", "3.8 and newer")}
    table = Names("Fake", "fake_framework", wanted)
    view = table.find("View")
    assert isinstance(view, Missing)
    assert table.missing() == [text]

    class Derived(view):
        pass

    for use in (view, lambda: view.attribute, lambda: Derived(), lambda: Derived.apply(1)):  # noqa: PLW0108 - used
        with pytest.raises(UnsupportedOnBackend) as caught:
            use()
        assert str(caught.value) == text


@pytest.mark.parametrize("tested, having", [(("3.6",), "Fake 3.6"), (("3.6", "3.8"), "Fake 3.6 and 3.8")])
@pytest.mark.usefixtures("fake")
def test_tested_versions_have_what_the_installed_one_lacks(tested, having):
    """Where the table names no versions, those that are tested have the name, and the sentence says so."""
    table = Names("Fake", "fake_framework", {"View": Wanted(("fake_framework._View",), "views of DTensors")}, tested)
    text = f"views of DTensors needs fake_framework._View, which Fake 3.7 does not have; it is in {having}"
    assert table.missing() == [text]


@pytest.mark.parametrize(
    "version, newer",
    [("2.9.1", False), ("2.10.0+cpu", False), ("2.14.1+cu130", False), ("2.99.0.dev20261120+cpu", True), ("3.0", True)],
)
def test_newer_than_tested_is_said_and_refuses_nothing(version, newer):
    """A nightly build or a newer release is named with the newest tested one; older ones are not newer."""
    text = f"torch {version} is newer than {TESTED['torch'][-1]}, the newest that this version of hyper_parallel was "
    assert newer_than_tested("torch", version).startswith(text) is newer
    assert bool(newer_than_tested("torch", version)) is newer
    assert older_than_supported("torch", version) == (
        "torch 2.9.1 is older than 2.10, the oldest that this version of hyper_parallel supports"
        if version == "2.9.1"
        else ""
    )
    assert older_than_supported("torch", "of unknown version") == ""


def test_the_oldest_supported_versions_are_those_of_the_extras():
    """`pip install` and the messages on old versions name the same ones."""
    text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name, oldest in OLDEST.items():
        assert f'{name} = ["{name}>={oldest}", ' in text
        assert f"'{name}>={oldest}'" in INSTALL[name]
