"""The scripts of `ci/`, which are no package, as modules."""

import importlib.util
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture(scope="session")
def script():
    """`script(name)`: a fresh module of what `ci/name.py` says."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"hyper_parallel_ci_{name}", CI / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
