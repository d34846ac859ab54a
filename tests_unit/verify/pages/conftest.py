"""Shared fixtures of the tests of pages: small data, and a browser if one is installed."""

import importlib.util
from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin.capability import SkipReason, skip_without


def _helper(name):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"hyper_parallel_pages_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def samples():
    """Small data of every page."""
    return _helper("samples")


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium."""
    module = _helper("browser")
    if module.BROWSER is None:
        skip_without(SkipReason.NO_TOOL, "Chromium is not installed")
    return module
