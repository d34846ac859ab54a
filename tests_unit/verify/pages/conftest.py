"""Shared fixtures of the tests of pages: small data, and a browser if one is installed."""

from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin.capability import SkipReason, skip_without


@pytest.fixture(scope="session")
def samples(load_file):
    """Small data of every page."""
    return load_file(Path(__file__).with_name("samples.py"))


@pytest.fixture(scope="session")
def browser(load_file):
    """Headless Chromium."""
    module = load_file(Path(__file__).with_name("browser.py"))
    if module.BROWSER is None:
        skip_without(SkipReason.NO_TOOL, "Chromium is not installed")
    return module
