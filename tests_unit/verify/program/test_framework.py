"""The framework that a program trains with."""

from __future__ import annotations

import types

import pytest

from hyper_parallel.platform import select
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.framework import imported_frameworks, other_framework, program_framework
from hyper_parallel.verify.program.program import Program

FOUND = types.SimpleNamespace(origin="/here/__init__.py")


@pytest.fixture
def both(monkeypatch):
    """An environment in which both frameworks are installed and nothing is chosen."""
    monkeypatch.delenv(select.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: FOUND)


def written(folder, **files):
    """Write files of Python by their names, and return the path of ``train``."""
    for name, text in files.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "train.py"


@pytest.mark.parametrize("files, expected", [
    ({"train": "import torch.nn as nn"}, ["torch"]),
    ({"train": "def main():\n    from mindspore import nn"}, ["mindspore"]),
    ({"train": "import torch, mindspore"}, ["torch", "mindspore"]),
    ({"train": "import numpy, torchvision, nosuch"}, []),
    ({"train": "import net", "net": "import mindspore"}, ["mindspore"]),
    ({"train": "from parts.net import Net", "parts__in__net": "from . import cells", "parts__in__cells": ""}, []),
    ({"train": "from parts import net", "parts__in__net": "import torch"}, ["torch"]),
    ({"train": "import parts.net", "parts__in____init__": "import torch", "parts__in__net": ""}, ["torch"]),
    ({"train": "import a", "a": "import b", "b": "import a, torch"}, ["torch"]),
    ({"train": "import a", "a": "import a, b", "b": "("}, []),
])  # fmt: skip
def test_frameworks_are_those_that_the_file_imports(tmp_path, files, expected):
    """The imports of the file decide, also inside functions; where it has none, those of files beside it do."""
    assert imported_frameworks(written(tmp_path, **files)) == expected


def test_a_file_decides_where_both_are_installed(both, tmp_path):
    """A MindSpore script runs on MindSpore, whichever framework is imported or comes first."""
    path = written(tmp_path, train="import mindspore")
    assert program_framework(Program("train.py", str(path))) == "mindspore"


def test_the_other_framework_is_the_only_one_that_a_file_imports(tmp_path):
    """It is told of a file that imports one framework, not of one that imports both or none, nor of a function."""
    for text, other in (("import torch", "torch"), ("import torch, mindspore", ""), ("import numpy", "")):
        assert other_framework(Program("train.py", str(written(tmp_path, train=text))), "mindspore") == other
    assert other_framework(Program("train.py", str(written(tmp_path, train="import torch"))), "torch") == ""
    assert other_framework(Program("written", "", written), "torch") == ""


@pytest.mark.parametrize(
    "text, imports", [("import torch, mindspore", "both PyTorch and"), ("", "neither PyTorch nor")]
)
def test_a_file_that_does_not_tell_is_refused(both, monkeypatch, tmp_path, text, imports):
    """A file that imports both or none is refused with the option to add, unless the environment chooses."""
    program = Program("train.py", str(written(tmp_path, train=text)))
    with pytest.raises(InputError) as refused:
        program_framework(program)
    assert str(refused.value) == (
        f"FILE 'train.py' imports {imports} MindSpore; add --platform torch or --platform mindspore"
    )
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "torch")
    assert program_framework(program) == "torch"


def test_a_file_that_launches_another_is_told_so(both, tmp_path):
    """It imports neither framework, and the option that chooses one would not make it train."""
    path = written(tmp_path, train="import os\n\nos.system('torchrun --nproc-per-node 2 job.py')\n")
    with pytest.raises(InputError) as refused:
        program_framework(Program("train.py", str(path)))
    assert str(refused.value) == (
        "train.py:3 starts ranks itself: give the command after --, as in -- torchrun --nproc-per-node 2 job.py "
        "(docs/stacks.md)"
    )


def test_one_installed_framework_needs_no_choice(both, monkeypatch, tmp_path):
    """Where one framework is installed, a file that imports none runs on it."""
    for name in select.FRAMEWORKS:
        monkeypatch.delitem(select.sys.modules, name, raising=False)
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: FOUND if name == "torch" else None)
    assert program_framework(Program("train.py", str(written(tmp_path, train="")))) == "torch"


def test_a_function_decides_by_its_module(both):
    """A function runs on the framework that its module has a name for."""
    names = {"ms": types.ModuleType("mindspore")}
    exec("def train(): pass", names)  # noqa: S102 - a module made up of names
    assert program_framework(Program("train", "", names["train"])) == "mindspore"
