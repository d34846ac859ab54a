"""Fixtures of the tests of random programs."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small(load_file):
    """Return the module of small programs, which is not a test."""
    return load_file(Path(__file__).with_name("small_programs.py"))
