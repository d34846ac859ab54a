from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import subprocess
import sys

import pytest

PACKAGES = [
    "hyper_parallel",
    "hyper_parallel.core.checkpoint",
    "hyper_parallel.core.context_parallel",
    "hyper_parallel.core.data_parallel",
    "hyper_parallel.core.dtensor",
    "hyper_parallel.core.expert_parallel",
    "hyper_parallel.core.shard",
    "hyper_parallel.core.tensor_parallel",
    "hyper_parallel.core.tensor_parallel.styles",
    "hyper_parallel.verify",
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package):
    """A name in ``__all__`` can be imported, is listed by ``dir``, and a wrong one is an AttributeError."""
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_public_names(package):
    """The imports under ``TYPE_CHECKING`` name exactly what the package offers at run time."""
    module = importlib.import_module(package)
    tree = ast.parse(inspect.getsource(module))
    typing_only = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imported = {alias.asname or alias.name for node in typing_only for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    eager = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported <= set(module.__all__) <= imported | defined | eager


@pytest.mark.parametrize("package", PACKAGES)
def test_names_come_without_a_framework(package):
    """All public names can be imported without a framework."""
    code = (
        f"import sys; sys.modules['torch'] = sys.modules['mindspore'] = None; import {package} as p; "
        "[getattr(p, name) for name in p.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_turns_into_a_module(package):
    """A public name means the same in any order of imports, and is never a module."""
    code = (
        f"import importlib, pkgutil, types; import {package} as p; "
        "[importlib.import_module(p.__name__ + '.' + one.name) for one in pkgutil.iter_modules(p.__path__)]; "
        "wrong = [name for name in p.__all__ if isinstance(getattr(p, name), types.ModuleType)]; "
        "assert not wrong, wrong"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_script_ports_by_changing_its_imports():
    """The names of torch.distributed.tensor and its parallel package are all here."""
    import hyper_parallel

    names = """DTensor DeviceMesh init_device_mesh Shard Replicate Partial distribute_tensor distribute_module
    parallelize_module ColwiseParallel RowwiseParallel SequenceParallel PrepareModuleInput PrepareModuleOutput
    PrepareModuleInputOutput ParallelStyle ones zeros empty full"""
    assert set(names.split()) <= set(hyper_parallel.__all__)


def test_the_event_log_is_also_where_operators_are():
    """``strict``, ``implicit_budget`` and ``record_events`` have one home and are public beside the dispatcher."""
    from hyper_parallel.core import dtensor, shard

    for name in ("strict", "implicit_budget", "record_events"):
        assert getattr(shard, name) is getattr(dtensor, name)


@pytest.mark.platforms("torch")
def test_value_and_grad_on_torch_names_what_to_do():
    """value_and_grad on PyTorch raises an error that shows how to get gradients there."""
    import hyper_parallel
    from hyper_parallel.errors import UnsupportedOnBackend
    from hyper_parallel.platform.select import use_platform

    with use_platform("torch"), pytest.raises(UnsupportedOnBackend, match=r"call loss\.backward\(\)"):
        hyper_parallel.value_and_grad(abs)


def test_checkpoints_and_the_version_are_at_the_top():
    """``save`` and ``load`` are those of the checkpoint package, and the version is that of the installed package."""
    import hyper_parallel
    from hyper_parallel.core import checkpoint

    assert hyper_parallel.save is checkpoint.save
    assert hyper_parallel.load is checkpoint.load
    assert hyper_parallel.__version__ == importlib.metadata.version("hyper-parallel")


def test_the_version_of_a_checkout_is_that_of_its_settings(tmp_path, monkeypatch):
    """Where the package is not installed, the version is read from the project's settings, if there are any."""
    from hyper_parallel import _release as module

    settings = tmp_path / "pyproject.toml"
    assert module._checkout_version(settings) == "unknown"
    settings.write_text('[project]\nversion = "3.4"\n')
    assert module._checkout_version(settings) == "3.4"
    settings.write_text("[project]\n")
    assert module._checkout_version(settings) == "unknown"

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert module._installed_version() is None
