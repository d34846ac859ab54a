"""Fixtures of the tests of random programs."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small():
    """Return the module of small programs, which is no test."""
    path = Path(__file__).with_name("small_programs.py")
    spec = importlib.util.spec_from_file_location("hyper_parallel_small_programs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
