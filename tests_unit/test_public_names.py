from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = [
    "hyper_parallel",
    "hyper_parallel.core.dtensor",
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
def test_names_come_without_a_framework(package):
    """All public names can be imported where no framework is."""
    code = (
        f"import sys; sys.modules['torch'] = sys.modules['mindspore'] = None; import {package} as p; "
        "[getattr(p, name) for name in p.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_script_ports_by_changing_its_imports():
    """The names of torch.distributed.tensor and its parallel package are all here."""
    import hyper_parallel

    names = """DTensor DeviceMesh init_device_mesh Shard Replicate Partial distribute_tensor distribute_module
    parallelize_module ColwiseParallel RowwiseParallel SequenceParallel PrepareModuleInput PrepareModuleOutput
    PrepareModuleInputOutput ParallelStyle ones zeros empty full"""
    assert set(names.split()) <= set(hyper_parallel.__all__)
