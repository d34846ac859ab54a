"""Shared fixtures of the workshop's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def samples(load_file):
    """Small data of every page."""
    return load_file(Path(__file__).parents[2] / "verify" / "pages" / "samples.py")
