"""Shared fixtures of the tests of commands."""

import math

import pytest


@pytest.fixture(autouse=True)
def no_progress(request, monkeypatch):
    """On a busy machine commands take seconds; lines of progress would stand between what the tests compare."""
    if request.path.name != "test_progress.py":
        monkeypatch.setattr("hyper_parallel.cli.progress.FIRST_SECONDS", math.inf)
