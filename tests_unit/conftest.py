"""What all unit tests share."""

from __future__ import annotations

import sys
import threading

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Pause the tracer of coverage in tests marked ``untraced``; ranks are traced as the process that starts them."""
    if item.get_closest_marker("untraced") is None:
        return (yield)
    here, elsewhere = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        threading.settrace(elsewhere)
        sys.settrace(here)
