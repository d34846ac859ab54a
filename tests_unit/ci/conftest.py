"""The scripts of `ci/`, which is no package, as modules."""

import importlib.util
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture(scope="session")
def script():
    """Return a function that loads `ci/name.py` as a fresh module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"hyper_parallel_ci_{name}", CI / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
