from __future__ import annotations

import functools
import sys
import threading
import types

import pytest

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform import select


@pytest.fixture
def bare(monkeypatch):
    """An environment in which no framework is imported or installed and no platform is built."""
    monkeypatch.delenv(select.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(select, "_BUILT", {})
    for name in select.FRAMEWORKS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    present = set()
    found = types.SimpleNamespace(origin="/here/__init__.py")
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: found if name in present else None)
    return present


def built(monkeypatch):
    """Build platforms as plain objects, recorded by name."""
    made = {}

    def load(name):
        return types.SimpleNamespace(build=lambda: made.setdefault(name, f"built {name}"))

    monkeypatch.setattr(select.importlib, "import_module", load)
    return made


def test_an_unknown_name_in_the_environment(bare, monkeypatch):
    """The environment must name a framework; anything else is an error that lists them."""
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "jax")
    with pytest.raises(ValueError, match="jax") as caught:
        select.get_platform()
    assert str(caught.value) == "HYPER_PARALLEL_PLATFORM='jax' is not a framework; use one of torch, mindspore"


def test_an_unknown_name_in_a_call():
    """platform_named knows its frameworks and lists them when asked for another."""
    with pytest.raises(ValueError, match="jax") as caught:
        select.platform_named("jax")
    assert str(caught.value) == "unknown platform 'jax'; known: torch, mindspore"


def test_nothing_installed(bare):
    """Without a framework an ImportError names what to install."""
    with pytest.raises(ImportError) as caught:
        select.get_platform()
    assert isinstance(caught.value, HyperParallelError)
    assert str(caught.value) == (
        "neither PyTorch nor MindSpore is installed; one of them is needed: "
        "pip install 'torch>=2.10' 'safetensors>=0.8', or "
        "pip install 'mindspore>=2.8' 'safetensors>=0.8'"
    )


@pytest.mark.parametrize("name", select.FRAMEWORKS)
def test_asked_for_and_missing(bare, name):
    """A framework that is requested and missing raises an ImportError with the command that installs it."""
    with pytest.raises(select.MissingFrameworkError) as caught:
        select.platform_named(name)
    assert str(caught.value) == (f"{name} is needed, but not installed; {select.INSTALL[name]}")


def test_a_folder_without_modules_is_no_framework(bare, monkeypatch, tmp_path):
    """Python would import a folder named as a framework, such as one of data, as an empty package."""
    monkeypatch.undo()
    for name in select.FRAMEWORKS:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert select.installed_frameworks() == ()


PLATFORM = "hyper_parallel.platform.torch.platform"
NO_LIBRARY = OSError("libtorch_cpu.so: cannot open shared object file: No such file or directory\nand more")


@pytest.mark.parametrize(
    "version, failing, error, message",
    [
        (None, "torch", NO_LIBRARY,
         ("torch is installed, but cannot be imported: libtorch_cpu.so: cannot open shared object file: No such file "
         "or directory; hyper-parallel doctor says more")),
        (None, "torch", SyntaxError("source code string cannot contain null bytes"),
         ("torch is installed, but cannot be imported: source code string cannot contain null bytes; hyper-parallel "
         "doctor says more")),
        (None, "torch", ValueError("numpy.dtype size changed"),
         "torch is installed, but cannot be imported: numpy.dtype size changed; hyper-parallel doctor says more"),
        ("2.8.0+cu128", PLATFORM, AttributeError("'aten' object has no attribute 'hash_tensor'"),
         ("torch 2.8.0+cu128 is older than 2.10, the oldest that this version of hyper_parallel supports: 'aten' "
         "object has no attribute 'hash_tensor'; pip install 'torch>=2.10' 'safetensors>=0.8'")),
        ("2.14.1", PLATFORM, AttributeError("'aten' object has no attribute 'hash_tensor'"), None),
        ("2.14.1", PLATFORM, ImportError("cannot import name 'PrefixStore'", name="torch.distributed"),
         ("torch is installed, but lacks what is needed: cannot import name 'PrefixStore'; hyper-parallel doctor says "
         "more")),
        (None, PLATFORM, ImportError("a mistake of ours"), None),
        (None, PLATFORM, ImportError("another mistake of ours", name="hyper_parallel.platform"), None),
    ],
)  # fmt: skip
def test_a_framework_that_cannot_be_used_is_named(version, failing, error, message, bare, monkeypatch):
    """A framework that is incomplete or too old is an ImportError with what it lacks; other errors stay as they are."""
    bare.add("torch")

    def load(name):
        if name == failing:
            raise error
        return types.SimpleNamespace(__version__=version) if version else types.SimpleNamespace()

    monkeypatch.setattr(select.importlib, "import_module", load)
    expected = select.MissingFrameworkError if message else type(error)
    with pytest.raises(expected) as caught:
        select.platform_named("torch")
    assert str(caught.value) == (message or str(error))
    assert type(caught.value) is expected


@pytest.mark.parametrize("present, imported, asked, expected", [
    ({"torch"}, (), None, "torch"),
    ({"mindspore"}, (), None, "mindspore"),
    ({"torch", "mindspore"}, (), None, "mindspore"),
    ({"torch", "mindspore"}, ("torch",), None, "torch"),
    ({"torch", "mindspore"}, ("mindspore",), None, "mindspore"),
    ({"torch", "mindspore"}, ("torch", "mindspore"), None, "mindspore"),
    ({"torch", "mindspore"}, ("mindspore",), "Torch", "torch"),
])  # fmt: skip
def test_order_of_choice(bare, monkeypatch, present, imported, asked, expected):
    """The platform is chosen by the environment, then the only imported framework, then MindSpore, then PyTorch."""
    bare.update(present)
    built(monkeypatch)
    for name in imported:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    if asked:
        monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, asked)
    assert select.get_platform() == f"built hyper_parallel.platform.{expected}.platform"


def _function_of(**names):
    """Return a function whose module has these names."""
    exec("def function(): pass", names)  # noqa: S102 - a module made up of names
    return names["function"]


class _Tensor:
    """A tensor of PyTorch, to those who look at the module of its type."""


_Tensor.__module__ = "torch"


@pytest.mark.parametrize("names, arguments, expected", [
    ({}, (), "mindspore"),
    ({"nn": types.ModuleType("torch.nn"), "np": types.ModuleType("numpy")}, (), "torch"),
    ({"Tensor": _Tensor}, (), "torch"),
    ({"nn": types.ModuleType("torch.nn"), "ms": types.ModuleType("mindspore")}, (), "mindspore"),
    ({"ms": types.ModuleType("mindspore")}, (3, _Tensor()), "torch"),
])  # fmt: skip
def test_ranks_run_on_the_framework_of_arguments_or_module(bare, monkeypatch, names, arguments, expected):
    """With both frameworks imported, tensors among the arguments decide, then names in the function's module."""
    bare.update(select.FRAMEWORKS)
    for name in select.FRAMEWORKS:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    function = functools.partial(_function_of(**names))
    assert select.framework_for(function, arguments) == expected
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "mindspore")
    assert select.framework_for(function, arguments) == "mindspore"
    built(monkeypatch)
    with select.use_platform("torch"):
        assert select.framework_for(function, arguments) == "torch"


def test_an_explicit_choice_wins_in_its_thread(bare, monkeypatch):
    """use_platform beats the environment, nests, is undone by exceptions and does not reach other threads."""
    bare.update(select.FRAMEWORKS)
    built(monkeypatch)
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "mindspore")
    seen = []
    with select.use_platform("torch") as chosen:
        assert select.get_platform() is chosen
        with pytest.raises(ZeroDivisionError), select.use_platform("mindspore"):
            seen.append(select.get_platform() is not chosen and 1 // 0)
        assert select.current_platform() is chosen
        other = threading.Thread(target=lambda: seen.append(select.get_platform()))
        other.start()
        other.join()
    assert seen == ["built hyper_parallel.platform.mindspore.platform"]


def test_a_platform_is_built_once(bare, monkeypatch):
    """Threads that ask for a platform at once get the same object."""
    bare.update(select.FRAMEWORKS)
    count = []
    monkeypatch.setattr(
        select.importlib, "import_module", lambda _: types.SimpleNamespace(build=lambda: count.append(1) or object())
    )
    chosen = []
    threads = [threading.Thread(target=lambda: chosen.append(select.get_torch_platform())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(name) for name in chosen}) == len(count) == 1


def test_a_value_that_no_framework_knows():
    """platform_of takes tensors of the frameworks only."""
    with pytest.raises(TypeError) as caught:
        select.platform_of([1.0])
    assert str(caught.value) == "expected a tensor of torch or mindspore, got list"


@pytest.mark.platforms("torch")
def test_the_platform_of_a_tensor_is_that_of_its_type():
    """platform_of decides by the tensor's type, subclasses and parameters included, whatever platform is chosen."""
    import torch

    for value in (torch.ones(1), torch.nn.Parameter(torch.ones(1)), torch.nn.Linear(1, 1)):
        assert select.platform_of(value) is select.get_torch_platform()


def test_the_default_is_found_without_an_import(bare, monkeypatch):
    """The default follows the order of choice and is found without importing a framework."""
    made = built(monkeypatch)
    bare.update(select.FRAMEWORKS)
    assert select.default_framework() == "mindspore"
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert select.default_framework() == "torch"
    monkeypatch.setenv(select.ENVIRONMENT_VARIABLE, "MindSpore")
    assert select.default_framework() == "mindspore"
    assert made == {}
