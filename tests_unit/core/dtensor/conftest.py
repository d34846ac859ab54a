"""The NumPy reference, for every test of this folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dense():
    """The module ``dense.py`` beside this file; pytest's importlib mode puts no test folder on the path."""
    spec = importlib.util.spec_from_file_location("dtensor_dense", Path(__file__).with_name("dense.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
